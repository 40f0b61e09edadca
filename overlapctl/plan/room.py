"""The room one kernel leaves for another on the same SM, and how to make it.

A second kernel's block is placed beside resident blocks if registers (in each sub-partition),
warp slots, shared memory *within the carve-out step the SM is configured to*, and block slots all
suffice. The step is what makes a pad or a carve-out preference useful beside a kernel of one block
per SM: it is chosen for the running kernel, and nothing changes it while that kernel runs.

Warp-specialised kernels of Hopper (cuBLAS GEMMs, cuDNN attention: 384 threads x 168 registers) are
an exception to the register arithmetic, measured on H200 (``bench/residency/sweep.py``,
``tests/data/h200_room.csv``). Some of their producer warps exit early; what they held is free until
the kernel ends, *once*: guests that have ended do not give it back. See :class:`GuestBound`.
"""

from __future__ import annotations

from dataclasses import dataclass

from overlapctl.plan.residency import (
    blocks_per_sm,
    carveout_step,
    grid_is_coresident,
    padded,
    registers_per_warp,
    smem_per_block,
    warps_per_block,
)
from overlapctl.records import DeviceFacts, KernelFootprint

__all__ = ["GuestBound", "RoomMaker", "guest_bound", "pad_or_carveout_for_room", "room_beside"]


@dataclass(frozen=True, kw_only=True)
class GuestBound:
    """What registers let in beside one block of a warp-specialised kernel, per SM.

    Parameters
    ----------
    warps
        Most warps a guest's block may have.
    registers
        Most registers per thread it may have.
    blocks
        Most guests from the kernel's start to its end, one after another or at once.
    """

    warps: int
    registers: int
    blocks: int


_WARP_SPECIALISED = GuestBound(warps=1, registers=32, blocks=2)
"""H200, cuBLAS bf16 GEMM: 1 warp of up to 32 registers always got in, twice per SM and never a
third time, however short the guests; 1 warp of 36 registers and blocks of 4 warps never did; blocks
of 2 and 3 warps did, once, on every other SM only."""


@dataclass(frozen=True, kw_only=True)
class RoomMaker:
    """What makes room for another kernel's block; all zero and -1: nothing is needed.

    Parameters
    ----------
    pad
        Bytes added to each block's dynamic shared memory.
    carveout
        Preferred carve-out in percent, or -1 to leave it.
    """

    pad: int = 0
    carveout: int = -1


def room_beside(
    facts: DeviceFacts,
    footprint: KernelFootprint,
    resident: int,
    other: KernelFootprint,
    *,
    carveout: int | None = None,
) -> int:
    """How many blocks of ``other`` fit one SM beside ``resident`` blocks of ``footprint``.

    Parameters
    ----------
    facts
        The GPU.
    footprint, resident
        The running kernel and how many of its blocks the SM holds (0: the SM is empty).
    other
        The kernel that wants in.
    carveout
        The running kernel's carve-out preference in percent; ``None`` or -1: none.

    Returns
    -------
    int
        0 if none fits on every SM. Blocks of ``other`` beyond its own residency never fit. Beside
        a warp-specialised kernel: how many over its whole life.

    Notes
    -----
    Resident warps are taken to be dealt evenly to the sub-partitions.
    """
    alone = blocks_per_sm(facts, other)
    if resident <= 0 or alone == 0:
        return alone
    smem = _smem_free(facts, footprint, resident, carveout) // max(1, smem_per_block(facts, other))
    slots = facts.max_blocks_per_sm - resident
    bound = guest_bound(facts, footprint) if resident == 1 else None
    if bound is not None:
        allowed = warps_per_block(facts, other) <= bound.warps
        by_registers = bound.blocks if allowed and other.registers <= bound.registers else 0
    else:
        warps = _warps_free(facts, footprint, resident, other)
        by_registers = warps // warps_per_block(facts, other)
    return max(0, min(alone, smem, by_registers, slots))


def guest_bound(facts: DeviceFacts, footprint: KernelFootprint) -> GuestBound | None:
    """Measured bound beside a warp-specialised kernel; ``None``: the arithmetic holds.

    Recognised by architecture and footprint: sm_90, three warp groups, 168 registers per thread
    (which fill the register file but for 256 in each sub-partition).
    """
    if facts.arch == "sm_90" and footprint.threads == 384 and footprint.registers == 168:
        return _WARP_SPECIALISED
    return None


def pad_or_carveout_for_room(
    facts: DeviceFacts,
    footprint: KernelFootprint,
    other: KernelFootprint,
) -> RoomMaker | None:
    """Smallest change that lets one block of ``other`` in beside a full SM of ``footprint``.

    Tried in this order: nothing; the smallest pad that keeps the kernel's residency but moves the
    SM to a larger carve-out step; the smallest carve-out preference that does. The pad comes first
    because every launch path takes one; a carve-out needs a launch attribute.

    Returns
    -------
    RoomMaker or None
        ``None`` if neither helps: registers, warps or slots are short, or shared memory is full.
    """
    residency = blocks_per_sm(facts, footprint)
    if residency == 0:
        return None

    def fits(kernel: KernelFootprint, carveout: int = -1) -> bool:
        return (
            blocks_per_sm(facts, kernel, carveout=carveout) == residency
            and room_beside(facts, kernel, residency, other, carveout=carveout) > 0
        )

    if fits(footprint):
        return RoomMaker()
    own = smem_per_block(facts, footprint) * residency
    for step in facts.carveout_steps:
        if step < own:
            continue
        # One byte beyond this step configures the next larger one.
        pad = max(0, step // residency - facts.smem_reserved_per_block - footprint.smem + 1)
        candidate = padded(footprint, pad)
        keeps_grid = grid_is_coresident(facts, candidate) or not grid_is_coresident(
            facts, footprint
        )
        if keeps_grid and fits(candidate):
            return RoomMaker(pad=pad)
    for percent in range(1, 101):
        if fits(footprint, percent):
            return RoomMaker(carveout=percent)
    return None


def _smem_free(
    facts: DeviceFacts, footprint: KernelFootprint, resident: int, carveout: int | None
) -> int:
    step = carveout_step(facts, footprint, carveout)
    return step - resident * smem_per_block(facts, footprint)


def _warps_free(
    facts: DeviceFacts,
    footprint: KernelFootprint,
    resident: int,
    other: KernelFootprint,
) -> int:
    """Warps of ``other`` that registers and warp slots of all sub-partitions still take."""
    parts = facts.subpartitions
    slots = facts.max_threads_per_sm // facts.warp_size // parts
    file = facts.registers_per_sm // parts
    held = resident * warps_per_block(facts, footprint)
    mine, theirs = registers_per_warp(facts, footprint), registers_per_warp(facts, other)
    free = 0
    for part in range(parts):
        warps = held // parts + (1 if part < held % parts else 0)
        by_registers = (file - warps * mine) // theirs if theirs else slots
        free += max(0, min(by_registers, slots - warps))
    return free
