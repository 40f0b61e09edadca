"""Limits that every GPU of one architecture shares, with their sources.

NVIDIA: "Technical Specifications per Compute Capability" and "Shared Memory" in the CUDA C++
Programming Guide; allocation granules and carve-out steps: ``cuda_occupancy.h`` of CUDA 13 (which
lists the shared-memory sizes an SM can be configured to) and libcu++'s ``arch_traits.h``.

AMD: compute-unit resources from ROCm's "GPU hardware specifications"; wave slots, VGPR granule and
LDS granule from LLVM's ``AMDGPUBaseInfo.cpp`` and "User Guide for AMDGPU Backend"
(``GRANULATED_LDS_SIZE``: 128 dwords, 320 on gfx950). Registers are counted in 32-bit lanes:
512 VGPRs x 64 lanes x 4 SIMDs, dealt in granules of 8 VGPRs x 64 lanes. LDS needs no opt-in, the
driver reserves none of it, and it is not configurable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ARCHITECTURES", "Architecture"]

_KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Limits of an SM (NVIDIA) or CU (AMD); fields as in :class:`~overlapctl.records.DeviceFacts`.

    Priorities: NVIDIA drivers report the range 0 to -5 (measured on H200, driver 580); HIP reports
    1 (low) to -1 (high).
    """

    vendor: Literal["nvidia", "amd"] = "nvidia"
    warp_size: int = 32
    max_threads_per_sm: int = 2048
    max_threads_per_block: int = 1024
    max_blocks_per_sm: int = 32
    registers_per_sm: int = 65536
    registers_per_block: int = 65536
    register_granule: int = 256
    subpartitions: int = 4
    smem_per_sm: int
    smem_per_block: int = 48 * _KIB
    smem_per_block_optin: int
    smem_reserved_per_block: int = 1024
    smem_granule: int = 128
    carveout_steps: tuple[int, ...]
    priority_least: int = 0
    priority_greatest: int = -5


def _kib(*steps: int) -> tuple[int, ...]:
    return tuple(step * _KIB for step in steps)


_SM80 = Architecture(
    smem_per_sm=164 * _KIB,
    smem_per_block_optin=163 * _KIB,
    carveout_steps=_kib(0, 8, 16, 32, 64, 100, 132, 164),
)
_SM86 = Architecture(
    max_threads_per_sm=1536,
    max_blocks_per_sm=16,
    smem_per_sm=100 * _KIB,
    smem_per_block_optin=99 * _KIB,
    carveout_steps=_kib(0, 8, 16, 32, 64, 100),
)
_SM89 = Architecture(
    max_threads_per_sm=1536,
    max_blocks_per_sm=24,
    smem_per_sm=100 * _KIB,
    smem_per_block_optin=99 * _KIB,
    carveout_steps=_kib(0, 8, 16, 32, 64, 100),
)
_SM90 = Architecture(
    smem_per_sm=228 * _KIB,
    smem_per_block_optin=227 * _KIB,
    carveout_steps=_kib(0, 8, 16, 32, 64, 100, 132, 164, 196, 228),
)


def _amd(lds_kib: int, lds_granule: int) -> Architecture:
    return Architecture(
        vendor="amd",
        warp_size=64,
        # 8 wave slots x 4 SIMDs x 64 lanes; a workgroup has at least one wave.
        max_threads_per_sm=8 * 4 * 64,
        max_blocks_per_sm=8 * 4,
        registers_per_sm=512 * 64 * 4,
        registers_per_block=512 * 64 * 4,
        register_granule=8 * 64,
        smem_per_sm=lds_kib * _KIB,
        smem_per_block=lds_kib * _KIB,
        smem_per_block_optin=lds_kib * _KIB,
        smem_reserved_per_block=0,
        smem_granule=lds_granule,
        carveout_steps=_kib(lds_kib),
        priority_least=1,
        priority_greatest=-1,
    )


ARCHITECTURES: dict[str, Architecture] = {
    "sm_80": _SM80,
    "sm_86": _SM86,
    "sm_89": _SM89,
    "sm_90": _SM90,
    "sm_100": _SM90,  # the tables give compute capability 10.0 the limits of 9.0
    "sm_103": _SM90,
    "sm_120": _SM89,  # and 12.0 those of 8.9
    "gfx90a": _amd(64, 512),
    "gfx942": _amd(64, 512),
    "gfx950": _amd(160, 1280),
}
