"""What the rest of overlapctl may ask of a device, real or simulated."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from overlapctl.records import Clocks, DeviceFacts, Topology

__all__ = ["Device"]


@runtime_checkable
class Device(Protocol):
    """One GPU, and the peers it communicates with.

    Everything but :meth:`clocks` is constant for the life of the process and may be cached.
    """

    @property
    def spec(self) -> str:
        """The text that :func:`~overlapctl.device.open_device` opens this device by."""

    @property
    def is_simulated(self) -> bool:
        """True if nothing this device says was read from hardware."""

    def facts(self) -> DeviceFacts:
        """Limits and rates of the GPU."""

    def topology(self) -> Topology:
        """All GPUs the process sees and how each reaches each other."""

    def clocks(self) -> Clocks:
        """Clocks, power and temperature now; ``None`` for what cannot be read."""

    def versions(self) -> dict[str, str]:
        """Versions of ``driver``, ``torch``, ``nccl`` and ``triton``; ``"none"`` if missing."""
