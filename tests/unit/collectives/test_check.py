import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from overlapctl.collectives.algorithms import Recipe, build
from overlapctl.collectives.check import check, checked
from overlapctl.collectives.schedule import REDUCIBLE, Call, Copy, Flag, Inner, Reduce, Signal, Wait
from overlapctl.errors import CollectiveError, UsageError

OPS = [
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "gather", "scatter",
    "reduce", "send_recv",
]  # fmt: skip


@st.composite
def calls(draw, most=16, ops=OPS):
    op = draw(st.sampled_from(ops))
    world = draw(st.integers(2, most))
    fields = {}
    if op == "all_to_all":
        size = st.sampled_from([0, 0, 1, 5, 64])
        row = st.lists(size, min_size=world, max_size=world).map(tuple)
        fields["splits"] = tuple(draw(row) for _ in range(world))
    else:
        fields["count"] = draw(st.sampled_from([1, 2, 7, 64, 129]))
    if op in {"broadcast", "gather", "scatter", "reduce", "send_recv"}:
        fields["root"] = draw(st.integers(0, world - 1))
    if op == "send_recv":
        fields["peer"] = (fields["root"] + draw(st.integers(1, world - 1))) % world
    if op in REDUCIBLE:
        fields["reduction"] = draw(st.sampled_from(["sum", "avg", "premul"]))
        fields["factor"] = 0.37 if fields["reduction"] == "premul" else 1.0
        fields["accumulate"] = draw(st.sampled_from(["fp32", "dtype"]))
        fields["dtype"] = draw(st.sampled_from(["bf16", "fp16", "fp32"]))
    else:
        fields["dtype"] = draw(st.sampled_from(["u8", "bf16", "fp32"]))
    if op in {"all_gather", "reduce_scatter", "all_reduce", "reduce"}:
        fields["in_place"] = draw(st.booleans())
    return Call(op=op, world=world, **fields | ({"in_place": True} if op == "broadcast" else {}))


