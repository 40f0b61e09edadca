"""One rank's part of a trial, and the merging of ranks, with a fake backend."""

from __future__ import annotations

import pytest
from fake_trial_backend import FOOTPRINT, FakeBackend

from overlapctl.errors import MeasurementError
from overlapctl.measure.rank import WARM_UP_ROUNDS, RankResult, RankRunner, Timing, merge_ranks
from overlapctl.records import Arm, Case, CommSpec, ComputeSpec, Policy

CASE = Case(
    compute=ComputeSpec(op="gemm", shape=(64, 64, 64)),
    comm=CommSpec(op="all_reduce", size_bytes=1 << 20),
)
ARMS = [Arm(name="default"), Arm(name="shaped", policy=Policy(max_blocks_per_sm=3))]
SHAPED = ARMS[1].policy


def test_samples_come_once_for_each_repetition_and_the_default_runs_without_policy():
    backend = FakeBackend()
    result = RankRunner(backend).run(CASE, ARMS, repeats=4)
    assert len(result.compute_alone) == len(result.comm_alone) == 4
    assert [len(arm.samples) for arm in result.arms] == [4, 4]
    assert [len(arm.alone) for arm in result.arms] == [0, 4]
    steps = [entry for entry in backend.log if entry[0] in ("compute", "comm", "overlap")]
    rounds = 4 + WARM_UP_ROUNDS
    assert steps.count(("overlap", None)) == rounds
    assert steps.count(("overlap", SHAPED)) == rounds
    assert steps.count(("compute", None)) == rounds
    assert steps.count(("compute", SHAPED)) == rounds
    assert steps.count(("comm", None)) == rounds
    # Interleaved: every round is complete before the next begins.
    for r in range(rounds):
        assert len(set(steps[5 * r : 5 * r + 5])) == 5


def test_results_are_checked_once_for_each_arm_before_anything_is_timed():
    backend = FakeBackend()
    runner = RankRunner(backend)
    runner.run(CASE, ARMS, repeats=1)
    assert backend.log[:3] == [("prepare", CASE), ("check", Policy()), ("check", SHAPED)]
    again = runner.run(CASE, ARMS, repeats=1)
    assert sum(entry[0] == "check" for entry in backend.log) == 2
    assert again.arms[1].applied[0].shaped == 1


def test_a_second_run_draws_new_orders():
    backend = FakeBackend()
    runner = RankRunner(backend)

    def steps_of_run():
        start = len(backend.log)
        runner.run(CASE, ARMS, repeats=3)
        return [e for e in backend.log[start:] if e[0] in ("compute", "comm", "overlap")]

    assert steps_of_run() != steps_of_run()


def test_footprint_brings_isolated_times_along():
    assert RankRunner(FakeBackend()).footprint(CASE) == (FOOTPRINT, 4.0, pytest.approx(3.0))


def test_merging_takes_the_slowest_rank_and_its_clocks():
    results = [RankRunner(FakeBackend(rank, 2)).run(CASE, ARMS, repeats=3) for rank in range(2)]
    default, shaped = merge_ranks(CASE, ARMS, results)
    assert default.compute_alone == shaped.compute_alone == (4.5,) * 3
    assert default.comm_alone == pytest.approx((3.0,) * 3)
    assert default.arm_compute_alone == default.compute_alone
    assert shaped.arm_compute_alone == pytest.approx((4.95,) * 3)
    assert [s.total for s in default.samples] == [7.5] * 3
    assert [s.total for s in shaped.samples] == pytest.approx([4.95] * 3)
    assert {s.clocks.sm_mhz for s in default.samples} == {1800}
    assert shaped.applied[0].shaped == 1


def test_merging_refuses_ranks_that_did_not_do_the_same():
    short, full = (RankRunner(FakeBackend()).run(CASE, ARMS, repeats=n) for n in (2, 3))
    with pytest.raises(MeasurementError, match=r"\[2, 3\] values of compute_alone"):
        merge_ranks(CASE, ARMS, [short, full])
    with pytest.raises(MeasurementError, match="no rank"):
        merge_ranks(CASE, ARMS, [])


def test_a_step_without_its_measurement_is_an_error():
    result = RankResult(compute_alone=[1.0], comm_alone=[1.0])
    full = RankRunner(FakeBackend()).run(CASE, ARMS[:1], repeats=1)
    full.arms[0].samples[0] = Timing(compute_end=1.0)
    with pytest.raises(MeasurementError):
        merge_ranks(CASE, ARMS[:1], [full])
    result.arms = full.arms
