"""What "auto" does without a profile: timid, legal, explained."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from overlapctl.device import open_device
from overlapctl.device.footprints import (
    light_footprint,
    nccl_footprint,
    one_warp_footprint,
    symmetric_memory_footprint,
)
from overlapctl.plan.heuristic import heuristic_policy, plan_kernels
from overlapctl.plan.residency import blocks_per_sm, grid_is_coresident, pad_for_blocks, padded
from overlapctl.plan.rules import fewest_blocks
from overlapctl.records import DeviceFacts, KernelFootprint, Policy

H200 = open_device("sim:h200").facts()
NCCL = nccl_footprint(H200, "ring")
LIGHT = light_footprint()
TILED = KernelFootprint(name="gemm", threads=128, registers=64, dynamic_smem=49152, blocks=16384)
CUBLAS = KernelFootprint(name="nvjet", threads=384, registers=168, dynamic_smem=188636, blocks=132)
SMALL = KernelFootprint(name="norm", threads=128, registers=32, blocks=500)


def without_priorities(facts: DeviceFacts) -> DeviceFacts:
    return dataclasses.replace(facts, priority_greatest=0, priority_least=0)


def test_nothing_seen_means_priority_alone() -> None:
    assert heuristic_policy(H200)[0] == Policy(comm_priority=True)
    assert plan_kernels(H200, [], [NCCL]) == (Policy(comm_priority=True), {})
    assert heuristic_policy(without_priorities(H200))[0].is_default
    assert plan_kernels(without_priorities(H200), [TILED], [NCCL])[0].is_default


def test_many_waves_get_priority_and_no_pad_without_times() -> None:
    policy, reasons = plan_kernels(H200, [TILED], [NCCL])
    assert policy == Policy(comm_priority=True)
    assert "priority lets communication in" in reasons["gemm"]


def test_only_persistent_kernels_are_left_alone() -> None:
    policy, reasons = plan_kernels(H200, [CUBLAS], [NCCL])
    assert policy.is_default
    assert reasons["nvjet"].startswith("persistent")
    # One kernel with pending blocks is reason enough for priority.
    assert plan_kernels(H200, [CUBLAS, TILED], [NCCL])[0] == Policy(comm_priority=True)


def test_room_is_made_for_one_warp_kernels_beside_a_persistent_one() -> None:
    policy, reasons = plan_kernels(H200, [CUBLAS], [one_warp_footprint(H200)])
    (rule,) = policy.rules
    assert policy.comm_priority
    # Measured: padded by 12,288 B the SM is configured to 228 KB and the GEMM is as fast.
    assert (rule.pattern, rule.pad_bytes, rule.max_blocks_per_sm) == ("nvjet", 11045, 0)
    assert blocks_per_sm(H200, padded(CUBLAS, rule.pad_bytes)) == 1
    assert "one_warp fits beside it" in reasons["nvjet"]


def test_longer_light_communication_is_protected_by_a_pad_if_times_are_known() -> None:
    times = {"gemm": 3.9, LIGHT.name: 10.0}
    policy, reasons = plan_kernels(H200, [TILED], [LIGHT], milliseconds=times)
    (rule,) = policy.rules
    assert (rule.pattern, rule.max_blocks_per_sm) == ("gemm", 3)
    assert "3 of 4 blocks per SM" in reasons["gemm"]
    short = {"gemm": 3.9, LIGHT.name: 1.0}
    assert plan_kernels(H200, [TILED], [LIGHT], milliseconds=short)[0] == Policy(comm_priority=True)


def test_a_pad_must_pay_beside_every_communication_kernel() -> None:
    times = {"gemm": 3.9, LIGHT.name: 10.0, NCCL.name: 10.0}
    policy, _ = plan_kernels(H200, [TILED], [LIGHT, NCCL], milliseconds=times)
    assert policy == Policy(comm_priority=True)


def test_launches_of_one_name_that_differ_get_no_rule() -> None:
    small = dataclasses.replace(TILED, blocks=132)
    times = {"gemm": 3.9, LIGHT.name: 10.0}
    policy, reasons = plan_kernels(H200, [TILED, small], [LIGHT], milliseconds=times)
    assert policy.rules == ()
    assert "launches of gemm differ" in reasons["gemm"]


def test_cooperative_resident_and_unknown_kernels_are_left() -> None:
    cooperative = dataclasses.replace(TILED, name="grid_sync", cooperative=True)
    huge = dataclasses.replace(TILED, name="huge", dynamic_smem=300_000)
    policy, reasons = plan_kernels(H200, [cooperative, SMALL, huge], [NCCL])
    assert policy.rules == ()
    assert "cooperative" in reasons["grid_sync"]
    assert "resident at once" in reasons["norm"]
    assert "unknown" in reasons["huge"]
    assert "no communication" in plan_kernels(H200, [TILED], [])[1]["gemm"]


_KERNELS = st.builds(
    KernelFootprint,
    name=st.sampled_from(["a", "b", "c"]),
    threads=st.sampled_from([32, 128, 256, 384, 1024]),
    registers=st.integers(8, 255),
    dynamic_smem=st.integers(0, 240_000),
    blocks=st.sampled_from([1, 132, 500, 20_000]),
    cluster=st.sampled_from([1, 2]),
    cooperative=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(_KERNELS, max_size=4),
    st.lists(
        st.sampled_from([NCCL, LIGHT, one_warp_footprint(H200), symmetric_memory_footprint()]),
        max_size=2,
    ),
    st.floats(0.01, 20),
)
def test_rules_are_legal_whatever_is_observed(
    kernels: list[KernelFootprint], comms: list[KernelFootprint], comm_ms: float
) -> None:
    times = {k.name: 1.0 for k in kernels} | {c.name: comm_ms for c in comms}
    policy, reasons = plan_kernels(H200, kernels, comms, milliseconds=times)
    assert set(reasons) == {k.name for k in kernels}
    assert (policy.pad_bytes, policy.max_blocks_per_sm, policy.carveout) == (0, 0, -1)
    for rule in policy.rules:
        for kernel in (k for k in kernels if k.name == rule.pattern):
            natural = blocks_per_sm(H200, kernel)
            pad = rule.pad_bytes
            if rule.max_blocks_per_sm:
                pad = pad_for_blocks(H200, kernel, rule.max_blocks_per_sm) or 0
            after = blocks_per_sm(H200, padded(kernel, pad))
            assert not kernel.cooperative
            assert after >= fewest_blocks(natural)
            assert after == natural or kernel.cluster == 1
            if grid_is_coresident(H200, kernel):
                assert grid_is_coresident(H200, padded(kernel, pad))