@st.composite
def recipes(draw, world):
    algorithm = draw(st.sampled_from(["direct", "direct", "ring", "hierarchical", "inner"]))
    fields = {
        "chunks": draw(st.integers(1, 4)),
        "depth": draw(st.integers(0, 2)),
        "lanes": draw(st.integers(0, 3)),
        "align": draw(st.sampled_from([1, 8])),
    }
    if algorithm == "ring":
        fields["order"] = tuple(draw(st.permutations(range(world))))
    else:
        fields["pull"] = draw(st.booleans())
        fields["push_reduce"] = draw(st.booleans())
    if algorithm == "hierarchical":
        of_host = draw(st.sampled_from([k for k in range(1, world + 1) if world % k == 0]))
        hosts = [r // of_host for r in range(world)]
        fields["hosts"] = tuple(draw(st.permutations(hosts)))
    return Recipe(algorithm=algorithm, **fields)


def built(data, most=16, ops=OPS):
    call = data.draw(calls(most, ops))
    try:
        return build(call, data.draw(recipes(call.world)))
    except UsageError:
        assume(False)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_every_built_schedule_is_right(data):
    check(built(data))


def replaced(schedule, p, steps):
    program = dataclasses.replace(schedule.programs[p], steps=tuple(steps))
    programs = (*schedule.programs[:p], program, *schedule.programs[p + 1 :])
    return dataclasses.replace(schedule, programs=programs)


def places(schedule, kind):
    return [
        (p, i)
        for p, program in enumerate(schedule.programs)
        for i, step in enumerate(program.steps)
        if isinstance(step, kind)
    ]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_missing_signal_is_found(data):
    schedule = built(data, 6)
    found = places(schedule, Signal)
    assume(found)
    p, i = data.draw(st.sampled_from(found))
    steps = schedule.programs[p].steps
    # A later signal of the same flag releases the wait too: late, but possibly in time.
    assume(not any(isinstance(s, Signal) and s.flag == steps[i].flag for s in steps[i + 1 :]))
    with pytest.raises(CollectiveError, match="without a signal"):
        check(replaced(schedule, p, [*steps[:i], *steps[i + 1 :]]))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_missing_transfer_is_found(data):
    schedule = built(data, 6)
    found = places(schedule, (Copy, Reduce))
    assume(found)
    p, i = data.draw(st.sampled_from(found))
    steps = schedule.programs[p].steps
    with pytest.raises(CollectiveError, match="wrong result"):
        check(replaced(schedule, p, [*steps[:i], *steps[i + 1 :]]))


def test_waits_on_each_other_are_a_deadlock():
    schedule = build(
        Call(op="all_gather", world=2, dtype="u8", count=4), Recipe(algorithm="direct")
    )
    # Each rank says that it is ready only once the other's data has arrived.
    for p, program in enumerate(schedule.programs):
        if program.stream == "sync":
            schedule = replaced(schedule, p, reversed(program.steps))
    with pytest.raises(CollectiveError, match=r"deadlock.*\n.*rank 0 copy0 #0: wait   ready"):
        check(schedule)


def test_two_writers_of_one_place_are_a_race():
    call = Call(op="reduce_scatter", world=3, dtype="fp32", count=4)
    schedule = build(call, Recipe(align=1))
    p, i = next(
        (p, i) for p, i in places(schedule, Copy) if schedule.programs[p].steps[i].target.rank == 0
    )
    steps = list(schedule.programs[p].steps)
    other = next(
        s.target
        for q, program in enumerate(schedule.programs)
        for s in program.steps
        if isinstance(s, Copy) and s.target.rank == 0 and q != p
    )
    steps[i] = Copy(steps[i].source, other)
    with pytest.raises(CollectiveError, match="races") as caught:
        check(replaced(schedule, p, steps))
    assert str(other) in str(caught.value)


def test_reusing_a_slot_too_early_is_a_race():
    call = Call(op="reduce_scatter", world=2, dtype="fp32", count=64)
    schedule = checked(call, Recipe(align=1, chunks=4, depth=1))
    p = next(p for p, x in enumerate(schedule.programs) if (x.rank, x.stream) == (1, "copy0"))
    steps = [
        s
        for s in schedule.programs[p].steps
        if not (isinstance(s, Wait) and s.flag.stream == "reduce")
    ]
    assert len(steps) == len(schedule.programs[p].steps) - 3
    with pytest.raises(CollectiveError, match=r"races.*\n.*0\.staging"):
        check(replaced(schedule, p, steps))


def test_access_before_the_begin_and_after_the_end_of_a_call_is_refused():
    schedule = build(Call(op="send_recv", world=2, dtype="u8", count=4, peer=1), Recipe())
    sync = next(p for p, x in enumerate(schedule.programs) if x.rank == 1)
    copy = next(p for p, x in enumerate(schedule.programs) if x.rank == 0)
    ready, arrived = schedule.programs[sync].steps
    without_end = replaced(schedule, sync, [ready])
    with pytest.raises(CollectiveError, match="after rank 1's end"):
        check(without_end)
    without_begin = replaced(replaced(schedule, copy, schedule.programs[copy].steps[1:]), sync,
                             [ready, arrived])  # fmt: skip
    with pytest.raises(CollectiveError, match="before rank 1 has begun"):
        check(without_begin)


def test_malformed_steps_are_listed():
    schedule = build(Call(op="send_recv", world=2, dtype="u8", count=4, peer=1), Recipe())
    p = next(p for p, x in enumerate(schedule.programs) if x.stream == "copy0")
    wait, copy, signal = schedule.programs[p].steps
    cases = {
        "outside of 4": [wait, Copy(copy.source.part(1, 4), copy.target), signal],
        "differ in count": [wait, Copy(copy.source.part(1, 2), copy.target), signal],
        "neither end": [wait, Copy(copy.target, copy.target), signal],
        "another stream": [wait, copy, Signal(Flag(0, 1, "data", "copy1"), 1)],
        "was 1 before": [wait, copy, signal, signal],
        "on another rank": [Wait(signal.flag, 1), copy, signal],
    }
    for problem, steps in cases.items():
        with pytest.raises(CollectiveError, match=problem):
            check(replaced(schedule, p, steps))


def test_inner_calls_must_match():
    call = Call(op="all_reduce", world=2, dtype="fp32", count=4)
    schedule = build(call, Recipe(algorithm="inner"))
    step = schedule.programs[1].steps[0]
    other = dataclasses.replace(step, op="all_gather")
    with pytest.raises(CollectiveError, match="different inner calls"):
        check(replaced(schedule, 1, [other]))
    with pytest.raises(CollectiveError, match="deadlock"):
        check(replaced(schedule, 1, []))
    assert isinstance(step, Inner)


def test_an_input_is_left_alone():
    call = Call(op="all_reduce", world=2, dtype="fp32", count=4)
    schedule = build(call, Recipe(align=1))
    p, i = places(schedule, Reduce)[0]
    steps = list(schedule.programs[p].steps)
    own = next(x for x in steps[i].inputs if x.buffer == "input")
    with pytest.raises(CollectiveError, match="writes to an input"):
        check(replaced(schedule, p, [*steps, Reduce((own,), own, (2.0,))]))
