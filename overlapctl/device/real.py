"""The GPU in this machine."""

from __future__ import annotations

import dataclasses
import functools
import sys

from overlapctl.device import cuda, nvml
from overlapctl.device.probe import PCIE_GBPS, differences, read_facts
from overlapctl.device.simulated import installed_version
from overlapctl.device.topology import read_topology
from overlapctl.records import Clocks, DeviceFacts, Topology

__all__ = ["RealDevice", "current_index"]


class RealDevice:
    """A GPU of this machine; implements :class:`~overlapctl.device.protocol.Device`.

    Parameters
    ----------
    index
        Index among the GPUs visible to the process, as torch counts.

    Raises
    ------
    DeviceError
        If there is no driver, or no such GPU.
    """

    is_simulated = False

    def __init__(self, index: int) -> None:
        self._handle = cuda.device_handle(index)
        self._index = index

    def __repr__(self) -> str:
        return f"RealDevice({self._index})"

    @property
    def spec(self) -> str:
        """``"cuda:0"`` and so on."""
        return f"cuda:{self._index}"

    def facts(self) -> DeviceFacts:
        """Facts by the driver, completed from the catalogue; read once."""
        return self._facts

    def differences(self) -> list[str]:
        """List where the driver contradicts the catalogue, one sentence each."""
        return differences(self.facts())

    def topology(self) -> Topology:
        """All GPUs the process sees and how each reaches each other; read once."""
        return self._topology

    def clocks(self) -> Clocks:
        """Clocks, power and temperature now; ``None`` for what NVML does not give."""
        return nvml.read_clocks(self._address)

    def versions(self) -> dict[str, str]:
        """Versions of ``driver``, ``torch``, ``nccl`` and ``triton``; ``"none"`` if missing."""
        return {
            "driver": nvml.driver_version() or cuda.driver_version(),
            "torch": installed_version("torch"),
            "nccl": _nccl_version(),
            "triton": installed_version("triton"),
        }

    @functools.cached_property
    def _facts(self) -> DeviceFacts:
        facts = read_facts(self._index)
        mine = [link for link in self.topology().links if link.source == self._index]
        if mine and all(link.kind != "nvlink" for link in mine):
            # A model that can have NVLink, but here it has none: its bridge or switch is missing.
            rates = dataclasses.replace(facts.rates, link_gbps=round(PCIE_GBPS, 1))
            facts = dataclasses.replace(facts, rates=rates)
        return facts

    @functools.cached_property
    def _topology(self) -> Topology:
        return read_topology()

    @functools.cached_property
    def _address(self) -> cuda.PciAddress:
        return cuda.pci_address(self._handle)


def current_index() -> int:
    """Torch's current device, or 0 if torch is not loaded or does not use CUDA yet."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.current_device())


def _nccl_version() -> str:
    """Version of the NCCL that torch uses, or ``"none"``."""
    try:
        import torch

        version = torch.cuda.nccl.version()
    except (ImportError, AttributeError, RuntimeError):  # no torch, or one without NCCL
        return "none"
    return ".".join(str(part) for part in version if not isinstance(part, bytes))
