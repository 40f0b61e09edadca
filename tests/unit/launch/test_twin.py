"""The Python twin by itself, and the C decisions compared with it."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "helpers"))

import core_harness
import shim_build

from overlapctl.device import catalogue
from overlapctl.launch import twin
from overlapctl.records import DeviceFacts, KernelFootprint, KernelRule, Policy, Role, Rule

H200 = catalogue.model("h200").facts
RULES = list(Rule)
ROLES = list(Role)


class Limits(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in (
            *("sm_count", "warp_size", "max_threads_per_sm", "max_blocks_per_sm"),
            *("registers_per_sm", "register_granule", "subpartitions", "smem_per_sm"),
            *("smem_per_block_optin", "smem_reserved_per_block", "smem_granule"),
            "priority_greatest",
        )
    )


class Launch(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in ("role", "threads", "registers", "static_smem", "dynamic_smem")
        ),
        ("blocks", ctypes.c_uint64),
        *(
            (name, ctypes.c_int32)
            for name in ("cluster", "cooperative", "capturing", "failed_before", "natural")
        ),
    )


class NativeWish(ctypes.Structure):
    _fields_ = (
        ("pad_bytes", ctypes.c_uint32),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("max_blocks_per_sm", "carveout", "comm_priority", "shape_captures"),
                "included",
            )
        ),
    )


class NativeDecision(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in (
            *("dynamic_smem", "blocks_before", "blocks_after", "set_priority", "priority"),
            *("carveout", "rule"),
        )
    )


def native(facts: DeviceFacts, launch: twin.TwinLaunch, wish: twin.Wish) -> twin.Decision:
    abi = core_harness.core().abi
    limits = Limits(*(getattr(facts, name) for name, _ in Limits._fields_))
    f = launch.footprint
    natural = -1 if launch.natural_blocks is None else launch.natural_blocks
    asked = Launch(
        *(ROLES.index(launch.role), f.threads, f.registers, f.static_smem, f.dynamic_smem),
        *(f.blocks, f.cluster, f.cooperative, launch.capturing, launch.failed_before, natural),
    )
    included = {None: 1, Rule.EXCLUDED: 2, Rule.NOT_INCLUDED: 0}[wish.refusal]
    wanted = NativeWish(
        *(wish.pad_bytes, wish.max_blocks_per_sm, wish.carveout),
        *(wish.comm_priority, wish.shape_captures, included),
    )
    out = NativeDecision()
    abi.ovl_decide(*map(ctypes.byref, (limits, asked, wanted, out)))
    return twin.Decision(
        dynamic_smem=out.dynamic_smem,
        blocks_before=out.blocks_before,
        blocks_after=out.blocks_after,
        rule=RULES[out.rule],
        priority=out.priority if out.set_priority else None,
        carveout=out.carveout if out.carveout >= 0 else None,
    )


footprints = st.builds(
    KernelFootprint,
    name=st.just("k"),
    threads=st.integers(1, 1024),
    registers=st.integers(8, 255),
    static_smem=st.integers(0, 49152),
    dynamic_smem=st.one_of(st.integers(0, 49152), st.integers(0, 232448)),
    blocks=st.one_of(st.integers(1, 4500), st.integers(1, 2**40)),
    cluster=st.sampled_from([1, 1, 1, 2, 4]),
    cooperative=st.sampled_from([False, False, False, True]),
)
launches = st.builds(
    twin.TwinLaunch,
    footprint=footprints,
    role=st.sampled_from([Role.COMPUTE] * 4 + ROLES),
    capturing=st.booleans(),
    failed_before=st.sampled_from([False, False, False, True]),
    natural_blocks=st.one_of(st.none(), st.none(), st.integers(0, 32)),
)
wishes = st.builds(
    twin.Wish,
    pad_bytes=st.one_of(st.just(0), st.integers(1, 65536), st.integers(1, 2**30)),
    max_blocks_per_sm=st.one_of(st.just(0), st.integers(1, 16)),
    carveout=st.one_of(st.just(-1), st.integers(0, 100)),
    comm_priority=st.booleans(),
    shape_captures=st.sampled_from([True, True, True, False]),
    refusal=st.sampled_from([None] * 6 + [Rule.EXCLUDED, Rule.NOT_INCLUDED]),
)
devices = st.sampled_from([catalogue.model(n).facts for n in ("h200", "a100", "a40")])


@shim_build.needs_compiler
@settings(max_examples=600, deadline=None)
@given(devices, launches, wishes)
def test_c_and_python_decide_alike(
    facts: DeviceFacts, launch: twin.TwinLaunch, wish: twin.Wish
) -> None:
    assert native(facts, launch, wish) == twin.decide(facts, launch, wish)


@shim_build.needs_compiler
@settings(max_examples=300, deadline=None)
@given(devices, footprints)
def test_c_and_python_agree_on_residency(facts: DeviceFacts, footprint: KernelFootprint) -> None:
    limits = Limits(*(getattr(facts, name) for name, _ in Limits._fields_))
    f = footprint
    got = core_harness.core().abi.ovl_residency(
        ctypes.byref(limits), f.threads, f.registers, f.smem
    )
    assert got == twin.residency(facts, footprint)


@settings(max_examples=300, deadline=None)
@given(launches, wishes)
def test_no_decision_breaks_a_promise(launch: twin.TwinLaunch, wish: twin.Wish) -> None:
    f, decision = launch.footprint, twin.decide(H200, launch, wish)
    if decision.dynamic_smem != f.dynamic_smem:
        assert launch.role is Role.COMPUTE
        assert not f.cooperative
        assert f.static_smem + decision.dynamic_smem <= H200.smem_per_block_optin
        assert decision.dynamic_smem > f.dynamic_smem
        assert 1 <= decision.blocks_after <= decision.blocks_before
        if f.blocks <= decision.blocks_before * H200.sm_count:
            assert f.blocks <= decision.blocks_after * H200.sm_count
    if decision.rule is Rule.PADDED_TO_TARGET:
        assert decision.blocks_after <= wish.max_blocks_per_sm


@shim_build.needs_compiler
@given(st.text("ab*?", max_size=8), st.text("ab[", max_size=8))
def test_patterns_match_alike(pattern: str, text: str) -> None:
    got = core_harness.core().abi.ovl_match(pattern.encode(), text.encode())
    assert bool(got) == twin.match(pattern, text)


@shim_build.needs_compiler
@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "c"),
        ("_Z27ncclDevKernel_SendRecv19ncclDevKernelArgsStorageILm4096EE", "c"),
        ("_Z46ncclKernel_AllReduce_RING_LL_Sum_float11ncclWork", "c"),
        ("_Z33ncclSymkDevKernel_AllGather_LL", "c"),
        ("nvshmemi_transfer_rma", "c"),
        ("_ZN2at6nativeN12_GLOBAL_23multimem_all_reduce_kernelE", "c"),
        ("two_shot_all_reduce_kernel_inplace", "c"),
        ("_ZN7deep_ep8internode8dispatchE", "c"),
        ("overlapctl_comm_one_warp_copy", "c"),
        ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NNT", "x"),
        ("_ZN2at6native29vectorized_elementwise_kernelE", "x"),
        ("triton_red_fused_layer_norm", "x"),
        ("", "x"),
    ],
)
def test_names_have_the_same_role_in_both(name: str, role: str) -> None:
    expected = Role.COMMUNICATION if role == "c" else Role.COMPUTE
    assert twin.role_of_name(name) is expected
    assert ROLES[core_harness.core().abi.ovl_role_of_name(name.encode())] is expected


@shim_build.needs_compiler
def test_rules_are_the_same_in_the_same_order() -> None:
    abi = core_harness.core().abi
    assert [abi.ovl_rule_name(i).decode() for i in range(len(RULES))] == [r.value for r in RULES]
    assert all(abi.ovl_rule_text(i) for i in range(len(RULES)))
    assert abi.ovl_rule_name(len(RULES)) is abi.ovl_rule_name(-1) is None


def test_the_known_gemm_is_padded_to_three_blocks() -> None:
    gemm = KernelFootprint(
        name="gemm_64x64x64", threads=128, registers=128, dynamic_smem=49152, blocks=16384
    )
    launch = twin.TwinLaunch(footprint=gemm)
    decision = twin.decide(H200, launch, twin.Wish(max_blocks_per_sm=3))
    assert (decision.blocks_before, decision.blocks_after) == (4, 3)
    assert decision.rule is Rule.PADDED_TO_TARGET
    resident = dataclasses.replace(launch, footprint=dataclasses.replace(gemm, blocks=132 * 4))
    kept = twin.decide(H200, resident, twin.Wish(max_blocks_per_sm=3))
    assert (kept.dynamic_smem, kept.rule) == (49152, Rule.KEEPS_GRID_RESIDENT)


def test_a_policy_becomes_the_wish_of_one_kernel() -> None:
    policy = Policy(
        pad_bytes=1,
        comm_priority=True,
        include=("gemm*",),
        exclude=("*_small",),
        rules=(KernelRule(pattern="gemm_a*", max_blocks_per_sm=2),),
    )
    assert twin.wish(policy, "gemm_b") == twin.Wish(pad_bytes=1, comm_priority=True)
    assert twin.wish(policy, "gemm_a1") == twin.Wish(max_blocks_per_sm=2, comm_priority=True)
    assert twin.wish(policy, "gemm_small").refusal is Rule.EXCLUDED
    assert twin.wish(policy, "norm").refusal is Rule.NOT_INCLUDED
