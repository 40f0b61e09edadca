"""A real NCCL kernel on one GPU: a communicator of one rank that sends to itself.

NCCL copies by plain memcpy where a collective has one rank, but a grouped send and receive to the
own rank goes through its point-to-point kernel, with NCCL's footprint. That lets one GPU show what
shaping and priority do for NCCL. The library is the one torch has loaded; only its documented C
API is used.
"""

from __future__ import annotations

import ctypes
from importlib import metadata
from pathlib import Path
from typing import Any

from overlapctl.errors import DeviceError, MeasurementError

__all__ = ["NcclSelf"]

_UNIQUE_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES
_INT8 = 0  # ncclInt8


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * _UNIQUE_ID_BYTES),)


class NcclSelf:
    """A communicator of one rank on the current CUDA device.

    Raises
    ------
    DeviceError
        If NCCL cannot be loaded or refuses the communicator.
    """

    def __init__(self) -> None:
        self._library = _load()
        self._communicator = ctypes.c_void_p()
        identity = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(identity))
        self._call(
            "ncclCommInitRank", ctypes.byref(self._communicator), ctypes.c_int(1), identity, 0
        )

    def copy(self, dst: int, src: int, size: int, stream: int) -> None:
        """Enqueue a send of ``size`` bytes from address ``src`` to address ``dst``.

        Parameters
        ----------
        dst, src
            Device addresses.
        size
            Bytes.
        stream
            Handle of the stream.

        Raises
        ------
        MeasurementError
            If NCCL refuses.
        """
        if not self._communicator:
            raise MeasurementError("the NCCL communicator is closed", remedy="make a new one")
        peer = ctypes.c_int(0)
        count, kind = ctypes.c_size_t(size), ctypes.c_int(_INT8)
        where = ctypes.c_void_p(stream)
        self._call("ncclGroupStart")
        self._call("ncclSend", ctypes.c_void_p(src), count, kind, peer, self._communicator, where)
        self._call("ncclRecv", ctypes.c_void_p(dst), count, kind, peer, self._communicator, where)
        self._call("ncclGroupEnd")

    def close(self) -> None:
        """Destroy the communicator; may be called twice. Work must have ended."""
        if self._communicator:
            communicator, self._communicator = self._communicator, ctypes.c_void_p()
            self._call("ncclCommDestroy", communicator)

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name)
        function.restype = ctypes.c_int
        status = function(*arguments)
        if status != 0:
            describe = self._library.ncclGetErrorString
            describe.restype = ctypes.c_char_p
            text = (describe(status) or b"unknown").decode(errors="replace")
            raise MeasurementError(
                f"{name} failed: {text}", remedy="run again with NCCL_DEBUG=WARN to see why"
            )


def _load() -> ctypes.CDLL:
    """Load NCCL: by name if torch's is already mapped or on the path, else from its package."""
    tried = []
    for candidate in ["libnccl.so.2", *_packaged()]:
        try:
            return ctypes.CDLL(candidate)
        except OSError as error:
            tried.append(str(error))
    raise DeviceError(
        f"NCCL cannot be loaded ({'; '.join(tried)})",
        remedy="install a CUDA build of torch, which brings NCCL along",
    )


def _packaged() -> list[str]:
    """Paths of libnccl in installed nvidia-nccl packages."""
    found = []
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        found += [str(Path(str(f.locate()))) for f in files if f.name.startswith("libnccl.so")]
    return found
