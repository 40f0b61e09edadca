"""GPU models overlapctl knows without having one: for planning offline and for simulation.

Each model names the sources of its own numbers; those of its architecture are in
:mod:`overlapctl.device.architectures`. Rates are what programs reach, not what data sheets promise,
since times are predicted from them. On H200 they were measured (large copies, a cuBLAS bf16 GEMM,
peer copies of 128 MB and more); elsewhere they are the data sheet's figure times the share that
H200 reaches of its own, see :data:`REACHED`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import Literal

from overlapctl.device.architectures import ARCHITECTURES
from overlapctl.errors import DeviceError
from overlapctl.records import DeviceFacts, DeviceRates

__all__ = ["MODELS", "REACHED", "Model", "Reached", "find_model", "model", "model_names"]


@dataclass(frozen=True)
class Reached:
    """Share of the data sheet's rate that large kernels reach, as measured on H200.

    Memory 4,300 of 4,800 GB/s; bf16 790 of 989 TFLOP/s; NVLink peer copies 370 of 450 GB/s per
    direction. For fp32 nothing was measured: the bf16 share, which both owe to the clock under
    load, stands in.
    """

    hbm: float = 4300 / 4800
    tensor: float = 790 / 989
    fp32: float = 790 / 989
    link: float = 370 / 450


REACHED = Reached()


@dataclass(frozen=True, kw_only=True)
class Model:
    """One GPU model as its data sheet describes it.

    Parameters
    ----------
    key
        Name after ``sim:``.
    name
        Name as the driver gives it, for the variant described.
    pattern
        Regular expression that the driver's name must match, ignoring case, and
        ``min_memory`` / ``max_memory`` (bytes) its memory, to be this model.
    hbm_gbps, tensor_tflops, fp32_tflops
        Data-sheet peaks: memory, dense bf16 matrix, plain fp32.
    link, links, link_gbps
        How two GPUs are connected, by how many links of that kind, and the data-sheet rate
        between the two in one direction, GB/s.
    copy_engines
        Copy engines (``asyncEngineCount``); 2 (one per direction) where no figure was found.
    sm_mhz
        Boost clock.
    sources
        Field to source; ``"*"`` for all that are not listed.
    """

    key: str
    name: str
    pattern: str
    arch: str
    sm_count: int
    l2_bytes: int
    memory_bytes: int
    hbm_gbps: float
    tensor_tflops: float
    fp32_tflops: float
    link: Literal["nvlink", "pcie", "xgmi"]
    links: int
    link_gbps: float
    copy_engines: int = 2
    sm_mhz: int
    max_memory: int | None = None
    min_memory: int | None = None
    measured: DeviceRates | None = None
    aliases: tuple[str, ...] = ()
    sources: dict[str, str] = field(hash=False)

    @property
    def rates(self) -> DeviceRates:
        """Rates that large kernels and transfers reach: measured, or estimated from the sheet."""
        return self.measured or DeviceRates(
            hbm_gbps=round(self.hbm_gbps * REACHED.hbm, 1),
            link_gbps=round(self.link_gbps * REACHED.link, 1),
            tensor_tflops=round(self.tensor_tflops * REACHED.tensor, 1),
            fp32_tflops=round(self.fp32_tflops * REACHED.fp32, 1),
            copy_engines=self.copy_engines,
        )

    @property
    def facts(self) -> DeviceFacts:
        """The model as facts, with ``source="catalogue"``."""
        return DeviceFacts(
            name=self.name,
            arch=self.arch,
            sm_count=self.sm_count,
            l2_bytes=self.l2_bytes,
            memory_bytes=self.memory_bytes,
            rates=self.rates,
            source="catalogue",
            **vars(ARCHITECTURES[self.arch]),
        )

    def describes(self, name: str, memory_bytes: int) -> bool:
        """Whether a GPU with this driver name and memory is this model."""
        return (
            re.search(self.pattern, name, re.IGNORECASE) is not None
            and (self.min_memory is None or memory_bytes >= self.min_memory)
            and (self.max_memory is None or memory_bytes < self.max_memory)
        )


_MIB = 1 << 20
_GB = 10**9
_A100_WHITEPAPER = "NVIDIA A100 Tensor Core GPU Architecture whitepaper, table of GA100 GPUs"
_H100_WHITEPAPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper, table of H100 GPUs"
_ROCM_SPECS = "ROCm documentation, GPU hardware specifications (CUs, L2)"
_CLOCK = "clock implied by the data sheet's fp32 rate: rate / (SMs x 128 lanes x 2)"
_CLOCK_64 = "clock implied by the data sheet's fp32 rate: rate / (SMs x 64 lanes x 2)"
_ENGINES = "asyncEngineCount by the driver on H200, taken to hold for A100 and H100 too"

_LIST = (
    Model(
        key="a40",
        name="NVIDIA A40",
        pattern=r"\bA40\b",
        arch="sm_86",
        sm_count=84,
        l2_bytes=6 * _MIB,
        memory_bytes=48 * _GB,
        hbm_gbps=696,
        tensor_tflops=149.7,
        fp32_tflops=37.4,
        link="nvlink",
        links=4,
        link_gbps=56.25,
        sm_mhz=1740,
        sources={
            "*": "NVIDIA A40 data sheet (10,752 CUDA cores = 84 SMs x 128)",
            "l2_bytes": "NVIDIA Ampere GA102 GPU Architecture whitepaper: 6 MB L2",
            "link_gbps": "data sheet: NVLink bridge 112.5 GB/s bidirectional (pairs; else PCIe 4)",
            "links": "GA102 whitepaper: four x4 NVLink 3 links of 14.0625 GB/s per direction",
            "sm_mhz": _CLOCK,
        },
    ),
    Model(
        key="a100-40",
        name="NVIDIA A100-SXM4-40GB",
        pattern=r"\bA100\b",
        max_memory=60 * _GB,
        arch="sm_80",
        sm_count=108,
        l2_bytes=40 * _MIB,
        memory_bytes=40 * _GB,
        hbm_gbps=1555,
        tensor_tflops=312,
        fp32_tflops=19.5,
        link="nvlink",
        links=12,
        link_gbps=300,
        copy_engines=3,
        sm_mhz=1410,
        sources={
            "*": _A100_WHITEPAPER,
            "link_gbps": "whitepaper: 12 links, 600 GB/s bidirectional",
            "copy_engines": _ENGINES,
        },
    ),
    Model(
        key="a100-80",
        name="NVIDIA A100-SXM4-80GB",
        pattern=r"\bA100\b",
        min_memory=60 * _GB,
        aliases=("a100",),
        arch="sm_80",
        sm_count=108,
        l2_bytes=40 * _MIB,
        memory_bytes=80 * _GB,
        hbm_gbps=2039,
        tensor_tflops=312,
        fp32_tflops=19.5,
        link="nvlink",
        links=12,
        link_gbps=300,
        copy_engines=3,
        sm_mhz=1410,
        sources={
            "*": _A100_WHITEPAPER,
            "memory_bytes": "NVIDIA A100 data sheet, SXM 80 GB",
            "hbm_gbps": "NVIDIA A100 data sheet, SXM 80 GB",
            "link_gbps": "whitepaper: 12 links, 600 GB/s bidirectional",
            "copy_engines": _ENGINES,
        },
    ),
    Model(
        key="l40s",
        name="NVIDIA L40S",
        pattern=r"\bL40S\b",
        arch="sm_89",
        sm_count=142,
        l2_bytes=96 * _MIB,
        memory_bytes=48 * _GB,
        hbm_gbps=864,
        tensor_tflops=362,
        fp32_tflops=91.6,
        link="pcie",
        links=0,
        link_gbps=31.5,
        sm_mhz=2520,
        sources={
            "*": "NVIDIA L40S data sheet (18,176 CUDA cores = 142 SMs x 128)",
            "l2_bytes": "NVIDIA Ada GPU Architecture whitepaper: 96 MB L2 (AD102, L40 class)",
            "link_gbps": "PCIe 4.0 x16: 16 GT/s x 16 lanes x 128/130 / 8; no NVLink",
            "sm_mhz": _CLOCK,
        },
    ),
    Model(
        key="h100-sxm",
        name="NVIDIA H100 80GB HBM3",
        pattern=r"\bH100\b(?!.*PCIe)",
        aliases=("h100",),
        arch="sm_90",
        sm_count=132,
        l2_bytes=50 * _MIB,
        memory_bytes=80 * _GB,
        hbm_gbps=3352,
        tensor_tflops=989.4,
        fp32_tflops=66.9,
        link="nvlink",
        links=18,
        link_gbps=450,
        copy_engines=3,
        sm_mhz=1980,
        sources={
            "*": _H100_WHITEPAPER + ", column SXM5",
            "link_gbps": "whitepaper: 18 links, 900 GB/s bidirectional",
            "sm_mhz": _CLOCK,
            "copy_engines": _ENGINES,
        },
    ),
    Model(
        key="h100-pcie",
        name="NVIDIA H100 PCIe",
        pattern=r"\bH100\b.*PCIe",
        arch="sm_90",
        sm_count=114,
        l2_bytes=50 * _MIB,
        memory_bytes=80 * _GB,
        hbm_gbps=2039,
        tensor_tflops=756,
        fp32_tflops=51.2,
        link="nvlink",
        links=12,
        link_gbps=300,
        copy_engines=3,
        sm_mhz=1755,
        sources={
            "*": _H100_WHITEPAPER + ", column PCIe",
            "link_gbps": "H100 PCIe product brief: three bridges, 600 GB/s bidirectional (pairs)",
            "links": "H100 PCIe product brief: three bridges of four links",
            "sm_mhz": _CLOCK,
            "copy_engines": _ENGINES,
        },
    ),
    Model(
        key="h200",
        name="NVIDIA H200",
        pattern=r"\bH200\b(?!.*NVL)",
        arch="sm_90",
        sm_count=132,
        l2_bytes=60 * _MIB,
        memory_bytes=141 * _GB,
        hbm_gbps=4800,
        tensor_tflops=989,
        fp32_tflops=67,
        link="nvlink",
        links=18,
        link_gbps=450,
        copy_engines=3,
        sm_mhz=1980,
        measured=DeviceRates(
            hbm_gbps=4300,
            link_gbps=370,
            tensor_tflops=790,
            fp32_tflops=53.5,
            copy_engines=3,
        ),
        sources={
            "*": "NVIDIA H200 data sheet",
            "sm_count": "read from the driver on H200",
            "l2_bytes": "read from the driver on H200",
            "measured": "measured on 2x H200, NVLink (NV18), driver 580; fp32: 67 x 790/989",
            "link_gbps": "data sheet: 900 GB/s bidirectional",
            "links": "NVML on H200: 18 active links",
            "sm_mhz": _CLOCK,
            "copy_engines": _ENGINES,
        },
    ),
    Model(
        key="b200",
        name="NVIDIA B200",
        pattern=r"\bB200\b",
        arch="sm_100",
        sm_count=148,
        l2_bytes=126 * _MIB,
        memory_bytes=180 * _GB,
        hbm_gbps=7672,
        tensor_tflops=2250,
        fp32_tflops=75,
        link="nvlink",
        links=18,
        link_gbps=900,
        sm_mhz=1980,
        sources={
            "*": "NVIDIA DGX/HGX B200 data sheet, an eighth of the system, dense",
            "sm_count": "by the driver (pytorch/ao#4002)",
            "l2_bytes": "Blackwell tuning guide: 126 MB (by the driver: pytorch/ao#4002)",
            "hbm_gbps": "by the driver, 7,680 bits x 3,996 MHz x 2 / 8 (pytorch/ao#4002)",
            "link_gbps": "data sheet: NVLink 5, 1.8 TB/s bidirectional",
            "links": "NVLink 5: 18 links of 50 GB/s per direction",
            "sm_mhz": _CLOCK,
        },
    ),
    Model(
        key="rtx-pro-6000",
        name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        pattern=r"RTX PRO 6000",
        arch="sm_120",
        sm_count=188,
        l2_bytes=128 * _MIB,
        memory_bytes=96 * _GB,
        hbm_gbps=1792,
        tensor_tflops=500,
        fp32_tflops=125,
        link="pcie",
        links=0,
        link_gbps=63,
        sm_mhz=2597,
        sources={
            "*": "NVIDIA RTX PRO 6000 Blackwell data sheet (24,064 CUDA cores = 188 SMs x 128)",
            "l2_bytes": "NVIDIA RTX Blackwell PRO GPU Architecture whitepaper: 128 MB L2",
            "hbm_gbps": "512 bits x 28 Gbit/s / 8 (GDDR7)",
            "tensor_tflops": "data sheet: 4,000 TOPS fp4 sparse; an eighth of it is bf16 dense",
            "link_gbps": "PCIe 5.0 x16: 32 GT/s x 16 lanes x 128/130 / 8; no NVLink",
            "sm_mhz": _CLOCK,
        },
    ),
    Model(
        key="mi250x",
        name="AMD Instinct MI250X (one GCD)",
        pattern=r"MI250X",
        arch="gfx90a",
        sm_count=110,
        l2_bytes=8 * _MIB,
        memory_bytes=64 * _GB,
        hbm_gbps=1638,
        tensor_tflops=191.5,
        fp32_tflops=23.95,
        link="xgmi",
        links=4,
        link_gbps=200,
        sm_mhz=1700,
        sources={
            "*": "AMD Instinct MI250X data sheet, half of the package (two GCDs)",
            "sm_count": _ROCM_SPECS,
            "l2_bytes": _ROCM_SPECS,
            "link_gbps": "ROCm MI250 microarchitecture: 50 GB/s per link and direction, four links "
            "between the two GCDs of a package (GCDs of other packages have fewer)",
            "sm_mhz": _CLOCK_64,
        },
    ),
    Model(
        key="mi300x",
        name="AMD Instinct MI300X",
        pattern=r"MI300X",
        arch="gfx942",
        sm_count=304,
        l2_bytes=32 * _MIB,
        memory_bytes=192 * _GB,
        hbm_gbps=5300,
        tensor_tflops=1307.4,
        fp32_tflops=163.4,
        link="xgmi",
        links=1,
        link_gbps=64,
        sm_mhz=2100,
        sources={
            "*": "AMD Instinct MI300X data sheet, dense",
            "sm_count": _ROCM_SPECS,
            "l2_bytes": _ROCM_SPECS + ": 4 MiB per XCD x 8",
            "link_gbps": "data sheet: seven links of 128 GB/s bidirectional, one to each peer",
            "sm_mhz": "data sheet: peak engine clock",
        },
    ),
    Model(
        key="mi355x",
        name="AMD Instinct MI355X",
        pattern=r"MI355X",
        arch="gfx950",
        sm_count=256,
        l2_bytes=32 * _MIB,
        memory_bytes=288 * _GB,
        hbm_gbps=8000,
        tensor_tflops=2516.6,
        fp32_tflops=157.3,
        link="xgmi",
        links=1,
        link_gbps=76.8,
        sm_mhz=2400,
        sources={
            "*": "AMD Instinct MI355X data sheet, dense",
            "sm_count": _ROCM_SPECS,
            "l2_bytes": _ROCM_SPECS + ": 4 MiB per XCD x 8",
            "link_gbps": "data sheet: seven links of 153.6 GB/s bidirectional, one to each peer",
            "sm_mhz": "data sheet: peak engine clock",
        },
    ),
)

MODELS: dict[str, Model] = {m.key: m for m in _LIST}
_BY_NAME = {name: m for m in _LIST for name in (m.key, *m.aliases)}


def model_names() -> tuple[str, ...]:
    """Names that :func:`model` accepts, aliases included, sorted."""
    return tuple(sorted(_BY_NAME))


def model(name: str) -> Model:
    """Look a model up by its catalogue name, for example ``"h200"``.

    Raises
    ------
    DeviceError
        If the name is unknown; the message lists close matches and all names.
    """
    found = _BY_NAME.get(name.strip().lower())
    if found is None:
        close = difflib.get_close_matches(name.strip().lower(), _BY_NAME, n=3)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise DeviceError(
            f"simulated device {name!r} is unknown",
            remedy=f"{hint}known are {', '.join(model_names())}",
        )
    return found


def find_model(name: str, memory_bytes: int) -> Model | None:
    """Find the model of a GPU by the driver's name for it and its memory in bytes, if any."""
    return next((m for m in _LIST if m.describes(name, memory_bytes)), None)
