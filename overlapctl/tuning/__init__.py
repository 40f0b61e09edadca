"""The tuning loop: cases -> arms -> interleaved trials -> verdicts -> profile.

::

    plan_tuning   which arms for each case, how long it takes (measures nothing)
    tune          race the arms of each case, decide, store after each case
"""

from overlapctl.tuning.default_cases import default_cases
from overlapctl.tuning.loop import Evidence, Progress, TuningResult, tune
from overlapctl.tuning.planning import PlannedCase, TuningPlan, check_budget, plan_tuning
from overlapctl.tuning.verdict import decide

__all__ = [
    "Evidence",
    "PlannedCase",
    "Progress",
    "TuningPlan",
    "TuningResult",
    "check_budget",
    "decide",
    "default_cases",
    "plan_tuning",
    "tune",
]
