"""From launches to kernels, from kernels to a plan, and regions that stay open for long."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapctl.device import open_device
from overlapctl.launch.observe import ObservedKernel, observe_kernels
from overlapctl.launch.ring import LaunchRecord
from overlapctl.learning import Learner, Pace, plan_observed
from overlapctl.records import Applied, KernelFootprint, Policy, Role, Rule

FACTS = open_device("sim:h200").facts()
START = Policy(comm_priority=True)


def function(name, registers=62, static=0):
    zeros = {f.name: 0 for f in dataclasses.fields(Applied)}
    return Applied(
        **zeros
        | {"kernel": name, "registers": registers, "static_smem": static}
        | {"role": Role.COMPUTE, "rule": Rule.NOTHING_ASKED}
    )


FUNCTIONS = {1: function("gemm"), 2: function("nccl", 96), 3: function("add", 18, 16)}


def record(handle, *, at, stream=7, blocks=4096, role=None, **changes):
    zeros = {f.name: 0 for f in dataclasses.fields(LaunchRecord)}
    role = role or (Role.COMMUNICATION if handle == 2 else Role.COMPUTE)
    known = {"function": handle, "ticks": at, "sequence": at, "stream": stream, "blocks": blocks}
    known |= {"threads": 128, "before": 1024, "role": role, "rule": Rule.NOTHING_ASKED}
    return LaunchRecord(**zeros | known | changes)


# --- observing ------------------------------------------------------------------------------------


def test_footprints_come_from_record_and_function():
    (gemm, add) = observe_kernels(
        [
            record(1, at=1, blocks=4096, cluster=2),
            record(1, at=2, blocks=512, cluster=2),
            record(3, at=3, blocks=64, stream=8, rule=Rule.COOPERATIVE),
        ],
        FUNCTIONS,
    )
    assert gemm.footprint == KernelFootprint(
        name="gemm", threads=128, registers=62, dynamic_smem=1024, blocks=4096, cluster=2
    )
    assert add.footprint == KernelFootprint(
        name="add",
        threads=128,
        registers=18,
        static_smem=16,
        dynamic_smem=1024,
        blocks=64,
        cooperative=True,
    )
    assert (gemm.launches, gemm.streams, add.streams) == (2, (7,), (8,))
    assert gemm.share == pytest.approx(4608 / 4672)
    assert add.share == pytest.approx(64 / 4672)


def test_the_grid_is_the_one_most_blocks_were_launched_in():
    many = [record(1, at=i, blocks=100) for i in range(50)]
    (gemm,) = observe_kernels([*many, record(1, at=99, blocks=3000)], FUNCTIONS)
    assert gemm.footprint.blocks == 100


def test_refused_launches_and_unloaded_functions_are_left_out():
    records = [record(1, at=1, result=700), record(99, at=2)]
    assert observe_kernels(records, FUNCTIONS) == ()


def beside(records):
    return {k.footprint.name: k.beside for k in observe_kernels(records, FUNCTIONS)}


def test_kernels_of_different_streams_may_run_together():
    records = [record(1, at=1), record(2, at=2, stream=9), record(3, at=3)]
    assert beside(records) == {"gemm": ("nccl",), "add": ("nccl",), "nccl": ("add", "gemm")}


def test_kernels_of_one_stream_never_do():
    assert beside([record(1, at=1), record(2, at=2), record(3, at=3)]) == {
        "gemm": (),
        "nccl": (),
        "add": (),
    }


def test_another_collective_of_the_same_stream_stands_between():
    functions = {**FUNCTIONS, 4: function("a2a")}
    a2a = record(4, at=3, stream=9, role=Role.COMMUNICATION)
    records = [record(1, at=1), record(2, at=2, stream=9), a2a, record(3, at=4)]
    kernels = {k.footprint.name: k.beside for k in observe_kernels(records, functions)}
    assert kernels == {"gemm": ("nccl",), "nccl": ("gemm",), "a2a": ("add",), "add": ("a2a",)}


def test_ignored_kernels_run_beside_nothing():
    records = [record(1, at=1, role=Role.IGNORED), record(2, at=2, stream=9)]
    assert beside(records) == {"gemm": (), "nccl": ()}


@settings(max_examples=40, deadline=None)
@given(
    launches=st.lists(
        st.tuples(st.sampled_from([1, 2, 3]), st.integers(0, 3), st.integers(1, 500)),
        max_size=30,
    ),
    offset=st.integers(1, 1000),
    shuffled=st.randoms(use_true_random=False),
)
def test_the_same_launches_give_the_same_kernels(launches, offset, shuffled):
    """Handles, clocks and the order of reading differ between ranks; the outcome does not."""
    records = [
        record(f, at=i, stream=stream, blocks=blocks)
        for i, (f, stream, blocks) in enumerate(launches)
    ]
    other = [
        dataclasses.replace(r, function=r.function + offset, ticks=r.ticks * 3 + offset)
        for r in records
    ]
    shuffled.shuffle(other)
    functions = {handle + offset: row for handle, row in FUNCTIONS.items()}
    kernels = observe_kernels(records, FUNCTIONS)
    assert observe_kernels(other, functions) == kernels
    assert sum(k.launches for k in kernels) == len(launches)
    for role in {k.role for k in kernels}:
        assert sum(k.share for k in kernels if k.role is role) == pytest.approx(1)
    names = {(k.footprint.name, other) for k in kernels for other in k.beside}
    assert {(b, a) for a, b in names} == names


# --- planning -------------------------------------------------------------------------------------


def kernel(name, role=Role.COMPUTE, *, beside=("nccl",), share=0.5, **footprint):
    given = {"threads": 384, "registers": 168, "dynamic_smem": 188636, "blocks": 132} | footprint
    return ObservedKernel(
        footprint=KernelFootprint(name=name, **given),
        role=role,
        launches=10,
        share=share,
        streams=(7,),
        beside=beside,
    )


NCCL = kernel(
    "nccl", Role.COMMUNICATION, beside=("nvjet",), threads=544, registers=96, dynamic_smem=82240,
    blocks=24,
)  # fmt: skip
ONE_WARP = kernel(
    "one_warp", Role.COMMUNICATION, beside=("nvjet",), threads=32, registers=8, dynamic_smem=16400,
    blocks=132,
)  # fmt: skip


def test_without_communication_the_heuristic_stays():
    policy, reason = plan_observed(FACTS, [kernel("nvjet", beside=())])
    assert policy == START
    assert "no communication kernel was launched" in reason


def test_communication_on_the_compute_stream_is_named():
    alone = dataclasses.replace(NCCL, beside=())
    policy, reason = plan_observed(FACTS, [kernel("nvjet", beside=()), alone])
    assert policy == START
    assert "nccl only ran on the streams of the compute kernels" in reason


def test_room_is_made_beside_a_persistent_kernel_for_a_kernel_that_fits():
    nvjet = kernel("nvjet", beside=("one_warp",))
    policy, reason = plan_observed(FACTS, [nvjet, ONE_WARP])
    (rule,) = policy.rules
    assert rule.pattern == "nvjet"
    assert rule.pad_bytes > 0 or rule.carveout > 0
    assert reason.startswith("beside one_warp: nvjet: ")
    assert plan_observed(FACTS, [kernel("nvjet"), NCCL])[0].rules == ()


def test_kernels_that_never_meet_communication_or_hardly_count_are_left_out():
    policy, reason = plan_observed(
        FACTS,
        [
            kernel("nvjet", beside=("one_warp",)),
            kernel("lonely", beside=()),
            kernel("tiny", beside=("one_warp",), share=0.0001),
            ONE_WARP,
        ],
    )
    assert [rule.pattern for rule in policy.rules] == ["nvjet"]
    assert "lonely" not in reason
    assert "tiny" not in reason


# --- a region that stays open -----------------------------------------------------------------

QUICK = Pace(long_after_s=0.02, window_s=0.02, patience_s=0.2, poll_s=0.01)


class FakeShim:
    def __init__(self):
        self.listeners, self.kinds, self.clock = 0, [], 0

    @contextlib.contextmanager
    def listening(self):
        self.listeners += 1
        yield
        self.listeners -= 1

    def reader(self):
        return SimpleNamespace(read=self.read, skip=lambda: None)

    def read(self):
        self.clock += 1
        return [record(k, at=self.clock, stream=k) for k in self.kinds]

    def snapshot(self):
        return SimpleNamespace(functions=lambda: FUNCTIONS)


def learner(shim, planner, pace=QUICK, errors=None):
    def on_error(error):
        errors.append(error)

    return Learner(shim, START, "heuristic", planner, on_error=on_error, pace=pace)


def test_a_region_open_for_long_switches_while_it_is_open():
    shim, switched, adopted = FakeShim(), threading.Event(), []
    shim.kinds = [1, 2]
    region = learner(shim, lambda kernels: (Policy(pad_bytes=len(kernels)), "seen"))
    step = region.enter(lambda *change: (adopted.append(change), switched.set()))
    assert switched.wait(20)
    assert adopted == [(Policy(pad_bytes=2), region.reason)]
    assert region.reason.startswith("learned from ")
    region.leave(step, launches=5, completed=True)
    assert shim.listeners == 0
    later = region.enter(lambda *_: pytest.fail("switched twice"))
    region.leave(later, launches=5, completed=True)
    assert [change.policy for change in region.history] == [START, Policy(pad_bytes=2)]
    assert region.progress == ""


def test_it_waits_longer_where_no_communication_shows_up():
    shim, switched = FakeShim(), threading.Event()
    shim.kinds = [1]
    region = learner(shim, lambda kernels: (START, "none"))
    begun = time.monotonic()
    step = region.enter(lambda *_: switched.set())
    assert switched.wait(20)
    assert time.monotonic() - begun > QUICK.patience_s
    region.leave(step, launches=1, completed=True)


def test_an_error_in_the_background_is_told_when_the_region_is_left():
    shim, errors, switched = FakeShim(), [], threading.Event()
    shim.kinds = [2]

    def fail(kernels):
        raise ValueError("no")

    region = learner(shim, fail, errors=errors)
    step = region.enter(lambda *_: switched.set())
    assert switched.wait(20)
    time.sleep(0.05)
    region.leave(step, launches=1, completed=True)
    assert [str(error) for error in errors] == ["no"]
    assert (region.errors, region.policy) == (1, START)
    assert "learning failed: ValueError: no" in region.reason


def test_a_short_region_ends_its_watch_and_listens_only_when_it_observes():
    shim = FakeShim()
    pace = Pace(warm_up_steps=2, observed_steps=1, long_after_s=60)
    region = learner(shim, lambda kernels: (START, "done"), pace)
    listened = []
    for _ in range(4):
        step = region.enter(lambda *_: None)
        listened.append(shim.listeners)
        region.leave(step, launches=1, completed=True)
    assert listened == [0, 0, 1, 0]
    assert region.settled
    deadline = time.monotonic() + 10
    while any(t.name == "overlapctl-learner" for t in threading.enumerate()):
        assert time.monotonic() < deadline, "the watching thread goes on"
        time.sleep(0.01)


def test_steps_on_several_threads_plan_once():
    shim, plans = FakeShim(), []

    def planner(kernels):
        plans.append(kernels)
        return START, "done"

    region = learner(shim, planner, Pace(long_after_s=60))

    def work():
        for _ in range(10):
            region.leave(region.enter(lambda *_: None), launches=1, completed=True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(plans) == 1
    assert shim.listeners == 0
