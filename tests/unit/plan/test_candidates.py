import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapctl.plan.arms import DEFAULT, PRIORITY, arm_name, split_arm_name, target_of_shape
from overlapctl.plan.candidates import candidate_arms, find_candidates, residency_targets
from overlapctl.plan.residency import blocks_per_sm, carveout_step, padded
from overlapctl.records import DeviceFacts, DeviceRates, KernelFootprint, Policy

H200 = DeviceFacts(
    name="NVIDIA H200", vendor="nvidia", arch="sm_90", sm_count=132, warp_size=32,
    max_threads_per_sm=2048, max_threads_per_block=1024, max_blocks_per_sm=32,
    registers_per_sm=65536, registers_per_block=65536, register_granule=256,
    subpartitions=4, smem_per_sm=233472, smem_per_block=49152, smem_per_block_optin=232448,
    smem_reserved_per_block=1024, smem_granule=128,
    carveout_steps=tuple(k << 10 for k in (0, 8, 16, 32, 64, 100, 132, 164, 196, 228)),
    l2_bytes=1, memory_bytes=1, priority_least=0, priority_greatest=-5,
    rates=DeviceRates(hbm_gbps=1, link_gbps=1, tensor_tflops=1, fp32_tflops=1),
)  # fmt: skip
# Triton GEMM 8192^3, tile 64x64x64, 4 warps, 3 stages: natural residency 4.
TRITON = KernelFootprint(
    name="gemm_kernel", threads=128, registers=90, dynamic_smem=49152, blocks=16384
)
# cuBLAS: persistent, 188.6 KB a block, so that the SM is configured to 196 KB.
CUBLAS = KernelFootprint(name="nvjet", threads=384, registers=168, dynamic_smem=193_126, blocks=132)
ELEMENTWISE = KernelFootprint(name="vectorized", threads=128, registers=32, blocks=100_000)


def names(footprint, facts=H200) -> list[str]:
    return [arm.name for arm in candidate_arms(facts, footprint)]


def test_many_waves_get_targets_with_and_without_priority():
    assert names(TRITON) == [
        "default", "priority", "3/SM", "priority+3/SM", "2/SM", "priority+2/SM", "1/SM",
        "priority+1/SM",
    ]  # fmt: skip
    arms = {arm.name: arm.policy for arm in candidate_arms(H200, TRITON)}
    assert arms["default"] == Policy()
    assert arms["priority"] == Policy(comm_priority=True)
    assert arms["priority+3/SM"] == Policy(comm_priority=True, max_blocks_per_sm=3)


def test_many_blocks_per_sm_are_thinned():
    assert residency_targets(16) == [12, 8, 6, 4, 3, 2]
    assert residency_targets(4) == [3, 2, 1]
    assert residency_targets(1) == []
    assert [n for n in names(ELEMENTWISE) if "+" not in n][2:] == [
        "12/SM", "8/SM", "6/SM", "4/SM", "3/SM", "2/SM",
    ]  # fmt: skip


@given(st.integers(1, 64), st.integers(2, 8))
def test_targets_are_below_natural_and_descend(natural, most):
    targets = residency_targets(natural, most=most)
    assert len(targets) == min(most, natural - 1) or natural > most + 1
    assert len(targets) <= max(most, 0)
    assert targets == sorted(set(targets), reverse=True)
    assert all(1 <= n < natural for n in targets)


def test_one_block_per_sm_gets_what_raises_the_carveout_step():
    arms = {arm.name: arm.policy for arm in candidate_arms(H200, CUBLAS)}
    pad = next(p.pad_bytes for n, p in arms.items() if n.startswith("pad"))
    assert list(arms) == [
        "default", "priority", "carveout100", "priority+carveout100", f"pad{pad}",
        f"priority+pad{pad}",
    ]  # fmt: skip
    assert arms["carveout100"] == Policy(carveout=100)
    assert carveout_step(H200, CUBLAS) == 196 << 10
    assert carveout_step(H200, padded(CUBLAS, pad - 1)) == 196 << 10
    assert carveout_step(H200, padded(CUBLAS, pad)) == 228 << 10
    assert blocks_per_sm(H200, padded(CUBLAS, pad)) == 1


def test_a_full_carveout_leaves_priority_only():
    full = dataclasses.replace(CUBLAS, dynamic_smem=232_448)
    found = find_candidates(H200, full)
    assert [arm.name for arm in found.arms] == ["default", "priority"]
    assert dict(found.pruned)["carveout100"].startswith("the SM is configured to 233472 B")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"blocks": 132 * 4}, "all 528 blocks of the grid are resident at once"),
        ({"cluster": 2}, "co-scheduling"),
    ],
)
def test_illegal_targets_are_pruned_with_the_reason(changes, reason):
    found = find_candidates(H200, dataclasses.replace(TRITON, **changes))
    assert [arm.name for arm in found.arms] == ["default", "priority"]
    assert [name for name, _ in found.pruned] == ["3/SM", "2/SM", "1/SM"]
    assert all(reason in text for _, text in found.pruned)


def test_a_coresident_grid_keeps_the_targets_that_still_hold_it():
    grid = dataclasses.replace(TRITON, blocks=132 * 2 + 1)
    assert names(grid) == ["default", "priority", "3/SM", "priority+3/SM"]


def test_cooperative_kernels_are_never_shaped():
    found = find_candidates(H200, dataclasses.replace(TRITON, cooperative=True))
    assert [arm.name for arm in found.arms] == ["default", "priority"]
    assert "cooperative" in found.pruned[0][1]


def test_a_kernel_that_does_not_fit_is_not_shaped():
    assert names(dataclasses.replace(TRITON, dynamic_smem=300_000)) == ["default", "priority"]


def test_without_stream_priorities_no_arm_has_one():
    facts = dataclasses.replace(H200, priority_greatest=0)
    found = find_candidates(facts, TRITON)
    assert [arm.name for arm in found.arms] == ["default", "3/SM", "2/SM", "1/SM"]
    assert found.pruned[-1] == ("priority", "NVIDIA H200 has no stream priorities")


def test_unobserved_kernels_get_the_usual_targets():
    assert names(None)[:4] == ["default", "priority", "8/SM", "priority+8/SM"]


@given(
    threads=st.integers(1, 32).map(lambda w: w * 32),
    registers=st.integers(8, 255),
    smem=st.integers(0, 240_000),
    blocks=st.integers(1, 5000),
)
def test_every_arm_changes_the_residency_or_the_carveout(threads, registers, smem, blocks):
    kernel = KernelFootprint(
        name="k", threads=threads, registers=registers, dynamic_smem=smem, blocks=blocks
    )
    arms = candidate_arms(H200, kernel)
    assert arms[0].name == DEFAULT
    assert arms[0].policy.is_default
    assert len({arm.name for arm in arms}) == len(arms) == len({a.policy for a in arms})
    natural = blocks_per_sm(H200, kernel)
    for arm in arms:
        priority, shape = split_arm_name(arm.name)
        assert arm.policy.comm_priority == priority
        target = target_of_shape(shape)
        assert (target or 0) < max(natural, 1)
        assert arm.policy.max_blocks_per_sm == (target or 0)


@given(st.booleans(), st.sampled_from(["", "3/SM", "carveout100", "pad12288"]))
def test_names_round_trip(priority, shape):
    assert split_arm_name(arm_name(priority=priority, shape=shape)) == (priority, shape)


def test_names():
    assert arm_name(priority=False) == DEFAULT == "default"
    assert arm_name(priority=True) == PRIORITY == "priority"
    assert target_of_shape("12/SM") == 12
    assert target_of_shape("carveout100") is None
