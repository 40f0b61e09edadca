"""``overlapctl plan``: what would help, by prediction, without a measurement."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overlapctl.errors import DeviceError

if TYPE_CHECKING:
    from overlapctl.device.protocol import Device

__all__ = ["plan"]

_LEAST_WORLD = 2


class Form(str, enum.Enum):
    """Forms of a case."""

    PAIR = "pair"
    PIPELINE = "pipeline"


def plan(
    compute: Annotated[
        str,
        typer.Option(help="Compute workload, for example gemm:8192x8192x8192:bf16:64x64x64."),
    ],
    comm: Annotated[
        str,
        typer.Option(help="Collective, for example all_reduce:896MB (MB is 2^20 bytes)."),
    ],
    device: Annotated[
        str | None,
        typer.Option(help="A model of the catalogue (a40, sim:h200,world=8 ...) or cuda, cuda:1."),
    ] = None,
    form: Annotated[
        Form,
        typer.Option(
            help="pair: issued while the kernel runs; pipeline: 8 stages, each collective on the "
            "result of its stage."
        ),
    ] = Form.PAIR,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document, and nothing else, on stdout.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the predicted timeline into this file (needs matplotlib)."),
    ] = None,
) -> None:
    """Predict what each lever would do, choose, and say why; nothing is measured or stored."""
    from overlapctl.cli.console import console, show
    from overlapctl.plan.choose import plan_case
    from overlapctl.records import Case
    from overlapctl.reports.plan_plot import check_plot_file, plot_plan
    from overlapctl.reports.plan_text import predicted_document, predicted_report
    from overlapctl.specs import parse_comm, parse_compute

    case = Case(compute=parse_compute(compute), comm=parse_comm(comm), form=form.value)
    opened = _open(device)
    if plot is not None:
        check_plot_file(plot)
    gpus = len(opened.topology().devices)
    notices = console(to_stderr=True)
    if gpus < _LEAST_WORLD and case.comm.op != "local_copy":
        notices.print(f"one GPU is visible: a collective of {_LEAST_WORLD} ranks is assumed")
    planned = plan_case(
        opened.facts(),
        case,
        world=max(_LEAST_WORLD, gpus),
        nccl_version=opened.versions()["nccl"],
    )
    if plot is not None:
        plot_plan(planned.plan, planned.timelines, plot)
        notices.print(f"timeline: {plot}", markup=False)
    if as_json:
        simulated = opened.is_simulated
        text = predicted_document(planned.plan, device=opened.spec, simulated=simulated)
        typer.echo(text)
    else:
        show(predicted_report(planned.plan))


def _open(text: str | None) -> Device:
    """Open a device; a catalogue name may stand without ``sim:``."""
    from overlapctl.device import open_device
    from overlapctl.device.catalogue import model_names

    if text is None:
        return open_device(None)
    name = text.strip()
    if name.partition(":")[0] in ("cuda", "sim"):
        return open_device(name)
    if name.partition(",")[0].strip().lower() not in model_names():
        raise DeviceError(
            f"--device {text!r} is no GPU model of the catalogue",
            remedy=f"use cuda, or one of {', '.join(model_names())}",
        )
    return open_device(f"sim:{name}")
