"""Trials over two GPUs: NCCL and the light kernel, started here and under torchrun."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys

import pytest

from overlapctl.measure.gpu import GpuRunner
from overlapctl.measure.metrics import evaluate
from overlapctl.measure.stats import median
from overlapctl.records import Arm, Case, CommSpec, ComputeSpec, Policy, Role

torch = pytest.importorskip("torch")
if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
    pytest.skip("needs two CUDA GPUs with peer access", allow_module_level=True)
pytestmark = pytest.mark.multigpu

GEMM = ComputeSpec(op="gemm", shape=(8192, 8192, 8192), tile=(64, 64, 64, 4, 3))
ARMS = [
    Arm(name="default"),
    Arm(name="priority", policy=Policy(comm_priority=True)),
    Arm(name="3 blocks", policy=Policy(comm_priority=True, max_blocks_per_sm=3)),
]


def case(op="all_reduce", path="nccl", size=256 << 20, **more):
    return Case(compute=GEMM, comm=CommSpec(op=op, size_bytes=size, path=path), **more)


@pytest.fixture(scope="module")
def runner():
    with GpuRunner([0, 1]) as runner:
        yield runner
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("op", "path"),
    [
        ("all_reduce", "nccl"),
        ("all_gather", "nccl"),
        ("reduce_scatter", "nccl"),
        ("all_to_all", "nccl"),
        ("all_reduce", "light"),
    ],
)
def test_collectives_give_right_results_under_every_arm(runner, op, path):
    for trial in runner.run(case(op, path), ARMS, repeats=2):
        assert len(trial.samples) == 2


@pytest.mark.parametrize("size", [2, 30, 4096 + 6, (1 << 20) + 14])
def test_the_light_kernel_sums_sizes_that_divide_into_nothing(runner, size):
    runner.run(case(path="light", size=size), ARMS[:1], repeats=1)


def test_pipelines_run(runner):
    (trial,) = runner.run(case(form="pipeline", depth=3), ARMS[:1], repeats=2)
    metrics = evaluate(trial, trial)
    assert 0.8 * metrics.ideal < metrics.total < 1.3 * metrics.serial


def test_priority_on_an_ordinary_group_gets_nccl_ahead_of_waiting_blocks(runner):
    default, priority, shaped = runner.run(case(size=896 << 20), ARMS, repeats=5)
    totals = [median([s.total for s in t.samples]) for t in (default, priority, shaped)]
    assert totals[1] < 0.85 * totals[0]
    assert totals[2] < 0.75 * totals[0]
    nccl = [row for row in priority.applied if row.role is Role.COMMUNICATION]
    assert nccl
    assert all(row.prioritised == row.launches for row in nccl)


_PROGRAM = """
import json
from overlapctl.measure.gpu import GpuRunner
from overlapctl.records import Arm, Case, CommSpec, ComputeSpec
case = Case(compute=ComputeSpec(op="gemm", shape=(2048, 2048, 2048)),
            comm=CommSpec(op="all_reduce", size_bytes=16 << 20))
with GpuRunner() as runner:
    (trial,) = runner.run(case, [Arm(name="default")], repeats=2)
    agreed = runner.agree(__import__("os").environ["RANK"] == "0")
print(json.dumps([runner.ranks, [s.total for s in trial.samples], agreed]))
"""


def test_under_torchrun_every_rank_gets_the_same_trials(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--log-dir"]
        + [str(tmp_path / "log"), "--redirects=3", str(program)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [
        json.loads(path.read_text().strip().splitlines()[-1])
        for path in sorted((tmp_path / "log").rglob("stdout.log"))
    ]
    assert len(answers) == 2
    assert answers[0] == answers[1]
    ranks, totals, agreed = answers[0]
    assert (ranks, len(totals), agreed) == (2, 2, True)
