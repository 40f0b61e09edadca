"""Rows of the shim's table, as growth between two readings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from overlapctl.records import Applied

__all__ = ["rows_since"]

_COUNTS = ("launches", "shaped", "prioritised", "carved", "failed", "captured")


def rows_since(now: Sequence[Applied], before: Sequence[Applied]) -> tuple[Applied, ...]:
    """Return rows whose launches grew from ``before`` to ``now``, with the growth as counts.

    Rows of one kernel name and configuration are added up: a kernel that is loaded twice has two.
    """
    total: dict[tuple[str, int, int, int, int], Applied] = {}
    counts: dict[tuple[str, int, int, int, int], dict[str, Any]] = {}
    for sign, rows in ((-1, before), (1, now)):
        for row in rows:
            key = (row.kernel, row.threads, row.registers, row.static_smem, row.before)
            sums = counts.setdefault(key, dict.fromkeys(_COUNTS, 0))
            for name in _COUNTS:
                sums[name] += sign * getattr(row, name)
            total[key] = row
    return tuple(
        dataclasses.replace(row, **counts[key])
        for key, row in total.items()
        if counts[key]["launches"] > 0
    )
