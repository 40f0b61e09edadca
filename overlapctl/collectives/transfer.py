"""Runs schedules on a GPU: copies on copy engines, flags by stream operations, no host in between.

All steps of a call are enqueued at once and in an order in which nothing waits for what is not
enqueued yet. Flags within the rank become events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overlapctl.collectives import driver as gpu
from overlapctl.collectives.reduce import Adder, reduce_into, torch_dtype
from overlapctl.collectives.schedule import (
    DTYPE_BYTES,
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
    word_value,
)
from overlapctl.collectives.streams import Flags, Lanes
from overlapctl.errors import UsageError

__all__ = ["Binding", "Ended", "Executor"]

_FIRST = "sync"  # the lane a call begins and ends on


_SIZES = (4096, 3)
"""Elements of trial reductions: torch has kernels for whole vectors and for what is left over."""


def _dtypes(schedule: Schedule) -> dict[tuple[int, str], str]:
    return {(b.rank, b.name): b.dtype for b in schedule.buffers}


def _run_once(step: Reduce, kinds: Sequence[str], adder: Adder | None) -> None:
    """Reduce scratch tensors of the step's types, aligned and not, on the current stream."""
    import torch

    def copy(dst: Any, src: Any) -> None:
        dst.copy_(src)

    for size in _SIZES:
        for start in (0, 1):
            output, *inputs = (
                torch.zeros(size + 1, dtype=torch_dtype(kind), device="cuda")[start : start + size]
                for kind in kinds
            )
            reduce_into(step, output, inputs, adder=adder, copy=copy)


@dataclass(frozen=True)
class Binding:
    """Where a call's buffers are.

    Parameters
    ----------
    addresses
        Address, in this process, of each (rank, buffer name) that this rank touches.
    copy_in, copy_out
        Local copies before the call begins for peers, and after its last step: between tensors of
        the caller and the memory that peers see.
    """

    addresses: Mapping[tuple[int, str], int]
    copy_in: Sequence[gpu.Copy] = ()
    copy_out: Sequence[gpu.Copy] = ()


@dataclass(frozen=True)
class Ended:
    """Events of an enqueued call: all its work is done; the gate has let it end."""

    worked: Any
    end: Any


