"""Profiles and verdicts for the tests of profiles, reports and commands."""

from overlapctl.profiles import combine_verdicts
from overlapctl.records import (
    Case,
    CommSpec,
    ComputeSpec,
    KernelRule,
    Policy,
    Profile,
    ProfileKey,
    Verdict,
)

KEY = ProfileKey(
    gpu="NVIDIA H200", driver="580.159", torch="2.11.0", nccl="2.28.9", triton="3.6.0",
    topology="2x NVIDIA H200, nvlink x18",
)  # fmt: skip


def case(size_mib=896, *, m=8192) -> Case:
    return Case(
        compute=ComputeSpec(op="gemm", shape=(m, 8192, 8192), tile=(64, 64, 64, 4, 3)),
        comm=CommSpec(op="all_reduce", size_bytes=size_mib << 20),
    )


def verdict(
    chosen="default", *, of=None, kernel="gemm_kernel", spread=0.01, rule=None, **totals
) -> Verdict:
    """A verdict; totals by arm name with ``p``/``n3``/``p3`` short for priority, 3/SM, both."""
    named = {"default": totals.pop("default", 10.0)}
    for short, total in totals.items():
        priority, target = short[0] == "p", short[1:]
        shape = f"{target}/SM" if target else ""
        named["+".join((["priority"] if priority else []) + ([shape] if shape else []))] = total
    rule = rule or KernelRule(pattern=kernel)
    return Verdict(
        case=of or case(),
        chosen=chosen,
        policy=Policy(comm_priority=chosen.startswith("priority"), rules=(rule,)),
        reason="because",
        gain=1 - named[chosen] / named["default"],
        spread=spread,
        totals=named,
        serial=14.0,
        ideal=8.0,
    )


def profile(*verdicts: Verdict, key=KEY, created="2026-01-01T00:00:00+00:00") -> Profile:
    policy, reason = combine_verdicts(verdicts)
    return Profile(
        key=key, created=created, overlapctl="0.1.0", policy=policy, reason=reason,
        verdicts=verdicts,
    )  # fmt: skip
