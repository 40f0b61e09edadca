"""The errors overlapctl raises on purpose.

::

    OverlapctlError                 exit code 1
    +-- UsageError (ValueError)     2   an argument is out of range or malformed
    +-- DeviceError                 3   no driver, no GPU, unknown device name, missing capability
    +-- AttachError                 4   the shim cannot be, or must not be, attached
    +-- ProfileError                5   a profile cannot be read, written or used
    +-- MeasurementError            6   a trial could not be run or gave unusable data
    +-- CollectiveError             7   a collective is wrong, was broken off or cannot be run

Every message names the field, the value it had and the remedy. The training job never dies of
overlapctl: in the hot path these are counted and reported once, and raised only with
``strict=True``.
"""

from __future__ import annotations

__all__ = [
    "AttachError",
    "CollectiveError",
    "DeviceError",
    "MeasurementError",
    "OverlapctlError",
    "OverlapctlWarning",
    "ProfileError",
    "UsageError",
]


class OverlapctlError(Exception):
    """Base of all errors raised by overlapctl.

    Parameters
    ----------
    what
        What went wrong: field, value, circumstance.
    remedy
        What the user can do about it.
    """

    exit_code = 1

    def __init__(self, what: str, *, remedy: str) -> None:
        super().__init__(f"{what} ({remedy})")
        self.what = what
        self.remedy = remedy


class UsageError(OverlapctlError, ValueError):
    """An argument is out of range, malformed or contradicts another one."""

    exit_code = 2


class DeviceError(OverlapctlError):
    """No driver, no GPU, an unknown device name or a missing capability."""

    exit_code = 3


class AttachError(OverlapctlError):
    """The shim cannot be attached, or must not be."""

    exit_code = 4


class ProfileError(OverlapctlError):
    """A profile cannot be read, written or used here."""

    exit_code = 5


class MeasurementError(OverlapctlError):
    """A trial could not be run, or what it measured cannot be used."""

    exit_code = 6


class CollectiveError(OverlapctlError):
    """A collective's schedule is wrong, or a peer died, stalled or called something else."""

    exit_code = 7


class OverlapctlWarning(UserWarning):
    """Something asked for did not take effect; the job goes on without it."""
