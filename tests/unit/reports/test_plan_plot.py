"""The predicted timeline as a picture."""

import sys

import pytest

from overlapctl.device import open_device
from overlapctl.errors import UsageError
from overlapctl.plan.choose import Planned, plan_case
from overlapctl.records import Case
from overlapctl.reports.plan_plot import check_plot_file, plot_plan
from overlapctl.specs import parse_comm, parse_compute


def planned(compute: str, form: str = "pair") -> Planned:
    case = Case(compute=parse_compute(compute), comm=parse_comm("all_reduce:256MB"), form=form)
    return plan_case(open_device("sim:h200").facts(), case)


@pytest.mark.parametrize("form", ["pair", "pipeline"])
@pytest.mark.parametrize(
    "compute", ["gemm:8192x8192x8192:bf16:64x64x64", "gemm:8192x8192x8192:bf16"]
)
def test_default_and_choice_are_drawn(monkeypatch, tmp_path, compute, form):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    save = figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, path: (drawn.append(self), save(self, path))
    )
    made = planned(compute, form)
    path = tmp_path / "plan.png"
    plot_plan(made.plan, made.timelines, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    titles = [axes.get_title(loc="left") for axes in drawn[0].axes]
    assert titles[0].startswith("default")
    assert len(titles) == 2
    assert sum("(chosen)" in title for title in titles) == 1
    # Both time axes end alike, so that bars can be compared by eye, and hold every bar.
    ends = [axes.get_xlim()[1] for axes in drawn[0].axes]
    assert ends[0] == ends[1]
    bars = [bar for axes in drawn[0].axes for bar in axes.patches]
    assert max(bar.get_x() + bar.get_width() for bar in bars) <= ends[0]


def test_what_cannot_be_written_is_refused_with_the_remedy(tmp_path):
    pytest.importorskip("matplotlib.figure")
    with pytest.raises(UsageError, match=r"names no picture format.*\.png"):
        check_plot_file(tmp_path / "plan.docx")
    with pytest.raises(UsageError, match="does not exist"):
        check_plot_file(tmp_path / "missing" / "plan.png")
    check_plot_file(tmp_path / "plan.svg")


def test_missing_matplotlib_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"overlapctl\[plot\]"):
        check_plot_file(tmp_path / "plan.png")
