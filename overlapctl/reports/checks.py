"""One line of a health report."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Check", "Status"]


class Status(str, enum.Enum):
    """How a check came out."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Check:
    """What was looked at, how it is, and what to do if that is not good.

    Parameters
    ----------
    name
        For example ``"cache folder"``.
    status
        ``WARN``: overlapctl works, but with less effect or on a simulated device.
    value
        The effective value, with the reason for the status.
    remedy
        A line to follow or to paste; empty if nothing is wrong.
    """

    name: str
    status: Status
    value: str
    remedy: str = ""
