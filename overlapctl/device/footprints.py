"""What communication kernels ask of an SM, by library version and architecture.

NCCL (read from the published wheels' device code, and NCCL's ``src/include/device.h``,
``src/graph/tuning.cc``, ``src/enqueue.cc``): every ``ncclDevKernel_*`` uses 96 registers per thread
so that 640 threads fit; static shared memory grew in 2.29; dynamic shared memory is always that of
640 threads, 20 warps times the scratch of a warp; one block per channel. Threads: 544 for ring
(512 and one warp that synchronises), 640 for send/receive, 288 where links are as slow as PCIe.

Measured on H200, NCCL 2.28.9: 24 blocks of 512-544 threads, 96 registers, 22,592 + 82,240 bytes;
torch's ``two_shot_all_reduce_``: 24 blocks of 1,024 threads, 32 registers, no shared memory.
"""

from __future__ import annotations

import re
from typing import Literal

from overlapctl.device.catalogue import find_model
from overlapctl.errors import UsageError
from overlapctl.records import DeviceFacts, KernelFootprint

__all__ = [
    "communication_footprint",
    "light_footprint",
    "nccl_footprint",
    "one_warp_footprint",
    "rccl_footprint",
    "standin_gbps",
    "symmetric_memory_footprint",
]

_DEFAULT_NCCL = "2.28.9"
_MAX_WARPS = 20  # NCCL_MAX_NTHREADS 640 / 32
_REGISTERS = 96
_PCIE_GBPS = 64
"""PCIe 5.0 x16, one direction: a link no faster than this is taken for PCIe if nothing tells."""

_CHANNELS_FAST = 24
"""Channels over NVLink: measured on H200; A100 and H100 have the same rings per link."""

_CHANNELS_BLACKWELL = 16
"""NCCL 2.28.3 release notes: default maximum on Blackwell lowered from 32 to 16."""

_CHANNELS_SLOW = 4
"""Channels over PCIe or an NVLink bridge: an estimate (two per ring, two rings)."""

_BRIDGE_LINKS = 4
"""NVLinks of one bridge between two cards (A40)."""

_CHANNELS_RCCL = 32
"""Workgroups of RCCL: an estimate; it depends on the number of links in the ring search."""

_LIGHT_BLOCKS = 24

Link = Literal["nvlink", "pcie", "xgmi", "system"]


_STANDIN_LINK_SHARE = 0.87
"""NCCL's all-reduce of 896 MiB takes 2.93 ms on two H200s: 320 of 370 GB/s between peers."""


def standin_gbps(facts: DeviceFacts) -> float:
    """Pace of the stand-in kernel in GB/s: what NCCL would get out of this GPU's link."""
    return facts.rates.link_gbps * _STANDIN_LINK_SHARE


def communication_footprint(
    facts: DeviceFacts,
    path: str,
    op: str,
    nccl_version: str = _DEFAULT_NCCL,
    *,
    link: Link | None = None,
) -> KernelFootprint | None:
    """Footprint of the kernel that runs a collective.

    Parameters
    ----------
    facts
        The GPU.
    path
        As in :class:`~overlapctl.records.CommSpec`: ``"nccl"`` (RCCL on AMD), ``"light"``
        (own symmetric-memory kernel), ``"copy"`` or ``"standin"`` (NCCL's ring kernel).
    op
        As in :class:`~overlapctl.records.CommSpec`.
    nccl_version
        For example ``"2.28.9"``; ``"none"`` counts as the default.
    link
        How the GPUs are connected; by default as the catalogue says of the model, else by the
        rate in ``facts``.

    Returns
    -------
    KernelFootprint or None
        ``None`` for ``"copy"``: a copy engine occupies no SM.

    Raises
    ------
    UsageError
        If the path or the version is unknown.
    """
    if path == "copy":
        return None
    if path == "light":
        return light_footprint()
    if path in ("nccl", "standin"):
        if facts.vendor == "amd":
            return rccl_footprint()
        ring = path == "standin" or op in ("all_reduce", "all_gather", "reduce_scatter")
        return nccl_footprint(
            facts, "ring" if ring else "p2p", nccl_version, link=link or _link(facts)
        )
    raise UsageError(
        f"communication path {path!r} is unknown", remedy="use nccl, light, copy or standin"
    )


