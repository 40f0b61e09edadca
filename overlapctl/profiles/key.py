"""What a profile is valid for: the machine and the software that was measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlapctl.records import ProfileKey

if TYPE_CHECKING:
    from overlapctl.device.protocol import Device

__all__ = ["FieldDifference", "differences", "profile_key"]


@dataclass(frozen=True)
class FieldDifference:
    """One field of a stored key that does not match the key asked for."""

    field: str
    stored: str
    here: str

    def __str__(self) -> str:
        """Render as ``driver is 580.159, the profile's is 570.86``."""
        return f"{self.field} is {self.here!r}, the profile's is {self.stored!r}"


def profile_key(device: Device) -> ProfileKey:
    """Make the key of the machine behind ``device``.

    A simulated device is marked as such in ``gpu``: what was simulated must never be taken for
    measured.

    Parameters
    ----------
    device
        A real or a simulated device.

    Returns
    -------
    ProfileKey
        Versions the device does not know are ``"unknown"``.
    """
    versions = device.versions()
    name = device.facts().name

    def version(of: str) -> str:
        return versions.get(of) or "unknown"

    return ProfileKey(
        gpu=f"{name} (simulated)" if device.is_simulated else name,
        driver=version("driver"),
        torch=version("torch"),
        nccl=version("nccl"),
        triton=version("triton"),
        topology=device.topology().signature,
    )


def differences(stored: ProfileKey, here: ProfileKey) -> tuple[FieldDifference, ...]:
    """List the fields in which two keys differ, in the order of :class:`ProfileKey`."""
    return tuple(
        FieldDifference(f.name, getattr(stored, f.name), getattr(here, f.name))
        for f in dataclasses.fields(ProfileKey)
        if getattr(stored, f.name) != getattr(here, f.name)
    )
