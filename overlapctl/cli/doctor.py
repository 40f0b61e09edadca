"""``overlapctl doctor``: whether what overlapping needs is here, and nothing in its way."""

from __future__ import annotations

import os
from typing import Annotated

import typer

__all__ = ["doctor"]


def doctor(
    device: Annotated[
        str | None,
        typer.Option(help="cuda, cuda:1, sim:h200 ... Default: the GPU, else sim:h200."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check driver, GPU, versions, shim, profile, environment and cache folder.

    Exit code 1 if anything failed.
    """
    from overlapctl.cli.console import show
    from overlapctl.cli.environment_checks import check_environment
    from overlapctl.cli.machine_checks import check_machine
    from overlapctl.reports.as_json import checks_document
    from overlapctl.reports.checks import Status
    from overlapctl.reports.text import checks_table

    checks = [*check_machine(device), *check_environment(os.environ)]
    if as_json:
        typer.echo(checks_document(checks))
    else:
        show(checks_table(checks))
    if any(check.status is Status.FAIL for check in checks):
        raise typer.Exit(1)
