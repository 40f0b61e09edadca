"""Median, spread, and when two arms differ."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapctl.errors import UsageError
from overlapctl.measure.stats import compare, differs, median, quantile, spread

TIMES = st.lists(st.floats(0.1, 100.0), min_size=3, max_size=12)


def test_median_and_quantiles_interpolate():
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert quantile([0.0, 10.0], 0.1) == pytest.approx(1.0)


def test_spread_is_half_the_middle_four_fifths_over_the_median():
    # 0, 1, ... 10 around 100: 10 % and 90 % quantiles are 96 and 104 of 95 ... 105.
    assert spread([95.0 + i for i in range(11)]) == pytest.approx(0.04)
    assert spread([5.0]) == 0.0


def test_a_difference_inside_the_spread_is_no_difference():
    noisy_a = [10.0, 10.4, 9.6, 10.2, 9.8, 10.5, 9.5]
    noisy_b = [x * 1.02 for x in noisy_a]
    # The paired interval alone would call this significant.
    assert compare(noisy_b, noisy_a).low > 1.0
    assert not differs(noisy_b, noisy_a)


def test_a_clear_difference_is_one():
    a = [10.0, 10.1, 9.9, 10.05, 9.95]
    found = compare([x * 0.8 for x in a], a)
    assert found.differs
    assert found.ratio == pytest.approx(0.8)
    assert found.low <= 0.8 <= found.high


def test_one_outlier_makes_no_difference():
    assert not differs([10.0, 10.0, 10.0, 10.0, 30.0], [10.0] * 5)


def test_too_few_samples_claim_nothing():
    assert not differs([1.0, 1.0], [2.0, 2.0])


def test_a_shared_drift_does_not_widen_the_interval():
    draw = random.Random(1)
    drift = [10.0 + i for i in range(9)]
    a = [d * draw.uniform(0.999, 1.001) for d in drift]
    b = [d * 0.95 for d in drift]
    found = compare(b, a)
    assert found.high < 0.97
    assert not found.differs  # yet the spread of each is far larger than 5 %


@settings(max_examples=30, deadline=None)
@given(TIMES)
def test_an_arm_never_differs_from_itself(values):
    found = compare(values, values)
    assert (found.ratio, found.low, found.high) == pytest.approx((1.0, 1.0, 1.0))
    assert not found.differs


@settings(max_examples=30, deadline=None)
@given(TIMES, st.floats(0.01, 100.0))
def test_the_unit_does_not_matter(values, scale):
    scaled = [v * scale for v in values]
    assert spread(scaled) == pytest.approx(spread(values))
    assert compare(scaled, values).ratio == pytest.approx(scale)


@pytest.mark.parametrize("bad", [[], [1.0, 0.0], [-1.0]])
def test_missing_or_impossible_times_are_refused(bad):
    with pytest.raises(UsageError, match="b is"):
        compare([1.0], bad)


def test_bad_quantiles_are_refused():
    with pytest.raises(UsageError, match=r"q is 1\.5"):
        quantile([1.0], 1.5)
    with pytest.raises(UsageError, match="empty"):
        median([])
