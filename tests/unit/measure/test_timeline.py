"""Interval algebra against a plain model: sets of unit cells."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapctl.errors import UsageError
from overlapctl.measure.timeline import intersect, length, merge, subtract

INTERVALS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 6)).map(lambda t: (t[0], t[0] + t[1])),
    max_size=8,
)


def cells(intervals):
    return {cell for start, end in intervals for cell in range(start, end)}


def is_canonical(intervals):
    return all(start < end for start, end in intervals) and all(
        a[1] < b[0] for a, b in itertools.pairwise(intervals)
    )


@settings(max_examples=150, deadline=None)
@given(INTERVALS, INTERVALS)
def test_operations_are_those_of_sets(a, b):
    assert cells(merge(a)) == cells(a)
    assert cells(intersect(a, b)) == cells(a) & cells(b)
    assert cells(subtract(a, b)) == cells(a) - cells(b)
    assert length(a) == len(cells(a))
    assert all(is_canonical(r) for r in (merge(a), intersect(a, b), subtract(a, b)))


@settings(max_examples=100, deadline=None)
@given(INTERVALS, INTERVALS)
def test_lengths_add_up(a, b):
    assert length(intersect(a, b)) + length(subtract(a, b)) == length(a)
    assert intersect(a, b) == intersect(b, a)
    assert length([*a, *b]) == length(a) + length(b) - length(intersect(a, b))


def test_touching_intervals_unite_and_do_not_overlap():
    assert merge([(2, 3), (1, 2)]) == [(1, 3)]
    assert intersect([(1, 2)], [(2, 3)]) == []


def test_an_interval_that_ends_before_it_starts_is_refused():
    with pytest.raises(UsageError, match=r"\(3, 1\)"):
        merge([(3, 1)])
