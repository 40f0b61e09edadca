"""All ways to run a case that are known today, each with why it cannot be had, if so.

::

    facts, case, footprints --options--> Option (policy, path, block limit, order; refusal)

Launch policies come from :mod:`overlapctl.plan.candidates`; this module adds what lies outside
the launches of the compute kernel: another communication kernel, NCCL's block limit, an SM target
or green context for the GEMM, the order of issue.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from overlapctl.errors import UsageError
from overlapctl.plan.arms import DEFAULT, NO_SHAPE, PRIORITY, split_arm_name
from overlapctl.plan.candidates import find_candidates
from overlapctl.plan.residency import blocks_per_sm, is_persistent
from overlapctl.plan.room import pad_or_carveout_for_room
from overlapctl.records import Arm, Case, DeviceFacts, KernelFootprint, Policy

__all__ = ["BLOCK_LIMITS", "Option", "green_context_sms", "options"]

BLOCK_LIMITS = (32, 16, 8, 4)
"""Limits of NCCL's blocks (``NCCL_MAX_CTAS``) that are tried below what it uses by itself."""

_FUTURE = "not offered in this version"
_REDUCES = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to run a case.

    Parameters
    ----------
    name, lever, policy, settings
        As in :class:`~overlapctl.records.Candidate`.
    path
        Communication path instead of the case's, or ``None``.
    max_blocks
        Limit of the communication kernel's blocks, or ``None``.
    comm_first
        The collective is issued before the compute kernel.
    refusal
        Why it cannot be had here; empty if it can.
    note
        What to know of an option that can be had.
    predictable
        Whether its times can be simulated; one that cannot be had may still be worth a number.
    """

    name: str
    lever: str
    policy: Policy = field(default_factory=Policy)
    settings: tuple[str, ...] = ()
    path: Literal["nccl", "light", "copy"] | None = None
    max_blocks: int | None = None
    comm_first: bool = False
    refusal: str = ""
    note: str = ""
    predictable: bool = True


def options(
    facts: DeviceFacts,
    case: Case,
    footprint: KernelFootprint,
    comm: KernelFootprint | None,
) -> list[Option]:
    """List the options of a case; the default first, simple ones before composed ones.

    Parameters
    ----------
    facts
        The GPU.
    case
        What runs.
    footprint
        Of the compute kernel, untouched.
    comm
        Of the communication kernel; ``None``: it occupies no SM (copy engine).
    """
    found = find_candidates(facts, footprint)
    arms = found.arms if comm is not None else tuple(a for a in found.arms if not _raises(a))
    listed = [Option(name=arm.name, lever=_lever(arm.name), policy=arm.policy) for arm in arms]
    listed += [
        _refused(name, _lever(name) if name != "padding" else "residency", reason)
        for name, reason in found.pruned
    ]
    if comm is None:
        reason = "the transfer runs on copy engines: there is no launch to give priority to"
        listed.append(_refused(PRIORITY, "priority", reason))
    else:
        listed += _communication_kernels(facts, case, footprint, arms)
        listed += _block_limits(case, comm, arms)
        listed.append(_order(facts, case))
    listed += _partitions(facts, footprint, comm)
    return listed


def green_context_sms(facts: DeviceFacts, asked: int) -> int:
    """SMs a green context gets for ``asked`` SMs.

    Minimum and granule are those of the CUDA driver API (``CUdevSmResource``): 8 SMs in multiples
    of 8 from compute capability 9.0 on, at least 4 in multiples of 2 on 8.x, multiples of 2 before.
    The driver rounds up; all SMs are granted as they are.

    Raises
    ------
    UsageError
        If ``asked`` is no number of SMs this GPU has, or the GPU is not NVIDIA's.
    """
    if facts.vendor != "nvidia":
        raise UsageError(
            f"{facts.name} has no green contexts", remedy="use a stream with a CU mask there"
        )
    if not 1 <= asked <= facts.sm_count:
        raise UsageError(
            f"{asked} SMs are asked for, {facts.name} has {facts.sm_count}",
            remedy=f"ask for 1 to {facts.sm_count}",
        )
    major = int(facts.arch.removeprefix("sm_")) // 10
    least, granule = (8, 8) if major >= 9 else (4, 2) if major == 8 else (2, 2)
    granted = max(least, -(-asked // granule) * granule)
    return min(granted, facts.sm_count)


def _raises(arm: Arm) -> bool:
    return arm.policy.comm_priority


def _lever(arm: str) -> str:
    """Lever of an arm by its name; a shape counts for more than the priority it comes with."""
    shape = split_arm_name(arm)[1]
    if arm == DEFAULT:
        return "none"
    if shape == NO_SHAPE:
        return "priority"
    return "residency" if shape.endswith("/SM") or shape == "residency targets" else "carve-out"


def _refused(name: str, lever: str, reason: str) -> Option:
    return Option(name=name, lever=lever, refusal=reason, predictable=False)


def _communication_kernels(
    facts: DeviceFacts, case: Case, footprint: KernelFootprint, arms: tuple[Arm, ...]
) -> list[Option]:
    if case.comm.op == "local_copy" or case.comm.path != "nccl":
        return []
    lever = "communication kernel"
    listed = []
    if case.comm.op == "all_reduce":
        how = "reduce it in symmetric memory with the light kernel"
        light = Option(name="light", lever=lever, path="light", settings=(how,))
        listed += [
            replace(light, name=f"light, {arm.name}", policy=arm.policy)
            if arm.name != DEFAULT
            else light
            for arm in arms
        ]
    else:
        listed.append(_refused("light", lever, f"there is no light kernel for {case.comm.op}"))
    reduces = case.comm.op in _REDUCES
    listed.append(
        Option(
            name="copy engine",
            lever=lever,
            path="copy",
            refusal=f"copy-engine collectives are {_FUTURE}"
            + ("; the reduction would need SMs still" if reduces else ""),
            predictable=not reduces,
        )
    )
    if blocks_per_sm(facts, footprint) == 1:
        listed.append(_refused("one warp", lever, _one_warp(facts, footprint)))
    return listed


def _one_warp(facts: DeviceFacts, footprint: KernelFootprint) -> str:
    """Why collectives cannot run on the one-warp kernel beside one block per SM."""
    from overlapctl.device.footprints import one_warp_footprint

    if facts.vendor != "nvidia" or int(facts.arch.removeprefix("sm_")) < 90:
        return f"bulk copies need compute capability 9.0, {facts.name} is {facts.arch}"
    room = pad_or_carveout_for_room(facts, footprint, one_warp_footprint(facts))
    if room is None:
        return f"an SM that holds {footprint.name} has no room for it, whatever is padded"
    how = f" with a pad of {room.pad} B" if room.pad else ""
    how = f" with carve-out {room.carveout}%" if room.carveout >= 0 else how
    return f"it would find room{how}, but collectives on it are {_FUTURE}"


def _block_limits(case: Case, comm: KernelFootprint, arms: tuple[Arm, ...]) -> list[Option]:
    if case.comm.path != "nccl":
        return []
    return [
        Option(
            name=f"at most {limit} blocks" + ("" if arm.name == DEFAULT else f", {arm.name}"),
            lever="block limit",
            policy=arm.policy,
            max_blocks=limit,
            settings=(f"NCCL_MAX_CTAS={limit}",),
        )
        for limit in BLOCK_LIMITS
        if limit < comm.blocks
        for arm in arms
        if arm.name in (DEFAULT, PRIORITY)
    ]


def _order(facts: DeviceFacts, case: Case) -> Option:
    name, lever = "collective first", "order"
    if case.form == "pipeline":
        return _refused(name, lever, "each collective needs the result of its compute stage")
    del facts
    return Option(
        name=name,
        lever=lever,
        comm_first=True,
        settings=("issue the collective before the compute kernel, if its input is ready",),
    )


def _partitions(
    facts: DeviceFacts, footprint: KernelFootprint, comm: KernelFootprint | None
) -> list[Option]:
    """SM target and green context: known levers that are not offered, each with the reason."""
    if not is_persistent(facts, footprint):
        target = "only a persistent kernel has an SM target: this one has a block for each tile"
    else:
        target = (
            "torch's SM carve-out has no effect on torch.mm, and the vendor library's own target "
            "changes the grid without net gain (measured on H200)"
        )
    listed = [_refused("SM target", "SM target", target)]
    if facts.vendor != "nvidia":
        return [*listed, _refused("green context", "green context", f"{facts.name} has none")]
    wanted = min(comm.blocks if comm is not None else 0, facts.sm_count - 1)
    if wanted:
        granted = green_context_sms(facts, wanted)
        reason = (
            f"{granted} SMs for a collective of {comm.blocks if comm else 0} blocks leave "
            f"{facts.sm_count - granted} to compute all the time: no net gain (measured on H200)"
        )
    else:
        reason = "the transfer needs no SM"
    return [*listed, _refused("green context", "green context", reason)]
