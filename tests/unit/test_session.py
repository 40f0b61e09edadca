"""`overlap()`: which policy comes into force, for how long, and what is said about it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import overlapctl
from overlapctl import env, learning, session
from overlapctl.device import open_device
from overlapctl.errors import AttachError, OverlapctlWarning, ProfileError, UsageError
from overlapctl.launch import attach
from overlapctl.launch import shim as face
from overlapctl.launch.ring import LaunchRecord
from overlapctl.launch.shim import Counters
from overlapctl.profiles import ProfileStore, profile_key
from overlapctl.records import Applied, KernelRule, Policy, Profile, Role, Rule

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import core_harness
import shim_build

FACTS = open_device("sim:h200").facts()
GEMM = Applied(
    kernel="gemm",
    role=Role.COMPUTE,
    threads=128,
    registers=62,
    static_smem=0,
    launches=0,
    shaped=0,
    prioritised=0,
    carved=0,
    failed=0,
    captured=0,
    before=49152,
    after=60000,
    blocks_before=4,
    blocks_after=3,
    rule=Rule.PADDED_TO_TARGET,
)
NCCL = dataclasses.replace(
    GEMM,
    kernel="ncclDevKernel_AllReduce",
    role=Role.COMMUNICATION,
    threads=544,
    registers=96,
    before=82240,
    after=82240,
    rule=Rule.COMMUNICATION,
)
KERNELS = {0x1: GEMM, 0x2: NCCL}


class FakeShim:
    """Keeps the stack, the table and the ring; `launch` stands for the job."""

    def __init__(self):
        self.stack, self.ring, self.listeners, self.tokens = [], [], 0, 0
        self.counts = dict.fromkeys(KERNELS, 0)
        self.forbidden = None

    @property
    def in_force(self):
        return self.stack[-1][1] if self.stack else None

    def push(self, policy):
        if policy == self.forbidden:
            raise UsageError("full", remedy="none")
        self.tokens += 1
        self.stack.append((self.tokens, policy))
        return self.tokens

    def pop(self, token):
        if token not in [t for t, _ in self.stack]:
            raise UsageError(f"token={token}: not in force", remedy="pop once")
        self.stack = [entry for entry in self.stack if entry[0] != token]

    def launch(self, function=0x1, stream=7, blocks=16384):
        self.counts[function] += 1
        if self.listeners:
            row = KERNELS[function]
            zeros = {field.name: 0 for field in dataclasses.fields(LaunchRecord)}
            known = {"ticks": len(self.ring), "function": function, "stream": stream}
            known |= {"blocks": blocks, "threads": row.threads, "before": row.before, "cluster": 1}
            self.ring.append(LaunchRecord(**zeros | known | {"role": row.role, "rule": row.rule}))

    def counters(self):
        names = [field.name for field in dataclasses.fields(Counters)]
        return Counters(**dict.fromkeys(names, 0) | {"launches": sum(self.counts.values())})

    def snapshot(self):
        rows = [dataclasses.replace(r, launches=self.counts[f]) for f, r in KERNELS.items()]
        return SimpleNamespace(rows=lambda: rows, functions=lambda: KERNELS)

    @contextlib.contextmanager
    def listening(self):
        self.listeners += 1
        yield
        self.listeners -= 1

    def reader(self):
        return FakeReader(self)


class FakeReader:
    def __init__(self, shim):
        self.shim, self.next = shim, len(shim.ring)

    def skip(self):
        self.next = len(self.shim.ring)

    def read(self):
        found, self.next = self.shim.ring[self.next :], len(self.shim.ring)
        return found


@pytest.fixture(autouse=True)
def shim(monkeypatch, tmp_path):
    fake = FakeShim()
    attachment = SimpleNamespace(kind="detour", shim=fake)
    monkeypatch.setattr(attach, "ensure_attached", lambda: attachment)
    monkeypatch.setattr(overlapctl.device, "open_device", lambda _: open_device("sim:h200"))
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path))
    monkeypatch.delenv(env.DISABLE, raising=False)
    for memory in (session._regions, session._warned):
        memory.clear()
    session._order.last = None
    session._machine.cache_clear()
    yield fake
    assert fake.stack == []
    assert fake.listeners == 0
    assert session._order.sessions == []
    session._machine.cache_clear()


def train_step(shim):
    """A compute kernel, and a collective beside it on a stream of its own."""
    shim.launch(0x1, stream=7)
    shim.launch(0x2, stream=9, blocks=24)
    shim.launch(0x1, stream=7)


def write_profile(policy, **changes):
    key = dataclasses.replace(profile_key(open_device("sim:h200")), **changes)
    profile = Profile(
        key=key, created="2026-01-02", overlapctl="0.1.0", policy=policy, reason="3/SM gains"
    )
    return ProfileStore().save(profile)


# --- which policy ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "pad"), [(4096, 4096), ("48KiB", 49152), (None, 0), (0, 0)])
def test_explicit_reserves(shim, value, pad):
    with overlapctl.overlap(value) as region:
        assert shim.in_force == region.policy == Policy(pad_bytes=pad, comm_priority=True)
    assert region.reason == "as the arguments say"
    assert region.history == ()


def test_every_argument_reaches_the_policy(shim):
    rule = KernelRule(pattern="gemm*", max_blocks_per_sm=3)
    with overlapctl.overlap(
        None,
        max_blocks_per_sm=5,
        carveout=100,
        comm_priority=False,
        include=["a*"],
        exclude=["b*"],
        rules=[rule],
        shape_captures=False,
    ):
        assert shim.in_force == Policy(
            max_blocks_per_sm=5,
            carveout=100,
            include=("a*",),
            exclude=("b*",),
            rules=(rule,),
            shape_captures=False,
        )


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"smem_reserve": -1}, "negative"),
        ({"smem_reserve": "lots"}, "lots"),
        ({"smem_reserve": "2GiB"}, "smem_reserve"),
        ({"carveout": 101}, "carveout=101"),
        ({"max_blocks_per_sm": 0}, "max_blocks_per_sm=0"),
        ({"max_blocks_per_sm": True}, "max_blocks_per_sm=True"),
        ({"include": "gemm*"}, "include='gemm\\*'"),
        ({"rules": ["gemm*"]}, "KernelRule"),
        ({"rules": [KernelRule(pattern="x", carveout=101)]}, "carveout=101"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, field):
    with pytest.raises(UsageError, match=field):
        overlapctl.overlap(**arguments)


def test_auto_takes_the_profile_and_says_so(shim):
    policy = Policy(comm_priority=True, rules=(KernelRule(pattern="gemm", max_blocks_per_sm=3),))
    write_profile(policy)
    for _ in range(5):
        with overlapctl.overlap() as region:
            assert shim.in_force == policy
            train_step(shim)
    assert region.reason == "profile of 2026-01-02: 3/SM gains"
    assert shim.ring == []


def test_arguments_override_the_profile_in_its_rules_too(shim):
    write_profile(Policy(rules=(KernelRule(pattern="gemm", max_blocks_per_sm=3, pad_bytes=64),)))
    with overlapctl.overlap(max_blocks_per_sm=5) as region:
        assert shim.in_force == Policy(
            max_blocks_per_sm=5,
            rules=(KernelRule(pattern="gemm", max_blocks_per_sm=5, pad_bytes=64),),
        )
    assert region.reason.endswith("arguments override max_blocks_per_sm")


def test_a_miss_says_which_fields_differ(shim):
    write_profile(Policy(pad_bytes=64), driver="1.2.3")
    with overlapctl.overlap() as region:
        assert shim.in_force == Policy(comm_priority=True)
    assert "driver is" in region.reason
    assert "the profile's is '1.2.3'" in region.reason


def test_a_broken_profile_is_warned_of_once_and_the_heuristic_serves(shim):
    path = write_profile(Policy(pad_bytes=64))
    path.write_text("{}")
    with pytest.warns(OverlapctlWarning, match="cannot use the profile"), overlapctl.overlap():
        assert shim.in_force == Policy(comm_priority=True)
    with warnings.catch_warnings(), overlapctl.overlap():
        warnings.simplefilter("error")
    with pytest.raises(ProfileError), overlapctl.overlap(strict=True):
        pass


# --- nothing to attach to ------------------------------------------------------------------------


def test_an_attach_error_is_warned_of_once_and_not_tried_again(monkeypatch):
    tries = []

    def refuse():
        tries.append(1)
        raise AttachError("a debugger is here", remedy="leave it")

    monkeypatch.setattr(attach, "ensure_attached", refuse)
    region = overlapctl.overlap(4096)
    with pytest.warns(OverlapctlWarning, match="a debugger is here"), region as first:
        assert not first.active
    with warnings.catch_warnings(), region as second:
        warnings.simplefilter("error")
    assert len(tries) == 1
    assert "a debugger is here" in str(second.explain())
    assert second.stats().launches == 0
    with pytest.raises(AttachError), overlapctl.overlap(4096, strict=True):
        pass


def test_disabled_changes_nothing(monkeypatch, shim):
    monkeypatch.setenv(env.DISABLE, "1")
    with overlapctl.overlap(4096, strict=True) as region:
        assert shim.in_force is None
    assert env.DISABLE in region.reason


# --- how long ------------------------------------------------------------------------------------


def test_an_exception_passes_and_the_policy_is_taken_back(shim):
    with pytest.raises(KeyError), overlapctl.overlap(64):
        raise KeyError
    assert shim.in_force is None


def test_nesting(shim):
    region = overlapctl.overlap(64)
    with region as outer, overlapctl.overlap(128), region as again:
        assert [policy.pad_bytes for _, policy in shim.stack] == [64, 128, 64]
        assert outer is not again
        shim.launch()
    assert outer.stats().launches == again.stats().launches == 1
    with pytest.raises(RuntimeError, match="without having been entered"):
        region.__exit__(None, None, None)


def test_decorator(shim):
    @overlapctl.overlap(64)
    def step(x, *, y):
        """Train."""
        return shim.in_force.pad_bytes, x, y

    assert step(1, y=2) == (64, 1, 2)
    assert step.__doc__ == "Train."
    assert shim.in_force is None


def test_generators_and_coroutines_cannot_be_decorated():
    def generate():
        yield

    async def wait():
        pass

    for function in (generate, wait):
        with pytest.raises(UsageError, match="generator or coroutine"):
            overlapctl.overlap(64)(function)


def test_threads_share_a_region(shim):
    region, barrier, failures = overlapctl.overlap(64), threading.Barrier(4), []

    def work():
        try:
            for _ in range(20):
                with region as mine:
                    barrier.wait(10)
                    assert mine.policy.pad_bytes == 64
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_region_may_be_left_by_another_thread(shim):
    region = overlapctl.overlap(64)
    region.__enter__()
    thread = threading.Thread(target=region.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    assert shim.in_force is None


def test_a_forked_child_leaves_without_error(shim):
    region = overlapctl.overlap(64, strict=True)
    child = -1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            with region, session._regions_lock, session._order.lock:
                child = os.fork()
                if child == 0:
                    shim.stack.clear()  # as the shim does
            if child == 0:
                with region:
                    ok = shim.in_force.pad_bytes == 64
                os._exit(0 if ok and shim.in_force is None else 3)
        except BaseException:
            if child == 0:
                os._exit(4)
            raise
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- what is said --------------------------------------------------------------------------------


def test_explain_prints_before_after_and_rule(shim):
    shim.launch()  # not of the region
    with overlapctl.overlap(None, max_blocks_per_sm=3) as region:
        shim.launch()
        shim.launch(0x2)
        assert region.stats().launches == 2
    shim.launch()
    text = str(region.explain())
    (line,) = [line for line in text.splitlines() if line.startswith("gemm")]
    assert line.split()[1:3] == ["compute", "1"]
    for part in ("49152", "60000", "4 -> 3", "padded-to-target"):
        assert part in line
    assert "at most 3 blocks per SM" in text
    assert "because: as the arguments say" in text
    assert "shim: detour" in text
    assert region.stats().launches == 2


# --- learning ------------------------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch):
    """Plan every compute kernel to three blocks per SM, and keep what the planner was given."""
    calls = []

    def plan(facts, kernels, communication, **_):
        calls.append((facts, kernels, communication))
        rules = tuple(KernelRule(pattern=k.name, max_blocks_per_sm=3) for k in kernels)
        return Policy(comm_priority=True, rules=rules), {k.name: "3 suffice" for k in kernels}

    monkeypatch.setattr(learning, "plan_kernels", plan)
    return calls


PLAN = Policy(comm_priority=True, rules=(KernelRule(pattern="gemm", max_blocks_per_sm=3),))


def test_without_a_profile_the_fourth_step_runs_as_planned(shim, planned):
    seen = []
    for _ in range(6):
        with overlapctl.overlap("auto") as region:  # a new object each time, the same region
            seen.append(shim.in_force)
            if len(seen) == 2:
                assert "learning: 1 of 3 steps seen" in str(region.explain())
            train_step(shim)
    assert seen == [Policy(comm_priority=True)] * 3 + [PLAN] * 3
    ((facts, (gemm,), (nccl,)),) = planned
    assert facts == FACTS
    assert (gemm.name, gemm.blocks, gemm.smem) == ("gemm", 16384, 49152)
    assert (nccl.name, nccl.blocks) == ("ncclDevKernel_AllReduce", 24)
    assert len(shim.ring) == 6  # of the two observed steps
    first, then = region.history
    assert (first.policy, then.policy) == (Policy(comm_priority=True), PLAN)
    text = str(region.explain())
    assert "learned from 2 steps: beside ncclDevKernel_AllReduce: gemm: 3 suffice" in text
    assert "history:" in text
    assert first.when in text


def test_steps_that_fail_or_launch_nothing_do_not_count(shim, planned):
    region = overlapctl.overlap()
    for number in range(9):
        with contextlib.suppress(KeyError), region:
            if number % 3 == 0:
                train_step(shim)
            if number % 3 == 1:
                train_step(shim)
                raise KeyError
    assert len(planned) == 1
    assert len(shim.ring) == 12  # two good and two failing steps while it listened


def test_overrides_hold_for_the_plan_too(shim, planned):
    region = overlapctl.overlap(comm_priority=False, exclude=["x*"])
    for _ in range(4):
        with region as last:
            train_step(shim)
    assert last.policy == dataclasses.replace(PLAN, comm_priority=False, exclude=("x*",))
    assert "arguments override comm_priority, exclude" in last.reason


def test_nothing_is_learned_where_the_arguments_decide_it_all(shim, planned):
    region = overlapctl.overlap(max_blocks_per_sm=3)
    for _ in range(5):
        with region:
            train_step(shim)
    assert (shim.ring, planned) == ([], [])


def test_a_failing_planner_leaves_the_heuristic(shim, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("no plan")

    monkeypatch.setattr(learning, "plan_kernels", fail)
    region = overlapctl.overlap()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            with region as last:
                train_step(shim)
    assert [w.category for w in caught] == [OverlapctlWarning]
    assert last.policy == Policy(comm_priority=True)
    assert "learning failed: ZeroDivisionError: no plan" in last.reason
    assert len(last.history) == 2

    strict = overlapctl.overlap(strict=True)
    for _ in range(2):
        with strict:
            train_step(shim)
    with pytest.raises(ZeroDivisionError), strict:
        train_step(shim)
    with strict:
        train_step(shim)


def test_a_plan_that_comes_inside_another_region_waits_for_its_end(shim):
    with overlapctl.overlap(64) as outer:
        with overlapctl.overlap(128):
            outer._adopt(PLAN, "learned")
            assert shim.in_force.pad_bytes == 128
            assert outer.policy.pad_bytes == 64
        assert shim.in_force == outer.policy == PLAN
        shim.forbidden = Policy(pad_bytes=1)
        with pytest.warns(OverlapctlWarning, match="keeps its policy"):
            outer._adopt(shim.forbidden, "too much")
        assert shim.in_force == PLAN
    outer._adopt(Policy(), "too late")
    assert shim.in_force is None


# --- cost ----------------------------------------------------------------------------------------


class Harness:
    """The shim's core over the fake driver: attaching is not in it, and need not be declared."""

    def __init__(self, core):
        self.core = core

    def __getattr__(self, name):
        try:
            return getattr(self.core.abi, name)
        except AttributeError:
            return SimpleNamespace()


