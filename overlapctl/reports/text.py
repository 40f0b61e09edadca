"""Text reports, made of records alone; rich renderables for a console, or plain strings."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from overlapctl.measure.metrics import Metrics
from overlapctl.profiles import Entry
from overlapctl.records import Applied, Policy, PolicyChange, Profile, Verdict
from overlapctl.reports.checks import Check, Status
from overlapctl.reports.names import case_name, policy_text, verdict_text

__all__ = [
    "arms_table",
    "as_text",
    "checks_table",
    "entries_table",
    "explanation_table",
    "profile_report",
    "verdicts_report",
]


def as_text(report: RenderableType, *, width: int = 120) -> str:
    """Render a report as plain text."""
    target = io.StringIO()
    Console(file=target, width=width, color_system=None).print(report)
    return target.getvalue().rstrip("\n")


def verdicts_report(verdicts: Sequence[Verdict]) -> RenderableType:
    """Table of verdicts, each with its reason below; times in ms."""
    table = _table("case", "verdict", ">default", ">chosen", ">change", ">spread", ">ideal")
    for number, verdict in enumerate(verdicts, 1):
        default = verdict.totals.get("default")
        chosen = verdict.totals.get(verdict.chosen)
        table.add_row(
            f"{number}. {case_name(verdict.case)}",
            Text(verdict_text(verdict), style="dim" if verdict.policy.is_default else "bold"),
            _ms(default),
            _ms(chosen),
            "0%" if verdict.policy.is_default else f"{-verdict.gain:+.1%}",
            f"{verdict.spread:.1%}",
            _ms(verdict.ideal),
        )
    reasons = [
        Padding(Text(f"{number}. {verdict_text(verdict)}: {verdict.reason}"), (0, 0, 0, 2))
        for number, verdict in enumerate(verdicts, 1)
    ]
    return Group(table, Text("why:", style="bold"), *reasons)


def arms_table(metrics: Sequence[Metrics]) -> RenderableType:
    """All metrics of the arms of one case, in the order measured."""
    table = _table(
        "arm", ">total ms", ">spread", ">T/T0", ">S/T", ">share of ideal", ">compute slow-down",
        ">comm latency ms", ">hidden", ">SM MHz",
    )  # fmt: skip
    for m in metrics:
        table.add_row(
            m.arm,
            _ms(m.total),
            f"{m.total_spread:.1%}",
            f"{m.against_default:.3f}",
            f"{m.speedup:.2f}",
            "-" if m.gain_share is None else f"{m.gain_share:.0%}",
            f"{m.compute_slowdown:.2f}",
            _ms(m.comm_latency),
            f"{m.hidden_share:.0%}",
            "-" if m.sm_mhz is None else f"{m.sm_mhz:.0f}",
        )
    return table


def profile_report(profile: Profile) -> RenderableType:
    """One profile: key, policy, verdicts."""
    key = profile.key
    head = Table.grid(padding=(0, 2))
    for name, value in (
        ("GPU", key.gpu),
        ("topology", key.topology),
        ("driver", key.driver),
        ("torch", key.torch),
        ("NCCL", key.nccl),
        ("Triton", key.triton),
        ("written", f"{profile.created} by overlapctl {profile.overlapctl}"),
        ("verdict", profile.reason),
        ("policy", "\n".join(policy_text(profile.policy))),
    ):
        head.add_row(Text(name, style="bold"), Text(value))
    return Group(head, verdicts_report(profile.verdicts)) if profile.verdicts else head


def entries_table(entries: Sequence[Entry]) -> RenderableType:
    """List the files of the profile folder."""
    table = _table("name", "GPU", "written", ">cases", "verdict or problem")
    for entry in entries:
        profile = entry.profile
        if profile is None:
            table.add_row(Text(entry.path.name), "-", "-", "-", Text(entry.problem, style="red"))
        else:
            table.add_row(
                Text(entry.path.stem),
                Text(profile.key.gpu),
                profile.created,
                str(len(profile.verdicts)),
                Text(profile.reason),
            )
    return table


def checks_table(checks: Sequence[Check]) -> RenderableType:
    """Lines of a health report, each remedy below its line, and a count."""
    style = {Status.PASS: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}
    grid = Table.grid(padding=(0, 2))
    for check in checks:
        value = Text(check.value)
        if check.remedy:
            value.append(f"\n-> {check.remedy}", style="italic")
        grid.add_row(Text(check.status.value, style=style[check.status]), Text(check.name), value)
    counts = ", ".join(
        f"{sum(check.status is status for check in checks)} {status.value}" for status in Status
    )
    return Group(grid, Text(counts, style="bold"))


def explanation_table(
    policy: Policy,
    reason: str,
    attachment: str,
    kernels: Sequence[Applied],
    history: Sequence[PolicyChange] = (),
) -> str:
    """Render what a session did to each kernel, as plain text.

    Parameters
    ----------
    policy, reason
        The policy in force and where it comes from.
    attachment
        How the shim is attached, or ``"not attached"``.
    kernels
        One row for each kernel, launch counts of the session.
    history
        The region's policies so far, oldest first; listed if there has been more than one.
    """
    head = [
        f"policy: {'; '.join(policy_text(policy))}",
        f"because: {reason}",
        f"shim: {attachment}",
    ]
    if len(history) > 1:
        head.append("history:")
        head += [f"  {c.when}  {'; '.join(policy_text(c.policy))}; {c.reason}" for c in history]
    if not kernels:
        return "\n".join([*head, "no kernel was launched"])
    table = _table(
        "kernel", "role", ">launches", ">shaped", ">priority", ">smem before", ">after",
        ">blocks/SM", "rule",
    )  # fmt: skip
    for row in kernels:
        before, after = (str(n) if n else "?" for n in (row.blocks_before, row.blocks_after))
        failed = f" ({row.failed} failed and repeated as asked)" if row.failed else ""
        table.add_row(
            Text(_shortened(row.kernel)),
            row.role.value,
            str(row.launches),
            str(row.shaped),
            str(row.prioritised),
            str(row.before),
            str(row.after),
            before if before == after else f"{before} -> {after}",
            f"{row.rule.value}{failed}",
        )
    return "\n".join([*head, as_text(table, width=160)])


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        right = column.startswith(">")
        table.add_column(
            column.lstrip(">"), justify="right" if right else "left", no_wrap=right, overflow="fold"
        )
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def _shortened(name: str, most: int = 60) -> str:
    return name if len(name) <= most else f"{name[: most - 3]}..."
