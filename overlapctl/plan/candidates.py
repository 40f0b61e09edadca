"""Which configurations ("arms") are worth measuring for one compute kernel.

What the shim would refuse, or what cannot change anything, is pruned with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from overlapctl.plan.arms import NO_SHAPE, PRIORITY, arm_name
from overlapctl.plan.residency import (
    blocks_per_sm,
    carveout_step,
    grid_is_coresident,
    pad_for_blocks,
    padded,
)
from overlapctl.records import Arm, DeviceFacts, KernelFootprint, Policy

__all__ = ["Candidates", "candidate_arms", "find_candidates", "residency_targets"]

MAX_TARGETS = 6
"""Residency targets tried for one kernel: each costs as much time as the default arm."""

UNOBSERVED_TARGETS = (8, 6, 4, 3, 2)
"""Targets for a kernel whose footprint is unknown; the shim leaves it where one changes nothing."""


@dataclass(frozen=True)
class Candidates:
    """Arms to measure, and what was left out: pairs of arm or shape name and reason."""

    arms: tuple[Arm, ...]
    pruned: tuple[tuple[str, str], ...] = ()


def residency_targets(natural: int, *, most: int = MAX_TARGETS) -> list[int]:
    """Targets below ``natural`` blocks per SM, descending.

    All of them, down to 1, if these are at most ``most``; else ``most`` of them in equal ratios
    from three quarters of ``natural`` down to 2 (from 16: 12, 8, 6, 4, 3, 2): the effect of a
    target goes with the share of blocks it takes away.
    """
    if natural - 1 <= most:
        return list(range(natural - 1, 0, -1))
    first = natural * 3 / 4
    ratio = (first / 2) ** (1 / (most - 1))
    return sorted({round(first / ratio**step) for step in range(most)}, reverse=True)


def candidate_arms(facts: DeviceFacts, footprint: KernelFootprint | None) -> list[Arm]:
    """Arms to measure for a compute kernel; the first is always ``"default"``."""
    return list(find_candidates(facts, footprint).arms)


def find_candidates(facts: DeviceFacts, footprint: KernelFootprint | None) -> Candidates:
    """Arms to measure for a compute kernel, and those left out with the reason.

    Parameters
    ----------
    facts
        The GPU.
    footprint
        The kernel; ``None`` if it could not be observed: then legality is left to the shim.

    Returns
    -------
    Candidates
        ``default`` first, then ``priority``, then each shape without and with priority, gentlest
        first.
    """
    shapes, pruned = _shapes(facts, footprint)
    has_priority = facts.priority_greatest < facts.priority_least
    if not has_priority:
        pruned.append((PRIORITY, f"{facts.name} has no stream priorities"))
    arms = []
    for shape, policy in [(NO_SHAPE, Policy()), *shapes]:
        arms.append(Arm(name=arm_name(priority=False, shape=shape), policy=policy))
        if has_priority:
            raised = replace(policy, comm_priority=True)
            arms.append(Arm(name=arm_name(priority=True, shape=shape), policy=raised))
    return Candidates(tuple(arms), tuple(pruned))


_Shapes = tuple[list[tuple[str, Policy]], list[tuple[str, str]]]


def _shapes(facts: DeviceFacts, footprint: KernelFootprint | None) -> _Shapes:
    """Shapes worth an arm, and the pruned ones with the reason."""
    if footprint is None:
        return [_residency_shape(n) for n in UNOBSERVED_TARGETS], []
    if footprint.cooperative:
        return [], [("padding", "a cooperative launch needs all its blocks resident")]
    natural = blocks_per_sm(facts, footprint)
    if natural == 0:
        return [], [("padding", f"{footprint.name} does not fit an SM of {facts.name}")]
    if natural == 1:
        return _carveout_shapes(facts, footprint)
    shapes, pruned = [], []
    for target in residency_targets(natural):
        name, policy = _residency_shape(target)
        reason = _illegal(facts, footprint, target)
        if reason:
            pruned.append((name, reason))
        else:
            shapes.append((name, policy))
    return shapes, pruned


def _residency_shape(target: int) -> tuple[str, Policy]:
    return f"{target}/SM", Policy(max_blocks_per_sm=target)


def _illegal(facts: DeviceFacts, footprint: KernelFootprint, target: int) -> str:
    """Why the shim would refuse to pad to ``target`` blocks per SM; empty if it would not."""
    pad = pad_for_blocks(facts, footprint, target)
    if pad is None:
        return "the pad would pass the opt-in limit of a block"
    shaped = padded(footprint, pad)
    if blocks_per_sm(facts, shaped) != target:
        return f"no pad leaves exactly {target} blocks on an SM"
    if footprint.cluster > 1:
        return "the pad would break the co-scheduling of the kernel's clusters"
    if grid_is_coresident(facts, footprint) and not grid_is_coresident(facts, shaped):
        return (
            f"all {footprint.blocks} blocks of the grid are resident at once today and would not "
            "be any more"
        )
    return ""


def _carveout_shapes(facts: DeviceFacts, footprint: KernelFootprint) -> _Shapes:
    """Raise the carve-out step an SM is configured to beside a kernel of one block per SM."""
    step = carveout_step(facts, footprint)
    largest = carveout_step(facts, footprint, 100)
    if largest <= step:
        return [], [
            ("padding", "one block per SM: there is none to take away"),
            ("carveout100", f"the SM is configured to {step} B of shared memory already"),
        ]
    shapes = [("carveout100", Policy(carveout=100))]
    # One byte more than the step holds configures the next larger one.
    pad = step - footprint.smem - facts.smem_reserved_per_block + 1
    if footprint.smem + pad <= facts.smem_per_block_optin and footprint.cluster == 1:
        shapes.append((f"pad{pad}", Policy(pad_bytes=pad)))
    return shapes, [("residency targets", "one block per SM: there is none to take away")]
