"""Runs schedules on CPU tensors: the reference executor, for tests at any world size.

:class:`Interpreter` runs all ranks in one thread and picks the stream that does its next step at
random: one seed is one interleaving, again and again. For ranks that are processes see
:mod:`overlapctl.collectives.processes`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
    Wait,
    reached,
    word_value,
)
from overlapctl.errors import CollectiveError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Interpreter", "inner_results", "poison", "reduce_into", "torch_dtype"]


def torch_dtype(name: str) -> object:
    """Return torch's dtype for a schedule's."""
    import torch

    return {
        "u8": torch.uint8,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
    }[name]


def poison(tensor: Tensor) -> None:
    """Fill with what nobody trains on: NaN, or 0xA5 bytes."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 0xA5)


def reduce_into(step: Reduce, inputs: Sequence[Tensor], output: Tensor) -> None:
    """Do a reduction as :class:`~overlapctl.collectives.schedule.Reduce` defines it."""
    kind = torch_dtype(step.accumulate)
    total: Any = None
    for k, one in enumerate(inputs):
        term = one.to(kind)
        if step.scales and step.scales[k] != 1.0:
            term = term * step.scales[k]
        total = term if total is None else total + term
    if step.output_scale != 1.0:
        total = total * step.output_scale
    output.copy_(total)


def inner_results(
    what: Call | Inner,
    members: Sequence[int],
    sources: Mapping[int, Tensor],
    splits: Mapping[int, Sequence[int]],
) -> dict[int, Tensor]:
    """Return what each member gets from a collective of the inner group.

    Sums are added in fp32 in the order of ``members``. ``splits`` are the elements that each
    member sends to each member (``all_to_all`` only).
    """
    import torch

    op = what.op
    if op == "send_recv":
        return {what.peer: sources[what.root].clone()}
    if op == "broadcast":
        return {r: sources[what.root].clone() for r in members}
    if op in ("all_gather", "gather"):
        joined = torch.cat([sources[r] for r in members])
        return dict.fromkeys(members if op == "all_gather" else [what.root], joined)
    if op == "all_to_all":
        cut = {r: sources[r].split(list(splits[r])) for r in members}
        return {p: torch.cat([cut[r][i] for r in members]) for i, p in enumerate(members)}
    if op == "scatter":
        whole = sources[what.root].clone()
    else:
        factor = what.factor if what.reduction == "premul" else 1.0
        first = sources[members[0]]
        total = torch.zeros_like(first, dtype=torch.float32)
        for r in members:
            total += sources[r].float() * factor
        whole = (total / len(members) if what.reduction == "avg" else total).to(first.dtype)
    if op == "all_reduce":
        return dict.fromkeys(members, whole)
    if op == "reduce":
        return {what.root: whole}
    size = whole.numel() // len(members)
    return {r: whole[i * size : (i + 1) * size] for i, r in enumerate(members)}


class Interpreter:
    """Ranks of one group in one thread; memory of words lasts from call to call.

    Parameters
    ----------
    seed
        Chooses the interleavings.
    base
        What every flag word holds before the first call (to test the wrap-around).
    """

    def __init__(self, *, seed: int = 0, base: int = 0) -> None:
        self._random = random.Random(seed)
        self._first = base
        self._words: dict[Flag, int] = {}
        self._bases: dict[Flag, int] = {}

    def run(self, schedule: Schedule, inputs: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Run one call.

        Parameters
        ----------
        schedule
            What to run.
        inputs
            A flat tensor per rank that has an input.

        Returns
        -------
        dict
            A flat tensor per rank that has an output.

        Raises
        ------
        CollectiveError
            If no stream can go on.
        """
        import torch

        memory: dict[tuple[int, str], Tensor] = {}
        for b in schedule.buffers:
            memory[b.rank, b.name] = torch.empty(b.count, dtype=torch_dtype(b.dtype))
            poison(memory[b.rank, b.name])
        for region in schedule.inputs:
            view(memory, region).copy_(inputs[region.rank])
        self._run(schedule, memory)
        for flag, advance in schedule.advances.items():
            self._bases[flag] = word_value(self._base(flag), advance)
        return {region.rank: view(memory, region).clone() for region in schedule.outputs}

    def _base(self, flag: Flag) -> int:
        return self._bases.get(flag, self._first)

    def _run(self, schedule: Schedule, memory: dict[tuple[int, str], Tensor]) -> None:
        programs = schedule.programs
        at = [0] * len(programs)
        active = [p for p, program in enumerate(programs) if program.steps]
        blocked: list[int] = []
        meetings: dict[tuple[int, ...], dict[int, Inner]] = {}
        while active:
            turn = self._random.randrange(len(active))
            p = active[turn]
            step = programs[p].steps[at[p]]
            if isinstance(step, Wait):
                base = self._base(step.flag)
                word = self._words.get(step.flag, base)
                if not reached(word, word_value(base, step.value)):
                    blocked.append(active.pop(turn))
                    continue
            elif isinstance(step, Signal):
                self._words[step.flag] = word_value(self._base(step.flag), step.value)
                active += blocked
                blocked = []
            elif isinstance(step, Copy):
                view(memory, step.target).copy_(view(memory, step.source))
            elif isinstance(step, Reduce):
                values = [view(memory, x) for x in step.inputs]
                reduce_into(step, values, view(memory, step.output))
            else:
                meeting = meetings.setdefault(step.ranks, {})
                meeting[p] = step
                if len(meeting) < len(step.ranks):
                    active.pop(turn)
                    continue
                del meetings[step.ranks]
                _meet({programs[q].rank: s for q, s in meeting.items()}, memory)
                for q in meeting:
                    if q != p:
                        at[q] += 1
                        if at[q] < len(programs[q].steps):
                            active.append(q)
            at[p] += 1
            if at[p] == len(programs[p].steps):
                active.remove(p)
        stuck = [p for p, program in enumerate(programs) if at[p] < len(program.steps)]
        if stuck:
            raise CollectiveError(
                f"{schedule.call.op}: deadlock at "
                + "; ".join(_at(programs[p], at[p]) for p in stuck),
                remedy="check the schedule before running it",
            )


def view(memory: Mapping[tuple[int, str], Tensor], region: Region) -> Tensor:
    """Return a region as a tensor that shares its memory."""
    whole = memory[region.rank, region.buffer]
    return whole[region.offset : region.offset + region.count]


def _at(program: Program, index: int) -> str:
    return f"rank {program.rank} {program.stream}: {program.steps[index]}"


def _meet(steps: dict[int, Inner], memory: Mapping[tuple[int, str], Tensor]) -> None:
    one = next(iter(steps.values()))
    sources = {r: view(memory, s.source) for r, s in steps.items() if s.source is not None}
    splits: dict[int, Sequence[int]] = {r: s.splits[0] for r, s in steps.items() if s.splits}
    for rank, result in inner_results(one, one.ranks, sources, splits).items():
        target = steps[rank].target
        if target is not None:
            view(memory, target).copy_(result)
