"""How an SM's throughput depends on the number of blocks resident on it.

With few resident blocks an SM waits for memory and its throughput is proportional to their number;
with many it is limited by what they share. The bend between the two is described by a knee (the
number of blocks at which both limits meet) and a sharpness.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OccupancyCurve"]


@dataclass(frozen=True, kw_only=True)
class OccupancyCurve:
    """Throughput of an SM over resident blocks, in units of one block that has the SM for itself.

    Parameters
    ----------
    knee
        Resident blocks at which the proportional and the saturated limit meet.
    sharpness
        Exponent p of ``x / (1 + x^p)^(1/p)``, x = blocks / knee; larger bends sharper.
    thrash_onset, thrash_slope
        Cache effect of residency: for x beyond ``thrash_onset`` the throughput falls by
        ``thrash_slope`` per unit of x.
    """

    knee: float
    sharpness: float
    thrash_onset: float = 1e9
    thrash_slope: float = 0.0

    def throughput(self, blocks: float) -> float:
        """Throughput with ``blocks`` resident blocks (0 for none)."""
        x = blocks / self.knee
        bent = self.knee * x / (1.0 + x**self.sharpness) ** (1.0 / self.sharpness)
        return float(bent / (1.0 + self.thrash_slope * max(0.0, x - self.thrash_onset)))

    @property
    def saturated(self) -> float:
        """Throughput the curve tends to without the cache effect."""
        return self.knee
