"""What is enqueued where, in which order, seen through fake streams and events."""

from __future__ import annotations

import contextlib

import pytest
import torch

from overlapctl.errors import MeasurementError
from overlapctl.measure import cuda_backend
from overlapctl.measure.collectives import Collective
from overlapctl.measure.cuda_backend import CudaBackend
from overlapctl.measure.workloads import Workload
from overlapctl.records import Case, CommSpec, ComputeSpec, Policy

PAIR = Case(
    compute=ComputeSpec(op="gemm", shape=(8, 8, 8)),
    comm=CommSpec(op="local_copy", size_bytes=64, path="copy"),
)
PIPELINE = Case(compute=PAIR.compute, comm=PAIR.comm, form="pipeline", depth=2)
SHAPED = Policy(max_blocks_per_sm=3)


class Machine:
    """Logs (stream, action); every action takes a millisecond; results can be tampered with."""

    def __init__(self):
        self.log, self.now, self.current = [], 0.0, "main"
        self.result = torch.ones(4)
        self.wrong, self.hangs = 0, False
        self.drift = 0.0

    def do(self, action, stream=None):
        self.now += 1.0
        self.log.append((stream or self.current, action))

    def compute(self):
        self.do("compute")
        self.result.fill_(1.0 + self.drift)


@pytest.fixture
def machine(monkeypatch):
    m = Machine()

    class Event:
        def __init__(self, enable_timing=False):
            self.at = None

        def record(self, stream=None):
            self.at = m.now

        def query(self):
            return not m.hangs

        def elapsed_time(self, other):
            return other.at - self.at

    class Stream:
        def __init__(self, device=None):
            pass

        def wait_event(self, event):
            m.log.append(("side", "wait"))

    @contextlib.contextmanager
    def on(stream):
        m.current = "side"
        yield
        m.current = "main"

    for name, value in {
        "Event": Event,
        "Stream": Stream,
        "stream": on,
        "current_stream": lambda *_: None,
        "set_device": lambda *_: None,
        "empty_cache": lambda: None,
        "_sleep": lambda cycles: m.do("gate"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(
        cuda_backend,
        "build_workload",
        lambda spec, device: Workload(spec, m.compute, lambda: m.result),
    )
    monkeypatch.setattr(
        cuda_backend,
        "build_collective",
        lambda spec, device, **_: Collective(
            spec, lambda: m.do("comm"), lambda: m.do("reset"), lambda: m.wrong
        ),
    )
    return m


class FakeShaping:
    def __init__(self, machine):
        self.machine, self.depth = machine, 0

    @contextlib.contextmanager
    def in_force(self, policy):
        self.machine.log.append(("host", policy))
        yield
        self.machine.log.append(("host", "popped"))

    def rows(self):
        return ()

    def since(self, before):
        return ()


@pytest.fixture
def backend(machine):
    backend = CudaBackend(0, FakeShaping(machine), timeout_s=0.05)
    backend.prepare(PAIR)
    machine.log.clear()
    return backend


def test_a_pair_issues_the_collective_without_any_dependency(machine, backend):
    timing = backend.measure("overlap", None)
    assert machine.log == [("main", "reset"), ("main", "compute"), ("side", "comm")]
    assert (timing.compute_end, timing.comm_issue, timing.comm_end) == (1.0, 1.0, 2.0)


def test_isolated_steps_run_one_side_only(machine, backend):
    assert backend.measure("compute", None).comm_end is None
    assert ("side", "comm") not in machine.log
    machine.log.clear()
    assert backend.measure("comm", None).compute_end is None
    assert ("main", "compute") not in machine.log


def test_a_policy_is_in_force_after_the_helpers_and_until_the_end(machine, backend):
    backend.measure("overlap", SHAPED)
    assert machine.log == [
        ("main", "reset"),
        ("host", SHAPED),
        ("main", "compute"),
        ("side", "comm"),
        ("host", "popped"),
    ]


def test_a_pipeline_waits_for_each_result_and_is_enqueued_behind_a_gate(machine, backend):
    backend.prepare(PIPELINE)
    machine.log.clear()
    backend.measure("overlap", SHAPED)
    assert machine.log == [
        ("main", "reset"),
        ("main", "gate"),
        ("host", SHAPED),
        ("side", "wait"),  # for the start
        ("main", "compute"),
        ("side", "wait"),
        ("side", "comm"),
        ("main", "compute"),
        ("side", "wait"),
        ("side", "comm"),
        ("host", "popped"),
    ]


def test_preparing_the_same_case_again_does_nothing(machine, backend):
    backend.prepare(PAIR)
    assert machine.log == []


def test_results_that_differ_end_the_trial(machine, backend):
    backend.check(SHAPED)
    machine.drift = 1e-7
    with pytest.raises(MeasurementError, match=r"4 of 4 elements .* on rank 0"):
        backend.check(SHAPED)
    machine.drift, machine.wrong = 0.0, 5
    with pytest.raises(MeasurementError, match="local_copy over path copy gave 5 wrong"):
        backend.check(SHAPED)


def test_a_hung_gpu_is_given_up(machine, backend):
    machine.hangs = True
    with pytest.raises(MeasurementError, match="rank 0 hung"):
        backend.measure("compute", None)


def test_closing_frees_and_tells(machine):
    told = []
    backend = CudaBackend(0, FakeShaping(machine), on_close=lambda: told.append(1))
    backend.prepare(PAIR)
    backend.close()
    assert told == [1]
    with pytest.raises(MeasurementError, match="no case is prepared"):
        backend.measure("compute", None)
