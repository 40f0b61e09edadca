"""Which blocks fit an SM together: the residency model.

Blocks per SM is the least of four limits: threads (warp slots), registers (dealt to sub-partitions
in per-warp granules), shared memory (in granules, each block with the driver's reserve, out of the
carve-out step the SM is configured to) and block slots. On NVIDIA this equals the driver's
occupancy query; the rules are those of the CUDA C++ programming guide and ``cuda_occupancy.h``.

On AMD the same rules hold with waves for warps, SIMDs for sub-partitions, VGPRs for registers and
LDS for shared memory: a SIMD has 512 VGPRs per lane and 8 wave slots, VGPRs are dealt 8 at a time,
and a workgroup of several waves needs one of 16 barriers (LLVM ``AMDGPUBaseInfo.cpp``:
``getTotalNumVGPRs``, ``getVGPRAllocGranule``, ``getMaxWavesPerEU``, ``getMaxWorkGroupsPerCU``).
``DeviceFacts`` counts registers in 32-bit lanes there too: 512 VGPRs x 64 lanes x 4 SIMDs, in
granules of 8 x 64.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from overlapctl.errors import UsageError
from overlapctl.records import DeviceFacts, KernelFootprint

__all__ = [
    "Limits",
    "Resource",
    "blocks_per_sm",
    "carveout_step",
    "grid_is_coresident",
    "is_persistent",
    "limiting_resource",
    "limits",
    "pad_for_blocks",
    "padded",
    "registers_per_warp",
    "smem_per_block",
]

Resource = Literal["threads", "registers", "smem", "slots"]

_UNLIMITED = 1 << 30
# LLVM's getMaxWorkGroupsPerCU: one barrier for each workgroup of more than one wave.
_AMD_BARRIERS = 16


class Limits(NamedTuple):
    """Blocks per SM that each resource alone would allow."""

    threads: int
    registers: int
    smem: int
    slots: int


def registers_per_warp(facts: DeviceFacts, footprint: KernelFootprint) -> int:
    """32-bit registers one warp takes from its sub-partition, rounded up to the granule."""
    return _round_up(footprint.registers * facts.warp_size, facts.register_granule)


def smem_per_block(facts: DeviceFacts, footprint: KernelFootprint) -> int:
    """Shared memory one block takes from its SM in bytes: own, reserve, rounded to the granule."""
    return _round_up(footprint.smem + facts.smem_reserved_per_block, facts.smem_granule)


def warps_per_block(facts: DeviceFacts, footprint: KernelFootprint) -> int:
    """Warps (waves on AMD) of one block."""
    return -(-footprint.threads // facts.warp_size)


def limits(
    facts: DeviceFacts, footprint: KernelFootprint, *, carveout: int | None = None
) -> Limits:
    """Blocks per SM that threads, registers, shared memory and slots would each allow.

    Parameters
    ----------
    facts
        The GPU.
    footprint
        What one block asks for.
    carveout
        Preferred shared-memory carve-out in percent of an SM's shared memory; ``None`` or -1: no
        preference, so that as much as the kernel can use is configured.

    Raises
    ------
    UsageError
        If ``carveout`` is no percentage or the block has no threads.
    """
    _check(footprint)
    return Limits(
        threads=_thread_limit(facts, footprint),
        registers=_register_limit(facts, footprint),
        smem=_smem_limit(facts, footprint, carveout),
        slots=_slot_limit(facts, footprint),
    )


def blocks_per_sm(
    facts: DeviceFacts, footprint: KernelFootprint, *, carveout: int | None = None
) -> int:
    """How many blocks of a kernel are resident on one SM (0: it cannot be launched).

    Parameters and errors as in :func:`limits`.
    """
    return min(limits(facts, footprint, carveout=carveout))


def limiting_resource(
    facts: DeviceFacts, footprint: KernelFootprint, *, carveout: int | None = None
) -> Resource:
    """Name the resource that limits :func:`blocks_per_sm`.

    Where several allow the same number, the first of shared memory, registers, threads and slots
    is named: the one a pad or a compiler option can change.
    """
    values = limits(facts, footprint, carveout=carveout)
    least = min(values)
    order: tuple[Resource, ...] = ("smem", "registers", "threads", "slots")
    return next(name for name in order if getattr(values, name) == least)


def padded(footprint: KernelFootprint, pad: int) -> KernelFootprint:
    """Return the footprint with ``pad`` bytes more dynamic shared memory per block."""
    return dataclasses.replace(footprint, dynamic_smem=footprint.dynamic_smem + pad)


def pad_for_blocks(facts: DeviceFacts, footprint: KernelFootprint, blocks: int) -> int | None:
    """Smallest pad after which at most ``blocks`` blocks, and at least one, fit an SM.

    Returns
    -------
    int or None
        Bytes per block; 0 if no more than ``blocks`` fit as it is. ``None`` if the kernel cannot be
        launched at all or the pad would pass the opt-in limit of a block.

    Raises
    ------
    UsageError
        If ``blocks`` is below 1.
    """
    if blocks < 1:
        raise UsageError(f"blocks is {blocks}", remedy="ask for at least 1 block per SM")
    natural = blocks_per_sm(facts, footprint)
    if natural == 0:
        return None
    if natural <= blocks:
        return 0
    # blocks + 1 must not fit: the granules of one block must exceed an SM's granules by (blocks+1).
    granule = facts.smem_granule
    needed = (facts.smem_per_sm // granule // (blocks + 1) + 1) * granule
    # The least request that rounds up to `needed` is one byte above the granule below.
    pad = needed - granule + 1 - facts.smem_reserved_per_block - footprint.smem
    return pad if blocks_per_sm(facts, padded(footprint, pad)) >= 1 else None


def carveout_step(
    facts: DeviceFacts, footprint: KernelFootprint, preferred: int | None = None
) -> int:
    """Shared memory in bytes an SM gets configured to for a kernel.

    Parameters
    ----------
    preferred
        The kernel's carve-out preference in percent; ``None`` or -1: none. A preference below what
        one block needs is ignored, as the driver does.

    Returns
    -------
    int
        One of ``facts.carveout_steps`` (or ``facts.smem_per_sm`` where there is only one size).

    Notes
    -----
    Without a preference: the smallest step that holds as many blocks as the other resources allow.
    That is what was observed on H200 beside cuBLAS's persistent GEMMs (188.6 KB a block: 196 KB;
    padded by 12 KB, or 213 KB a block: 228 KB).
    """
    steps = facts.carveout_steps or (facts.smem_per_sm,)
    block = smem_per_block(facts, footprint)
    if preferred is None or preferred < 0:
        wanted = block * max(1, blocks_per_sm(facts, footprint))
    else:
        _check_percent(preferred)
        wanted = max(block, facts.smem_per_sm * preferred // 100)
    return next((step for step in steps if step >= wanted), steps[-1])


def grid_is_coresident(
    facts: DeviceFacts, footprint: KernelFootprint, *, carveout: int | None = None
) -> bool:
    """Whether all blocks of the grid are resident at once on an otherwise idle GPU.

    Clusters are placed whole: with clusters of c blocks, at most ``residency * SMs // c`` fit.
    """
    room = blocks_per_sm(facts, footprint, carveout=carveout) * facts.sm_count
    if footprint.cluster > 1:
        room = room // footprint.cluster * footprint.cluster
    return footprint.blocks <= room


def is_persistent(facts: DeviceFacts, footprint: KernelFootprint) -> bool:
    """Whether the kernel keeps every SM it uses for itself until it ends.

    True for a grid that is no larger than the SM count and of which only one block fits an SM.
    """
    return footprint.blocks <= facts.sm_count and blocks_per_sm(facts, footprint) == 1


def _thread_limit(facts: DeviceFacts, footprint: KernelFootprint) -> int:
    if footprint.threads > facts.max_threads_per_block:
        return 0
    return facts.max_threads_per_sm // facts.warp_size // warps_per_block(facts, footprint)


def _register_limit(facts: DeviceFacts, footprint: KernelFootprint) -> int:
    warp = registers_per_warp(facts, footprint)
    if warp == 0:
        return _UNLIMITED
    warps = warps_per_block(facts, footprint)
    # NVIDIA checks a launch as if every sub-partition got the same number of warps.
    if warp * _round_up(warps, facts.subpartitions) > facts.registers_per_block:
        return 0
    per_subpartition = facts.registers_per_sm // facts.subpartitions // warp
    return per_subpartition * facts.subpartitions // warps


def _smem_limit(facts: DeviceFacts, footprint: KernelFootprint, carveout: int | None) -> int:
    if footprint.smem > facts.smem_per_block_optin:
        return 0
    block = smem_per_block(facts, footprint)
    if block == 0:
        return _UNLIMITED
    if carveout is None or carveout < 0:
        return facts.smem_per_sm // block
    return carveout_step(facts, footprint, carveout) // block


def _slot_limit(facts: DeviceFacts, footprint: KernelFootprint) -> int:
    if facts.vendor == "amd" and warps_per_block(facts, footprint) > 1:
        return min(facts.max_blocks_per_sm, _AMD_BARRIERS)
    return facts.max_blocks_per_sm


def _check(footprint: KernelFootprint) -> None:
    if footprint.threads < 1:
        raise UsageError(
            f"threads of {footprint.name!r} is {footprint.threads}",
            remedy="a block has at least 1 thread",
        )


def _check_percent(carveout: int) -> None:
    if carveout > 100:
        raise UsageError(f"carveout is {carveout}", remedy="give a percentage from 0 to 100")


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
