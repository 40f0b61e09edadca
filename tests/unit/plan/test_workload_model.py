"""Footprints against compiled kernels, and times alone against those measured on H200."""

from __future__ import annotations

import dataclasses

import pytest

from overlapctl.device import open_device
from overlapctl.plan.residency import blocks_per_sm, is_persistent
from overlapctl.plan.workload_model import comm_work, compute_footprint, compute_work
from overlapctl.records import CommSpec, ComputeSpec

H200 = open_device("sim:h200").facts()
CUBE = (8192, 8192, 8192)


@pytest.mark.parametrize(
    ("device", "tile", "smem", "registers", "tolerance"),
    [
        # As Triton and ptxas compile them.
        ("sim:h200", (64, 64, 64, 4, 2), 32768, 72, 0),
        ("sim:h200", (64, 64, 64, 4, 3), 49152, 64, 0),
        ("sim:h200", (32, 32, 64, 4, 2), 8192, 56, 0),
        ("sim:h200", (128, 128, 32, 8, 2), 32768, 96, 0),
        ("sim:h200", (128, 256, 64, 8, 3), 147456, 196, 0),
        ("sim:a100", (64, 64, 64, 4, 2), 16384, 95, 0.1),
        ("sim:a100", (64, 64, 64, 4, 3), 32768, 96, 0.1),
        ("sim:a100", (128, 128, 32, 8, 2), 32768, 128, 0.1),
    ],
)
def test_tile_footprints(
    device: str, tile: tuple[int, ...], smem: int, registers: int, tolerance: float
) -> None:
    spec = ComputeSpec(op="gemm", shape=CUBE, tile=tile)
    footprint = compute_footprint(open_device(device).facts(), spec)
    assert footprint.dynamic_smem == smem
    assert footprint.registers == pytest.approx(registers, rel=tolerance)
    assert footprint.threads == 32 * tile[3]
    assert footprint.blocks == (8192 // tile[0]) * (8192 // tile[1])


def test_vendor_kernels() -> None:
    gemm = compute_footprint(H200, ComputeSpec(op="gemm", shape=CUBE))
    assert is_persistent(H200, gemm)
    assert (gemm.blocks, gemm.threads, gemm.dynamic_smem) == (132, 384, 188636)
    fp32 = compute_footprint(H200, ComputeSpec(op="gemm", shape=CUBE, dtype="fp32"))
    assert not is_persistent(H200, fp32)
    assert (fp32.blocks, blocks_per_sm(H200, fp32)) == (2048, 1)
    add = compute_footprint(H200, ComputeSpec(op="elementwise", shape=(2**27,)))
    assert (add.blocks, blocks_per_sm(H200, add)) == (2**17, 16)


@pytest.mark.parametrize("name", ["h200", "h100", "a100", "a40", "mi250x"])
@pytest.mark.parametrize(
    "spec",
    [
        ComputeSpec(op="gemm", shape=CUBE),
        ComputeSpec(op="gemm", shape=CUBE, dtype="fp32"),
        ComputeSpec(op="gemm", shape=CUBE, tile=(64, 64, 64, 4, 3)),
        ComputeSpec(op="elementwise", shape=(2**28,)),
        ComputeSpec(op="layernorm", shape=(16384, 8192)),
        ComputeSpec(op="attention", shape=(4, 32, 4096, 128)),
    ],
    ids=lambda spec: spec.op + spec.dtype,
)
def test_every_workload_can_be_launched_everywhere(name: str, spec: ComputeSpec) -> None:
    facts = open_device(f"sim:{name}").facts()
    work = compute_work(facts, spec)
    assert blocks_per_sm(facts, work.footprint) >= 1
    assert work.alone_ms > 0


@pytest.mark.parametrize(
    ("spec", "measured", "within"),
    [
        (ComputeSpec(op="gemm", shape=CUBE), 1.43, 0.05),
        (ComputeSpec(op="gemm", shape=CUBE, dtype="fp32"), 21.7, 0.12),
        (ComputeSpec(op="gemm", shape=CUBE, tile=(64, 64, 64, 4, 2)), 3.36, 0.15),
        (ComputeSpec(op="gemm", shape=CUBE, tile=(64, 64, 64, 4, 3)), 3.90, 0.20),
        (ComputeSpec(op="gemm", shape=CUBE, tile=(32, 32, 64, 4, 2)), 7.17, 0.15),
        (ComputeSpec(op="gemm", shape=CUBE, tile=(128, 128, 32, 8, 2)), 3.17, 0.20),
        (ComputeSpec(op="elementwise", shape=(2**31,)), 2.05, 0.05),
        (ComputeSpec(op="layernorm", shape=(16384, 8192), repeats=10), 2.19, 0.05),
    ],
    ids=lambda value: str(value) if isinstance(value, float) else value.op,
)
def test_times_alone_on_h200(spec: ComputeSpec, measured: float, within: float) -> None:
    assert compute_work(H200, spec).alone_ms == pytest.approx(measured, rel=within)


@pytest.mark.parametrize(
    ("path", "mib", "measured"),
    [("nccl", 984, 3.24), ("nccl", 336, 1.21), ("nccl", 240, 0.97), ("light", 984, 3.15)],
)
def test_all_reduce_alone_on_h200(path: str, mib: int, measured: float) -> None:
    spec = CommSpec(op="all_reduce", size_bytes=mib * 2**20, path=path)  # type: ignore[arg-type]
    assert comm_work(H200, spec).alone_ms == pytest.approx(measured, rel=0.08)


def test_copy_engine_transfers_take_no_sm_and_observed_values_win() -> None:
    copy = CommSpec(op="all_gather", size_bytes=128 * 2**20, path="copy")
    work = comm_work(H200, copy)
    assert not work.uses_sms
    assert comm_work(H200, copy, alone_ms=5.0).alone_ms == 5.0
    nccl = dataclasses.replace(copy, path="nccl")
    few = dataclasses.replace(comm_work(H200, nccl).footprint, blocks=4)
    assert comm_work(H200, nccl, footprint=few).footprint.blocks == 4


def test_more_ranks_send_more_of_the_payload() -> None:
    spec = CommSpec(op="all_reduce", size_bytes=2**30)
    two, eight = (comm_work(H200, spec, world=world).alone_ms for world in (2, 8))
    assert 1.5 < eight / two < 1.8


@pytest.mark.parametrize(("blocks", "measured"), [(4, 3.384), (8, 1.744), (16, 1.062), (24, 0.932)])
def test_capped_nccl_alone_on_h200(blocks: int, measured: float) -> None:
    spec = CommSpec(op="all_reduce", size_bytes=264 * 2**20)
    work = comm_work(H200, spec, max_blocks=blocks)
    assert work.footprint.blocks == blocks
    assert work.alone_ms == pytest.approx(measured, rel=0.1)
