"""The typer application and the one place where errors become exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import overlapctl
from overlapctl.cli import doctor, plan, profiles, run, tune
from overlapctl.errors import OverlapctlError

__all__ = ["app", "main"]

app = typer.Typer(
    name="overlapctl",
    help="Make computation and communication share a GPU well.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("tune")(tune.tune)
app.command("plan")(plan.plan)
app.command("doctor")(doctor.doctor)
app.command("run", context_settings=run.CONTEXT_SETTINGS)(run.run)
app.add_typer(profiles.app, name="profiles")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"overlapctl {overlapctl.__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Make computation and communication share a GPU well."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Parameters
    ----------
    arguments
        Instead of ``sys.argv[1:]``.

    Raises
    ------
    SystemExit
        Always: 0, 1 for a failed check, 2 for wrong usage, else the code of the error's class.
    """
    try:
        app(args=None if arguments is None else list(arguments))
    except OverlapctlError as error:
        typer.echo(f"Error: {error.what}\nRemedy: {error.remedy}", err=True)
        sys.exit(error.exit_code)
