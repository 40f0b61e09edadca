"""The command line: one module per command; this one ties them together.

Errors raised on purpose end here, as two lines on stderr and the exit code of their class
(:mod:`overlapctl.errors`). Wrong options are refused by typer with exit code 2.
"""

from __future__ import annotations

from overlapctl.cli.app import app, main

__all__ = ["app", "main"]
