"""Cases users ran into, as far as the planner decides them: verdict and reason.

C and G-J are named as in the project's list of user cases; each test says what was seen there.
"""

from __future__ import annotations

import pytest

from overlapctl.device import open_device
from overlapctl.device.footprints import nccl_footprint
from overlapctl.errors import UsageError
from overlapctl.launch.twin import TwinLaunch, decide, wish
from overlapctl.plan.choose import plan_case
from overlapctl.plan.levers import green_context_sms
from overlapctl.plan.residency import padded
from overlapctl.plan.simulate import Shape, simulate
from overlapctl.plan.workload_model import comm_work, compute_footprint, compute_work
from overlapctl.records import Case, KernelFootprint, Plan, Policy, Rule
from overlapctl.specs import parse_comm, parse_compute

H200 = open_device("sim:h200").facts()


def plan(compute: str, comm: str, form: str = "pair", **more: KernelFootprint) -> Plan:
    case = Case(compute=parse_compute(compute), comm=parse_comm(comm), form=form)  # type: ignore[arg-type]
    return plan_case(H200, case, **more).plan


# --- C: a GEMM that leaves SMs free for a one-block collective is slowed nevertheless -----------


def test_c_gemm_that_leaves_sms_free_is_bound_by_bandwidth() -> None:
    gemm = KernelFootprint(
        name="gemm", threads=384, registers=168, dynamic_smem=213_188, blocks=132 - 14
    )
    one_block = KernelFootprint(
        name="ncclDevKernel", threads=544, registers=96, static_smem=22_592,
        dynamic_smem=82_240, blocks=1,
    )  # fmt: skip
    chosen = plan(
        "gemm:8192x8192x8192", "all_reduce:64MB", footprint=gemm, comm_footprint=one_block
    )
    assert chosen.policy.is_default
    assert chosen.rule == "bandwidth"
    assert "memory bandwidth" in chosen.rule_text
    # With the grid on all SMs the same collective waits, and the reason is another one.
    full = KernelFootprint(
        name="gemm", threads=384, registers=168, dynamic_smem=213_188, blocks=132
    )
    waiting = plan(
        "gemm:8192x8192x8192", "all_reduce:64MB", footprint=full, comm_footprint=one_block
    )
    assert waiting.rule == "persistent compute"


# --- G: a green context gets other SMs than were asked for ---------------------------------------


@pytest.mark.parametrize(
    ("gpu", "asked", "granted"),
    [
        ("h200", 1, 8),
        ("h200", 8, 8),
        ("h200", 9, 16),
        ("h200", 128, 128),
        ("h200", 129, 132),
        ("h200", 132, 132),
        ("a100", 1, 4),
        ("a100", 5, 6),
        ("a40", 84, 84),
    ],
)
def test_g_green_context_grants_by_granule(gpu: str, asked: int, granted: int) -> None:
    assert green_context_sms(open_device(f"sim:{gpu}").facts(), asked) == granted


def test_g_every_request_gets_at_least_what_it_asks() -> None:
    granted = [green_context_sms(H200, n) for n in range(1, H200.sm_count + 1)]
    assert all(g >= n for n, g in enumerate(granted, 1))
    assert granted == sorted(granted)
    for wrong in (0, 133):
        with pytest.raises(UsageError, match=f"{wrong} SMs are asked for, NVIDIA H200 has 132"):
            green_context_sms(H200, wrong)
    with pytest.raises(UsageError, match="no green contexts"):
        green_context_sms(open_device("sim:mi300x").facts(), 8)


# --- H: small shapes lose by overlapping ---------------------------------------------------------


@pytest.mark.parametrize("shape", ["4096x4096x8192", "8192x8192x29568"])
def test_h_all_reduce_of_164_kb_is_left_alone(shape: str) -> None:
    chosen = plan(f"gemm:{shape}", "all_reduce:164KB")
    assert chosen.policy.is_default
    assert "leave it alone" in chosen.rule_text
    assert chosen.gain == 0


def test_h_nothing_to_gain_beside_the_large_shape() -> None:
    chosen = plan("gemm:8192x8192x29568", "all_reduce:164KB")
    assert chosen.rule == "nothing to gain"
    assert 1 - chosen.ideal / chosen.serial < chosen.margin


# --- I: capping NCCL's blocks only hurts on a fast link ------------------------------------------


def test_i_the_best_block_limit_is_none() -> None:
    chosen = plan("gemm:8192x8192x8192", "all_reduce:264MB", form="pipeline")
    limits = {
        int(c.name.split()[2]): c.total
        for c in chosen.candidates
        if c.lever == "block limit" and "," not in c.name
    }
    assert sorted(limits) == [4, 8, 16]  # 32 is more than NCCL uses by itself
    free = next(c.total for c in chosen.candidates if c.name == "default")
    assert free is not None
    assert limits[16] is not None
    # Measured, cuBLAS: 15.4 ms uncapped, 20.2 at 8 blocks, 32.7 at 4; much the same at 16.
    assert limits[16] > 0.97 * free
    assert limits[8] > 1.05 * free
    assert limits[4] > limits[8]


@pytest.mark.parametrize("compute", ["gemm:8192x8192x8192", "gemm:8192x8192x8192:bf16:64x64x64"])
@pytest.mark.parametrize("form", ["pair", "pipeline"])
def test_i_no_limit_is_advised(compute: str, form: str) -> None:
    chosen = plan(compute, "all_reduce:896MB", form=form)
    assert any(c.lever == "block limit" for c in chosen.candidates)
    assert not any("NCCL_MAX_CTAS" in line for line in chosen.advice)


def test_i_the_limit_is_offered_as_the_jobs_setting() -> None:
    chosen = plan("gemm:8192x8192x8192", "all_reduce:264MB")
    limit = next(c for c in chosen.candidates if c.name == "at most 8 blocks")
    assert limit.settings == ("NCCL_MAX_CTAS=8",)
    assert nccl_footprint(H200, "ring").blocks == 24


# --- J: a pad up to the opt-in limit is applied, one byte more is not ----------------------------


def test_j_pad_to_the_opt_in_limit_and_beyond() -> None:
    kernel = compute_footprint(H200, parse_compute("gemm:8192x8192x8192:bf16:64x64x64"))
    limit = H200.smem_per_block_optin - kernel.smem
    for pad in (limit - 1, limit):
        decision = decide(
            H200, TwinLaunch(footprint=kernel), wish(Policy(pad_bytes=pad), kernel.name)
        )
        assert decision.rule is Rule.PADDED_BYTES
        assert decision.dynamic_smem == kernel.dynamic_smem + pad
    beyond = decide(
        H200, TwinLaunch(footprint=kernel), wish(Policy(pad_bytes=limit + 1), kernel.name)
    )
    assert beyond.rule is Rule.OPT_IN_LIMIT
    assert beyond.dynamic_smem == kernel.dynamic_smem


def test_j_the_simulation_refuses_only_beyond_the_limit() -> None:
    compute = compute_work(H200, parse_compute("gemm:8192x8192x8192:bf16:64x64x64"))
    comm = comm_work(H200, parse_comm("all_reduce:64MB"))
    limit = H200.smem_per_block_optin - compute.footprint.smem
    for pad in (limit - 1, limit):
        assert simulate(H200, compute, comm, Shape(pad=pad)).total > compute.alone_ms
    assert padded(compute.footprint, limit).smem == H200.smem_per_block_optin
    with pytest.raises(UsageError, match="fits no SM of NVIDIA H200"):
        simulate(H200, compute, comm, Shape(pad=limit + 1))
