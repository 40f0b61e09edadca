"""From the trials of one case to a verdict with its reason. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from overlapctl.errors import UsageError
from overlapctl.measure.metrics import MIN_IDEAL_SPEEDUP, Metrics, evaluate
from overlapctl.measure.stats import Comparison, compare
from overlapctl.measure.trial import DEFAULT_ARM
from overlapctl.plan.arms import split_arm_name
from overlapctl.plan.residency import is_persistent
from overlapctl.records import (
    DeviceFacts,
    KernelFootprint,
    KernelRule,
    Policy,
    Role,
    Trial,
    Verdict,
)
from overlapctl.tuning.race import TIE, paired_totals

__all__ = ["MIN_GAIN", "arm_metrics", "decide", "dominant_kernel"]

MIN_GAIN = 0.01
"""A smaller gain is never adopted: it is within what clocks drift between two runs."""


def arm_metrics(trials: Sequence[Trial]) -> list[Metrics]:
    """Metrics of each arm, each against the default in the same repetitions."""
    default = _default_of(trials)
    return [evaluate(trial, _first(default, len(trial.samples))) for trial in trials]


def decide(
    trials: Sequence[Trial], facts: DeviceFacts, footprint: KernelFootprint | None
) -> Verdict:
    """Decide which arm to adopt; keeping the default is a full verdict.

    Parameters
    ----------
    trials
        One for each arm of one race; the default is among them.
    facts, footprint
        The GPU and the compute kernel, for the mechanism in the reason.

    Returns
    -------
    Verdict
        ``policy`` has one rule, for the case's dominant kernel, even if it changes nothing: it
        says that this kernel is better left alone. ``totals`` are scaled to the default's median
        over all repetitions, so that arms that dropped out while the GPU was cooler compare fairly.

    Raises
    ------
    UsageError
        If there is no default arm.
    """
    default = _default_of(trials)
    rated = {t.arm.name: compare(*paired_totals(t, default)) for t in trials}
    metrics = {m.arm: m for m in arm_metrics(trials)}
    base = metrics[DEFAULT_ARM]
    best = _best(trials, rated)
    against = rated[best.arm.name]
    adopted = best.arm.name != DEFAULT_ARM and against.differs and 1 - against.ratio >= MIN_GAIN
    chosen = best if adopted else default
    kernel = dominant_kernel(trials, footprint)
    if adopted:
        reason = _why_adopted(base, metrics[best.arm.name], against)
    else:
        reason = _why_left(trials, rated, base, facts, footprint)
    return Verdict(
        case=default.case,
        chosen=chosen.arm.name,
        policy=_as_rule(chosen.arm.policy, kernel),
        reason=reason,
        gain=1 - rated[chosen.arm.name].ratio,
        spread=against.spread,
        totals={name: rated[name].ratio * base.total for name in metrics},
        serial=base.serial,
        ideal=base.ideal,
    )


def dominant_kernel(trials: Sequence[Trial], footprint: KernelFootprint | None) -> str:
    """Name of the compute kernel that policies of this case are about, or an empty string.

    The one launched most often as the shim saw it; without records, the footprint's.
    """
    launches: dict[str, int] = {}
    for trial in trials:
        for row in trial.applied:
            if row.role is Role.COMPUTE:
                launches[row.kernel] = launches.get(row.kernel, 0) + row.launches
    if footprint is not None and (footprint.name in launches or not launches):
        return footprint.name
    return max(launches, key=lambda name: launches[name], default="")


def _default_of(trials: Sequence[Trial]) -> Trial:
    for trial in trials:
        if trial.arm.name == DEFAULT_ARM:
            return trial
    raise UsageError("no trial is of the default arm", remedy="measure the default arm as well")


def _first(trial: Trial, count: int) -> Trial:
    return dataclasses.replace(trial, samples=trial.samples[:count])


def _best(trials: Sequence[Trial], rated: dict[str, Comparison]) -> Trial:
    """Pick the fastest arm measured to the end; of near equals the first, which is the simplest."""
    finalists = _finalists(trials)
    fastest = min(finalists, key=lambda trial: rated[trial.arm.name].ratio)
    for trial in finalists:
        gap = compare(*paired_totals(trial, fastest))
        if trial is fastest or (gap.ratio <= 1 + TIE):
            return trial
    return fastest


def _finalists(trials: Sequence[Trial]) -> list[Trial]:
    """List the arms measured as often as the default, which never drops out."""
    most = max(len(trial.samples) for trial in trials)
    return [trial for trial in trials if len(trial.samples) == most]


def _as_rule(policy: Policy, kernel: str) -> Policy:
    """Turn the settings for all compute kernels into a rule for the one that was measured."""
    if not kernel:
        return policy
    rule = KernelRule(
        pattern=kernel,
        pad_bytes=policy.pad_bytes,
        max_blocks_per_sm=policy.max_blocks_per_sm,
        carveout=policy.carveout,
    )
    return Policy(comm_priority=policy.comm_priority, rules=(rule,))


def _share(metrics: Metrics) -> str:
    return "" if metrics.gain_share is None else f"{metrics.gain_share:.0%} of the ideal gain"


def _why_adopted(base: Metrics, best: Metrics, against: Comparison) -> str:
    priority, shape = split_arm_name(best.arm)
    parts = [
        f"{best.total:.2f} ms against {best.default_total:.2f} ms by default "
        f"({against.ratio - 1:+.1%}, spread {against.spread:.1%})"
    ]
    if best.gain_share is not None:
        parts.append(f"{_share(best)}, default {base.gain_share or 0:.0%}")
    sooner = 1 - best.comm_latency / base.comm_latency
    if sooner > MIN_GAIN:
        how = "starts while the kernel runs" if priority else "finds room beside the kernel"
        parts.append(
            f"the collective {how} and ends {best.comm_latency:.2f} instead of "
            f"{base.comm_latency:.2f} ms after its issue"
        )
    if shape:
        alone = best.arm_compute_alone / best.compute_alone - 1
        if alone < -MIN_GAIN:
            parts.append(
                f"at {shape} the kernel alone is even {-alone:.1%} faster (less cache thrash)"
            )
        elif alone > MIN_GAIN:
            parts.append(
                f"at {shape} the kernel alone is {alone:.1%} slower, which the overlap repays"
            )
        else:
            parts.append(f"{shape} costs the kernel alone nothing")
    return "; ".join(parts)


def _why_left(
    trials: Sequence[Trial],
    rated: dict[str, Comparison],
    base: Metrics,
    facts: DeviceFacts,
    footprint: KernelFootprint | None,
) -> str:
    others = [t.arm.name for t in _finalists(trials) if t.arm.name != DEFAULT_ARM]
    parts = []
    if base.ideal_speedup < MIN_IDEAL_SPEEDUP:
        parts.append(
            f"even perfect overlap would save only {1 - base.ideal / base.serial:.1%} of serial"
        )
    elif base.gain_share is not None and 1 - base.ideal / base.total <= max(
        rated[DEFAULT_ARM].spread, 0.03
    ):
        parts.append(f"default already reaches {_share(base)}")
    if others:
        nearest = min(others, key=lambda name: rated[name].ratio)
        best = rated[nearest]
        if best.differs and best.ratio > 1:
            parts.append(f"every other arm is slower, {nearest} by {best.ratio - 1:.1%}")
        else:
            parts.append(
                f"the best other arm, {nearest}, changes the time by {best.ratio - 1:+.1%}, "
                f"within the spread of {best.spread:.1%}"
                if abs(best.ratio - 1) <= best.spread or not best.differs
                else f"the best other arm, {nearest}, gains {1 - best.ratio:.1%}: too little to "
                "be told from clock drift"
            )
    if footprint is not None and is_persistent(facts, footprint):
        parts.append(
            "persistent kernel (one block on every SM until it ends): neither padding nor priority "
            "changes when the collective runs"
        )
    return "; ".join(parts)