def nccl_footprint(
    facts: DeviceFacts,
    algorithm: Literal["ring", "p2p"],
    version: str = _DEFAULT_NCCL,
    *,
    link: Link = "nvlink",
) -> KernelFootprint:
    """Footprint of NCCL's kernels; see the module's description for the sources.

    Raises
    ------
    UsageError
        If ``version`` is no version.
    """
    number = int(facts.arch.removeprefix("sm_"))
    recent = _version(version) >= (2, 29)
    # sm_86 and sm_89 run the sm_80 code.
    old, new = (7_104, 14_144) if number < 90 else (22_592, 37_824)
    # Scratch of one warp in bytes; it goes with the kernels' unroll: 8, on sm_12x 6.
    scratch = 3_088 if number >= 120 else 4_112
    ring = 512 + 32 if link == "nvlink" else 256 + 32
    return KernelFootprint(
        name="ncclDevKernel_SendRecv" if algorithm == "p2p" else "ncclDevKernel_Ring",
        threads=640 if algorithm == "p2p" else ring,
        registers=_REGISTERS,
        static_smem=new if recent else old,
        dynamic_smem=scratch * _MAX_WARPS,
        blocks=min(_channels(facts, link), facts.sm_count),
    )


def rccl_footprint() -> KernelFootprint:
    """Footprint of RCCL's kernels.

    256 threads (``NCCL_MAX_NTHREADS`` in RCCL's ``src/include/device.h``), one workgroup per
    channel. Registers, LDS and the number of channels are estimates: RCCL publishes none of them,
    they are to be read from the code object where one is at hand.
    """
    return KernelFootprint(
        name="ncclDevKernel_Generic",
        threads=256,
        registers=96,
        static_smem=32 * 1024,
        blocks=_CHANNELS_RCCL,
    )


def light_footprint() -> KernelFootprint:
    """Footprint of the own light all-reduce (``kernels/light_all_reduce.py``: its contract)."""
    return KernelFootprint(
        name="overlapctl_comm_light_all_reduce",
        threads=512,
        registers=40,
        blocks=_LIGHT_BLOCKS,
    )


def symmetric_memory_footprint() -> KernelFootprint:
    """Footprint of torch's symmetric-memory collectives (measured on H200, torch 2.11)."""
    return KernelFootprint(
        name="two_shot_all_reduce_kernel_inplace",
        threads=1024,
        registers=32,
        blocks=_LIGHT_BLOCKS,
    )


def one_warp_footprint(facts: DeviceFacts) -> KernelFootprint:
    """Footprint of the own one-warp kernel: a ring of 4 x 4 KiB and barriers, a block per SM."""
    return KernelFootprint(
        name="overlapctl_comm_one_warp",
        threads=32,
        registers=8,
        static_smem=4 * 4096 + 128,
        blocks=facts.sm_count,
    )


def _channels(facts: DeviceFacts, link: Link) -> int:
    model = find_model(facts.name, facts.memory_bytes)
    if link != "nvlink" or (model is not None and model.links <= _BRIDGE_LINKS):
        return _CHANNELS_SLOW
    return _CHANNELS_BLACKWELL if int(facts.arch.removeprefix("sm_")) >= 100 else _CHANNELS_FAST


def _link(facts: DeviceFacts) -> Link:
    model = find_model(facts.name, facts.memory_bytes)
    if model is not None:
        return model.link
    return "pcie" if facts.rates.link_gbps <= _PCIE_GBPS else "nvlink"


def _version(text: str) -> tuple[int, ...]:
    if text in ("none", "unknown"):
        text = _DEFAULT_NCCL
    match = re.match(r"\d+\.\d+", text, re.ASCII)
    if match is None:
        raise UsageError(f"NCCL version {text!r} is no version", remedy='write it like "2.28.9"')
    return tuple(int(part) for part in match[0].split("."))
