"""Pair and pipeline trials on one GPU, beside copies and kernels that stand in for collectives."""

from __future__ import annotations

import pytest

from overlapctl.errors import MeasurementError, UsageError
from overlapctl.measure.gpu import GpuRunner
from overlapctl.measure.metrics import evaluate
from overlapctl.measure.stats import median
from overlapctl.records import Arm, Case, CommSpec, ComputeSpec, Policy, Role

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs one CUDA GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu

GEMM = ComputeSpec(op="gemm", shape=(4096, 4096, 4096), tile=(64, 64, 64, 4, 3), repeats=4)
ARMS = [
    Arm(name="default"),
    Arm(name="priority", policy=Policy(comm_priority=True)),
    Arm(name="3 blocks", policy=Policy(comm_priority=True, max_blocks_per_sm=3)),
]


@pytest.fixture(scope="module")
def runner():
    with GpuRunner([0]) as runner:
        yield runner


def case(path, form="pair", compute=GEMM):
    comm = CommSpec(op="local_copy", size_bytes=128 << 20, path=path)
    return Case(compute=compute, comm=comm, form=form, depth=4)


@pytest.mark.parametrize("form", ["pair", "pipeline"])
@pytest.mark.parametrize("path", ["copy", "standin", "nccl"])
def test_trials_are_complete_and_plausible(runner, path, form):
    trials = runner.run(case(path, form), ARMS, repeats=3)
    assert [t.arm for t in trials] == ARMS
    for trial in trials:
        assert len(trial.samples) == len(trial.compute_alone) == len(trial.comm_alone) == 3
        for sample in trial.samples:
            assert 0 < sample.comm_issue < sample.comm_end
            assert sample.clocks is not None
        metrics = evaluate(trial, trials[0])
        # Nothing can end before its own isolated time is nearly over, or take far beyond serial.
        assert 0.8 * metrics.ideal < metrics.total < 1.5 * metrics.serial + 0.5


def test_the_shim_says_what_each_arm_did(runner):
    default, priority, shaped = runner.run(case("standin"), ARMS, repeats=3)

    def rows(trial, role):
        return [row for row in trial.applied if row.role is role]

    assert all(row.shaped == row.prioritised == 0 for row in default.applied)
    assert all(row.prioritised == row.launches for row in rows(priority, Role.COMMUNICATION))
    assert rows(priority, Role.COMMUNICATION)
    (gemm,) = (row for row in rows(shaped, Role.COMPUTE) if "gemm" in row.kernel)
    assert gemm.launches == gemm.shaped == GEMM.repeats
    assert (gemm.blocks_before, gemm.blocks_after) == (4, 3)


def test_the_footprint_is_the_gemms(runner):
    footprint = runner.footprint(case("copy"))
    assert "gemm" in footprint.name
    assert (footprint.threads, footprint.blocks) == (128, 64 * 64)
    assert footprint.smem >= 3 * 2 * 64 * 64 * 2


def test_priority_gets_the_standin_ahead_of_waiting_blocks(runner):
    # One long kernel: between short ones, communication slips in without any priority.
    gemm = ComputeSpec(op="gemm", shape=(8192, 8192, 8192), tile=(64, 64, 64, 4, 3))
    default, priority, _ = runner.run(case("standin", compute=gemm), ARMS, repeats=5)
    assert median([s.comm_end for s in priority.samples]) < 0.8 * median(
        [s.comm_end for s in default.samples]
    )


@pytest.mark.parametrize(
    "compute",
    [
        ComputeSpec(op="gemm", shape=(2048, 2048, 2048), dtype="fp32"),
        ComputeSpec(op="elementwise", shape=(1 << 26,)),
        ComputeSpec(op="layernorm", shape=(8192, 4096), repeats=2),
        ComputeSpec(op="attention", shape=(2, 16, 2048, 128)),
    ],
    ids=lambda c: c.op,
)
def test_every_operation_can_be_measured(runner, compute):
    (trial,) = runner.run(case("copy", compute=compute), ARMS[:1], repeats=1)
    assert trial.samples[0].total > 0


def test_what_needs_two_gpus_says_so(runner):
    two = Case(compute=GEMM, comm=CommSpec(op="all_reduce", size_bytes=1 << 20))
    with pytest.raises(UsageError, match="use two GPUs"):
        runner.run(two, ARMS, repeats=1)


def test_too_large_a_case_is_a_clear_error(runner):
    huge = ComputeSpec(op="elementwise", shape=(1 << 40,))
    with pytest.raises(MeasurementError, match="does not fit"):
        runner.run(case("copy", compute=huge), ARMS, repeats=1)
