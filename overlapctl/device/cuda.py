"""The few calls to the CUDA driver that facts need, with errors a user can act on."""

from __future__ import annotations

from importlib import metadata
from typing import Any, NamedTuple

from overlapctl.errors import DeviceError

__all__ = [
    "PciAddress",
    "attribute",
    "can_access_peer",
    "device_count",
    "device_handle",
    "device_name",
    "driver_version",
    "memory_bytes",
    "pci_address",
    "priority_range",
]

_SIMULATE = 'or simulate one with "sim:h200"'
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_STUB_LIBRARY = 34  # CUDA_ERROR_STUB_LIBRARY
_SYSTEM_DRIVER_MISMATCH = 803
_SYSTEM_NOT_READY = 802


class PciAddress(NamedTuple):
    """Where a GPU sits; the only identity that CUDA and NVML share however devices are hidden."""

    domain: int
    bus: int
    device: int

    def __str__(self) -> str:
        """Render as NVML reads it, for example ``00000000:3B:00.0``."""
        return f"{self.domain:08X}:{self.bus:02X}:{self.device:02X}.0"


def device_count() -> int:
    """Initialise the driver and count the GPUs visible to the process (at least 1).

    Raises
    ------
    DeviceError
        If cuda-bindings or the driver is missing, torch is a ROCm build, or no GPU is visible.
    """
    driver = _bindings()
    try:
        _call("cuInit", driver.cuInit(0))
        count: int = _call("cuDeviceGetCount", driver.cuDeviceGetCount())
    except DeviceError:
        raise
    except Exception as error:  # what is raised for a missing libcuda differs by cuda-bindings
        raise _no_driver(str(error)) from error
    if count < 1:
        raise _no_gpu()
    return count


def device_handle(index: int) -> Any:
    """Driver handle of the GPU with this index.

    Raises
    ------
    DeviceError
        As :func:`device_count`, or if the index is out of range.
    """
    count = device_count()
    if not 0 <= index < count:
        known = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise DeviceError(
            f"device 'cuda:{index}' does not exist, {count} visible",
            remedy=f"use {known}; CUDA_VISIBLE_DEVICES may hide others",
        )
    return _call("cuDeviceGet", _bindings().cuDeviceGet(index))


def device_name(handle: Any) -> str:
    """Name as the driver gives it, for example ``"NVIDIA H200"``."""
    name: bytes = _call("cuDeviceGetName", _bindings().cuDeviceGetName(256, handle))
    return name.split(b"\0")[0].decode().strip()


def memory_bytes(handle: Any) -> int:
    """Device memory in bytes."""
    return int(_call("cuDeviceTotalMem", _bindings().cuDeviceTotalMem(handle)))


def attribute(handle: Any, name: str) -> int:
    """Read ``CU_DEVICE_ATTRIBUTE_<name>``."""
    driver = _bindings()
    which = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(_call(f"cuDeviceGetAttribute({name})", driver.cuDeviceGetAttribute(which, handle)))


def pci_address(handle: Any) -> PciAddress:
    """PCI address of a GPU."""
    return PciAddress(
        attribute(handle, "PCI_DOMAIN_ID"),
        attribute(handle, "PCI_BUS_ID"),
        attribute(handle, "PCI_DEVICE_ID"),
    )


def can_access_peer(handle: Any, peer: Any) -> bool:
    """Whether the first GPU can map the second's memory."""
    return bool(_call("cuDeviceCanAccessPeer", _bindings().cuDeviceCanAccessPeer(handle, peer)))


def priority_range(handle: Any) -> tuple[int, int] | None:
    """Least and greatest stream priority, or ``None`` if the GPU takes no context now.

    The driver tells it only of a current context, so the primary one is held for the moment; where
    torch uses the GPU already it is the same one, elsewhere it is gone afterwards.
    """
    driver = _bindings()
    try:
        context = _call("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(handle))
    except DeviceError:  # no memory left, or an exclusive-process GPU that another one holds
        return None
    try:
        _call("cuCtxPushCurrent", driver.cuCtxPushCurrent(context))
        try:
            least, greatest = _call(
                "cuCtxGetStreamPriorityRange", driver.cuCtxGetStreamPriorityRange()
            )
        finally:
            driver.cuCtxPopCurrent()
    finally:
        driver.cuDevicePrimaryCtxRelease(handle)
    return int(least), int(greatest)


def driver_version() -> str:
    """CUDA version the driver supports, for example ``"CUDA 13.0"``."""
    number = int(_call("cuDriverGetVersion", _bindings().cuDriverGetVersion()))
    return f"CUDA {number // 1000}.{number % 1000 // 10}"


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(
            f"the CUDA driver cannot be called: {error}",
            remedy=f"pip install cuda-bindings, {_SIMULATE}",
        ) from error
    return driver


def _call(what: str, result: tuple[Any, ...]) -> Any:
    status, *values = result
    code = int(status)
    if code == _NO_DEVICE:
        raise _no_gpu()
    if code == _STUB_LIBRARY:
        raise _no_driver("only the toolkit's stub of libcuda was found")
    if code == _SYSTEM_DRIVER_MISMATCH:
        raise DeviceError(
            f"{what}: the driver library and the kernel module differ in version",
            remedy="reboot, or reload the nvidia kernel modules, after a driver update",
        )
    if code == _SYSTEM_NOT_READY:
        raise DeviceError(
            f"{what}: the system is not ready", remedy="start nvidia-fabricmanager (NVSwitch)"
        )
    if code:
        raise DeviceError(
            f"{what} failed: {getattr(status, 'name', code)}",
            remedy=f"see whether nvidia-smi works, {_SIMULATE}",
        )
    return values[0] if len(values) == 1 else tuple(values)


def _no_gpu() -> DeviceError:
    return DeviceError(
        "the driver sees no GPU", remedy=f"check nvidia-smi and CUDA_VISIBLE_DEVICES, {_SIMULATE}"
    )


def _no_driver(why: str) -> DeviceError:
    if _torch_is_rocm():
        return DeviceError(
            "torch is built for ROCm; AMD GPUs are planned for, not driven",
            remedy='simulate one, for example "sim:mi300x"',
        )
    return DeviceError(
        f"no NVIDIA driver: {why}",
        remedy=f"install the driver (in a container: start it with GPU access), {_SIMULATE}",
    )


def _torch_is_rocm() -> bool:
    try:
        return "rocm" in metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
