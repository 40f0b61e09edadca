"""JSON reports: each a versioned object ``{"schema": ..., "version": 1, ...}``.

Fields may be added within a version; one that is removed or changes its meaning raises it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overlapctl.measure.metrics import Metrics
from overlapctl.profiles import Entry
from overlapctl.records import Arm, Case, KernelFootprint, Profile, Verdict, to_json
from overlapctl.reports.checks import Check, Status
from overlapctl.reports.names import case_name, verdict_text

__all__ = ["checks_document", "document", "plan_document", "profiles_document", "tune_document"]

VERSION = 1
"""Version of all documents of this module."""


def document(kind: str, fields: Mapping[str, Any]) -> str:
    """Write an object as the text of a document.

    Parameters
    ----------
    kind
        ``"tune"`` makes the schema ``"overlapctl-tune"``.
    fields
        JSON values.

    Raises
    ------
    ValueError
        If a number is not finite: JSON knows no NaN.
    """
    whole = {"schema": f"overlapctl-{kind}", "version": VERSION, **fields}
    return json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False)


def plan_document(
    *,
    device: str,
    simulated: bool,
    profile_path: Path,
    estimate_s: float,
    budget_s: float,
    cases: Sequence[
        tuple[Case, KernelFootprint | None, Sequence[Arm], Sequence[tuple[str, str]], float]
    ],
) -> str:
    """Write what ``tune`` would do.

    Parameters
    ----------
    cases
        Case, footprint, arms, pruned arms with reasons, and seconds at most.
    """
    return document(
        "tuning-plan",
        {
            "device": device,
            "simulated": simulated,
            "profile_path": str(profile_path),
            "estimate_s": estimate_s,
            "budget_s": budget_s,
            "cases": [
                {
                    "case": case_name(case),
                    "form": case.form,
                    "footprint": None if kernel is None else _plain(kernel),
                    "arms": [_plain(arm) for arm in arms],
                    "pruned": [{"arm": name, "reason": reason} for name, reason in pruned],
                    "seconds": seconds,
                }
                for case, kernel, arms, pruned, seconds in cases
            ],
        },
    )


def tune_document(
    *,
    device: str,
    simulated: bool,
    profile: Profile,
    path: Path | None,
    evidence: Sequence[tuple[Verdict, Sequence[Metrics], int]],
    left_out: Sequence[tuple[Case, str]],
    seconds: float,
) -> str:
    """Write what ``tune`` found.

    Parameters
    ----------
    evidence
        For each case of this run: verdict, metrics of each arm, and how often the default was
        repeated.
    """
    return document(
        "tune",
        {
            "device": device,
            "simulated": simulated,
            "profile_path": None if path is None else str(path),
            "seconds": seconds,
            "verdict": profile.reason,
            "profile": _plain(profile),
            "cases": [
                {
                    "case": case_name(verdict.case),
                    "form": verdict.case.form,
                    "verdict": verdict_text(verdict),
                    "chosen": verdict.chosen,
                    "reason": verdict.reason,
                    "gain": verdict.gain,
                    "spread": verdict.spread,
                    "serial_ms": verdict.serial,
                    "ideal_ms": verdict.ideal,
                    "repeats": repeats,
                    "arms": [dataclasses.asdict(m) for m in metrics],
                }
                for verdict, metrics, repeats in evidence
            ],
            "left_out": [{"case": case_name(case), "reason": reason} for case, reason in left_out],
        },
    )


def profiles_document(folder: Path, entries: Sequence[Entry]) -> str:
    """List the files of the profile folder."""
    return document(
        "profiles",
        {
            "folder": str(folder),
            "files": [
                {
                    "name": entry.path.name,
                    "problem": entry.problem or None,
                    "profile": None if entry.profile is None else _plain(entry.profile),
                }
                for entry in entries
            ],
        },
    )


def checks_document(checks: Sequence[Check]) -> str:
    """Write a health report; ``ok`` is false if anything failed."""
    return document(
        "doctor",
        {
            "ok": all(check.status is not Status.FAIL for check in checks),
            "checks": [
                {
                    "name": check.name,
                    "status": check.status.value,
                    "value": check.value,
                    "remedy": check.remedy or None,
                }
                for check in checks
            ],
        },
    )


def _plain(record: object) -> Any:
    return json.loads(to_json(record, indent=None))
