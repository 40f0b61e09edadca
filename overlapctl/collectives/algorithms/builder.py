"""Collects the steps of a schedule and keeps the book on flags."""

from __future__ import annotations

from collections.abc import Iterable

from overlapctl.collectives.algorithms.recipe import Recipe, parts
from overlapctl.collectives.schedule import (
    Buffer,
    Call,
    Copy,
    Dtype,
    Flag,
    Inner,
    Program,
    Purpose,
    Reduce,
    Region,
    Schedule,
    Signal,
    Step,
    Wait,
)

__all__ = ["Builder"]


class Builder:
    """Collects steps; :meth:`finish` makes the schedule.

    Values of a flag count up in the order in which :meth:`signal` is called, which is the order
    of the steps on the signalling stream. Waits that an earlier wait on the same stream implies
    are left out.
    """

    def __init__(self, call: Call, recipe: Recipe) -> None:
        self.call = call
        self.recipe = recipe
        self.inputs: list[Region] = []
        self.outputs: list[Region] = []
        self._steps: dict[tuple[int, str], list[Step]] = {}
        self._buffers: dict[tuple[int, str], Buffer] = {}
        self._values: dict[Flag, int] = {}
        self._waited: dict[tuple[str, Flag], int] = {}
        self._awaited: dict[Flag, int] = {}
        self._wanted: set[tuple[Flag, int]] = set()
        self._ready: dict[tuple[int, int], Wait] = {}
        self._first: dict[int, list[Step]] = {}

    # --- memory ----------------------------------------------------------------------------

    def buffer(self, rank: int, name: str, count: int, dtype: Dtype | None = None) -> Region:
        """Declare a buffer of a rank and return all of it."""
        self._buffers[rank, name] = Buffer(rank, name, count, dtype or self.call.dtype)
        return Region(rank, name, 0, count)

    def dtype(self, region: Region) -> Dtype:
        """Return the element type of a region."""
        return self._buffers[region.rank, region.buffer].dtype

    @property
    def partial_dtype(self) -> Dtype:
        """The element type that partial sums are kept in between two reductions."""
        return "fp32" if self.call.accumulate == "fp32" else self.call.dtype

    def chunks(self, region: Region) -> list[Region]:
        """Cut a region as the recipe says; empty parts are left out."""
        cut = parts(region.count, self.recipe.chunks, self.recipe.align)
        return [region.part(offset, count) for offset, count in cut if count]

    def stream(self, source: int, target: int) -> str:
        """Return the copy stream that ``source`` uses for ``target``.

        The peers of a rank come in the order rank + 1, rank + 2 ...: at any time every rank is
        the target of one other rank.
        """
        distance = (target - source - 1) % self.call.world
        return f"copy{distance % (self.recipe.lanes or self.call.world)}"

    # --- steps -----------------------------------------------------------------------------

    def add(self, rank: int, stream: str, step: Step) -> None:
        """Append a step other than a signal or a wait."""
        self._steps.setdefault((rank, stream), []).append(step)

    def signal(self, source: int, stream: str, target: int, purpose: Purpose) -> Wait:
        """Append a signal and return the wait for it, to be placed on a stream of ``target``."""
        flag = Flag(source, target, purpose, stream)
        value = self._values[flag] = self._values.get(flag, 0) + 1
        self.add(source, stream, Signal(flag, value))
        return Wait(flag, value)

    def wait(self, stream: str, *waits: Wait | None) -> None:
        """Append waits to a stream of the rank that they are for."""
        for wait in waits:
            if wait is None:
                continue
            flag, key = wait.flag, (stream, wait.flag)
            if flag.source == flag.target and flag.stream == stream:
                continue  # the stream's own order says it already
            if self._waited.get(key, 0) < wait.value:
                self._waited[key] = wait.value
                self._awaited[flag] = max(self._awaited.get(flag, 0), wait.value)
                self._wanted.add((flag, wait.value))
                self.add(flag.target, stream, wait)

    def ready(self, owner: int, peer: int) -> Wait:
        """Let ``peer`` know that ``owner`` has begun the call; one signal serves all uses."""
        if (owner, peer) not in self._ready:
            flag = Flag(owner, peer, "ready", "sync")
            self._values[flag] = 1
            # First thing of the call, whatever else was put on the stream before.
            self._first.setdefault(owner, []).append(Signal(flag, 1))
            self._ready[owner, peer] = Wait(flag, 1)
        return self._ready[owner, peer]

    def transfer(
        self,
        source: Region,
        target: Region,
        gates: Iterable[Wait | None] = (),
        *,
        pull: bool = False,
    ) -> Wait:
        """Append a copy to another rank and return the wait for its arrival on that rank.

        ``gates`` are waited for first; they are for the rank that executes the copy.
        """
        giver, taker = source.rank, target.rank
        if pull:
            stream = self.stream(taker, giver)
            self.wait(stream, self.ready(giver, taker), *gates)
            self.add(taker, stream, Copy(source, target))
            self.signal(taker, stream, giver, "done")
            return self.signal(taker, stream, taker, "data")
        stream = self.stream(giver, taker)
        self.wait(stream, self.ready(taker, giver), *gates)
        self.add(giver, stream, Copy(source, target))
        return self.signal(giver, stream, taker, "data")

    def local(self, source: Region, target: Region, *gates: Wait | None) -> None:
        """Append a copy within a rank, unless source and target are the same."""
        if source != target and source.count:
            self.wait("sync", *gates)
            self.add(source.rank, "sync", Copy(source, target))

    def reduce(
        self,
        inputs: tuple[Region, ...],
        output: Region,
        *,
        scales: tuple[float, ...] = (),
        output_scale: float = 1.0,
    ) -> None:
        """Append a reduction on the rank of the last input, or a copy where nothing changes."""
        rank = inputs[-1].rank
        if scales and all(s == 1.0 for s in scales):
            scales = ()
        if len(inputs) == 1 and not scales and output_scale == 1.0:
            if inputs[0] == output:
                return
            if self.dtype(inputs[0]) == self.dtype(output):
                self.add(rank, "reduce", Copy(inputs[0], output))
                return
        self.add(rank, "reduce", Reduce(inputs, output, scales, output_scale, self.partial_dtype))

    def inner(self, rank: int, step: Inner, *gates: Wait | None) -> Wait:
        """Append a rank's part of an inner collective; return the wait for its end there."""
        self.wait("inner", *gates)
        self.add(rank, "inner", step)
        return self.signal(rank, "inner", rank, "data")

    def finish(self, algorithm: str) -> Schedule:
        """Wait for whatever is still unawaited, so that a call's end ends all access, and seal.

        A rank's last stream to wait is ``"sync"``. Signals that no wait names are left out: a
        later one of the same flag says as much.
        """
        for flag, value in self._values.items():
            if flag.source != flag.target and self._awaited.get(flag, 0) < value:
                self.wait("sync", Wait(flag, value))
        for rank, signals in self._first.items():
            self._steps[rank, "sync"] = [*signals, *self._steps.get((rank, "sync"), [])]
        programs = []
        for (rank, stream), steps in sorted(self._steps.items()):
            kept = tuple(
                s for s in steps if not isinstance(s, Signal) or (s.flag, s.value) in self._wanted
            )
            if kept:
                programs.append(Program(rank, stream, kept))
        return Schedule(
            call=self.call,
            algorithm=algorithm,
            buffers=tuple(self._buffers[key] for key in sorted(self._buffers)),
            programs=tuple(programs),
            inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
        )
