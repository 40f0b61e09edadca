"""A collective as plain data: who copies, signals, waits and reduces what, in which order.

A :class:`Schedule` describes one collective call on all ranks. Each rank runs one
:class:`Program` per named stream; the steps of a program run in order, programs run side by side
and are ordered among each other by flags only. Executors keep these rules:

* every stream of a rank starts after the rank *begins* the call (its input is produced, its
  output may be written) and the rank *ends* the call when all its streams are done; after its end
  no rank touches its buffers any more (:mod:`overlapctl.collectives.check` proves this);
* a flag is one 32-bit word per (source rank, target rank, purpose, signalling stream). It lives
  in the memory of ``target``, is written by one stream of ``source`` and read by streams of
  ``target``. If both ranks are the same, an event does as well;
* flag values count up from 1 within a call. An executor keeps a base per word that advances by
  :attr:`Schedule.advances` after each call, writes :func:`word_value` and waits for
  :func:`reached`, which is how ``cuStreamWaitValue32`` compares with ``WAIT_VALUE_GEQ``: values
  may wrap around.

Offsets and counts are elements of the buffer's dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import pydantic

from overlapctl import records
from overlapctl.errors import UsageError

__all__ = [
    "DTYPE_BYTES",
    "REDUCIBLE",
    "Buffer",
    "Call",
    "Copy",
    "Dtype",
    "Flag",
    "Inner",
    "Op",
    "Program",
    "Reduce",
    "Region",
    "Schedule",
    "Signal",
    "Step",
    "Wait",
    "flag_slot",
    "flag_slots",
    "reached",
    "word_value",
]

Op: TypeAlias = Literal[
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "scatter",
    "reduce",
    "send_recv",
]
Dtype: TypeAlias = Literal["u8", "bf16", "fp16", "fp32"]
Purpose: TypeAlias = Literal["ready", "data", "done"]

DTYPE_BYTES: dict[str, int] = {"u8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes per element. Operations that only move data may pass any tensor as ``u8``."""

REDUCIBLE: frozenset[str] = frozenset({"reduce_scatter", "all_reduce", "reduce"})
"""Operations that compute."""

