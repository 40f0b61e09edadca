"""Proves a schedule right before it runs: no deadlock, no race, the right result.

What is proved, for all interleavings of the streams:

1. *form*: regions lie in their buffers, copies match, each step is on the rank that can do it,
   each flag is written by one stream with values that count up;
2. *no deadlock*: the graph of program order, flags and inner collectives has no cycle, and every
   wait has its signal;
3. *no race*: two accesses to the same elements, one of them a write, are ordered by that graph;
   other ranks touch a rank's memory only between that rank's begin and end of the call, so that
   neither the caller nor the next call, whose staging may be the same memory, races with it;
4. *the result*: running the steps on symbols leaves at every output exactly what the operation
   is defined to, and changes no input.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from overlapctl.collectives.algorithms import Recipe, build
from overlapctl.collectives.dataflow import Memory, Segments, add, define, merged, source_of
from overlapctl.collectives.schedule import (
    Call,
    Copy,
    Flag,
    Inner,
    Program,
    Reduce,
    Region,
    Schedule,
    Signal,
    Step,
    Wait,
)
from overlapctl.errors import CollectiveError

__all__ = ["check", "checked"]

Node = tuple[int, int]
"""A step: (index of the program, index in it)."""
_SHOWN = 8


@functools.lru_cache(maxsize=512)
def checked(call: Call, recipe: Recipe) -> Schedule:
    """Build the schedule of a call and check it; both are done once per (call, recipe)."""
    schedule = build(call, recipe)
    check(schedule)
    return schedule


def check(schedule: Schedule) -> None:
    """Check a schedule.

    Raises
    ------
    CollectiveError
        If it is malformed, can deadlock, has a race or does not compute what its call asks for.
        The message lists the offending steps.
    """
    _check_form(schedule)
    order, clocks = _order(schedule)
    _check_races(schedule, clocks)
    _check_result(schedule, order)


def _refuse(schedule: Schedule, problem: str, lines: Iterable[str]) -> None:
    found = list(lines)
    more = f"\n  ... and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise CollectiveError(
        f"schedule of {schedule.call.op} ({schedule.algorithm}, {schedule.call.world} ranks): "
        f"{problem}:\n  " + "\n  ".join(found[:_SHOWN]) + more + "\n",
        remedy="do not run it; build schedules with overlapctl.collectives.algorithms",
    )


def _name(program: Program, index: int) -> str:
    return f"rank {program.rank} {program.stream} #{index}: {program.steps[index]}"


def accesses(step: Step) -> tuple[list[Region], list[Region]]:
    """Return the regions that a step reads and those that it writes."""
    if isinstance(step, Copy):
        return [step.source], [step.target]
    if isinstance(step, Reduce):
        return list(step.inputs), [step.output]
    if isinstance(step, Inner):
        return ([step.source] if step.source else []), ([step.target] if step.target else [])
    return [], []


# --- form --------------------------------------------------------------------------------------


def _check_form(schedule: Schedule) -> None:
    buffers = {(b.rank, b.name): b for b in schedule.buffers}
    wrong: list[str] = []
    last: dict[Flag, int] = {}
    names = [(p.rank, p.stream) for p in schedule.programs]
    if len(set(names)) != len(names):
        wrong.append("two programs share a rank and a stream")

    def problem(program: Program, step: Step) -> str | None:
        rank = program.rank
        read, written = accesses(step)
        for region in (*read, *written):
            buffer = buffers.get((region.rank, region.buffer))
            if buffer is None:
                return f"unknown buffer of {region}"
            if (
                region.offset < 0
                or region.count < 0
                or (region.offset + region.count > buffer.count)
            ):
                return f"{region} is outside of {buffer.count} elements"
        if isinstance(step, Signal):
            if step.flag.source != rank or step.flag.stream != program.stream:
                return "the flag belongs to another stream"
            if not 0 <= step.flag.target < schedule.call.world:
                return "the flag's target is no rank"
            if step.value <= last.get(step.flag, 0):
                return f"the flag's value was {last.get(step.flag, 0)} before"
            last[step.flag] = step.value
        elif isinstance(step, Wait):
            if step.flag.target != rank:
                return "the flag lies on another rank"
        elif isinstance(step, Copy):
            a, b = (buffers[r.rank, r.buffer] for r in (step.source, step.target))
            if step.source.count != step.target.count or a.dtype != b.dtype:
                return "source and target differ in count or dtype"
            if rank not in (step.source.rank, step.target.rank):
                return "neither end is on the executing rank"
            if _overlap(step.source, step.target):
                return "source and target overlap"
        elif isinstance(step, Reduce):
            return _reduce_problem(rank, step)
        elif isinstance(step, Inner):
            if rank not in step.ranks or list(step.ranks) != sorted(set(step.ranks)):
                return "ranks are not ascending or lack the executing rank"
            if any(r.rank != rank for r in (*read, *written)):
                return "a region is on another rank"
        return None

    for program, index, step in schedule.steps():
        found = problem(program, step)
        if found:
            wrong.append(f"{_name(program, index)}: {found}")
    if wrong:
        _refuse(schedule, "malformed", wrong)


def _reduce_problem(rank: int, step: Reduce) -> str | None:
    if not step.inputs or any(x.count != step.output.count for x in step.inputs):
        return "inputs and output differ in count"
    if step.scales and len(step.scales) != len(step.inputs):
        return "not one scale per input"
    if any(x != step.output and _overlap(x, step.output) for x in step.inputs):
        return "an input overlaps the output without being it"
    if any(x.rank != rank and x != step.output for x in step.inputs):
        return "an input is on another rank"
    if step.output.rank != rank and step.output not in step.inputs:
        return "the output is on another rank without being an input (a push-reduce)"
    return None


def _overlap(a: Region, b: Region) -> bool:
    return (
        a.rank == b.rank
        and a.buffer == b.buffer
        and max(a.offset, b.offset) < min(a.offset + a.count, b.offset + b.count)
    )


# --- order -------------------------------------------------------------------------------------


def _order(schedule: Schedule) -> tuple[list[Node], list[list[list[int]]]]:
    """Run the schedule abstractly.

    Returns the steps in one possible order, and per program and step a vector clock: how many
    steps of each program are certainly done when the step starts (program order apart). The last
    entry of each program is the clock after its last step.
    """
    programs = schedule.programs
    signals: dict[Flag, list[int]] = {}
    where: dict[tuple[Flag, int], Node] = {}
    for p, program in enumerate(programs):
        for i, step in enumerate(program.steps):
            if isinstance(step, Signal):
                signals.setdefault(step.flag, []).append(step.value)
                where[step.flag, step.value] = (p, i)
    orphans = [
        _name(program, i)
        for program, i, step in schedule.steps()
        if isinstance(step, Wait) and signals.get(step.flag, [0])[-1] < step.value
    ]
    if orphans:
        _refuse(schedule, "waits without a signal", orphans)

    now = [[0] * len(programs) for _ in programs]
    at = [0] * len(programs)
    clocks: list[list[list[int]]] = [[] for _ in programs]
    order: list[Node] = []
    signalled: dict[Node, list[int]] = {}
    sleepers: dict[Node, list[int]] = {}
    meetings: dict[tuple[int, ...], dict[int, tuple[int, Inner]]] = {}
    runnable = list(range(len(programs)))[::-1]

    def finish(p: int) -> None:
        order.append((p, at[p]))
        at[p] += 1

    while runnable:
        p = runnable.pop()
        steps = programs[p].steps
        while at[p] < len(steps):
            step = steps[at[p]]
            if isinstance(step, Wait):
                values = signals[step.flag]
                source = where[step.flag, values[bisect_left(values, step.value)]]
                known = signalled.get(source)
                if known is None:
                    sleepers.setdefault(source, []).append(p)
                    break
                now[p] = [x if x > y else y for x, y in zip(now[p], known, strict=True)]
            elif isinstance(step, Inner):
                meeting = meetings.setdefault(step.ranks, {})
                rank = programs[p].rank
                if rank in meeting:
                    _refuse(
                        schedule, "two inner calls of a rank at once", [_name(programs[p], at[p])]
                    )
                meeting[rank] = (p, step)
                if len(meeting) < len(step.ranks):
                    break
                _check_meeting(schedule, meeting)
                ahead = [0] * len(programs)
                for q, _ in meeting.values():
                    mine = [*now[q]]
                    mine[q] = at[q]
                    ahead = [max(x, y) for x, y in zip(ahead, mine, strict=True)]
                del meetings[step.ranks]
                for q, _ in meeting.values():
                    clocks[q].append(now[q])
                    now[q] = [max(x, y) for x, y in zip(now[q], ahead, strict=True)]
                    finish(q)
                    if q != p:
                        runnable.append(q)
                continue
            clocks[p].append(now[p])
            if isinstance(step, Signal):
                clock = [*now[p]]
                clock[p] = at[p] + 1
                signalled[p, at[p]] = clock
                runnable += sleepers.pop((p, at[p]), [])
            finish(p)
    stuck = [
        _name(programs[p], at[p]) for p in range(len(programs)) if at[p] < len(programs[p].steps)
    ]
    if stuck:
        _refuse(schedule, "deadlock, these steps wait for each other", stuck)
    for p in range(len(programs)):
        final = [*now[p]]
        final[p] = at[p]
        clocks[p].append(final)
    return order, clocks


def _check_meeting(schedule: Schedule, meeting: dict[int, tuple[int, Inner]]) -> None:
    kinds = {
        (s.op, s.root, s.peer, s.reduction, s.factor, s.splits is None) for _, s in meeting.values()
    }
    if len(kinds) > 1:
        _refuse(
            schedule,
            "ranks meet in different inner calls",
            [f"rank {rank}: {step}" for rank, (_, step) in sorted(meeting.items())],
        )


# --- races -------------------------------------------------------------------------------------


def _check_races(schedule: Schedule, clocks: list[list[list[int]]]) -> None:
    programs = schedule.programs
    of_rank: dict[int, list[int]] = {}
    for p, program in enumerate(programs):
        of_rank.setdefault(program.rank, []).append(p)
    ends = {
        rank: [max(column) for column in zip(*(clocks[p][-1] for p in mine), strict=True)]
        for rank, mine in of_rank.items()
    }
    touched: dict[tuple[int, str], list[tuple[int, int, int, int, bool]]] = {}
    fences: list[str] = []
    for p, program in enumerate(programs):
        for i, step in enumerate(program.steps):
            if isinstance(step, (Signal, Wait)):
                continue
            read, written = accesses(step)
            for region, writes in [(r, False) for r in read] + [(w, True) for w in written]:
                if not region.count:
                    continue
                touched.setdefault((region.rank, region.buffer), []).append(
                    (region.offset, region.offset + region.count, p, i, writes)
                )
                if region.rank != program.rank:
                    mine = of_rank.get(region.rank, [])
                    if not any(clocks[p][i][q] for q in mine):
                        fences.append(f"{_name(program, i)}: before rank {region.rank} has begun")
                    if not mine or ends[region.rank][p] <= i:
                        fences.append(f"{_name(program, i)}: maybe after rank {region.rank}'s end")
    if fences:
        _refuse(schedule, "accesses outside of the call of the rank that owns the memory", fences)

    def before(a: Node, b: Node) -> bool:
        if a[0] == b[0]:
            return a[1] < b[1]
        return clocks[b[0]][b[1]][a[0]] > a[1]

    races: list[str] = []
    for key, found in touched.items():
        active: list[tuple[int, int, int, int, bool]] = []
        for one in sorted(found):
            active = [x for x in active if x[1] > one[0]]
            for other in active:
                if not (one[4] or other[4]):
                    continue
                a, b = (one[2], one[3]), (other[2], other[3])
                if a != b and not before(a, b) and not before(b, a):
                    races.append(
                        f"{key[0]}.{key[1]}[{one[0]}:{min(one[1], other[1])}]: "
                        f"{_name(programs[a[0]], a[1])} | {_name(programs[b[0]], b[1])}"
                    )
            active.append(one)
    if races:
        _refuse(schedule, "races, neither step is ordered before the other", races)


# --- result ------------------------------------------------------------------------------------


def _check_result(schedule: Schedule, order: list[Node]) -> None:
    call, programs = schedule.call, schedule.programs
    memory = {(b.rank, b.name): Memory(b.count) for b in schedule.buffers}
    outputs = {r.rank: r for r in schedule.outputs}
    sources = {r.rank: source_of(r.rank, r.count) for r in schedule.inputs}
    for region in schedule.inputs:
        memory[region.rank, region.buffer].write(region.offset, sources[region.rank])
    met: dict[tuple[int, ...], list[Inner]] = {}
    spoilt: list[str] = []
    for p, i in order:
        step = programs[p].steps[i]
        for region in accesses(step)[1]:
            output = outputs.get(region.rank)
            if (
                region.buffer == "input"
                and region.count
                and not (
                    output is not None
                    and output.buffer == "input"
                    and output.offset <= region.offset
                    and region.offset + region.count <= output.offset + output.count
                )
            ):
                spoilt.append(_name(programs[p], i))
        if isinstance(step, Copy):
            _write(memory, step.target, _read(memory, step.source))
        elif isinstance(step, Reduce):
            scales = step.scales or (1.0,) * len(step.inputs)
            parts = [_read(memory, x) for x in step.inputs]
            _write(memory, step.output, add(parts, scales, step.output_scale))
        elif isinstance(step, Inner):
            meeting = met.setdefault(step.ranks, [])
            meeting.append(step)
            if len(meeting) == len(step.ranks):
                _run_inner(schedule, memory, met.pop(step.ranks))
    if spoilt:
        _refuse(schedule, "writes to an input", spoilt)
    wanted = define(
        call, range(call.world), sources, dict[int, Sequence[int]](enumerate(call.splits))
    )
    wrong = []
    for rank, segments in wanted.items():
        found = _read(memory, outputs[rank]) if rank in outputs else []
        if merged(found) != merged(segments):
            wrong.append(f"rank {rank}: found {merged(found)}, wanted {merged(segments)}")
    if wrong:
        _refuse(schedule, "wrong result, as (elements, (rank, first element, factor)...)", wrong)


def _read(memory: dict[tuple[int, str], Memory], region: Region) -> Segments:
    return memory[region.rank, region.buffer].read(region.offset, region.count)


def _write(memory: dict[tuple[int, str], Memory], region: Region, segments: Segments) -> None:
    memory[region.rank, region.buffer].write(region.offset, segments)


def _run_inner(
    schedule: Schedule, memory: dict[tuple[int, str], Memory], steps: list[Inner]
) -> None:
    ranks = steps[0].ranks
    # Steps of one meeting are in the order in which the members came, not in that of the ranks.
    by_rank = {(s.source or s.target or Region(-1, "", 0, 0)).rank: s for s in steps}
    sources = {r: _read(memory, s.source) for r, s in by_rank.items() if s.source}
    splits: dict[int, Sequence[int]] = {r: s.splits[0] for r, s in by_rank.items() if s.splits}
    try:
        results = define(steps[0], ranks, sources, splits)
    except (KeyError, IndexError, ValueError):
        results = {}
    for rank, step in by_rank.items():
        if step.target is None:
            continue
        result = results.get(rank)
        if result is None or sum(length for length, _ in result) != step.target.count:
            _refuse(schedule, "sizes of an inner call do not match", map(str, steps))
        else:
            _write(memory, step.target, result)
