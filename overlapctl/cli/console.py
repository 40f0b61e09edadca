"""Where commands print: reports on stdout, progress and notices on stderr."""

from __future__ import annotations

import sys

from rich.console import Console, RenderableType

__all__ = ["PIPE_WIDTH", "console", "show"]

PIPE_WIDTH = 160
"""Columns where the output is no terminal: files and logs should not be folded at 80."""


def show(report: RenderableType) -> None:
    """Print a report on stdout."""
    console(to_stderr=False).print(report)


def console(*, to_stderr: bool) -> Console:
    """Console on stdout or stderr as they are now."""
    stream = sys.stderr if to_stderr else sys.stdout
    return Console(
        file=stream, highlight=False, width=None if stream.isatty() else PIPE_WIDTH, emoji=False
    )
