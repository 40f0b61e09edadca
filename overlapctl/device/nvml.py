"""What NVML tells: clocks, power, driver version, NVLink. All of it may be missing; then ``None``.

NVML knows all GPUs of the machine, CUDA those that ``CUDA_VISIBLE_DEVICES`` leaves: a GPU is looked
up by its PCI address, never by its index. A MIG instance has its GPU's address, so its clocks and
power are the whole GPU's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from overlapctl.device.cuda import PciAddress
from overlapctl.records import Clocks

__all__ = ["NvLinks", "common_ancestor", "driver_version", "nvlinks", "read_clocks"]

# Bits of nvmlClocksEventReasons (nvml.h). "Idle" (bit 0) is left out: it is no throttling.
_REASONS = {
    1 << 1: "application-clocks",
    1 << 2: "software-power-cap",
    1 << 3: "hardware-slowdown",
    1 << 4: "sync-boost",
    1 << 5: "software-thermal",
    1 << 6: "hardware-thermal",
    1 << 7: "hardware-power-brake",
    1 << 8: "display-clocks",
}


class NvLinks(NamedTuple):
    """Active NVLinks of one GPU: into a switch, and directly to other GPUs."""

    to_switch: int
    to_gpu: dict[PciAddress, int]


def read_clocks(address: PciAddress) -> Clocks:
    """Read clocks, power and temperature now; ``None`` for what NVML does not give."""
    nvml, handle = _handle(address)
    if handle is None:
        return Clocks(sm_mhz=None, memory_mhz=None, power_w=None, temperature_c=None)
    power = _try(nvml, nvml.nvmlDeviceGetPowerUsage, handle)  # mW
    mask = _try(nvml, _reasons_function(nvml), handle) or 0
    return Clocks(
        sm_mhz=_try(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        memory_mhz=_try(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        power_w=None if power is None else power / 1000,
        temperature_c=_try(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        throttle_reasons=tuple(name for bit, name in _REASONS.items() if mask & bit),
    )


def driver_version() -> str | None:
    """Version of the driver, for example ``"580.159.03"``."""
    nvml = _nvml()
    version = None if nvml is None else _try(nvml, nvml.nvmlSystemGetDriverVersion)
    return version.decode() if isinstance(version, bytes) else version


def nvlinks(address: PciAddress) -> NvLinks | None:
    """Count a GPU's active NVLinks; ``None`` if NVML does not tell."""
    nvml, handle = _handle(address)
    if handle is None:
        return None
    switch, direct = 0, dict[PciAddress, int]()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if _try(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) != 1:
            continue  # inactive, or no such link on this GPU
        kind = _try(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            switch += 1
        elif pci := _try(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link):
            remote = PciAddress(pci.domain, pci.bus, pci.device)
            direct[remote] = direct.get(remote, 0) + 1
    return NvLinks(switch, direct)


def common_ancestor(address: PciAddress, peer: PciAddress) -> int | None:
    """PCIe level at which two GPUs meet: ``NVML_TOPOLOGY_*``, 40 and above across NUMA nodes."""
    nvml, handle = _handle(address)
    _, other = _handle(peer)
    if handle is None or other is None:
        return None
    level = _try(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, handle, other)
    return None if level is None else int(level)


@functools.cache
def _nvml() -> Any:
    """Load and initialise NVML once per process; ``None`` where it is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


@functools.cache
def _handle(address: PciAddress) -> tuple[Any, Any]:
    nvml = _nvml()
    if nvml is None:
        return None, None
    return nvml, _try(nvml, nvml.nvmlDeviceGetHandleByPciBusId, str(address).encode())


def _reasons_function(nvml: Any) -> Callable[..., Any]:
    # Renamed in NVML 12.2; drivers before that export only the old name.
    name = "nvmlDeviceGetCurrentClocksEventReasons"
    old = "nvmlDeviceGetCurrentClocksThrottleReasons"
    function: Callable[..., Any] = getattr(nvml, name, None) or getattr(nvml, old)
    return function


def _try(nvml: Any, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except nvml.NVMLError:  # not supported here, or no permission
        return None
