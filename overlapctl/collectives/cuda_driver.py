"""The collectives' :class:`~overlapctl.collectives.driver.Driver` on a CUDA GPU.

Memory, copies and flags go through cuda-bindings, streams and events through torch, so that they
order with torch's own. Streams are created here and not taken from torch's pool: that pool hands
the same 32 streams out again and again, and a wait on one of them would stop a stranger's work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from overlapctl.collectives.driver import FLAG_MODULUS, Copy
from overlapctl.errors import DeviceError

__all__ = ["CudaDriver"]

_HANDLE_BYTES = 64  # sizeof(CUipcMemHandle)
_PORTABLE_MAPPED = 0x01 | 0x02  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Memory:
    """Device memory under the CUDA array interface, which torch wraps without copying."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


class CudaDriver:
    """One CUDA GPU.

    Parameters
    ----------
    device
        CUDA device index as torch counts.

    Raises
    ------
    DeviceError
        cuda-bindings is missing or too old for 32-bit stream memory operations.
    """

    is_cuda = True

    def __init__(self, device: int) -> None:
        import torch

        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise DeviceError(
                f"cuda-bindings cannot be imported ({error})",
                remedy="install cuda-bindings 12.8 or newer",
            ) from error
        self._torch, self._cu = torch, driver
        self._device = torch.device("cuda", device)
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().synchronize()  # makes the primary context
            _, greatest = self._call("cuCtxGetStreamPriorityRange")
        self._priority = int(greatest)
        self._attributes = self._overlap_attributes()

    # --- memory ------------------------------------------------------------------------------

    def allocate(self, size: int) -> int:
        """See :class:`Driver`; raises ``DeviceError`` if the GPU has no memory left."""
        return int(self._call("cuMemAlloc", size))

    def free(self, address: int) -> None:
        """See :class:`Driver`."""
        self._call("cuMemFree", self._cu.CUdeviceptr(address))

    def export(self, address: int) -> bytes:
        """See :class:`Driver`."""
        handle = self._call("cuIpcGetMemHandle", self._cu.CUdeviceptr(address))
        return ctypes.string_at(int(handle.getPtr()), _HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        """See :class:`Driver`."""
        opaque = self._cu.CUipcMemHandle()
        ctypes.memmove(int(opaque.getPtr()), handle, _HANDLE_BYTES)
        return int(self._call("cuIpcOpenMemHandle", opaque, _LAZY_PEER_ACCESS))

    def close(self, address: int) -> None:
        """See :class:`Driver`."""
        self._call("cuIpcCloseMemHandle", self._cu.CUdeviceptr(address))

    def map_host(self, address: int, size: int) -> int:
        """See :class:`Driver`."""
        self._call("cuMemHostRegister", address, size, _PORTABLE_MAPPED)
        return int(self._call("cuMemHostGetDevicePointer", address, 0))

    def unmap_host(self, address: int) -> None:
        """See :class:`Driver`."""
        self._call("cuMemHostUnregister", address)

    # --- streams and events ------------------------------------------------------------------

    def create_stream(self) -> Any:
        """See :class:`Driver`."""
        handle = int(self._call("cuStreamCreateWithPriority", _NON_BLOCKING, self._priority))
        return self._torch.cuda.ExternalStream(handle, device=self._device)

    def destroy_stream(self, stream: Any) -> None:
        """See :class:`Driver`."""
        self._call("cuStreamDestroy", stream.cuda_stream)

    def current_stream(self) -> Any:
        """See :class:`Driver`."""
        return self._torch.cuda.current_stream(self._device)

    def is_capturing(self) -> bool:
        """See :class:`Driver`."""
        with self._torch.cuda.device(self._device):
            return bool(self._torch.cuda.is_current_stream_capturing())

    def record(self, stream: Any) -> Any:
        """See :class:`Driver`."""
        event = self._torch.cuda.Event()
        event.record(stream)
        return event

    def wait_event(self, stream: Any, event: Any) -> None:
        """See :class:`Driver`."""
        stream.wait_event(event)

    def is_complete(self, event: Any) -> bool:
        """See :class:`Driver`."""
        return bool(event.query())

    # --- work --------------------------------------------------------------------------------

    def copy(self, copies: Sequence[Copy], stream: Any) -> None:
        """See :class:`Driver`.

        Copies within the GPU carry the driver's hint to leave the SMs alone, where it has one;
        between GPUs the copy engines are used anyway.
        """
        local = [c for c in copies if c.is_local and c.size]
        if local and self._attributes is not None:
            self._batch(local, stream, self._attributes)
            copies = [c for c in copies if not c.is_local]
        with self._torch.cuda.device(self._device):
            for copy in copies:
                if copy.size:
                    self._check(
                        self._cu.cuMemcpyAsync(
                            self._cu.CUdeviceptr(copy.dst),
                            self._cu.CUdeviceptr(copy.src),
                            copy.size,
                            stream.cuda_stream,
                        ),
                        "cuMemcpyAsync",
                    )

    def fill(self, address: int, value: int, size: int, stream: Any) -> None:
        """See :class:`Driver`."""
        if size:
            pointer = self._cu.CUdeviceptr(address)
            self._call("cuMemsetD8Async", pointer, value, size, stream.cuda_stream)

    def write_flag(self, address: int, value: int, stream: Any) -> None:
        """See :class:`Driver`."""
        self._flag("cuStreamWriteValue32", address, value, 0, stream)

    def wait_flag(self, address: int, value: int, stream: Any) -> None:
        """See :class:`Driver`."""
        self._flag("cuStreamWaitValue32", address, value, _GEQ, stream)

    def allocation(self, address: int) -> tuple[int, int]:
        """See :class:`Driver`."""
        base, size = self._call("cuMemGetAddressRange", self._cu.CUdeviceptr(address))
        return int(base), int(size)

    def view(self, address: int, numel: int, dtype: Any) -> Any:
        """See :class:`Driver`."""
        size = numel * dtype.itemsize
        memory = self._torch.as_tensor(_Memory(address, size), device=self._device)
        return memory.view(dtype)

    def compute(self, work: Callable[[], None], stream: Any) -> None:
        """See :class:`Driver`."""
        with self._torch.cuda.stream(stream):
            work()

    # --- plumbing ----------------------------------------------------------------------------

    def _flag(self, name: str, address: int, value: int, mode: int, stream: Any) -> None:
        pointer = self._cu.CUdeviceptr(address)
        self._call(name, stream.cuda_stream, pointer, value % FLAG_MODULUS, mode)

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._torch.cuda.device(self._device):
            return self._check(getattr(self._cu, name)(*arguments), name)

    def _check(self, result: tuple[Any, ...], name: str) -> Any:
        status, *values = result
        if int(status) != 0:
            reason = getattr(status, "name", status)
            raise DeviceError(
                f"{name} failed on {self._device}: {reason}",
                remedy="use collectives='nccl' here, or see the CUDA driver's text on this error",
            )
        if len(values) == 1:
            return values[0]
        return tuple(values)

    def _overlap_attributes(self) -> Any:
        """Attributes of batched copies that keep off the SMs; ``None``: the driver has none.

        Tried with one small copy, since bindings may know of what the driver does not.
        """
        flags = getattr(self._cu, "CUmemcpyFlags", None)
        if flags is None or not hasattr(self._cu, "cuMemcpyBatchAsync"):
            return None
        attributes = self._cu.CUmemcpyAttributes()
        attributes.srcAccessOrder = (
            self._cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        )
        attributes.flags = int(flags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
        stream = self.create_stream()
        memory = self.allocate(512)
        try:
            self._batch([Copy(memory, memory + 256, 256, True)], stream, attributes)
            stream.synchronize()
        except (DeviceError, AttributeError, RuntimeError, TypeError, ValueError):
            return None
        finally:
            self.free(memory)
            self.destroy_stream(stream)
        return attributes

    def _batch(self, copies: Sequence[Copy], stream: Any, attributes: Any) -> None:
        self._call(
            "cuMemcpyBatchAsync",
            [self._cu.CUdeviceptr(c.dst) for c in copies],
            [self._cu.CUdeviceptr(c.src) for c in copies],
            [c.size for c in copies],
            len(copies),
            [attributes],
            [0],
            1,
            stream.cuda_stream,
        )
