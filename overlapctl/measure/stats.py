"""Statistics of repeated timings: median, spread, and whether two arms differ.

Timings are skewed to long values (a throttled clock, a late rank), so the median stands for the
sample and the spread is taken from quantiles. Arms of one trial are interleaved: value ``i`` of
one arm and value ``i`` of another come from the same repetition, and the bootstrap keeps them
together, so that a drift of the clock that both share does not look like noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from overlapctl.errors import UsageError

__all__ = ["Comparison", "compare", "differs", "median", "quantile", "spread"]

MIN_SAMPLES = 3
"""Below this many samples nothing is known of the spread, and no difference is claimed."""

_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How arm ``a`` compares with arm ``b``.

    Parameters
    ----------
    ratio
        Median of ``a`` over median of ``b``; below 1: ``a`` is faster.
    low, high
        95 % interval of the ratio by the paired percentile bootstrap.
    spread
        The larger relative spread of the two.
    differs
        True if the ratio is further from 1 than the spread *and* the interval leaves out 1.
    """

    ratio: float
    low: float
    high: float
    spread: float
    differs: bool


def median(values: Sequence[float]) -> float:
    """Middle value; mean of the two middle ones for an even count."""
    return quantile(values, 0.5)


def quantile(values: Sequence[float], q: float) -> float:
    """Quantile with linear interpolation between order statistics.

    Raises
    ------
    UsageError
        If there are no values, or ``q`` lies outside 0 to 1.
    """
    if len(values) == 0:
        raise UsageError("values is empty", remedy="pass at least one sample")
    if not 0.0 <= q <= 1.0:
        raise UsageError(f"q is {q}", remedy="use a quantile from 0 to 1")
    return float(np.quantile(np.asarray(values, dtype=float), q))


def spread(values: Sequence[float]) -> float:
    """Relative spread: half the range from the 10 % to the 90 % quantile, over the median.

    0.02 means: four fifths of the samples lie within about 2 % of the middle.
    """
    middle = median(values)
    half = (quantile(values, 0.9) - quantile(values, 0.1)) / 2
    return half / middle if middle else 0.0


def compare(a: Sequence[float], b: Sequence[float], *, seed: int = 0) -> Comparison:
    """Compare two arms by their samples.

    Parameters
    ----------
    a, b
        Times of the two arms, in any unit, all above 0. If they are equally many, they are taken
        as pairs of the same repetition.
    seed
        Seed of the bootstrap: the same samples always give the same answer.

    Raises
    ------
    UsageError
        If an arm has no samples, or one that is not above 0.
    """
    for name, values in (("a", a), ("b", b)):
        if len(values) == 0 or min(values) <= 0:
            raise UsageError(
                f"{name} is {list(values)}", remedy="pass at least one time, all above 0"
            )
    ratio = median(a) / median(b)
    low, high = _ratio_interval(np.asarray(a, float), np.asarray(b, float), seed)
    noise = max(spread(a), spread(b))
    enough = min(len(a), len(b)) >= MIN_SAMPLES
    return Comparison(
        ratio=ratio,
        low=low,
        high=high,
        spread=noise,
        differs=enough and abs(ratio - 1.0) > noise and not low <= 1.0 <= high,
    )


def differs(a: Sequence[float], b: Sequence[float]) -> bool:
    """Say if two arms differ: a difference inside the spread is no difference."""
    return compare(a, b).differs


def _ratio_interval(
    a: np.ndarray[tuple[int], np.dtype[np.float64]],
    b: np.ndarray[tuple[int], np.dtype[np.float64]],
    seed: int,
) -> tuple[float, float]:
    """95 % percentile-bootstrap interval of median(a) / median(b)."""
    draw = np.random.default_rng(seed)
    index_a = draw.integers(0, len(a), size=(_RESAMPLES, len(a)))
    index_b = index_a if len(a) == len(b) else draw.integers(0, len(b), size=(_RESAMPLES, len(b)))
    ratios = np.median(a[index_a], axis=1) / np.median(b[index_b], axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)
