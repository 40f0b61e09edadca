"""Every environment variable overlapctl reads, with its meaning and range.

=========================  ======================================================================
``OVERLAPCTL_CACHE_DIR``   Folder for profiles instead of the user's cache folder.
``OVERLAPCTL_DISABLE``     ``1``: the shim never attaches and ``overlap()`` changes nothing.
``OVERLAPCTL_SHIM``        Set by ``overlapctl run`` for the preloaded shim: its own path.
``OVERLAPCTL_POLICY``      Set by ``overlapctl run``: the policy in force from the program's start,
                           as ``key=value;...`` (keys: ``launch/policy_text.py``). Only the
                           preloaded shim reads it; what it does not understand is left out.
=========================  ======================================================================
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CACHE_DIR", "DISABLE", "POLICY", "SHIM", "cache_dir", "is_disabled"]

CACHE_DIR = "OVERLAPCTL_CACHE_DIR"
DISABLE = "OVERLAPCTL_DISABLE"
SHIM = "OVERLAPCTL_SHIM"
POLICY = "OVERLAPCTL_POLICY"


def cache_dir() -> Path | None:
    """Folder named by ``OVERLAPCTL_CACHE_DIR``, or ``None`` if it is unset or empty."""
    value = os.environ.get(CACHE_DIR, "")
    return Path(value).expanduser() if value else None


def is_disabled() -> bool:
    """Tell if ``OVERLAPCTL_DISABLE`` is set to anything but ``0`` or nothing."""
    return os.environ.get(DISABLE, "0") not in ("", "0")
