"""Make computation and communication share a GPU well.

>>> import overlapctl
>>> with overlapctl.overlap(smem_reserve="auto") as session:  # doctest: +SKIP
...     loss = train_step(batch)
>>> print(session.explain())  # doctest: +SKIP

Importing this package touches no GPU and imports neither torch nor triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlapctl.errors import OverlapctlError, OverlapctlWarning
    from overlapctl.integrations.process_groups import process_group_options
    from overlapctl.launch.triton_hook import shaped
    from overlapctl.records import KernelRule, Policy
    from overlapctl.session import overlap

__all__ = [
    "KernelRule",
    "OverlapctlError",
    "OverlapctlWarning",
    "Policy",
    "overlap",
    "process_group_options",
    "shaped",
]

__version__ = "0.1.0"

_HOME = {
    "KernelRule": "overlapctl.records",
    "OverlapctlError": "overlapctl.errors",
    "OverlapctlWarning": "overlapctl.errors",
    "Policy": "overlapctl.records",
    "overlap": "overlapctl.session",
    "process_group_options": "overlapctl.integrations.process_groups",
    "shaped": "overlapctl.launch.triton_hook",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'overlapctl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
