"""What a tuning run will do, worked out before anything is measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlapctl.errors import MeasurementError, UsageError
from overlapctl.measure.stats import MIN_SAMPLES
from overlapctl.measure.trial import TrialRunner
from overlapctl.plan.candidates import find_candidates
from overlapctl.records import Arm, Case, KernelFootprint

if TYPE_CHECKING:
    from overlapctl.device.protocol import Device

__all__ = [
    "DEFAULT_REPEATS",
    "FIRST_ROUND",
    "PlannedCase",
    "TuningPlan",
    "check_budget",
    "plan_tuning",
]

FIRST_ROUND = MIN_SAMPLES
"""Repetitions of every arm before any can drop out."""

DEFAULT_REPEATS = 15
"""Repetitions of the arms that stay in the race to the end."""


@dataclass(frozen=True)
class PlannedCase:
    """One case, its arms, the ones left out, and times in seconds.

    ``first_round`` is the least that is measured; ``most`` is reached if no arm drops out.
    """

    case: Case
    footprint: KernelFootprint | None
    arms: tuple[Arm, ...]
    pruned: tuple[tuple[str, str], ...]
    first_round: float
    most: float


@dataclass(frozen=True)
class TuningPlan:
    """What will be measured.

    Parameters
    ----------
    cases
        Those that can be measured.
    repeats
        How often arms are repeated at most.
    budget_s
        Seconds allowed.
    left_out
        Cases that this machine cannot run, with the reason.
    """

    cases: tuple[PlannedCase, ...]
    repeats: int
    budget_s: float
    left_out: tuple[tuple[Case, str], ...] = ()

    @property
    def first_rounds(self) -> float:
        """Seconds that one round over all cases takes: the smallest useful budget."""
        return sum(planned.first_round for planned in self.cases)

    @property
    def estimate(self) -> float:
        """Seconds the run will take at most, by estimate: never more than the budget."""
        return min(self.budget_s, sum(planned.most for planned in self.cases))


def plan_tuning(
    device: Device,
    cases: Sequence[Case],
    runner: TrialRunner,
    *,
    budget_s: float,
    repeats: int = DEFAULT_REPEATS,
) -> TuningPlan:
    """Choose the arms of each case and estimate the time.

    Parameters
    ----------
    device
        The GPU, for its limits.
    cases
        What to tune; each once.
    runner
        Observes the compute kernels' footprints and estimates times.
    budget_s
        Seconds the measurements may take.
    repeats
        Repetitions of the arms that stay to the end, at least ``FIRST_ROUND``.

    Raises
    ------
    UsageError
        If there are no cases, one is given twice, or ``budget_s`` or ``repeats`` is too small; the
        message names the smallest value that would do.
    MeasurementError
        If not one case can be run here; the error of the first.
    """
    check_budget(budget_s, repeats)
    if not cases:
        raise UsageError("cases is empty", remedy="give at least one case")
    twice = [case for number, case in enumerate(cases) if case in cases[:number]]
    if twice:
        raise UsageError(f"the case {twice[0]} is given twice", remedy="give each case once")
    planned: list[PlannedCase] = []
    failed: list[tuple[Case, MeasurementError]] = []
    for case in cases:
        try:
            planned.append(_plan_case(device, case, runner, repeats))
        except MeasurementError as error:
            failed.append((case, error))
    if not planned:
        raise failed[0][1]
    left_out = tuple((case, str(error)) for case, error in failed)
    plan = TuningPlan(tuple(planned), repeats, budget_s, left_out)
    if budget_s < plan.first_rounds:
        raise UsageError(
            f"budget is {budget_s:g} s, but one round of {len(planned)} cases "
            f"takes about {plan.first_rounds:.1f} s",
            remedy=f"allow at least {math.ceil(plan.first_rounds)} s, or tune fewer cases",
        )
    return plan


def check_budget(budget_s: float, repeats: int) -> None:
    """Refuse what no machine could do; cheap, to be called before a GPU is opened.

    Raises
    ------
    UsageError
        If ``budget_s`` is no time above 0, or ``repeats`` is below ``FIRST_ROUND``.
    """
    if not (math.isfinite(budget_s) and budget_s > 0):
        raise UsageError(
            f"budget is {budget_s:g} s", remedy="give a number of seconds above 0, for example 60"
        )
    if repeats < FIRST_ROUND:
        raise UsageError(
            f"repeats is {repeats}: the spread of fewer than {FIRST_ROUND} samples is unknown",
            remedy=f"use at least {FIRST_ROUND}",
        )


def _plan_case(device: Device, case: Case, runner: TrialRunner, repeats: int) -> PlannedCase:
    footprint = runner.footprint(case)
    found = find_candidates(device.facts(), footprint)
    return PlannedCase(
        case=case,
        footprint=footprint,
        arms=found.arms,
        pruned=found.pruned,
        first_round=runner.estimate_seconds(case, found.arms, FIRST_ROUND),
        most=runner.estimate_seconds(case, found.arms, repeats),
    )