class Executor:
    """Enqueues calls of one rank, one behind the other.

    Parameters
    ----------
    driver, lanes, flags
        The GPU, the group's streams and flags.
    rank
        This rank.
    adder
        One-warp addition for reductions; ``None``: ordinary kernels.
    """

    def __init__(
        self, driver: gpu.Driver, lanes: Lanes, flags: Flags, rank: int, adder: Adder | None = None
    ) -> None:
        self._driver, self._lanes, self._flags = driver, lanes, flags
        self._rank, self._adder = rank, adder
        self._last_end: Any = None
        self._loaded: set[tuple[Any, ...]] = set()

    def load_kernels(self, schedule: Schedule) -> None:
        """Have the kernels of a schedule's reductions loaded before the first wait is enqueued.

        CUDA loads a kernel when it is first launched, and loading waits for work of the context
        that is under way. A launch between a wait and the peer's signal, where the peer does the
        same, would never return (seen on H200). Calls before this one are enqueued completely on
        all ranks that got this far, so loading here ends.
        """
        if not self._driver.is_cuda:
            return
        dtypes = _dtypes(schedule)
        for program in schedule.of_rank(self._rank):
            for step in program.steps:
                if isinstance(step, Reduce):
                    kinds = tuple(dtypes[r.rank, r.buffer] for r in (step.output, *step.inputs))
                    key = (kinds, step.scales, step.output_scale, step.accumulate)
                    if key not in self._loaded:
                        self._loaded.add(key)
                        _run_once(step, kinds, self._adder)

    def run(
        self,
        schedule: Schedule,
        binding: Binding,
        *,
        number: int,
        bases: Mapping[Flag, int],
        begin: Any,
    ) -> Ended:
        """Enqueue this rank's part of a call and return at once.

        Parameters
        ----------
        schedule, binding
            What to do, and where.
        number
            The call's number, for the gate.
        bases
            What :meth:`Flags.advance` returned for the schedule.
        begin
            Event behind which the caller's tensors may be used.

        Raises
        ------
        UsageError
            The schedule needs what this executor cannot do: inner calls, sums in peer memory.
        """
        programs = schedule.of_rank(self._rank)
        self._refuse(programs)
        first = self._lanes[_FIRST]
        self._driver.wait_event(first, begin)
        if self._last_end is not None:
            self._driver.wait_event(first, self._last_end)
        self._driver.copy(binding.copy_in, first)
        names = [p.stream for p in programs]
        begun = self._driver.record(first)
        for name in names:
            if name != _FIRST:
                self._driver.wait_event(self._lanes[name], begun)
        self._enqueue(programs, schedule, binding, bases)
        self._lanes.join(_FIRST, names)
        self._driver.copy(binding.copy_out, first)
        worked = self._driver.record(first)
        self._flags.wait_gate(number, first)
        self._last_end = self._driver.record(first)
        return Ended(worked, self._last_end)

    def _enqueue(
        self,
        programs: Sequence[Program],
        schedule: Schedule,
        binding: Binding,
        bases: Mapping[Flag, int],
    ) -> None:
        dtypes = _dtypes(schedule)
        signalled: dict[Flag, list[tuple[int, Any]]] = {}  # this rank's own signals, as events
        at = [0] * len(programs)
        while any(i < len(p.steps) for i, p in zip(at, programs, strict=True)):
            before = list(at)
            for which, program in enumerate(programs):
                stream = self._lanes[program.stream]
                while at[which] < len(program.steps):
                    step = program.steps[at[which]]
                    if _is_own(step) and isinstance(step, Wait):
                        wanted = step.value
                        events = [e for v, e in signalled.get(step.flag, ()) if v >= wanted]
                        if not events:
                            break  # another lane's turn: its signal is not enqueued yet
                        self._driver.wait_event(stream, events[0])
                    elif _is_own(step) and isinstance(step, Signal):
                        event = self._driver.record(stream)
                        signalled.setdefault(step.flag, []).append((step.value, event))
                    else:
                        self._step(step, stream, binding.addresses, dtypes, bases)
                    at[which] += 1
            if at == before:
                raise UsageError(
                    f"the {schedule.algorithm} schedule of {schedule.call.op} waits for itself",
                    remedy="check schedules before running them",
                )

    def _step(
        self,
        step: Step,
        stream: Any,
        addresses: Mapping[tuple[int, str], int],
        dtypes: Mapping[tuple[int, str], str],
        bases: Mapping[Flag, int],
    ) -> None:
        def place(region: Region) -> int:
            key = (region.rank, region.buffer)
            return addresses[key] + region.offset * DTYPE_BYTES[dtypes[key]]

        if isinstance(step, Signal):
            self._flags.signal(step.flag, word_value(bases[step.flag], step.value), stream)
        elif isinstance(step, Wait):
            self._flags.wait(step.flag, word_value(bases[step.flag], step.value), stream)
        elif isinstance(step, Copy):
            size = step.source.count * DTYPE_BYTES[dtypes[step.source.rank, step.source.buffer]]
            source, target = place(step.source), place(step.target)
            if source != target:
                is_local = step.source.rank == step.target.rank
                self._driver.copy([gpu.Copy(target, source, size, is_local)], stream)
        elif isinstance(step, Reduce):
            self._reduce(step, stream, place, dtypes)

    def _reduce(self, step: Reduce, stream: Any, place: Any, dtypes: Any) -> None:
        def view(region: Region) -> Any:
            kind = torch_dtype(dtypes[region.rank, region.buffer])
            return self._driver.view(place(region), region.count, kind)

        def copy(dst: Any, src: Any) -> None:
            size = dst.numel() * dst.element_size()
            self._driver.copy([gpu.Copy(dst.data_ptr(), src.data_ptr(), size, True)], stream)

        output, inputs = view(step.output), [view(x) for x in step.inputs]
        self._driver.compute(
            lambda: reduce_into(step, output, inputs, adder=self._adder, copy=copy), stream
        )

    def _refuse(self, programs: Sequence[Program]) -> None:
        for program in programs:
            for step in program.steps:
                if isinstance(step, Inner):
                    what = f"an inner {step.op}"
                elif isinstance(step, Reduce) and any(
                    r.rank != self._rank for r in (step.output, *step.inputs)
                ):
                    what = "a sum in the memory of a peer"
                else:
                    continue
                raise UsageError(
                    f"the schedule has {what}", remedy="build it staged, for the ranks of one host"
                )


def _is_own(step: Step) -> bool:
    return isinstance(step, (Signal, Wait)) and step.flag.source == step.flag.target