_PURPOSES: tuple[str, ...] = ("ready", "data", "done")
_ROOTED = frozenset({"broadcast", "gather", "scatter", "reduce", "send_recv"})
_WORD = 1 << 32


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a collective call asks for, the same on every rank.

    Parameters
    ----------
    op
        The operation, named as in ``torch.distributed``; ``"send_recv"`` is one message.
    world
        Ranks of the group.
    dtype
        Element type of input and output.
    count
        Elements, per rank where ranks differ: the input of one rank in ``all_gather`` and
        ``gather``, the output of one rank in ``reduce_scatter`` and ``scatter``, the whole tensor
        in ``all_reduce``, ``broadcast``, ``reduce`` and ``send_recv``. 0 for ``all_to_all``.
    splits
        ``all_to_all`` only: ``splits[r][p]`` elements go from rank ``r`` to rank ``p``.
    root, peer
        Root of the rooted operations (the sender of ``send_recv``); receiver of ``send_recv``.
    reduction
        ``"sum"``, ``"avg"`` (sum, then times 1/world) or ``"premul"`` (every rank's input times
        ``factor``, then sum).
    accumulate
        ``"dtype"`` rounds every partial sum to the data type, ``"fp32"`` adds in fp32 and rounds
        once.
    in_place
        Input and output are one tensor, as ``torch.distributed`` has it: always for
        ``broadcast``; the rank's own part of the larger tensor in ``all_gather`` and
        ``reduce_scatter``; not for ``all_to_all``, ``gather``, ``scatter`` and ``send_recv``.

    Raises
    ------
    UsageError
        If a field contradicts another one.
    """

    op: Op
    world: int
    dtype: Dtype
    count: int = 0
    splits: tuple[tuple[int, ...], ...] = ()
    root: int = 0
    peer: int = 0
    reduction: Literal["sum", "avg", "premul"] = "sum"
    factor: float = 1.0
    accumulate: Literal["dtype", "fp32"] = "fp32"
    in_place: bool = False

    def __post_init__(self) -> None:
        def refuse(what: str, remedy: str) -> None:
            raise UsageError(f"{self.op}: {what}", remedy=remedy)

        n = self.world
        if n < 1:
            refuse(f"world is {n}", "a group has at least one rank")
        if self.count < 0:
            refuse(f"count is {self.count}", "pass the number of elements")
        if self.op == "all_to_all":
            if len(self.splits) != n or any(len(row) != n for row in self.splits):
                refuse(f"splits is not {n} x {n}", "pass splits[r][p] for all pairs of ranks")
            if any(k < 0 for row in self.splits for k in row):
                refuse("splits has a negative entry", "pass element counts")
        elif self.splits:
            refuse("splits given", "only all_to_all takes splits")
        for name, rank in (("root", self.root), ("peer", self.peer)):
            if not 0 <= rank < n:
                refuse(f"{name} is {rank} in a group of {n}", "pass a rank of the group")
        if self.op not in _ROOTED and self.root:
            refuse(f"root is {self.root}", "this operation has no root")
        if self.op == "send_recv" and self.root == self.peer:
            refuse(f"rank {self.root} sends to itself", "copy the tensor locally")
        if self.op in REDUCIBLE and self.dtype == "u8":
            refuse("dtype is u8", "reduce bf16, fp16 or fp32")
        if self.op not in REDUCIBLE and self.reduction != "sum":
            refuse(f"reduction is {self.reduction}", "this operation only moves data")
        if self.reduction != "premul" and self.factor != 1.0:
            refuse(f"factor is {self.factor}", 'pass reduction="premul" with a factor')
        if not math.isfinite(self.factor):
            refuse(f"factor is {self.factor}", "pass a finite factor")
        if self.in_place and self.op in {"all_to_all", "gather", "scatter", "send_recv"}:
            refuse("in_place given", "pass separate input and output")
        if self.op == "broadcast" and not self.in_place:
            refuse("in_place is False", "a broadcast has one tensor: pass in_place=True")


@dataclass(frozen=True)
class Buffer:
    """A symbolic buffer of one rank: ``"input"``, ``"output"``, ``"staging"``, ``"partials"``.

    The caller provides input and output; the executor provides the others, which hold nothing of
    value before and after the call.
    """

    rank: int
    name: str
    count: int
    dtype: Dtype

    @property
    def size_bytes(self) -> int:
        """Size in bytes."""
        return self.count * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Region:
    """``count`` elements from element ``offset`` of a buffer of rank ``rank``."""

    rank: int
    buffer: str
    offset: int
    count: int

    def part(self, offset: int, count: int) -> Region:
        """Return ``count`` elements from element ``offset`` of this region."""
        return Region(self.rank, self.buffer, self.offset + offset, count)

    def __str__(self) -> str:
        return f"{self.rank}.{self.buffer}[{self.offset}:{self.offset + self.count}]"


@dataclass(frozen=True)
class Flag:
    """One word, in the memory of ``target``, written by stream ``stream`` of ``source``.

    ``purpose`` says what reaching a value means: ``"ready"`` (so many slots of target memory may
    be written, or so much source data may be pulled), ``"data"`` (so many chunks have arrived or
    been computed), ``"done"`` (so many reads are over).
    """

    source: int
    target: int
    purpose: Purpose
    stream: str

    def __str__(self) -> str:
        return f"{self.purpose}({self.source}->{self.target} {self.stream})"


@dataclass(frozen=True)
class Copy:
    """Copy ``source`` to ``target``: a push if the executing rank owns the source, else a pull.

    Both regions have the same count and dtype and do not overlap.
    """

    source: Region
    target: Region
    kind: Literal["copy"] = "copy"

    def __str__(self) -> str:
        return f"copy   {self.source} -> {self.target}"


@dataclass(frozen=True)
class Signal:
    """Write ``value`` to the flag once everything before it on the stream is done and visible."""

    flag: Flag
    value: int
    kind: Literal["signal"] = "signal"

    def __str__(self) -> str:
        return f"signal {self.flag} = {self.value}"


@dataclass(frozen=True)
class Wait:
    """Hold the stream until the flag has reached ``value``."""

    flag: Flag
    value: int
    kind: Literal["wait"] = "wait"

    def __str__(self) -> str:
        return f"wait   {self.flag} >= {self.value}"


@dataclass(frozen=True)
class Reduce:
    """``output = (s0*x0 + s1*x1 + ...) * output_scale``, added from left to right.

    Parameters
    ----------
    inputs
        Regions of equal count, in the order in which they are added. One input converts or
        scales.
    output
        Where the result goes. It may be exactly one of the inputs (in place), and then may lie on
        a peer: a push-reduce, which accumulates in the dtype of the output.
    scales
        Factor of each input; empty: all 1.
    accumulate
        The type that products and partial sums are rounded to, each operation by itself.
    """

    inputs: tuple[Region, ...]
    output: Region
    scales: tuple[float, ...] = ()
    output_scale: float = 1.0
    accumulate: Dtype = "fp32"
    kind: Literal["reduce"] = "reduce"

    def __str__(self) -> str:
        scales = self.scales or (1.0,) * len(self.inputs)
        terms = [
            str(x) if s == 1.0 else f"{s:g}*{x}" for s, x in zip(scales, self.inputs, strict=True)
        ]
        scale = "" if self.output_scale == 1.0 else f" * {self.output_scale:g}"
        return f"reduce {' + '.join(terms)}{scale} -> {self.output} in {self.accumulate}"


@dataclass(frozen=True)
class Inner:
    """Hand a collective over ``ranks`` to the inner (NCCL, gloo) group; all of them call it.

    Between nodes, and where the copy engine cannot go. The regions are the executing rank's own;
    ``None`` where the rank gives or gets nothing (a root's part on another rank). ``root`` and
    ``peer`` are ranks of the whole group; ``splits`` are this rank's (sent, received) elements
    per member in an ``all_to_all``.
    """

    op: Op
    ranks: tuple[int, ...]
    source: Region | None
    target: Region | None
    root: int = 0
    peer: int = 0
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    reduction: Literal["sum", "avg", "premul"] = "sum"
    factor: float = 1.0
    kind: Literal["inner"] = "inner"

    def __str__(self) -> str:
        return f"inner  {self.op} over {list(self.ranks)}: {self.source} -> {self.target}"


Step: TypeAlias = Annotated[
    Copy | Signal | Wait | Reduce | Inner, pydantic.Field(discriminator="kind")
]


@dataclass(frozen=True)
class Program:
    """The steps of one stream of one rank.

    ``stream`` is ``"sync"`` (hand-shakes and local copies), ``"reduce"`` (everything that runs on
    SMs), ``"inner"`` (calls of the inner group) or ``"copy<i>"`` (transfers).
    """

    rank: int
    stream: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Schedule:
    """One collective call on all ranks.

    Parameters
    ----------
    call
        What it computes.
    algorithm
        How, for people: ``"direct"``, ``"ring"`` ...
    buffers
        All buffers of all ranks.
    programs
        One per (rank, stream), ordered by rank.
    inputs, outputs
        Where each rank's input is and where its result belongs (ranks without one are left out).
    """

    call: Call
    algorithm: str
    buffers: tuple[Buffer, ...]
    programs: tuple[Program, ...]
    inputs: tuple[Region, ...]
    outputs: tuple[Region, ...]

    def of_rank(self, rank: int) -> tuple[Program, ...]:
        """Return the programs of one rank."""
        return tuple(p for p in self.programs if p.rank == rank)

    def buffers_of(self, rank: int) -> dict[str, Buffer]:
        """Return the buffers of one rank by name."""
        return {b.name: b for b in self.buffers if b.rank == rank}

    def steps(self) -> Iterator[tuple[Program, int, Step]]:
        """Yield every step with its program and its index there."""
        for program in self.programs:
            for index, step in enumerate(program.steps):
                yield program, index, step

    @functools.cached_property
    def advances(self) -> dict[Flag, int]:
        """How far each flag counts in one call: what an executor adds to the word's base."""
        found: dict[Flag, int] = {}
        for _, _, step in self.steps():
            if isinstance(step, Signal):
                found[step.flag] = max(found.get(step.flag, 0), step.value)
        return found

    def ranks_touched(self) -> frozenset[int]:
        """Ranks that take part; the others return at once."""
        return frozenset(p.rank for p in self.programs if p.steps)

    @property
    def moves_only(self) -> bool:
        """True if no step needs an SM of this group's own (inner calls not counted)."""
        return not any(isinstance(step, Reduce) for _, _, step in self.steps())

    def to_json(self, *, indent: int | None = None) -> str:
        """Write the schedule as JSON."""
        return records.to_json(self, indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> Schedule:
        """Read a schedule from JSON.

        Raises
        ------
        ValueError
            If the text is malformed; :func:`overlapctl.collectives.check.check` tells whether a
            well-formed schedule is right.
        """
        return records.from_json(cls, text)

    def __str__(self) -> str:
        call = self.call
        size = f"{sum(map(sum, call.splits))} in all" if call.splits else str(call.count)
        lines = [f"{call.op} of {size} x {call.dtype} on {call.world} ranks: {self.algorithm}"]
        for buffer in self.buffers:
            if buffer.name not in {"input", "output"}:
                lines.append(
                    f"  rank {buffer.rank} needs {buffer.name}: {buffer.count} x {buffer.dtype}"
                )
        for program in self.programs:
            lines.append(f"  rank {program.rank} stream {program.stream}")
            lines += [f"    {step}" for step in program.steps]
        return "\n".join(lines)


def flag_slots(world: int) -> int:
    """Return how many flag words each rank needs in a group of ``world`` ranks."""
    return len(_PURPOSES) * (3 + world) * world


def flag_slot(flag: Flag, world: int) -> int:
    """Return the index of a flag's word in the target's flag page.

    It depends on the flag and the group's size alone, so ranks agree without talking, also after
    calls in which only some of them took part.

    Raises
    ------
    UsageError
        If the stream has no number, that is, if it is not one that :class:`Program` names.
    """
    fixed = ("sync", "reduce", "inner")
    if flag.stream in fixed:
        stream = fixed.index(flag.stream)
    else:
        number = flag.stream.removeprefix("copy")
        if not number.isdecimal() or int(number) >= world:
            raise UsageError(
                f"stream {flag.stream!r} of a flag",
                remedy=f"name it sync, reduce, inner or copy0 to copy{world - 1}",
            )
        stream = len(fixed) + int(number)
    purpose = _PURPOSES.index(flag.purpose)
    return (purpose * (len(fixed) + world) + stream) * world + flag.source


def word_value(base: int, value: int) -> int:
    """Return the 32-bit word that stands for ``value`` of a call whose base is ``base``."""
    return (base + value) % _WORD


def reached(word: int, wanted: int) -> bool:
    """Tell whether ``word`` has reached ``wanted``, as 32-bit words that wrap around.

    The comparison is that of ``CU_STREAM_WAIT_VALUE_GEQ``: ``(int32)(word - wanted) >= 0``. It is
    right while the two are less than 2**31 apart, which no call exceeds.
    """
    return (word - wanted) % _WORD < _WORD // 2


for _record in (
    Call, Buffer, Region, Flag, Copy, Signal, Wait, Reduce, Inner, Program, Schedule,
):  # fmt: skip
    # pydantic reads this attribute from standard dataclasses: unknown fields are errors.
    setattr(_record, "__pydantic_config__", pydantic.ConfigDict(extra="forbid"))  # noqa: B010
del _record
