"""Collectives on the copy engines: schedules as data, their proof, and what runs them.

:class:`Group` is the surface. ``schedule``, ``algorithms``, ``check``, ``dataflow`` and ``host``
need no GPU; ``driver`` is what the rest needs from one.
"""

from __future__ import annotations

from overlapctl.collectives.group import Group, Options

__all__ = ["Group", "Options"]
