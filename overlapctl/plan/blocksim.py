"""The engine of the simulation: blocks of several kernels on the SMs of one GPU, event by event.

Blocks that started together on SMs that hold the same things end together, so the engine keeps
*groups* of identical SMs, each with *cohorts* of identical blocks, and one event ends one cohort:
16,384 blocks on 132 SMs are some tens of events. The reduction is exact under the rules below.

Dispatch
    Kernels of one stream run in order; a kernel is ready when its stream's previous kernel and the
    kernels it depends on have ended. Ready kernels are served by priority, then in the order in
    which they became ready. Blocks go to the SM with most free places first. As long as a block of
    the kernel at the head of the line is pending, no block behind it is placed (head-of-line
    rule): a large communication block of high priority thus drains SMs until it fits, and a
    kernel behind a persistent or many-wave grid waits until that grid is wholly placed.
    Blocks leave an SM one by one: a gang that has waited enters an SM as soon as one of its blocks
    fits; only where that takes an empty SM, as many of its blocks enter as fit.
Short blocks
    A kernel of very many short blocks is *fluid*: its blocks take and leave places at once, and
    only its total work counts. It yields places to a gang before it in the line, unless its blocks
    turn over so fast that they keep the block scheduler busy: then the gang waits for its end.
Carve-out
    An SM is configured to a shared-memory step when it is empty, for the kernel that comes in,
    and keeps the step until it is empty again.
Progress
    A compute block advances at the share of its SM's throughput that the residency there gives it.
    A gang (communication) kernel advances only while all its blocks are resident, then as one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from overlapctl.plan.residency import (
    blocks_per_sm,
    carveout_step,
    registers_per_warp,
    smem_per_block,
    warps_per_block,
)
from overlapctl.records import DeviceFacts, KernelFootprint

__all__ = ["BlockSimulation", "Kernel", "Span"]

_DONE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One launch.

    Parameters
    ----------
    stream
        Launches with the same stream name run one after the other.
    work
        Time in ms: for a compute kernel that of one block that has an SM for itself at full rate;
        for a gang that of the whole kernel, alone.
    curve
        Compute only: throughput of an SM that holds n blocks of this kernel, in blocks per
        ``work``; index n, 0 first.
    gang
        All blocks must be resident before any advances (communication kernels).
    priority
        Higher is served first.
    issued
        Earliest start in ms.
    after
        Indices of launches that must have ended.
    latency
        Time in ms between the end of what the launch waits for and its readiness.
    uses_sms
        False for transfers on the copy engines: no block is placed.
    fluid, yields
        Compute only: many short blocks; whether they yield to a gang of higher priority.
    """

    name: str
    footprint: KernelFootprint
    stream: str
    work: float
    curve: tuple[float, ...] = ()
    gang: bool = False
    priority: int = 0
    issued: float = 0.0
    after: tuple[int, ...] = ()
    latency: float = 0.0
    carveout: int = -1
    uses_sms: bool = True
    fluid: bool = False
    yields: bool = True


@dataclass(frozen=True)
class Span:
    """When one launch was ready, had its first block placed, its last block placed, and ended."""

    name: str
    ready: float
    first_placed: float
    last_placed: float
    end: float


@dataclass
class _Cohort:
    """Blocks of one kernel that started together on each SM of a group."""

    kernel: int
    blocks: int
    left: float


@dataclass
class _Group:
    """SMs that hold the same blocks."""

    sms: int
    step: int
    cohorts: list[_Cohort] = field(default_factory=list)

    def held(self) -> dict[int, int]:
        held: dict[int, int] = {}
        for cohort in self.cohorts:
            held[cohort.kernel] = held.get(cohort.kernel, 0) + cohort.blocks
        return held

    def split(self, sms: int) -> _Group:
        """Take ``sms`` SMs out into a group of their own."""
        self.sms -= sms
        copies = [_Cohort(c.kernel, c.blocks, c.left) for c in self.cohorts]
        return _Group(sms, self.step, copies)


@dataclass
class _State:
    pending: int
    ready: float = math.inf
    order: int = 0
    running: int = 0
    left: float = 0.0
    first: float = math.inf
    last: float = math.inf
    end: float = math.inf
    waited: bool = False
    crowding: int = 1


