"""Race, decide, store: case by case, within a budget of time."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from overlapctl.errors import MeasurementError
from overlapctl.measure.trial import TrialRunner
from overlapctl.profiles import ProfileStore, combine_verdicts, profile_key
from overlapctl.records import Case, Profile, Trial, Verdict
from overlapctl.tuning.planning import DEFAULT_REPEATS, TuningPlan, plan_tuning
from overlapctl.tuning.race import race
from overlapctl.tuning.verdict import decide

if TYPE_CHECKING:
    from overlapctl.device.protocol import Device

__all__ = ["Evidence", "Progress", "TuningResult", "tune"]

# By name: the package's root names everything above this layer, which must not be imported here.
_VERSION: str = importlib.import_module("overlapctl").__version__


class Progress(Protocol):
    """Told what goes on, for a progress bar."""

    def __call__(self, case: Case, number: int, share: float) -> None:
        """Report that ``share`` (0 to 1) of case ``number`` (from 0) is done."""
        ...


@dataclass(frozen=True)
class Evidence:
    """A verdict and the trials it was made from."""

    verdict: Verdict
    trials: tuple[Trial, ...]


@dataclass(frozen=True)
class TuningResult:
    """What a tuning run found.

    Parameters
    ----------
    profile
        As stored: with the verdicts of earlier runs for other cases.
    path
        Where it is stored; ``None`` if the run was told not to.
    evidence
        This run's verdicts, in the order of its cases.
    left_out
        Cases that were not measured, each with the reason.
    seconds
        How long measuring took.
    """

    profile: Profile
    path: Path | None
    evidence: tuple[Evidence, ...]
    left_out: tuple[tuple[Case, str], ...]
    seconds: float


def tune(
    device: Device,
    cases: Sequence[Case],
    runner: TrialRunner,
    *,
    budget_s: float,
    repeats: int = DEFAULT_REPEATS,
    progress: Progress | None = None,
    store: ProfileStore | None = None,
    plan: TuningPlan | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TuningResult:
    """Find the best policy for each case and for all of them, and store both.

    Every case is stored as soon as it is decided, so that an interrupted run keeps what it has.

    Parameters
    ----------
    device, cases, runner, budget_s, repeats
        As for :func:`plan_tuning`.
    progress
        Told after each round.
    store
        Where to keep the profile; ``None``: nowhere.
    plan
        What :func:`plan_tuning` said, if the caller has shown it already.

    Returns
    -------
    TuningResult
        With at least one verdict.

    Raises
    ------
    UsageError
        As :func:`plan_tuning`.
    ProfileError
        If the profile cannot be stored; checked before anything is measured.
    MeasurementError
        If not one case could be measured.
    """
    if plan is None:
        plan = plan_tuning(device, cases, runner, budget_s=budget_s, repeats=repeats)
    if store is not None:
        store.check_writable()
    agree: Callable[[bool], bool] = getattr(runner, "agree", bool)
    start = clock()
    evidence: list[Evidence] = []
    left_out = list(plan.left_out)
    profile: Profile | None = None
    for number, planned in enumerate(plan.cases):
        used = clock() - start
        waiting = plan.cases[number:]
        if evidence and agree(used + planned.first_round > plan.budget_s):
            left_out.append((planned.case, f"the budget of {plan.budget_s:g} s was used up"))
            continue
        # Each case may use its share of what is left; what it leaves goes to the later ones.
        weight = planned.most / (sum(p.most for p in waiting) or 1.0)
        deadline = start + used + (plan.budget_s - used) * weight

        def on_round(share: float, case: Case = planned.case, number: int = number) -> None:
            if progress is not None:
                progress(case, number, share)

        try:
            trials = race(
                planned,
                runner,
                repeats=plan.repeats,
                deadline=deadline,
                clock=clock,
                agree=agree,
                on_round=on_round,
            )
        except MeasurementError as error:
            left_out.append((planned.case, str(error)))
            continue
        verdict = decide(trials, device.facts(), planned.footprint)
        evidence.append(Evidence(verdict, tuple(trials)))
        profile = _profile(device, [item.verdict for item in evidence])
        if store is not None:
            profile = store.merge(profile)
    if profile is None:
        case, reason = left_out[0]
        raise MeasurementError(
            f"none of {len(plan.cases)} cases could be measured; the first, "
            f"{case.compute.op} + {case.comm.op}: {reason}",
            remedy="`overlapctl doctor` checks the machine; tune a single case to see its error",
        )
    return TuningResult(
        profile=profile,
        path=store.path(profile.key) if store is not None else None,
        evidence=tuple(evidence),
        left_out=tuple(left_out),
        seconds=clock() - start,
    )


def _profile(device: Device, verdicts: Sequence[Verdict]) -> Profile:
    policy, reason = combine_verdicts(verdicts)
    return Profile(
        key=profile_key(device),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        overlapctl=_VERSION,
        policy=policy,
        reason=reason,
        verdicts=tuple(verdicts),
    )
