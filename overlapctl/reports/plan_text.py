"""A plan as a table of its candidates with the reasons, or as a JSON document."""

from __future__ import annotations

import json

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overlapctl.records import Candidate, Plan, to_json
from overlapctl.reports.as_json import document
from overlapctl.reports.names import case_name, policy_text

__all__ = ["predicted_document", "predicted_report"]

_WIDEST_NAME = 34


def predicted_report(plan: Plan, *, estimated: bool = True) -> RenderableType:
    """Verdict, rule, reason and candidates of a plan; times in ms.

    Parameters
    ----------
    plan
        The plan.
    estimated
        Whether the times alone come from the GPU's rates instead of a measurement.
    """
    alone = (
        f"alone: compute {_ms(plan.compute_alone)} ms, collective {_ms(plan.comm_alone)} ms"
        f"{' (estimated)' if estimated else ''}; one after the other {_ms(plan.serial)} ms, "
        f"at best {_ms(plan.ideal)} ms"
    )
    verdict = "leave it alone" if plan.policy.is_default else plan.chosen
    head = Table.grid(padding=(0, 2))
    for name, value in (
        ("case", f"{case_name(plan.case)} ({plan.case.form}) on {plan.gpu}"),
        ("times", alone),
        ("plan", verdict),
        ("rule", f"{plan.rule}: {plan.rule_text}"),
        ("reason", plan.reason),
        ("policy", "; ".join(policy_text(plan.policy))),
        ("next best", ", ".join(plan.runners_up) or "-"),
    ):
        head.add_row(Text(name, style="bold"), Text(value))
    for line in plan.advice:
        head.add_row(Text("advice", style="bold"), Text(line))
    return Group(head, Text(""), _table(plan), Text(_LEGEND, style="dim"))


_LEGEND = (
    "legal: yes = overlapctl applies it; job = the job has to do it; no = not to be had here. "
    "Predictions, not measurements: `overlapctl tune` measures."
)


def predicted_document(plan: Plan, *, device: str, simulated: bool) -> str:
    """Write a plan as a JSON document (schema ``overlapctl-plan``)."""
    fields = json.loads(to_json(plan, indent=None))
    for row, candidate in zip(fields["candidates"], plan.candidates, strict=True):
        row["total"] = candidate.total
    head = {"device": device, "simulated": simulated, "name": case_name(plan.case)}
    return document("plan", {**head, **fields})


def _table(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("candidate", overflow="fold", max_width=_WIDEST_NAME)
    table.add_column("lever", no_wrap=True)
    table.add_column("legal", no_wrap=True)
    for name in ("compute end", "comm end", "total", "T/T0"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why, or how", overflow="fold")
    default = next(c.total for c in plan.candidates if c.total is not None)
    for candidate in plan.candidates:
        chosen = candidate.name == plan.chosen
        total = candidate.total
        table.add_row(
            Text(("> " if chosen else "  ") + candidate.name),
            candidate.lever,
            _legal(candidate),
            _ms(candidate.compute_end),
            _ms(candidate.comm_end),
            _ms(total),
            "-" if total is None else f"{total / default:.3f}",
            Text("; ".join(x for x in (candidate.reason, *candidate.settings) if x)),
            style="bold" if chosen else None if candidate.legal else "dim",
        )
    return table


def _legal(candidate: Candidate) -> str:
    if not candidate.legal:
        return "no"
    return "job" if candidate.settings else "yes"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}"