class BlockSimulation:
    """Simulates a set of launches on one GPU.

    Parameters
    ----------
    facts
        The GPU.
    kernels
        Launches; those of one stream in launch order.
    slowdowns
        Called with the throughput at which each launch runs now (index: SMs' worth of its
        full rate for compute, 1 for a gang); gives the factor (>= 1) by which each launch is
        slowed by the others. ``None``: no contention.
    crowded_gang
        Factor by which a gang is slowed for each further block of it on the same SM.
    kept_beside_gang
        Share of its throughput that an SM keeps for compute blocks while a block of a gang is
        resident there too.
    """

    def __init__(
        self,
        facts: DeviceFacts,
        kernels: Sequence[Kernel],
        slowdowns: Callable[[dict[int, float]], dict[int, float]] | None = None,
        crowded_gang: float = 1.0,
        kept_beside_gang: float = 1.0,
    ) -> None:
        self._facts = facts
        self._kernels = list(kernels)
        self._slowdowns = slowdowns
        self._crowded = crowded_gang
        self._kept = kept_beside_gang
        self._states = [
            _State(pending=k.footprint.blocks if k.uses_sms else 0) for k in self._kernels
        ]
        self._groups = [_Group(facts.sm_count, 0)]
        self._room_cache: dict[tuple[int, int, tuple[tuple[int, int], ...]], int] = {}
        self._orders = itertools.count(1)
        self._previous = self._previous_in_stream()
        self._now = 0.0
        self._blocker: int | None = None  # the compute kernel that got SMs last

    def run(self) -> list[Span]:
        """Run until every launch has ended.

        Returns
        -------
        list of Span
            One for each launch, in their order.
        """
        for _ in range(1_000_000):
            self._make_ready()
            self._place()
            if not self._advance():
                break
        else:
            raise RuntimeError("the simulation does not end")
        return [
            Span(k.name, s.ready, s.first, s.last, s.end)
            for k, s in zip(self._kernels, self._states, strict=True)
        ]

    # --- readiness ---------------------------------------------------------------------------

    def _previous_in_stream(self) -> list[int | None]:
        last: dict[str, int] = {}
        previous: list[int | None] = []
        for index, kernel in enumerate(self._kernels):
            previous.append(last.get(kernel.stream))
            last[kernel.stream] = index
        return previous

    def _ready_time(self, index: int) -> float:
        kernel, previous = self._kernels[index], self._previous[index]
        waits = [self._states[i].end for i in kernel.after]
        if previous is not None:
            waits.append(self._states[previous].end)
        return max(kernel.issued, max(waits) + kernel.latency) if waits else kernel.issued

    def _make_ready(self) -> None:
        for index, state in enumerate(self._states):
            if state.ready < math.inf or self._ready_time(index) > self._now + _DONE:
                continue
            state.ready = self._now
            state.order = next(self._orders)
            if not self._kernels[index].uses_sms:
                state.first = state.last = self._now
            if self._kernels[index].gang:
                state.left = self._kernels[index].work
            elif self._kernels[index].fluid:
                state.left = float(self._kernels[index].footprint.blocks)

    # --- placing -----------------------------------------------------------------------------

    def _place(self) -> None:
        line = [i for i, s in enumerate(self._states) if s.ready < math.inf and s.pending > 0]
        line.sort(key=lambda i: (-self._kernels[i].priority, self._states[i].order))
        for place, index in enumerate(line):
            if self._kernels[index].fluid:
                self._pour(index)
                break
            if self._kernels[index].gang:
                self._make_way(index)
            self._place_kernel(index)
            if self._states[index].pending and not self._fluid_runs():
                for waiting in line[place:]:
                    self._states[waiting].waited = True
                break  # head-of-line rule

    def _place_kernel(self, index: int) -> None:
        state = self._states[index]
        fills = self._entering(index) if self._kernels[index].gang and state.waited else 0
        while state.pending:
            rooms = [(self._room(index, g), g) for g in self._groups]
            room, group = max(rooms, key=lambda r: (r[0], -len(r[1].cohorts)))
            if room == 0:
                return
            if fills:
                room = min(room, fills)
                each = min(room, state.pending)
                sms = min(group.sms, state.pending // each)
            else:
                # Level the group down to the next fullest one, block by block on all its SMs.
                others = [r for r, g in rooms if g is not group and r < room]
                each = min(room - max(others, default=0), state.pending // group.sms)
                sms = group.sms
                if each == 0:
                    each, sms = 1, state.pending
            if sms < group.sms:
                group = group.split(sms)
                self._groups.append(group)
            self._put(index, group, each)
            state.pending -= each * sms

    def _entering(self, index: int) -> int:
        """Blocks of a waiting gang that get in together when just enough compute blocks leave.

        SMs become free block by block: the gang enters one as soon as one of its blocks fits, and
        if that takes the last compute block, as many enter as an empty SM holds.
        """
        if self._blocker is None:
            return self._room(index, _Group(1, 0))
        kernel = self._kernels[self._blocker]
        probe = _Group(1, carveout_step(self._facts, kernel.footprint, kernel.carveout))
        resident = blocks_per_sm(self._facts, kernel.footprint, carveout=kernel.carveout)
        for stay in range(resident - 1, -1, -1):
            probe.cohorts = [_Cohort(self._blocker, stay, 1.0)] if stay else []
            room = self._room(index, probe)
            if room:
                return room
        return 1

    def _pour(self, index: int) -> None:
        """Fill all room with a fluid kernel's blocks; they stay until its work is done."""
        for group in self._groups:
            room = self._room(index, group)
            if room:
                self._put(index, group, room, math.inf)

    def _fluid_runs(self) -> bool:
        return any(self._kernels[c.kernel].fluid for g in self._groups for c in g.cohorts)

    def _make_way(self, index: int) -> None:
        """Let fluid blocks leave as many SMs as a gang needs, and no more blocks than it needs."""
        needed = self._states[index].pending
        needed -= sum(self._room(index, g) * g.sms for g in self._groups)
        for group in list(self._groups):
            cohort = self._yielding(group)
            if needed <= 0 or cohort is None:
                continue
            keep = next(
                n
                for n in range(cohort.blocks - 1, -1, -1)
                if n == 0 or self._room_with(index, group, cohort, n)
            )
            if not self._room_with(index, group, cohort, keep):
                continue
            if needed < group.sms:
                group = group.split(needed)
                self._groups.append(group)
                cohort = self._yielding(group)
                assert cohort is not None
            self._states[cohort.kernel].running -= (cohort.blocks - keep) * group.sms
            cohort.blocks = keep
            group.cohorts = [c for c in group.cohorts if c.blocks]
            needed -= group.sms

    def _yielding(self, group: _Group) -> _Cohort | None:
        kernels = self._kernels
        mine = (c for c in group.cohorts if kernels[c.kernel].fluid and kernels[c.kernel].yields)
        return next(mine, None)

    def _room_with(self, index: int, group: _Group, cohort: _Cohort, blocks: int) -> int:
        held, cohort.blocks = cohort.blocks, blocks
        room = self._count_room(index, group)
        cohort.blocks = held
        return room

    def _put(self, index: int, group: _Group, each: int, work: float = 1.0) -> None:
        kernel, state = self._kernels[index], self._states[index]
        if not kernel.gang:
            self._blocker = index
        if not group.cohorts:
            group.step = carveout_step(self._facts, kernel.footprint, kernel.carveout)
        if kernel.gang:
            work = math.inf
            held = group.held().get(index, 0)
            state.crowding = max(state.crowding, held + each)
        for cohort in group.cohorts:
            if cohort.kernel == index and cohort.left == work:
                cohort.blocks += each
                break
        else:
            group.cohorts.append(_Cohort(index, each, work))
        state.running += each * group.sms
        state.first = min(state.first, self._now)
        if state.pending == each * group.sms or kernel.fluid:
            state.last = self._now

    def _room(self, index: int, group: _Group) -> int:
        key = (index, group.step if group.cohorts else -1, tuple(sorted(group.held().items())))
        if key not in self._room_cache:
            self._room_cache[key] = self._count_room(index, group)
        return self._room_cache[key]

    def _count_room(self, index: int, group: _Group) -> int:
        facts, kernel = self._facts, self._kernels[index]
        own = blocks_per_sm(facts, kernel.footprint, carveout=kernel.carveout)
        held = {other: blocks for other, blocks in group.held().items() if blocks}
        if not held:
            return own
        registers = smem = warps = slots = 0
        for other, blocks in held.items():
            footprint = self._kernels[other].footprint
            block_warps = warps_per_block(facts, footprint)
            registers += blocks * block_warps * registers_per_warp(facts, footprint)
            warps += blocks * block_warps
            smem += blocks * smem_per_block(facts, footprint)
            slots += blocks
        parts = facts.subpartitions
        per_warp = max(1, registers_per_warp(facts, kernel.footprint))
        by_registers = int((facts.registers_per_sm - registers) / parts // per_warp) * parts
        by_slots = facts.max_threads_per_sm // facts.warp_size - warps
        mine = warps_per_block(facts, kernel.footprint)
        room = min(
            max(0, min(by_registers, by_slots)) // mine,
            max(0, group.step - smem) // max(1, smem_per_block(facts, kernel.footprint)),
            facts.max_blocks_per_sm - slots,
            own - held.get(index, 0),
        )
        return max(0, room)

    # --- progress ----------------------------------------------------------------------------

    def _advance(self) -> bool:
        """Move to the next event; False if nothing can happen any more."""
        throughput, rates = self._rates()
        gangs = [i for i in range(len(self._kernels)) if self._gang_runs(i)]
        throughput.update(dict.fromkeys(gangs, 1.0))
        slow = self._slowdowns(throughput) if self._slowdowns else {}
        for i in gangs:
            crowd = 1.0 + (self._crowded - 1.0) * (self._states[i].crowding - 1)
            slow[i] = slow.get(i, 1.0) * crowd
        wait = self._time_to_next_ready()
        for cohort, rate in rates:
            wait = min(wait, cohort.left / rate * slow.get(cohort.kernel, 1.0))
        fluid = {
            i: t / self._kernels[i].work / slow.get(i, 1.0)
            for i, t in throughput.items()
            if self._kernels[i].fluid and t > 0
        }
        for i, rate in fluid.items():
            wait = min(wait, self._states[i].left / rate)
        for i in gangs:
            wait = min(wait, self._states[i].left * slow.get(i, 1.0))
        if wait == math.inf:
            return False
        self._now += wait
        for cohort, rate in rates:
            cohort.left -= wait * rate / slow.get(cohort.kernel, 1.0)
        for i in gangs:
            self._states[i].left -= wait / slow.get(i, 1.0)
        for i, rate in fluid.items():
            self._states[i].left -= wait * rate
            if self._states[i].left <= _DONE * self._kernels[i].footprint.blocks:
                self._states[i].left = 0.0
                self._states[i].pending = 0
                self._states[i].end = self._now
        self._retire(gangs)
        return True

    def _rates(self) -> tuple[dict[int, float], list[tuple[_Cohort, float]]]:
        throughput: dict[int, float] = {}
        rates: list[tuple[_Cohort, float]] = []
        for group in self._groups:
            held = group.held()
            shared = any(self._kernels[i].gang for i in held)
            compute = sum(n for i, n in held.items() if not self._kernels[i].gang)
            for cohort in group.cohorts:
                kernel = self._kernels[cohort.kernel]
                if kernel.gang:
                    continue
                # Blocks of two compute kernels (tail of one, head of the next) share by number.
                sm = kernel.curve[min(compute, len(kernel.curve) - 1)]
                rate = sm / compute / kernel.work * (self._kept if shared else 1.0)
                rates.append((cohort, rate))
                done = throughput.get(cohort.kernel, 0.0)
                throughput[cohort.kernel] = done + rate * kernel.work * cohort.blocks * group.sms
        return throughput, rates

    def _gang_runs(self, index: int) -> bool:
        kernel, state = self._kernels[index], self._states[index]
        return (
            kernel.gang and state.ready < math.inf and not state.pending and state.end == math.inf
        )

    def _time_to_next_ready(self) -> float:
        waits = [
            self._ready_time(i) - self._now
            for i, s in enumerate(self._states)
            if s.ready == math.inf
        ]
        return max(0.0, min(waits, default=math.inf))

    def _retire(self, gangs: list[int]) -> None:
        for i in gangs:
            if self._states[i].left <= _DONE:
                self._states[i].end = self._now
        for group in self._groups:
            kept = []
            for cohort in group.cohorts:
                state = self._states[cohort.kernel]
                if cohort.left <= _DONE or state.end < math.inf:
                    state.running -= cohort.blocks * group.sms
                else:
                    kept.append(cohort)
            group.cohorts = kept
        for state in self._states:
            if state.end == math.inf and state.ready < math.inf:
                over = not state.running and not state.pending
                if over and state.first < math.inf and state.left <= _DONE:
                    state.end = self._now
        self._merge()

    def _merge(self) -> None:
        """Join groups that have become alike, so that their number stays small."""
        merged: dict[tuple[object, ...], _Group] = {}
        for group in self._groups:
            cohorts = tuple(sorted((c.kernel, c.blocks, round(c.left, 9)) for c in group.cohorts))
            key = (group.step if cohorts else -1, cohorts)
            if key in merged:
                merged[key].sms += group.sms
            else:
                merged[key] = group
        self._groups = [g for g in merged.values() if g.sms]
