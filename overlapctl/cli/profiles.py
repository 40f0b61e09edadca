"""``overlapctl profiles``: look at and tidy the tuner's memory."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(help="Look at and tidy the stored profiles.", no_args_is_help=True)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_Name = Annotated[str, typer.Argument(help="A name as `profiles list` shows it.")]


@app.command("list")
def list_profiles(as_json: _Json = False) -> None:
    """List the stored profiles, and files that cannot be used with the reason."""
    from overlapctl.cli.console import show
    from overlapctl.profiles import ProfileStore
    from overlapctl.reports.as_json import profiles_document
    from overlapctl.reports.text import entries_table

    store = ProfileStore()
    entries = store.entries()
    if as_json:
        typer.echo(profiles_document(store.folder, entries))
    elif not entries:
        typer.echo(f"no profile in {store.folder}: `overlapctl tune` makes one")
    else:
        show(entries_table(entries))


@app.command("show")
def show_profile(name: _Name, as_json: _Json = False) -> None:
    """Show one profile: what it is valid for, its policy and its verdicts."""
    from overlapctl.cli.console import show
    from overlapctl.profiles import ProfileStore, dump_profile
    from overlapctl.reports.text import profile_report

    profile = ProfileStore().named(name)
    if as_json:
        typer.echo(dump_profile(profile), nl=False)
    else:
        show(profile_report(profile))


@app.command("remove")
def remove(name: _Name) -> None:
    """Delete one file of the profile folder."""
    from overlapctl.profiles import ProfileStore

    typer.echo(f"removed {ProfileStore().remove(name)}")


@app.command("path")
def path() -> None:
    """Print the folder the profiles are in."""
    from overlapctl.profiles import default_folder

    typer.echo(str(default_folder()))
