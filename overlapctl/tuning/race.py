"""Measure the arms of one case, spending repetitions on those that can still win.

All arms run a first round. After each round an arm drops out if it is measurably slower than the
best one: the 95 % interval of its time against the best's lies above 1 and its time is more than
``TIE`` longer, with both measured in the same repetitions. From the second round on only the better
half of the rest stays too (successive halving); of arms as good as the best, the simplest. The
default never drops out: everything is compared with it. The race ends when nothing is left to
decide, at the wanted number of repetitions, or when the next round would pass the deadline.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from overlapctl.measure.metrics import totals
from overlapctl.measure.stats import compare, differs
from overlapctl.measure.trial import DEFAULT_ARM, TrialRunner
from overlapctl.records import Arm, Trial
from overlapctl.tuning.planning import FIRST_ROUND, PlannedCase

__all__ = ["TIE", "paired_totals", "race"]

TIE = 0.01
"""Arms this close to the best are as good: the simplest of them is wanted."""

HALVE_FROM = 2 * FIRST_ROUND
"""Repetitions an arm gets before it can be dropped for being in the slower half."""


def race(
    planned: PlannedCase,
    runner: TrialRunner,
    *,
    repeats: int,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
    agree: Callable[[bool], bool] = bool,
    on_round: Callable[[float], None] = lambda _: None,
) -> list[Trial]:
    """Measure all arms of a case.

    Parameters
    ----------
    planned
        The case and its arms, the default first.
    runner
        Runs the trials.
    repeats
        Repetitions of the arms that stay to the end.
    deadline
        No round but the first starts if it would end after this time of ``clock``.
    agree
        Makes a decision that depends on a rank's own clock the same on all ranks.
    on_round
        Called after each round with the share of ``repeats`` that is done.

    Returns
    -------
    list of Trial
        One for each arm, in the order of ``planned.arms``. Arms that dropped out have fewer
        samples: the first ones, taken in the same repetitions as the default's first ones.
    """
    trials: dict[str, Trial] = {}
    stay: Sequence[Arm] = planned.arms
    done, size = 0, FIRST_ROUND
    while True:
        start = clock()
        for trial in runner.run(planned.case, stay, repeats=size):
            earlier = trials.get(trial.arm.name)
            trials[trial.arm.name] = trial if earlier is None else _joined(earlier, trial)
        took, planned_s = clock() - start, runner.estimate_seconds(planned.case, stay, size)
        done += size
        on_round(min(1.0, done / repeats))
        stay = _survivors(stay, trials, done)
        size = min(max(FIRST_ROUND, done), repeats - done)
        if size < 1 or _is_settled(stay, trials, done):
            break
        # The estimate knows how a round's time depends on its size, the last round how right it is.
        next_s = runner.estimate_seconds(planned.case, stay, size) * took / (planned_s or 1.0)
        if agree(clock() + next_s > deadline):
            break
    on_round(1.0)
    return [trials[arm.name] for arm in planned.arms]


def paired_totals(trial: Trial, other: Trial) -> tuple[list[float], list[float]]:
    """Totals of two arms of one race, cut to the repetitions both took part in."""
    mine, theirs = totals(trial), totals(other)
    both = min(len(mine), len(theirs))
    return mine[:both], theirs[:both]


def _survivors(stay: Sequence[Arm], trials: dict[str, Trial], done: int) -> list[Arm]:
    default = trials[DEFAULT_ARM]
    rated = {arm.name: compare(*paired_totals(trials[arm.name], default)).ratio for arm in stay}
    best = trials[min(rated, key=lambda name: rated[name])]
    gaps = {arm.name: compare(*paired_totals(trials[arm.name], best)) for arm in stay}
    able = [arm for arm in stay if gaps[arm.name].low <= 1.0 or gaps[arm.name].ratio <= 1 + TIE]
    if done >= HALVE_FROM:
        keep = max(2, (len(stay) + 1) // 2)
        # Sorting is stable: of arms as good as the best, the earlier and simpler ones stay.
        able = sorted(able, key=lambda arm: max(gaps[arm.name].ratio, 1 + TIE))[:keep]
    names = {DEFAULT_ARM, *(arm.name for arm in able)}
    return [arm for arm in stay if arm.name in names]


def _is_settled(stay: Sequence[Arm], trials: dict[str, Trial], done: int) -> bool:
    """Nothing is left to decide: the default alone, or one arm that clearly differs from it."""
    others = [arm for arm in stay if arm.name != DEFAULT_ARM]
    if not others:
        return True
    if len(others) > 1 or done < HALVE_FROM:
        return False
    return differs(*paired_totals(trials[others[0].name], trials[DEFAULT_ARM]))


def _joined(first: Trial, second: Trial) -> Trial:
    return dataclasses.replace(
        first,
        samples=first.samples + second.samples,
        compute_alone=first.compute_alone + second.compute_alone,
        comm_alone=first.comm_alone + second.comm_alone,
        arm_compute_alone=first.arm_compute_alone + second.arm_compute_alone,
        applied=second.applied or first.applied,
    )
