"""The residency model against the driver's own answers, worked examples and its own inverse."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapctl.errors import UsageError
from overlapctl.plan.residency import (
    blocks_per_sm,
    carveout_step,
    grid_is_coresident,
    is_persistent,
    limiting_resource,
    limits,
    pad_for_blocks,
    padded,
)
from overlapctl.records import DeviceFacts, KernelFootprint

KIB = 1024
DATA = Path(__file__).parents[2] / "data"


def launches() -> list[dict[str, str]]:
    with (DATA / "h200_launches.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "row", launches(), ids=lambda r: f"{r['op']}-{r['threads']}x{r['registers']}"
)
def test_equals_the_drivers_occupancy_on_h200(h200: DeviceFacts, row: dict[str, str]) -> None:
    kernel = KernelFootprint(
        name=row["kernel"],
        threads=int(row["threads"]),
        registers=int(row["registers"]),
        static_smem=int(row["static_smem"]),
        dynamic_smem=int(row["dynamic_smem"]),
    )
    assert blocks_per_sm(h200, kernel) == int(row["blocks_per_sm"])


@pytest.mark.parametrize(
    ("threads", "registers", "smem", "expected", "resource"),
    [
        (1024, 16, 0, 2, "threads"),
        (128, 72, 32768, 6, "smem"),  # Triton 64x64x64 in two stages
        (128, 72, 8704, 7, "registers"),  # 72 x 32 -> 2304 a warp, 7 warps a sub-partition
        (96, 72, 0, 9, "registers"),  # 28 warps in the SM, 3 a block
        (32, 16, 0, 32, "slots"),
        (544, 96, 103 * KIB, 1, "registers"),  # an NCCL block
        (256, 255, 0, 1, "registers"),
        (288, 255, 0, 0, "registers"),  # 9 warps count as 12: more than a block may have
        (512, 128, 0, 1, "registers"),
        (128, 32, 227 * KIB, 1, "smem"),
        (128, 32, 227 * KIB + 1, 0, "smem"),
        (1056, 16, 0, 0, "threads"),
        (128, 0, 0, 16, "threads"),
    ],
)
def test_worked_examples_on_h200(
    h200: DeviceFacts, threads: int, registers: int, smem: int, expected: int, resource: str
) -> None:
    kernel = KernelFootprint(name="k", threads=threads, registers=registers, dynamic_smem=smem)
    assert blocks_per_sm(h200, kernel) == expected
    assert limiting_resource(h200, kernel) == resource


@pytest.mark.parametrize(
    ("gpu", "threads", "vgprs", "lds", "expected", "resource"),
    [
        # LLVM's table for gfx90a: 512 VGPRs a lane, dealt 8 at a time, at most 8 waves a SIMD.
        ("mi250x", 64, 64, 0, 32, "registers"),  # 512 / 64 = 8 waves a SIMD, x 4 SIMDs
        ("mi250x", 64, 65, 0, 28, "registers"),  # 65 -> 72: 7 waves a SIMD
        ("mi250x", 64, 128, 0, 16, "registers"),
        ("mi250x", 64, 256, 0, 8, "registers"),
        ("mi250x", 64, 257, 0, 4, "registers"),  # 264: 1 wave a SIMD
        ("mi250x", 256, 32, 0, 8, "threads"),  # 4 waves a workgroup, 32 wave slots
        ("mi250x", 128, 32, 0, 16, "threads"),  # 2 waves: 16 workgroups, also the barrier limit
        ("mi250x", 256, 128, 32 * KIB, 2, "smem"),
        ("mi250x", 256, 64, 64 * KIB, 1, "smem"),
        ("mi250x", 64, 32, 2560, 25, "smem"),  # 5 granules of 512 B; 65536 // 2560
        ("mi355x", 64, 32, 2561, 42, "smem"),  # 3 granules of 1280 B; 163840 // 3840
    ],
)
def test_worked_examples_on_amd(
    gpus: dict[str, DeviceFacts],
    gpu: str,
    threads: int,
    vgprs: int,
    lds: int,
    expected: int,
    resource: str,
) -> None:
    facts = gpus[gpu]
    kernel = KernelFootprint(name="k", threads=threads, registers=vgprs, static_smem=lds)
    if expected > 32:
        assert limits(facts, kernel).smem == expected
    else:
        assert blocks_per_sm(facts, kernel) == expected
        assert limiting_resource(facts, kernel) == resource


def test_amd_workgroups_of_several_waves_need_barriers(gpus: dict[str, DeviceFacts]) -> None:
    wide = dataclasses.replace(gpus["mi250x"], max_threads_per_sm=4096)
    several = KernelFootprint(name="k", threads=128, registers=8)
    assert limits(wide, several).slots == 16
    assert limits(wide, dataclasses.replace(several, threads=64)).slots == 32


kernels = st.builds(
    KernelFootprint,
    name=st.just("k"),
    threads=st.integers(1, 1024),
    registers=st.integers(0, 255),
    static_smem=st.integers(0, 40 * KIB),
    dynamic_smem=st.integers(0, 187 * KIB),
)
names = st.sampled_from(["h200", "mi250x", "mi355x"])


@settings(max_examples=150, deadline=None)
@given(names, kernels, st.integers(1, 33))
def test_pad_is_the_smallest_that_gives_the_blocks(
    gpus: dict[str, DeviceFacts], gpu: str, kernel: KernelFootprint, blocks: int
) -> None:
    facts = gpus[gpu]
    natural = blocks_per_sm(facts, kernel)
    pad = pad_for_blocks(facts, kernel, blocks)
    if pad is None:
        # Impossible for a reason: no block fits at all, or not with that much shared memory.
        unit = facts.smem_granule
        least = (facts.smem_per_sm // unit // (blocks + 1) + 1) * unit
        smem = least - unit + 1 - facts.smem_reserved_per_block
        assert natural == 0 or smem > facts.smem_per_block_optin
        return
    assert pad >= 0
    assert 1 <= blocks_per_sm(facts, padded(kernel, pad)) <= blocks
    if natural <= blocks:
        assert pad == 0
    else:
        assert blocks_per_sm(facts, padded(kernel, pad - 1)) > blocks


@settings(max_examples=150, deadline=None)
@given(names, kernels, st.integers(0, 64 * KIB), st.integers(0, 128), st.integers(0, 512))
def test_asking_for_more_never_fits_more_blocks(
    gpus: dict[str, DeviceFacts],
    gpu: str,
    kernel: KernelFootprint,
    pad: int,
    registers: int,
    threads: int,
) -> None:
    facts = gpus[gpu]
    larger = dataclasses.replace(
        kernel,
        dynamic_smem=kernel.dynamic_smem + pad,
        registers=kernel.registers + registers,
        threads=kernel.threads + threads,
    )
    assert blocks_per_sm(facts, larger) <= blocks_per_sm(facts, kernel)


@settings(max_examples=100, deadline=None)
@given(kernels, st.integers(-1, 100))
def test_a_carveout_never_adds_blocks_and_is_one_of_the_steps(
    h200: DeviceFacts, kernel: KernelFootprint, carveout: int
) -> None:
    assert blocks_per_sm(h200, kernel, carveout=carveout) <= blocks_per_sm(h200, kernel)
    assert carveout_step(h200, kernel, carveout) in h200.carveout_steps
    if blocks_per_sm(h200, kernel):
        assert blocks_per_sm(h200, kernel, carveout=carveout) >= 1
        assert blocks_per_sm(h200, kernel, carveout=100) == blocks_per_sm(h200, kernel)


def test_carveout_step_grows_with_what_a_block_needs(h200: DeviceFacts) -> None:
    gemm = KernelFootprint(name="gemm", threads=384, registers=168, dynamic_smem=188636)
    assert carveout_step(h200, gemm) == 196 * KIB
    assert carveout_step(h200, padded(gemm, 12288)) == 228 * KIB
    assert carveout_step(h200, gemm, 100) == 228 * KIB
    assert carveout_step(h200, gemm, 10) == 196 * KIB  # less than one block needs: ignored


def test_coresidency(h200: DeviceFacts) -> None:
    gemm = KernelFootprint(name="g", threads=384, registers=168, dynamic_smem=188636, blocks=132)
    assert is_persistent(h200, gemm)
    assert grid_is_coresident(h200, gemm)
    assert not grid_is_coresident(h200, dataclasses.replace(gemm, blocks=133))
    assert not grid_is_coresident(h200, dataclasses.replace(gemm, blocks=132, cluster=16))
    light = KernelFootprint(name="l", threads=128, registers=32, blocks=132 * 16)
    assert grid_is_coresident(h200, light)
    assert not is_persistent(h200, light)


def test_bad_input_is_named(h200: DeviceFacts) -> None:
    kernel = KernelFootprint(name="k", threads=128, registers=32)
    with pytest.raises(UsageError, match="carveout is 101"):
        carveout_step(h200, kernel, 101)
    with pytest.raises(UsageError, match="blocks is 0"):
        pad_for_blocks(h200, kernel, 0)
    with pytest.raises(UsageError, match="threads of 'k' is 0"):
        blocks_per_sm(h200, dataclasses.replace(kernel, threads=0))
