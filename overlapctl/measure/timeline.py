"""Algebra of time intervals: what ran while what else ran.

A *set of intervals* is any iterable of ``(start, end)`` pairs with ``start <= end``, in any unit;
functions return merged sets: sorted, disjoint, not touching, none empty. Intervals are half-open,
so two that merely touch do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterable

from overlapctl.errors import UsageError

__all__ = ["Interval", "intersect", "length", "merge", "subtract"]

Interval = tuple[float, float]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Unite intervals into the smallest sorted list of disjoint ones.

    Raises
    ------
    UsageError
        If an interval ends before it starts.
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end < start:
            raise UsageError(
                f"interval ({start}, {end}) ends before it starts", remedy="swap its ends"
            )
        if start == end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Return the times that lie in both sets."""
    left, right = merge(a), merge(b)
    both: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        if start < end:
            both.append((start, end))
        # The one that ends first cannot meet anything later.
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return both


def subtract(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Return the times that lie in ``a`` and not in ``b``."""
    holes = merge(b)
    rest: list[Interval] = []
    for start, end in merge(a):
        position = start
        for hole_start, hole_end in holes:
            if hole_end <= position:
                continue
            if hole_start >= end:
                break
            if hole_start > position:
                rest.append((position, hole_start))
            position = hole_end
        if position < end:
            rest.append((position, end))
    return rest


def length(intervals: Iterable[Interval]) -> float:
    """Total time covered, overlaps counted once."""
    return sum(end - start for start, end in merge(intervals))
