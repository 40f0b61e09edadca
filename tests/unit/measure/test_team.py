"""Worker processes: answers, failures, and that nothing is left behind."""

from __future__ import annotations

import functools
import multiprocessing

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fake_trial_backend import (
    FOOTPRINT,
    FakeBackend,
    make_broken,
    make_failing,
    make_failing_in_job,
    make_fake,
)

from overlapctl.errors import DeviceError, MeasurementError, UsageError
from overlapctl.measure.gpu import GpuRunner
from overlapctl.measure.team import JobTeam, LocalTeam
from overlapctl.measure.trial import TrialRunner
from overlapctl.measure.worker import SpawnedTeam
from overlapctl.records import Arm, Case, CommSpec, ComputeSpec, Policy

CASE = Case(
    compute=ComputeSpec(op="gemm", shape=(64, 64, 64)),
    comm=CommSpec(op="all_reduce", size_bytes=1 << 20),
)
ARMS = [Arm(name="default"), Arm(name="shaped", policy=Policy(max_blocks_per_sm=3))]


@pytest.fixture(autouse=True)
def _no_process_is_left():
    yield
    assert multiprocessing.active_children() == []


def test_workers_answer_and_end():
    events = []
    team = SpawnedTeam(
        make_fake, 2, on_start=lambda: events.append("start"), on_end=lambda: events.append("end")
    )
    with GpuRunner(team=team) as runner:
        assert isinstance(runner, TrialRunner)
        assert runner.ranks == 2
        assert runner.footprint(CASE) == FOOTPRINT
        default, shaped = runner.run(CASE, ARMS, repeats=2)
        assert [s.total for s in default.samples] == [7.5] * 2  # rank 1's, the slower one
        assert [s.total for s in shaped.samples] == pytest.approx([4.95] * 2)
    runner.close()
    assert events == ["start", "end"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "rank 1 of 2 failed: 7 elements differ"),
        ("bug", "rank 1 of 2 failed: ZeroDivisionError: division by zero"),
        ("die", "worker of rank 1 ended with exit code 3"),
        ("kill", "worker of rank 1 ended by signal 9"),
    ],
)
def test_a_failing_worker_is_named_and_ends_the_team(how, message):
    ends = []
    team = SpawnedTeam(functools.partial(make_failing, how), 2, on_end=lambda: ends.append(1))
    with pytest.raises(MeasurementError, match=message):
        GpuRunner(team=team).run(CASE, ARMS, repeats=1)
    assert ends == [1]
    assert multiprocessing.active_children() == []


def test_silence_is_an_error():
    team = SpawnedTeam(functools.partial(make_failing, "wait"), 1, silence_s=3.0)
    with pytest.raises(MeasurementError, match=r"ranks \[0\] said nothing for 3 s"):
        team.run(CASE, ARMS, 1)


def test_a_backend_that_cannot_be_made_is_a_failure_of_its_rank():
    with pytest.raises(MeasurementError, match="rank 0 of 1 failed: no GPU for rank 0"):
        SpawnedTeam(make_broken, 1).footprint(CASE)


def test_the_runner_refuses_bad_requests_before_any_worker_starts():
    runner = GpuRunner(team=SpawnedTeam(make_fake, 2, on_start=lambda: pytest.fail("started")))
    with pytest.raises(UsageError, match="repeats is 0"):
        runner.run(CASE, ARMS, repeats=0)
    bad = Case(compute=ComputeSpec(op="gemm", shape=(64, 64)), comm=CASE.comm)
    with pytest.raises(UsageError, match="shape of gemm"):
        runner.run(bad, ARMS, repeats=1)
    deep = Case(compute=CASE.compute, comm=CASE.comm, form="pipeline", depth=0)
    with pytest.raises(UsageError, match="depth is 0"):
        runner.run(deep, ARMS, repeats=1)


def test_one_gpu_refuses_collectives_between_gpus():
    runner = GpuRunner(team=LocalTeam(FakeBackend))
    with pytest.raises(UsageError, match="all_reduce is asked for on 1 GPU"):
        runner.run(CASE, ARMS, repeats=1)


def test_the_estimate_grows_with_arms_and_repetitions():
    runner = GpuRunner(team=LocalTeam(FakeBackend))
    case = Case(
        compute=CASE.compute, comm=CommSpec(op="local_copy", size_bytes=1 << 20, path="copy")
    )
    few = runner.estimate_seconds(case, ARMS[:1], 5)
    # 7 rounds of (4 + 3 + 7) ms of GPU time, 3 steps of 4 ms, 3 s of set-up.
    assert few == pytest.approx(3 + 7 * (0.014 + 0.012))
    assert runner.estimate_seconds(case, ARMS, 5) > few
    assert runner.estimate_seconds(case, ARMS[:1], 50) > few


def test_agreement_is_the_own_value_where_nobody_else_decides():
    assert GpuRunner(team=LocalTeam(FakeBackend)).agree(True) is True
    assert SpawnedTeam(make_fake, 2).agree(False) is False


def _job_rank(rank, ranks, store, how, out):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    make = functools.partial(make_failing_in_job, how) if how else make_fake
    runner = GpuRunner(team=JobTeam(lambda: make(rank, ranks), dist.group.WORLD))
    try:
        trials = runner.run(CASE, ARMS, repeats=2)
        answer = ([s.total for s in trials[0].samples], runner.agree(rank == 0))
    except MeasurementError as error:
        answer = str(error)
    runner.close()
    dist.destroy_process_group()
    out.put(answer)


def _answers_of_job(tmp_path, how):
    context = mp.get_context("spawn")
    out = context.SimpleQueue()
    mp.spawn(_job_rank, args=(2, str(tmp_path / "store"), how, out), nprocs=2)
    return [out.get() for _ in range(2)]


def test_ranks_of_a_job_get_the_same_trials_and_agree_with_rank_0(tmp_path):
    assert _answers_of_job(tmp_path, "") == [([7.5, 7.5], True)] * 2


def test_a_failure_in_a_job_is_raised_on_every_rank_and_names_the_one_that_failed(tmp_path):
    for answer in _answers_of_job(tmp_path, "raise"):
        assert "rank 1 of 2 failed: 7 elements differ" in answer


def test_without_a_gpu_the_runner_names_the_simulated_device():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(DeviceError, match="sim:h200"):
        GpuRunner()
