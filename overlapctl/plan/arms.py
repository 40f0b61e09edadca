"""Names of arms: a *shape* of the compute kernel's launches, with or without priority.

``"default"``, ``"priority"``, ``"3/SM"``, ``"priority+3/SM"``, ``"priority+carveout100"`` ...
Verdicts and profiles refer to arms by name, so the names are part of the profile format.
"""

from __future__ import annotations

import re

__all__ = ["DEFAULT", "NO_SHAPE", "PRIORITY", "arm_name", "split_arm_name", "target_of_shape"]

DEFAULT = "default"
"""Name of the arm that leaves the job untouched."""

PRIORITY = "priority"
"""Name of the arm that only raises the priority of communication launches."""

NO_SHAPE = ""
"""The shape that changes nothing."""


def arm_name(*, priority: bool, shape: str = NO_SHAPE) -> str:
    """Name the arm of a shape, with or without communication priority."""
    parts = ([PRIORITY] if priority else []) + ([shape] if shape else [])
    return "+".join(parts) or DEFAULT


def split_arm_name(name: str) -> tuple[bool, str]:
    """Undo :func:`arm_name`: whether priority is on, and the shape."""
    if name == DEFAULT:
        return False, NO_SHAPE
    if name == PRIORITY:
        return True, NO_SHAPE
    head, plus, tail = name.partition("+")
    return (True, tail) if plus and head == PRIORITY else (False, name)


def target_of_shape(shape: str) -> int | None:
    """Blocks per SM that a shape like ``"3/SM"`` asks for, ``None`` for other shapes."""
    match = re.fullmatch(r"(\d+)/SM", shape)
    return int(match[1]) if match else None
