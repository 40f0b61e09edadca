"""The predicted timeline of a plan as a picture; needs matplotlib (the ``plot`` extra)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlapctl.errors import UsageError
from overlapctl.plan.arms import DEFAULT
from overlapctl.records import Plan
from overlapctl.reports.names import case_name

if TYPE_CHECKING:
    from overlapctl.plan.blocksim import Span
    from overlapctl.plan.simulate import SimulationResult

__all__ = ["check_plot_file", "plot_plan"]

_COLOURS = {"compute": "#4477aa", "comm": "#ee6677"}
_WAITING = "#bbbbbb"
_LABELS = {"compute": "compute", "comm": "collective"}


def check_plot_file(path: Path) -> None:
    """Refuse early what :func:`plot_plan` could not write.

    Raises
    ------
    UsageError
        If matplotlib is missing, it knows no such format, or the folder does not exist.
    """
    figure = _figure()
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise UsageError(
            f"--plot {path} names no picture format",
            remedy=f"use one of {', '.join('.' + kind for kind in sorted(known))}",
        )
    if not path.resolve().parent.is_dir():
        raise UsageError(
            f"the folder of --plot {path} does not exist", remedy="make it, or name another file"
        )


def plot_plan(plan: Plan, timelines: Mapping[str, SimulationResult], path: Path) -> None:
    """Draw the predicted timelines of the default and the chosen candidate.

    Parameters
    ----------
    plan
        What was chosen.
    timelines
        By candidate, as :class:`~overlapctl.plan.choose.Planned` has them. Where the default was
        kept, that of the best runner-up is drawn beside it.
    path
        Picture file; the suffix decides the format.

    Raises
    ------
    UsageError
        As :func:`check_plot_file`.
    """
    check_plot_file(path)
    names = [DEFAULT]
    names += [plan.chosen] if plan.chosen != DEFAULT else list(plan.runners_up[:1])
    figure = _figure(rows=len(names))
    for place, name in enumerate(names, 1):
        axes = figure.add_subplot(len(names), 1, place)
        _draw(axes, timelines[name], _title(plan, name, timelines[name]), plan.ideal)
    end = max(timelines[name].total for name in names)
    for axes in figure.axes:
        axes.set_xlim(0, 1.02 * end)
    figure.axes[-1].set_xlabel("ms after the compute kernel's start (predicted)")
    figure.suptitle(f"{case_name(plan.case)} on {plan.gpu}\nrule: {plan.rule}", fontsize=10)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path)


def _figure(rows: int = 1) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "matplotlib, which draws --plot, is not installed",
            remedy="install it with: pip install 'overlapctl[plot]'",
        ) from None
    return Figure(figsize=(9, 1.3 + 1.5 * rows), dpi=120)


def _title(plan: Plan, name: str, timeline: SimulationResult) -> str:
    chosen = " (chosen)" if name == plan.chosen else ""
    return f"{name}{chosen}: {timeline.total:.2f} ms"


def _draw(axes: Any, timeline: SimulationResult, title: str, ideal: float) -> None:
    rows = ("comm", "compute")
    seen: set[str] = set()
    for span in timeline.spans:
        side = "comm" if span.name.startswith("comm") else "compute"
        row = rows.index(side)
        for start, end, colour, label in _parts(span, side):
            if end <= start:
                continue
            axes.barh(
                row, end - start, left=start, height=0.6, color=colour, edgecolor="white",
                linewidth=0.5, label=None if label in seen else label,
            )  # fmt: skip
            seen.add(label)
    axes.axvline(ideal, color="black", linestyle=":", linewidth=1, label="the longer side alone")
    axes.set_yticks(range(len(rows)), [_LABELS[side] for side in rows])
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set_title(title, fontsize=9, loc="left")
    for edge in ("top", "right"):
        axes.spines[edge].set_visible(False)


def _parts(span: Span, side: str) -> list[tuple[float, float, str, str]]:
    """List waiting, then running; a collective moves data once its last block is placed."""
    start = span.last_placed if side == "comm" else span.first_placed
    return [
        (span.ready, start, _WAITING, "waiting for SMs"),
        (start, span.end, _COLOURS[side], f"{_LABELS[side]} runs"),
    ]
