"""Symbolic data: which sum of which ranks' input elements a region holds.

A :data:`Segments` describes a run of elements as pieces ``(length, terms)``. ``terms`` holds, for
the first element of the piece, ``(rank, element of that rank's input, factor)`` for each summand;
the next element's terms have the next input elements. ``None`` stands for undefined data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from overlapctl.collectives.schedule import Call, Inner

__all__ = ["Memory", "Segments", "add", "define", "merged", "source_of"]

Terms: TypeAlias = "tuple[tuple[int, int, float], ...] | None"
Segments: TypeAlias = "list[tuple[int, Terms]]"


def source_of(rank: int, count: int) -> Segments:
    """Return the input of a rank itself."""
    return [(count, ((rank, 0, 1.0),))] if count else []


def _shift(terms: Terms, by: int) -> Terms:
    if not by or terms is None:
        return terms
    return tuple((rank, at + by, factor) for rank, at, factor in terms)


def cut(segments: Segments, offset: int, count: int) -> Segments:
    """Return ``count`` elements from ``offset``."""
    found: Segments = []
    start = 0
    for length, terms in segments:
        low, high = max(start, offset), min(start + length, offset + count)
        if low < high:
            found.append((high - low, _shift(terms, low - start)))
        start += length
        if start >= offset + count:
            break
    return found


def add(parts: Sequence[Segments], scales: Sequence[float], output_scale: float) -> Segments:
    """Return the scaled sum, element by element."""
    found: Segments = []
    at = [0] * len(parts)  # piece
    used = [0] * len(parts)  # elements of the piece already dealt with
    while parts and at[0] < len(parts[0]):
        length = min(p[i][0] - u for p, i, u in zip(parts, at, used, strict=True))
        terms: list[tuple[int, int, float]] | None = []
        for k, part in enumerate(parts):
            one = _shift(part[at[k]][1], used[k])
            if one is None or terms is None:
                terms = None
            else:
                factor = scales[k] * output_scale
                terms += [(rank, e, f * factor) for rank, e, f in one]
            used[k] += length
            if used[k] == part[at[k]][0]:
                at[k], used[k] = at[k] + 1, 0
        found.append((length, tuple(sorted(terms)) if terms is not None else None))
    return found


def merged(segments: Segments) -> Segments:
    """Join pieces that continue each other, so that equal contents compare equal.

    Factors are rounded to 9 digits: the order of scaling is free.
    """
    found: Segments = []
    for length, terms in segments:
        if terms is not None:
            terms = tuple((r, e, float(f"{f:.9g}")) for r, e, f in terms)
        if found and terms == _shift(found[-1][1], found[-1][0]):
            found[-1] = (found[-1][0] + length, found[-1][1])
        else:
            found.append((length, terms))
    return found


def define(
    what: Call | Inner,
    members: Sequence[int],
    sources: dict[int, Segments],
    splits: dict[int, Sequence[int]],
) -> dict[int, Segments]:
    """Return what each member's output is by the operation's definition.

    ``splits`` are the elements each member sends to each member (``all_to_all`` only).
    """
    op, n = what.op, len(members)
    if op == "send_recv":
        return {what.peer: sources[what.root]}
    if op == "broadcast":
        return dict.fromkeys(members, sources[what.root])
    if op in ("all_gather", "gather"):
        joined = [piece for r in members for piece in sources[r]]
        return dict.fromkeys(members if op == "all_gather" else [what.root], joined)
    if op == "all_to_all":
        blocks: dict[int, Segments] = {r: [] for r in members}
        for r in members:
            start = 0
            for p, count in zip(members, splits[r], strict=True):
                blocks[p] += cut(sources[r], start, count)
                start += count
        return blocks
    if op == "scatter":
        whole = sources[what.root]
    else:
        scales = [what.factor if what.reduction == "premul" else 1.0] * n
        whole = add(
            [sources[r] for r in members], scales, 1.0 / n if what.reduction == "avg" else 1.0
        )
    if op == "all_reduce":
        return dict.fromkeys(members, whole)
    if op == "reduce":
        return {what.root: whole}
    size = sum(length for length, _ in whole) // n
    return {r: cut(whole, i * size, size) for i, r in enumerate(members)}


class Memory:
    """Contents of one buffer."""

    def __init__(self, count: int) -> None:
        self._segments: Segments = [(count, None)] if count else []
        self._count = count

    def read(self, offset: int, count: int) -> Segments:
        """Return the contents of a region."""
        return cut(self._segments, offset, count)

    def write(self, offset: int, segments: Segments) -> None:
        """Replace the contents of a region."""
        end = offset + sum(length for length, _ in segments)
        self._segments = [
            *cut(self._segments, 0, offset),
            *segments,
            *cut(self._segments, end, self._count - end),
        ]
