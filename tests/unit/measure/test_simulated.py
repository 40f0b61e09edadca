"""The simulated runner: the runner protocol, the shim's rules, determinism, stated noise."""

from __future__ import annotations

import statistics

import pytest

from overlapctl.device import open_device
from overlapctl.errors import UsageError
from overlapctl.measure.simulated import SimulatedRunner
from overlapctl.measure.trial import TrialRunner
from overlapctl.records import Arm, Case, CommSpec, ComputeSpec, KernelRule, Policy, Role, Rule

GEMM = ComputeSpec(op="gemm", shape=(8192, 8192, 8192), tile=(64, 64, 64, 4, 3))
CASE = Case(compute=GEMM, comm=CommSpec(op="all_reduce", size_bytes=896 * 2**20))
ARMS = (
    Arm(name="default"),
    Arm(name="priority", policy=Policy(comm_priority=True)),
    Arm(name="priority+3/SM", policy=Policy(comm_priority=True, max_blocks_per_sm=3)),
)


@pytest.fixture
def runner() -> SimulatedRunner:
    return SimulatedRunner(open_device("sim:h200").facts())


def test_follows_the_protocol(runner: SimulatedRunner) -> None:
    assert isinstance(runner, TrialRunner)
    footprint = runner.footprint(CASE)
    assert footprint is not None
    assert (footprint.threads, footprint.registers, footprint.smem) == (128, 64, 49152)
    assert 0 < runner.estimate_seconds(CASE, ARMS, 5) < 1
    runner.close()
    runner.close()


def test_trials_have_all_values_and_the_expected_order(runner: SimulatedRunner) -> None:
    trials = runner.run(CASE, ARMS, repeats=5)
    assert [t.arm.name for t in trials] == [a.name for a in ARMS]
    for trial in trials:
        assert len(trial.samples) == len(trial.compute_alone) == len(trial.comm_alone) == 5
        assert len(trial.arm_compute_alone) == 5
        assert trial.compute_alone == trials[0].compute_alone
        for sample in trial.samples:
            assert sample.compute_end is not None
            assert sample.comm_issue == pytest.approx(0.15)
            assert sample.comm_end is not None
            assert sample.comm_end > sample.comm_issue
    default, priority, both = (statistics.median(s.total for s in t.samples) for t in trials)
    assert both < priority < default


def test_same_seed_same_trials_other_seed_other_noise(runner: SimulatedRunner) -> None:
    facts = open_device("sim:h200").facts()
    first = runner.run(CASE, ARMS, repeats=3)
    assert SimulatedRunner(facts).run(CASE, ARMS, repeats=3) == first
    assert SimulatedRunner(facts, seed=1).run(CASE, ARMS, repeats=3) != first


def test_noise_is_as_large_as_stated(runner: SimulatedRunner) -> None:
    trial = runner.run(CASE, ARMS[:1], repeats=400)[0]
    spread = statistics.stdev(trial.compute_alone) / statistics.mean(trial.compute_alone)
    assert spread == pytest.approx(0.007, rel=0.2)


@pytest.mark.parametrize(
    ("compute", "policy", "rule", "after"),
    [
        (GEMM, Policy(max_blocks_per_sm=3), Rule.PADDED_TO_TARGET, 3),
        (GEMM, Policy(max_blocks_per_sm=4), Rule.ALREADY_AT_TARGET, 4),
        (GEMM, Policy(pad_bytes=30_000), Rule.PADDED_BYTES, 2),
        (GEMM, Policy(pad_bytes=190_000), Rule.OPT_IN_LIMIT, 4),
        (GEMM, Policy(comm_priority=True), Rule.NOTHING_ASKED, 4),
        (GEMM, Policy(max_blocks_per_sm=3, exclude=("gemm*",)), Rule.EXCLUDED, 4),
        (GEMM, Policy(max_blocks_per_sm=3, include=("other",)), Rule.NOT_INCLUDED, 4),
        (
            GEMM,
            Policy(rules=(KernelRule(pattern="*gemm*", max_blocks_per_sm=2),)),
            Rule.PADDED_TO_TARGET,
            2,
        ),
        (
            ComputeSpec(op="elementwise", shape=(2**20,)),
            Policy(max_blocks_per_sm=1),
            Rule.KEEPS_GRID_RESIDENT,
            16,
        ),
    ],
)
def test_the_shims_rules_hold(
    runner: SimulatedRunner, compute: ComputeSpec, policy: Policy, rule: Rule, after: int
) -> None:
    case = Case(compute=compute, comm=CASE.comm)
    trial = runner.run(case, [Arm(name="arm", policy=policy)], repeats=1)[0]
    kernel = next(row for row in trial.applied if row.role is Role.COMPUTE)
    assert kernel.rule is rule
    assert kernel.blocks_after == after
    assert (kernel.shaped > 0) == (kernel.after != kernel.before)
    comm = next(row for row in trial.applied if row.role is Role.COMMUNICATION)
    assert comm.rule is Rule.COMMUNICATION
    assert comm.before == comm.after
    assert (comm.prioritised > 0) is policy.comm_priority


def test_the_untouched_arm_applies_nothing(runner: SimulatedRunner) -> None:
    trial = runner.run(CASE, ARMS, repeats=1)[0]
    assert trial.applied == ()
    assert trial.arm_compute_alone == trial.compute_alone


def test_pipeline_times_are_of_all_stages(runner: SimulatedRunner) -> None:
    pair = runner.run(CASE, ARMS[:1], repeats=5)[0]
    pipeline = runner.run(
        Case(compute=GEMM, comm=CASE.comm, form="pipeline", depth=4), ARMS[:1], repeats=5
    )[0]
    ratio = statistics.median(pipeline.compute_alone) / statistics.median(pair.compute_alone)
    assert ratio == pytest.approx(4, rel=0.03)


def test_bad_requests_are_refused(runner: SimulatedRunner) -> None:
    with pytest.raises(UsageError, match="repeats is 0"):
        runner.run(CASE, ARMS, repeats=0)
    with pytest.raises(UsageError, match="used 2 times"):
        runner.run(CASE, [ARMS[0], ARMS[0]], repeats=1)
