"""What ``smem_reserve="auto"`` does on a machine that has no profile.

Two levels, by what is known:

* nothing but the GPU: communication launches at the greatest priority, nothing padded
  (:func:`heuristic_policy`);
* footprints, and perhaps times, of the kernels a region launched (:func:`plan_kernels`): priority
  where some kernel has blocks pending that it could overtake, room beside kernels of one block per
  SM, and pads only where they pay even if each block taken away costs its full share of throughput.

Both are deliberately timid, because nothing was measured under the policy: priority changes neither
the compute kernels nor their residency, and within a few percent it is the best single setting of
nearly all cases measured on H200. What padding gains beyond it, ``overlapctl tune`` finds out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from overlapctl.plan.parameters import parameters_for
from overlapctl.plan.residency import (
    blocks_per_sm,
    grid_is_coresident,
    is_persistent,
    pad_for_blocks,
    padded,
)
from overlapctl.plan.room import pad_or_carveout_for_room, room_beside
from overlapctl.plan.rules import fewest_blocks, may_pad
from overlapctl.plan.simulate import CommWork, ComputeWork, Shape, simulate
from overlapctl.plan.throughput import OccupancyCurve
from overlapctl.records import DeviceFacts, KernelFootprint, KernelRule, Policy

__all__ = ["heuristic_policy", "plan_kernels"]

PAD_MARGIN = 0.08
"""Share of the time with priority alone that a pad must be predicted to save in each pairing: three
quarters of the predicted ratios of two recorded arms are within 8.2 % of the measured ones."""

_MOST_LAUNCHES = 8
_SHORT_MS = 0.05
"""Kernels shorter than this end before a collective could profit from the room a pad makes."""

_Comm = tuple[KernelFootprint, float | None]


def heuristic_policy(facts: DeviceFacts) -> tuple[Policy, str]:
    """Policy for an untuned GPU before any kernel was seen, and the reason in words.

    Parameters
    ----------
    facts
        The GPU at hand; one without stream priorities gets the default policy.

    Returns
    -------
    policy
        Communication at the greatest priority, nothing padded.
    reason
        For reports.
    """
    if not _has_priorities(facts):
        return Policy(), f"{facts.name} has no stream priorities: nothing is changed untuned"
    return (
        Policy(comm_priority=True),
        "no profile: communication launches at the greatest priority, nothing padded "
        "(run `overlapctl tune` to find what padding gains here)",
    )


def plan_kernels(
    facts: DeviceFacts,
    kernels: Sequence[KernelFootprint],
    communication: Sequence[KernelFootprint],
    *,
    milliseconds: Mapping[str, float] | None = None,
) -> tuple[Policy, dict[str, str]]:
    """Plan each observed compute kernel for the observed communication kernels.

    Parameters
    ----------
    facts
        The GPU.
    kernels
        Compute kernels that run, or may run, beside communication; one entry for each footprint
        seen. Entries of one name share a rule, because policies know kernels by name.
    communication
        Communication kernels seen.
    milliseconds
        Mean time of one launch by kernel name, of both sides; kernels that are missing are not
        padded.

    Returns
    -------
    policy
        Priority if it can have an effect, and one rule for each kernel that is shaped.
    reasons
        For every compute kernel, by name, what is done and why.
    """
    known = milliseconds or {}
    comms: list[_Comm] = [(kernel, known.get(kernel.name)) for kernel in communication]
    by_name: dict[str, list[KernelFootprint]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, []).append(kernel)
    reasons: dict[str, str] = {}
    rules: list[KernelRule] = []
    for name, footprints in by_name.items():
        rule, reasons[name] = _plan_name(facts, name, footprints, comms, known.get(name))
        if rule is not None:
            rules.append(rule)
    # What was not seen yet may have pending blocks too: off only if all that was seen has none.
    pending = not kernels or any(not grid_is_coresident(facts, k) for k in kernels)
    priority = _has_priorities(facts) and (pending or bool(rules))
    return Policy(comm_priority=priority, rules=tuple(rules)), reasons


def _has_priorities(facts: DeviceFacts) -> bool:
    return facts.priority_greatest < facts.priority_least


def _plan_name(
    facts: DeviceFacts,
    name: str,
    footprints: Sequence[KernelFootprint],
    comms: Sequence[_Comm],
    alone_ms: float | None,
) -> tuple[KernelRule | None, str]:
    """Rule of all footprints of one name; none unless all of them want the same."""
    plans = [
        _plan_footprint(facts, kernel, comms, alone_ms) for kernel in dict.fromkeys(footprints)
    ]
    rules = {rule for rule, _ in plans}
    if len(rules) == 1:
        return plans[0]
    left = next((why for rule, why in plans if rule is None), "its launches want different pads")
    return None, f"launches of {name} differ: {left}"


def _plan_footprint(
    facts: DeviceFacts,
    kernel: KernelFootprint,
    comms: Sequence[_Comm],
    alone_ms: float | None,
) -> tuple[KernelRule | None, str]:
    natural = blocks_per_sm(facts, kernel)
    if kernel.cooperative:
        return None, "cooperative: all its blocks must be resident, it is left alone"
    if natural == 0:
        return None, "its residency is unknown, it is left alone"
    if not comms:
        return None, "no communication was seen: nothing to make room for"
    if natural == 1:
        return _make_room(facts, kernel, comms)
    if grid_is_coresident(facts, kernel):
        return None, "all its blocks are resident at once: none is pending, and none may be delayed"
    if not _has_priorities(facts):
        return None, f"{facts.name} has no priorities: a pad alone does not let communication in"
    return _pad(facts, kernel, comms, alone_ms, natural)


def _make_room(
    facts: DeviceFacts, kernel: KernelFootprint, comms: Sequence[_Comm]
) -> tuple[KernelRule | None, str]:
    """Configure SMs so that a small communication block fits beside one block per SM."""
    kind = "persistent" if is_persistent(facts, kernel) else "one block per SM"
    for comm, _ in comms:
        maker = pad_or_carveout_for_room(facts, kernel, comm)
        if maker is None:
            continue
        if maker.pad == 0 and maker.carveout < 0:
            return None, f"{kind}: {comm.name} fits beside it as it is"
        changed = KernelRule(pattern=kernel.name, pad_bytes=maker.pad, carveout=maker.carveout)
        how = f"{maker.pad} B of pad" if maker.pad else f"a carve-out of {maker.carveout}%"
        return changed, f"{kind}: {how} configures the SM so that {comm.name} fits beside it"
    if kind == "persistent":
        return None, "persistent: neither priority nor padding lets these collectives in"
    return None, "one block per SM: none to take away; priority lets communication in"


def _pad(
    facts: DeviceFacts,
    kernel: KernelFootprint,
    comms: Sequence[_Comm],
    alone_ms: float | None,
    natural: int,
) -> tuple[KernelRule | None, str]:
    timed = [(comm, ms) for comm, ms in comms if ms is not None]
    if alone_ms is None or not timed:
        return None, "many waves: priority lets communication in; times unknown, so no pad"
    if alone_ms < _SHORT_MS:
        return None, f"many waves: priority lets communication in; too short ({alone_ms:.3f} ms)"
    if all(room_beside(facts, kernel, natural, comm) > 0 for comm, _ in timed):
        return None, f"communication fits beside its {natural} blocks per SM as it is"
    best: tuple[float, int] | None = None
    for target in range(natural - 1, fewest_blocks(natural) - 1, -1):
        pad = pad_for_blocks(facts, kernel, target)
        if not pad or kernel.cluster > 1 or blocks_per_sm(facts, padded(kernel, pad)) != target:
            continue
        worst = max(_ratio(facts, kernel, alone_ms, comm, ms, pad, natural) for comm, ms in timed)
        if best is None or worst < best[0]:
            best = worst, target
    if best is None or best[0] > 1 - PAD_MARGIN:
        return None, "many waves: priority lets communication in; no pad is sure to gain"
    saved = 1 - best[0]
    return (
        KernelRule(pattern=kernel.name, max_blocks_per_sm=best[1]),
        f"many waves beside longer communication: {best[1]} of {natural} blocks per SM are "
        f"predicted to save {saved:.0%} beyond priority, at full cost to compute",
    )


def _ratio(
    facts: DeviceFacts,
    kernel: KernelFootprint,
    alone_ms: float,
    comm: KernelFootprint,
    comm_ms: float,
    pad: int,
    natural: int,
) -> float:
    """Time with the pad over time without, both with priority, by a pessimistic simulation."""
    launches = max(1, min(_MOST_LAUNCHES, math.ceil(comm_ms / alone_ms)))
    if not may_pad(launches * alone_ms, comm_ms):
        return 1.0
    # Nothing is known of how the kernel waits: take every block for fully used.
    curve = OccupancyCurve(knee=float(natural), sharpness=parameters_for(facts).gemm_sharpness)
    compute = ComputeWork(
        footprint=kernel, alone_ms=launches * alone_ms, curve=curve, launches=launches
    )
    work = CommWork(footprint=comm, alone_ms=comm_ms)
    if blocks_per_sm(facts, comm) * facts.sm_count < comm.blocks:
        return 1.0
    before = simulate(facts, compute, work, Shape(comm_priority=True)).total
    return simulate(facts, compute, work, Shape(pad=pad, comm_priority=True)).total / before
