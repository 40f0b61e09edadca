"""The recorded trials on 2x H200 as inputs and outcomes for the simulator."""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass, replace
from pathlib import Path

from overlapctl.plan.parameters import SimulationParameters
from overlapctl.plan.residency import pad_for_blocks
from overlapctl.plan.simulate import (
    CommWork,
    ComputeWork,
    Shape,
    SimulationResult,
    compute_alone_ms,
    simulate,
)
from overlapctl.plan.throughput import OccupancyCurve
from overlapctl.plan.workload_model import gemm_curve, memory_curve
from overlapctl.records import DeviceFacts, KernelFootprint

DATA = Path(__file__).parents[2] / "tests" / "data"

_DEFAULTS = SimulationParameters()

CUBE = 8192
# name: (footprint, tile or None, flop of one launch or 0, launches). Registers and shared memory of
# the Triton tiles as compiled for sm_90, of library kernels as launched (h200_launches.csv).
_TRITON = {
    "tri64": ((64, 64, 64, 4, 2), 72, 32768),
    "tri32": ((32, 32, 64, 4, 2), 56, 8192),
    "tri128": ((128, 128, 32, 8, 2), 96, 32768),
    "tri128s4": ((128, 256, 64, 8, 3), 196, 147456),
}


@dataclass(frozen=True)
class Kernel:
    """A compute kernel of the tables."""

    footprint: KernelFootprint
    launches: int
    tile: tuple[int, ...] = ()
    flops: float = 0.0
    memory: bool = False


