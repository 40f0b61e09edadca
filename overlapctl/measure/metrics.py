"""The metrics of a trial; all are reported together, because each alone can mislead.

With ``C`` the untouched compute kernel alone, ``M`` the untouched collective alone (both from the
same run, arms interleaved, medians), ``T`` the overlapped total of an arm and ``T0`` that of the
default arm:

==========================  =================================================================
serial ``S``                ``C + M``
ideal ``I``                 ``max(C, M)``
speed-up                    ``S / T``
share of ideal gain         ``(S - T) / (S - I)``, and of speed-ups ``(S/T - 1) / (S/I - 1)``
against default             ``T / T0``
compute slow-down           end of compute in the overlap over ``C``
communication latency       from the issue of the collective to its end, ms
hidden share                ``1 - (T - end of compute) / M``: 1 if nothing of it is exposed
==========================  =================================================================

Nothing is clipped: an arm that is slower than serial has a negative share of gain, one that beats
the ideal (shaping can speed a kernel up) a share above 1. A mean over cases leaves out those with
``S / I`` below 1.1: where there is next to nothing to gain, the share of it is noise.

A pair trial issues its collective 0.15 ms late, which counts against every arm alike; ``I`` does
not grant it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from overlapctl.errors import MeasurementError, UsageError
from overlapctl.measure.stats import median, spread
from overlapctl.records import Trial

__all__ = ["MIN_IDEAL_SPEEDUP", "Metrics", "evaluate", "mean_gain_share", "totals"]

MIN_IDEAL_SPEEDUP = 1.1
"""Cases with a smaller ``S / I`` are left out of means."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What one arm of one case came to. Times in ms, medians; see the module for each formula.

    ``gain_share`` and ``speedup_share`` are ``None`` where serial is not above ideal. ``sm_mhz``
    and ``power_w`` are medians over the samples, ``None`` where the device does not tell.
    """

    arm: str
    compute_alone: float
    comm_alone: float
    arm_compute_alone: float
    serial: float
    ideal: float
    total: float
    total_spread: float
    default_total: float
    speedup: float
    gain_share: float | None
    speedup_share: float | None
    against_default: float
    compute_slowdown: float
    comm_latency: float
    hidden_share: float
    sm_mhz: float | None
    power_w: float | None

    @property
    def ideal_speedup(self) -> float:
        """``S / I``: how much there is to gain."""
        return self.serial / self.ideal


def totals(trial: Trial) -> list[float]:
    """Overlapped total of each sample, ms."""
    return [sample.total for sample in trial.samples]


def evaluate(trial: Trial, default: Trial) -> Metrics:
    """Work out all metrics of an arm.

    Parameters
    ----------
    trial
        The arm's trial.
    default
        The default arm's trial of the same case and run; may be ``trial`` itself.

    Raises
    ------
    UsageError
        If the trials are of different cases.
    MeasurementError
        If samples or isolated times are missing, or a time is not above 0.
    """
    if trial.case != default.case:
        raise UsageError(
            f"arm {trial.arm.name!r} and the default are of different cases",
            remedy="compare arms of one case",
        )
    compute = _middle(trial, "compute_alone", trial.compute_alone)
    comm = _middle(trial, "comm_alone", trial.comm_alone)
    ends = [(s.compute_end, s.comm_issue, s.comm_end) for s in trial.samples]
    compute_end = _middle(trial, "compute_end", [e for e, _, _ in ends if e is not None])
    total = _middle(trial, "total", totals(trial) if trial.samples else [])
    default_total = _middle(default, "total", totals(default) if default.samples else [])
    latency = _middle(
        trial,
        "comm_end - comm_issue",
        [end - issue for _, issue, end in ends if end is not None and issue is not None],
    )
    exposed = median([s.total - s.compute_end for s in trial.samples if s.compute_end is not None])
    serial, ideal = compute + comm, max(compute, comm)
    can_gain = serial > ideal
    clocks = [s.clocks for s in trial.samples if s.clocks is not None]
    sm_mhz = [c.sm_mhz for c in clocks if c.sm_mhz is not None]
    power_w = [c.power_w for c in clocks if c.power_w is not None]
    return Metrics(
        arm=trial.arm.name,
        compute_alone=compute,
        comm_alone=comm,
        arm_compute_alone=median(trial.arm_compute_alone) if trial.arm_compute_alone else compute,
        serial=serial,
        ideal=ideal,
        total=total,
        total_spread=spread(totals(trial)),
        default_total=default_total,
        speedup=serial / total,
        gain_share=(serial - total) / (serial - ideal) if can_gain else None,
        speedup_share=(serial / total - 1) / (serial / ideal - 1) if can_gain else None,
        against_default=total / default_total,
        compute_slowdown=compute_end / compute,
        comm_latency=latency,
        hidden_share=1 - exposed / comm,
        sm_mhz=median(sm_mhz) if sm_mhz else None,
        power_w=median(power_w) if power_w else None,
    )


def mean_gain_share(metrics: Iterable[Metrics]) -> float | None:
    """Mean share of ideal gain over cases with ``S / I >= 1.1``; ``None`` if there are none."""
    shares = [
        m.gain_share
        for m in metrics
        if m.gain_share is not None and m.ideal_speedup >= MIN_IDEAL_SPEEDUP
    ]
    return sum(shares) / len(shares) if shares else None


def _middle(trial: Trial, name: str, values: Iterable[float]) -> float:
    values = list(values)
    if not values or min(values) <= 0:
        raise MeasurementError(
            f"arm {trial.arm.name!r} has {name} = {values}",
            remedy="repeat the trial; every time must be above 0 ms",
        )
    return median(values)
