"""The recorded trials on 2x H200 as inputs and outcomes for the simulator."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from overlapctl.plan.calibration import Observation
from overlapctl.plan.residency import pad_for_blocks
from overlapctl.plan.simulate import Shape
from overlapctl.records import CommSpec, ComputeSpec, DeviceFacts, KernelFootprint

DATA = Path(__file__).parents[2] / "tests" / "data"

CUBE = 8192
DEPTH = 8
# name: tile, registers and shared memory as compiled for sm_90.
_TRITON = {
    "tri64": ((64, 64, 64, 4, 2), 72, 32768),
    "tri32": ((32, 32, 64, 4, 2), 56, 8192),
    "tri128": ((128, 128, 32, 8, 2), 96, 32768),
    "tri128s4": ((128, 256, 64, 8, 3), 196, 147456),
}


def _triton(name: str, side: int, depth: int, launches: int) -> tuple[ComputeSpec, KernelFootprint]:
    tile, registers, smem = _TRITON[name]
    spec = ComputeSpec(op="gemm", shape=(side, side, depth), tile=tile, repeats=launches)
    footprint = KernelFootprint(
        name=name,
        threads=32 * tile[3],
        registers=registers,
        dynamic_smem=smem,
        blocks=(side // tile[0]) * (side // tile[1]),
    )
    return spec, footprint


def _elementwise(
    name: str, elements: int, launches: int, registers: int = 32
) -> tuple[ComputeSpec, KernelFootprint]:
    footprint = KernelFootprint(
        name=name, threads=128, registers=registers, blocks=elements // (128 * 8)
    )
    return ComputeSpec(op="elementwise", shape=(elements,), repeats=launches), footprint


def _layernorm(launches: int) -> tuple[ComputeSpec, KernelFootprint]:
    footprint = KernelFootprint(
        name="lnorm", threads=128, registers=32, dynamic_smem=24, blocks=16384
    )
    return ComputeSpec(op="layernorm", shape=(16384, 8192), repeats=launches), footprint


def _library(
    spec: ComputeSpec, threads: int, registers: int, smem: int, blocks: int
) -> tuple[ComputeSpec, KernelFootprint]:
    footprint = KernelFootprint(
        name=spec.op, threads=threads, registers=registers, dynamic_smem=smem, blocks=blocks
    )
    return spec, footprint


_CUBE_FP32 = ComputeSpec(op="gemm", shape=(CUBE, CUBE, CUBE), dtype="fp32")
_HALF_FP32 = ComputeSpec(op="gemm", shape=(4096, 4096, 4096), dtype="fp32")
_CUBE_BF16 = ComputeSpec(op="gemm", shape=(CUBE, CUBE, CUBE))
_DEEP_BF16 = ComputeSpec(op="gemm", shape=(CUBE, CUBE, 4 * CUBE))
_ATTENTION = ComputeSpec(op="attention", shape=(1, 32, 8192, 128))  # the shape was not recorded

# Library kernels as launched (h200_launches.csv); add over 2^31 elements is launched in two halves.
KERNELS = {
    "tri64": _triton("tri64", CUBE, CUBE, 1),
    "tri64 x2": _triton("tri64", CUBE, CUBE, 2),
    "tri64K32k": _triton("tri64", CUBE, 4 * CUBE, 1),
    "tri32": _triton("tri32", CUBE, CUBE, 1),
    "tri128": _triton("tri128", CUBE, CUBE, 1),
    "tri128 x2": _triton("tri128", CUBE, CUBE, 2),
    "tri128K32k": _triton("tri128", CUBE, 4 * CUBE, 1),
    "tri128s4": _triton("tri128s4", CUBE, CUBE, 1),
    "sgemm": _library(_CUBE_FP32, 256, 254, 67584, 2048),
    "bf16": _library(_DEEP_BF16, 384, 168, 188636, 132),
    "elem": _elementwise("elem", 2**30, 2, registers=34),
    "add4GB": _elementwise("add4GB", 2**30, 2, registers=34),
    "gelu x12": _elementwise("gelu", 2**27, 12),
    "lnorm x10": _layernorm(10),
    "gemm_bf16": _library(_CUBE_BF16, 384, 168, 188636, 132),
    "gemm_fp32": _library(_HALF_FP32, 256, 254, 67584, 512),
    "triton128": _triton("tri128", 4096, 4096, 3),
    "triton64": _triton("tri64", 4096, 4096, 3),
    "gelu": _elementwise("gelu", 2**26, 6),
    "lnorm": _layernorm(4),
    "sdpa": _library(_ATTENTION, 384, 168, 232448, 132),
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


def observation(facts: DeviceFacts, row: Row) -> Observation:
    """Put a row's inputs and outcomes into the planner's terms."""
    spec, footprint = KERNELS[row.compute]
    light = row.comm == "symm"
    if light:
        comm = KernelFootprint(name="symm", threads=1024, registers=32, blocks=row.blocks)
    else:
        comm = KernelFootprint(
            name="nccl",
            threads=544,
            registers=96,
            static_smem=22592,
            dynamic_smem=82240,
            blocks=row.blocks,
        )
    pad = pad_for_blocks(facts, footprint, row.target) if row.target else 0
    stages = DEPTH if row.table == "pipeline" else 1
    return Observation(
        compute=spec,
        footprint=footprint,
        compute_alone=row.compute_alone / stages,
        comm=CommSpec(
            op="all_reduce", size_bytes=row.mib * 2**20, path="light" if light else "nccl"
        ),
        comm_footprint=comm,
        comm_alone=row.comm_alone / stages,
        comm_launches=row.repeats,
        shape=Shape(pad=pad or 0, comm_priority=row.priority),
        depth=DEPTH if row.table == "pipeline" else None,
        total=row.total,
        compute_end=row.compute_end,
        comm_end=row.comm_end,
    )


def _int(text: str) -> int | None:
    return int(text) if text else None


def _float(text: str) -> float | None:
    return float(text) if text else None
