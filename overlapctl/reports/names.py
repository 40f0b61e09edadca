"""How reports call cases and policies."""

from __future__ import annotations

from overlapctl.records import Case, KernelRule, Policy, Verdict
from overlapctl.specs import format_comm, format_compute

__all__ = ["case_name", "policy_text", "verdict_text"]


def case_name(case: Case) -> str:
    """Name the case as ``tune --case`` takes it."""
    return f"{format_compute(case.compute)}+{format_comm(case.comm)}"


def verdict_text(verdict: Verdict) -> str:
    """Say what to do, in a few words."""
    return "leave it alone" if verdict.policy.is_default else verdict.chosen


def policy_text(policy: Policy) -> list[str]:
    """Say what a policy does, one line for each part."""
    if policy.is_default:
        return ["no launch is changed"]
    lines = []
    if policy.comm_priority:
        lines.append("communication launches at the greatest priority")
    lines += [f"kernel {rule.pattern}: {_shape_text(rule)}" for rule in policy.rules]
    rest = _shape_text(policy)
    if policy.rules or rest != "left alone":
        lines.append(f"{'other' if policy.rules else 'all'} compute kernels: {rest}")
    if policy.include:
        lines.append(f"only kernels matching {', '.join(policy.include)}")
    if policy.exclude:
        lines.append(f"no kernels matching {', '.join(policy.exclude)}")
    if not policy.shape_captures:
        lines.append("launches being captured into a graph are left alone")
    return lines


def _shape_text(shape: KernelRule | Policy) -> str:
    parts = []
    if shape.max_blocks_per_sm:
        parts.append(f"at most {shape.max_blocks_per_sm} blocks per SM")
    if shape.pad_bytes:
        parts.append(f"{shape.pad_bytes} B more shared memory per block")
    if shape.carveout >= 0:
        parts.append(f"shared-memory carve-out {shape.carveout}%")
    return ", ".join(parts) or "left alone"