@functools.cache
def many_functions():
    return [core_harness.core().function(f"kernel{i}") for i in range(200)]


@pytest.mark.native
@shim_build.needs_compiler
@pytest.mark.parametrize("reserve", [None, "auto"])
def test_entering_and_leaving_is_cheap_with_200_kernels_in_the_table(monkeypatch, reserve):
    core = core_harness.core()
    core.reset()
    native = object.__new__(face.Shim)
    native._library, native._capacity = Harness(core), 256
    face._declare(native._library)
    native._library = core.abi
    monkeypatch.setattr(
        attach, "ensure_attached", lambda: SimpleNamespace(kind="detour", shim=native)
    )
    functions = many_functions()
    region = overlapctl.overlap(reserve, strict=True)
    for _ in range(4):  # learning is over after the third
        with region as first:
            for function in functions:
                core.launch(function)
    assert len(first.explain().kernels) == 200
    assert first.stats().launches == 200
    quickest, give_up = 1.0, time.monotonic() + 5
    # 75 us on an idle machine. Others share it: its undisturbed moments count, with a margin.
    while quickest >= 100e-6 and time.monotonic() < give_up:
        begin = time.perf_counter()
        with region:
            pass
        quickest = min(quickest, time.perf_counter() - begin)
    assert quickest < 250e-6
    core.reset()