def _triton(name: str, side: int, depth: int, launches: int) -> Kernel:
    tile, registers, smem = _TRITON[name]
    footprint = KernelFootprint(
        name=name,
        threads=32 * tile[3],
        registers=registers,
        dynamic_smem=smem,
        blocks=(side // tile[0]) * (side // tile[1]),
    )
    return Kernel(footprint, launches, tile, 2.0 * side * side * depth)


def _elementwise(name: str, elements: int, launches: int, registers: int = 32) -> Kernel:
    footprint = KernelFootprint(
        name=name, threads=128, registers=registers, blocks=elements // (128 * 8)
    )
    return Kernel(footprint, launches, memory=True)


def _layernorm(launches: int) -> Kernel:
    footprint = KernelFootprint(
        name="lnorm", threads=128, registers=32, dynamic_smem=24, blocks=16384
    )
    return Kernel(footprint, launches, memory=True)


def _library(name: str, threads: int, registers: int, smem: int, blocks: int) -> Kernel:
    footprint = KernelFootprint(
        name=name, threads=threads, registers=registers, dynamic_smem=smem, blocks=blocks
    )
    return Kernel(footprint, 1)


KERNELS = {
    "tri64": _triton("tri64", CUBE, CUBE, 1),
    "tri64 x2": _triton("tri64", CUBE, CUBE, 2),
    "tri64K32k": _triton("tri64", CUBE, 4 * CUBE, 1),
    "tri32": _triton("tri32", CUBE, CUBE, 1),
    "tri128": _triton("tri128", CUBE, CUBE, 1),
    "tri128 x2": _triton("tri128", CUBE, CUBE, 2),
    "tri128K32k": _triton("tri128", CUBE, 4 * CUBE, 1),
    "tri128s4": _triton("tri128s4", CUBE, CUBE, 1),
    "sgemm": _library("sgemm", 256, 254, 67584, 2048),
    "bf16": _library("bf16", 384, 168, 188636, 132),
    "elem": _elementwise("elem", 2**30, 2, registers=34),
    "add4GB": _elementwise("add4GB", 2**30, 2, registers=34),
    "gelu x12": _elementwise("gelu", 2**27, 12),
    "lnorm x10": _layernorm(10),
    "gemm_bf16": _library("gemm_bf16", 384, 168, 188636, 132),
    "gemm_fp32": _library("gemm_fp32", 256, 254, 67584, 512),
    "triton128": _triton("tri128", 4096, 4096, 3),
    "triton64": _triton("tri64", 4096, 4096, 3),
    "gelu": _elementwise("gelu", 2**26, 6),
    "lnorm": _layernorm(4),
    "sdpa": _library("sdpa", 384, 168, 232448, 132),
}

# What counts as the same compute kernel when one is left out.
FAMILY = {
    "tri64 x2": "tri64",
    "tri64K32k": "tri64",
    "triton64": "tri64",
    "tri128 x2": "tri128",
    "tri128K32k": "tri128",
    "triton128": "tri128",
    "gemm_fp32": "sgemm",
    "gemm_bf16": "bf16",
    "elem": "add4GB",
    "gelu x12": "gelu",
    "lnorm x10": "lnorm",
}


@dataclass(frozen=True)
class Row:
    """One measured arm: inputs, then outcomes (``None``: not recorded)."""

    table: str
    compute: str
    comm: str
    blocks: int
    mib: int
    repeats: int
    priority: bool
    target: int | None
    compute_alone: float
    comm_alone: float
    padded_alone: float | None
    compute_end: float | None
    comm_end: float | None
    total: float

    @property
    def family(self) -> str:
        """Name of the compute kernel to leave out together."""
        return FAMILY.get(self.compute, self.compute)

    @property
    def case(self) -> tuple[str, str, int, int]:
        """What a choice is made for: all rows with the same value are its arms."""
        return (self.table, self.compute, self.mib, self.repeats)

    @property
    def is_default(self) -> bool:
        """Whether the job was untouched."""
        return self.comm == "nccl" and self.blocks == 24 and not self.priority and not self.target


def pairs() -> list[Row]:
    with (DATA / "h200x2_pairs.csv").open(newline="") as file:
        return [
            Row(
                table="pair",
                compute=r["compute"],
                comm=r["comm_kernel"],
                blocks=24,
                mib=int(r["all_reduce_mib"]),
                repeats=int(r["repeats"]),
                priority=r["comm_priority"] == "high",
                target=_int(r["target_blocks_per_sm"]),
                compute_alone=float(r["compute_alone_ms"]),
                comm_alone=float(r["comm_alone_ms"]),
                padded_alone=_float(r["compute_alone_padded_ms"]),
                compute_end=float(r["compute_end_ms"]),
                comm_end=float(r["comm_end_ms"]),
                total=float(r["total_ms"]),
            )
            for r in csv.DictReader(file)
        ]


def pipelines() -> list[Row]:
    """Without the rows of torch's SM carve-out knob, which is no arm here (and had no effect)."""
    with (DATA / "h200x2_pipeline.csv").open(newline="") as file:
        rows = []
        for r in csv.DictReader(file):
            if r["sm_carveout"]:
                continue
            group, _, cta = r["process_group"].partition("_cta")
            rows.append(
                Row(
                    table="pipeline",
                    compute=r["compute"],
                    comm="nccl",
                    blocks=int(cta) if cta else 24,
                    mib=int(r["all_reduce_mib"]),
                    repeats=1,
                    priority=group == "hp",
                    target=_int(r["target_blocks_per_sm"]),
                    compute_alone=float(r["compute_alone_ms"]),
                    comm_alone=float(r["comm_alone_ms"]),
                    padded_alone=None,
                    compute_end=None,
                    comm_end=None,
                    total=float(r["overlapped_ms"]),
                )
            )
        return rows


def compute_input(facts: DeviceFacts, row: Row, parameters: SimulationParameters) -> ComputeWork:
    kernel = KERNELS[row.compute]
    alone = row.compute_alone / (8 if row.table == "pipeline" else 1)
    if kernel.memory:
        curve = memory_curve(facts, kernel.footprint, parameters)
    elif kernel.tile:
        rate = kernel.flops * kernel.launches / alone
        curve = gemm_curve(facts, kernel.footprint, rate, kernel.tile, parameters)
    else:
        curve = OccupancyCurve(knee=1.0, sharpness=parameters.gemm_sharpness)
    return ComputeWork(
        footprint=kernel.footprint,
        alone_ms=alone,
        curve=curve,
        bound="memory" if kernel.memory else "gemm",
        launches=kernel.launches,
    )


def comm_input(row: Row, parameters: SimulationParameters) -> CommWork:
    if row.comm == "symm":
        footprint = KernelFootprint(name="symm", threads=1024, registers=32, blocks=row.blocks)
    else:
        footprint = KernelFootprint(
            name="nccl",
            threads=544,
            registers=96,
            static_smem=22592,
            dynamic_smem=82240,
            blocks=row.blocks,
        )
    return CommWork(
        footprint=footprint,
        alone_ms=row.comm_alone / (8 if row.table == "pipeline" else 1),
        launches=row.repeats,
        traffic=parameters.light_traffic if row.comm == "symm" else 1.0,
        sensitivity=parameters.light_sensitivity if row.comm == "symm" else 1.0,
    )


@dataclass(frozen=True)
class Prediction:
    """What the simulation says of a row, ms."""

    padded_alone: float
    compute_end: float
    comm_end: float

    @property
    def total(self) -> float:
        """End of whatever ends last."""
        return max(self.compute_end, self.comm_end)


@functools.lru_cache(maxsize=100_000)
def _predict(
    facts: DeviceFacts,
    compute: ComputeWork,
    comm: CommWork,
    shape: Shape,
    pipeline: bool,
    parameters: SimulationParameters,
) -> Prediction:
    result: SimulationResult = simulate(
        facts, compute, comm, shape, depth=8 if pipeline else None, parameters=parameters
    )
    padded = compute_alone_ms(facts, compute, shape.pad) * (8 if pipeline else 1)
    return Prediction(padded, result.compute_end, result.comm_end)


_GEMM_ONLY = (
    "load_latency_us",
    "gemm_sharpness",
    "comm_latency_gemm",
    "compute_on_comm_gemm",
    "queueing_onset",
)
_MEMORY_ONLY = (
    "memory_sharpness",
    "memory_knee_warps",
    "comm_latency_memory",
    "compute_on_comm_memory",
)
_LIGHT_ONLY = ("light_traffic", "light_sensitivity", "crowded_comm")


def _relevant(row: Row, parameters: SimulationParameters) -> SimulationParameters:
    """Put parameters that cannot matter for the row back: more predictions are cached."""
    idle = _GEMM_ONLY if KERNELS[row.compute].memory else _MEMORY_ONLY
    idle += () if row.comm == "symm" else _LIGHT_ONLY
    return replace(parameters, **{name: getattr(_DEFAULTS, name) for name in idle})


def predict(facts: DeviceFacts, row: Row, parameters: SimulationParameters) -> Prediction:
    parameters = _relevant(row, parameters)
    compute = compute_input(facts, row, parameters)
    pad = pad_for_blocks(facts, compute.footprint, row.target) if row.target else 0
    shape = Shape(pad=pad or 0, comm_priority=row.priority)
    comm = comm_input(row, parameters)
    return _predict(facts, compute, comm, shape, row.table == "pipeline", parameters)


def _int(text: str) -> int | None:
    return int(text) if text else None


def _float(text: str) -> float | None:
    return float(text) if text else None
