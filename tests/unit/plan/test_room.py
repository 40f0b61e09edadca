"""Room beside running kernels: the one-warp rows measured on H200, and NCCL's footprint."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapctl.plan.residency import blocks_per_sm, carveout_step, padded
from overlapctl.plan.room import RoomMaker, pad_or_carveout_for_room, room_beside
from overlapctl.records import DeviceFacts, KernelFootprint

# One thread drives bulk copies through a ring of 4 x 4 KB and four barriers.
ONE_WARP = KernelFootprint(name="one_warp", threads=32, registers=8, dynamic_smem=4 * 4096 + 32)
TORCH_ADD = KernelFootprint(name="add", threads=128, registers=34)
GEMM_213K = KernelFootprint(name="nvjet_256x128", threads=384, registers=168, dynamic_smem=213188)
GEMM_188K = KernelFootprint(name="nvjet_320x128", threads=384, registers=168, dynamic_smem=188636)
ATTENTION = KernelFootprint(name="sdpa", threads=384, registers=168, dynamic_smem=232448)
NCCL = KernelFootprint(
    name="nccl", threads=544, registers=96, static_smem=22592, dynamic_smem=82240, blocks=24
)
SYMM = KernelFootprint(name="two_shot_all_reduce", threads=1024, registers=32, blocks=24)
TRITON_64 = KernelFootprint(name="mm", threads=128, registers=72, dynamic_smem=32768)


@pytest.mark.parametrize(
    ("kernel", "pad", "carveout", "other", "beside"),
    [
        (GEMM_213K, 0, -1, TORCH_ADD, False),
        (GEMM_188K, 0, -1, TORCH_ADD, False),
        (GEMM_213K, 0, -1, ONE_WARP, True),
        (GEMM_188K, 0, -1, ONE_WARP, False),
        (GEMM_188K, 12288, -1, ONE_WARP, True),
        (GEMM_188K, 0, 100, ONE_WARP, True),
        (GEMM_213K, 4096, -1, ONE_WARP, False),
        (GEMM_213K, 8192, -1, ONE_WARP, False),
        (GEMM_213K, 12288, -1, ONE_WARP, False),
        (GEMM_213K, 16384, -1, ONE_WARP, False),
        (ATTENTION, 0, -1, ONE_WARP, False),
        (ATTENTION, 0, 100, ONE_WARP, False),
    ],
)
def test_rows_measured_on_h200(
    h200: DeviceFacts,
    kernel: KernelFootprint,
    pad: int,
    carveout: int,
    other: KernelFootprint,
    beside: bool,
) -> None:
    room = room_beside(h200, padded(kernel, pad), 1, other, carveout=carveout)
    assert (room > 0) is beside


def test_what_makes_room_beside_a_persistent_gemm(h200: DeviceFacts) -> None:
    assert pad_or_carveout_for_room(h200, GEMM_213K, ONE_WARP) == RoomMaker()
    made = pad_or_carveout_for_room(h200, GEMM_188K, ONE_WARP)
    assert made is not None
    # 196 KB holds 200,704 B; the block takes 1,024 B of reserve.
    assert made == RoomMaker(pad=200704 - 1024 - 188636 + 1)
    assert carveout_step(h200, padded(GEMM_188K, made.pad - 1)) == 196 * 1024
    assert pad_or_carveout_for_room(h200, ATTENTION, ONE_WARP) is None
    assert pad_or_carveout_for_room(h200, GEMM_188K, TORCH_ADD) is None


def test_a_carveout_helps_where_a_pad_would_cost_the_room(h200: DeviceFacts) -> None:
    # Beside a kernel of 100 KB a block, 150 KB need the largest step, which no pad of the kernel
    # reaches without taking the room away.
    half = KernelFootprint(name="half", threads=384, registers=168, dynamic_smem=60000)
    other = KernelFootprint(name="o", threads=32, registers=8, dynamic_smem=150000)
    made = pad_or_carveout_for_room(h200, half, other)
    assert made is not None
    assert made.pad == 0
    assert room_beside(h200, half, 1, other, carveout=made.carveout) == 1
    assert room_beside(h200, half, 1, other, carveout=made.carveout - 1) == 0


def test_nccl_needs_an_empty_sm_and_the_light_kernel_does_not(h200: DeviceFacts) -> None:
    assert room_beside(h200, TRITON_64, 0, NCCL) == 1
    assert room_beside(h200, TRITON_64, 1, NCCL) == 0
    residency = blocks_per_sm(h200, TRITON_64)
    room = [room_beside(h200, TRITON_64, n, SYMM) for n in range(residency + 1)]
    # 1,024 registers a warp, 8 warps a sub-partition: 8,192 of 16,384 beside 2,304 a Triton block.
    assert room == [2, 1, 1, 1, 0, 0, 0]


def test_guests_beside_a_warp_specialised_kernel(h200: DeviceFacts) -> None:
    def room(warps: int, registers: int) -> int:
        guest = KernelFootprint(name="g", threads=32 * warps, registers=registers)
        return room_beside(h200, GEMM_213K, 1, guest)

    assert [room(1, r) for r in (8, 32, 33)] == [2, 2, 0]
    assert [room(w, 8) for w in (2, 3, 4)] == [0, 0, 0]
    # Other architectures and footprints follow the arithmetic: 256 registers a sub-partition.
    ampere = dataclasses.replace(h200, arch="sm_80")
    guest = KernelFootprint(name="g", threads=128, registers=8)
    assert room_beside(ampere, GEMM_213K, 1, guest) == 1


footprints = st.builds(
    KernelFootprint,
    name=st.just("k"),
    threads=st.integers(1, 1024),
    registers=st.integers(1, 168),
    dynamic_smem=st.integers(0, 200_000),
)


@settings(max_examples=150, deadline=None)
@given(footprints, footprints, st.integers(0, 32))
def test_room_never_grows_with_resident_blocks(
    h200: DeviceFacts, kernel: KernelFootprint, other: KernelFootprint, resident: int
) -> None:
    resident = min(resident, blocks_per_sm(h200, kernel))
    room = room_beside(h200, kernel, resident, other)
    assert 0 <= room <= blocks_per_sm(h200, other)
    if resident:
        assert room <= room_beside(h200, kernel, resident - 1, other)


@settings(max_examples=100, deadline=None)
@given(footprints)
def test_room_beside_itself_is_what_residency_leaves(
    h200: DeviceFacts, kernel: KernelFootprint
) -> None:
    residency = blocks_per_sm(h200, kernel)
    for resident in range(1, residency + 1):
        assert resident + room_beside(h200, kernel, resident, kernel, carveout=100) <= residency
    assert room_beside(h200, kernel, residency, kernel) == 0 or residency == 0
