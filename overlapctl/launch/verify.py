"""Proof that launches are really altered: a probe kernel that tells what it was launched with.

The kernel stores ``%dynamic_smem_size``, the dynamic shared memory its block really got, to memory.
It is launched without any, under a policy that pads this one kernel; what it stored must be the
pad. Everything goes through the driver's public entries, as a program would call them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from overlapctl.errors import AttachError
from overlapctl.launch.shim import Shim
from overlapctl.records import KernelRule, Policy

__all__ = ["PROBE_KERNEL", "PROBE_PAD", "Verification", "verify"]

PROBE_KERNEL = "overlapctl_probe"
PROBE_PAD = 16384
"""Bytes: changes the residency of a one-warp block on every GPU, and needs no opt-in."""

# The lowest versions that know %dynamic_smem_size and that drivers still compile for any GPU.
_PTX = f"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry {PROBE_KERNEL}(.param .u64 out)
{{
  .reg .b32 %r<2>;
  .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [out];
  cvta.to.global.u64 %rd2, %rd1;
  mov.u32 %r1, %dynamic_smem_size;
  st.global.u32 [%rd2], %r1;
  ret;
}}
""".encode()

_STREAM_NON_BLOCKING = 1
_CAPTURE_MODE_RELAXED = 2
_NOT_WRITTEN = 0xFFFFFFFF


@dataclass(frozen=True)
class Verification:
    """What the probe asked for and what each way of launching gave it.

    ``seen`` pairs the driver entry with the bytes the kernel read; empty while ``pending``: no
    CUDA context was current yet, so nothing could be launched.
    """

    asked: int
    seen: tuple[tuple[str, int], ...] = ()

    @property
    def pending(self) -> bool:
        """True if nothing has been proved yet."""
        return not self.seen


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


def verify(shim: Shim, driver: str = "libcuda.so.1") -> Verification:
    """Launch the probe on the current context through each launch entry and check what it saw.

    Takes about a millisecond. While it runs, its policy (which names the probe kernel only) is in
    force instead of another one. Nothing is left behind, also on errors.

    Parameters
    ----------
    shim
        The attached shim.
    driver
        Path or name of the driver library.

    Raises
    ------
    AttachError
        If a launch was not altered as asked, or the probe could not be run.
    """
    call = _Driver(driver)
    context = ctypes.c_void_p()
    if call.library.cuCtxGetCurrent(ctypes.byref(context)) != 0 or not context.value:
        return Verification(PROBE_PAD)
    rule = KernelRule(pattern=PROBE_KERNEL, pad_bytes=PROBE_PAD)
    policy = Policy(include=(PROBE_KERNEL,), rules=(rule,))
    with _capture_tolerated(call), ExitStack() as undo:
        run = _prepare(call, undo)
        token = shim.push(policy)
        undo.callback(shim.pop, token)
        seen = tuple((entry, run(entry)) for entry in ("cuLaunchKernel", "cuLaunchKernelEx"))
    wrong = [(entry, value) for entry, value in seen if value != PROBE_PAD]
    if wrong:
        found = ", ".join(f"{value} by {entry}" for entry, value in wrong)
        raise AttachError(
            f"a launch asked to be padded by {PROBE_PAD} bytes got {found}",
            remedy="another library alters or bypasses the driver's entries: run "
            "`overlapctl doctor`, or start the program with `overlapctl run`",
        )
    return Verification(PROBE_PAD, seen)


class _Driver:
    """The driver library; ``driver("cuX", ...)`` raises unless the call succeeds."""

    def __init__(self, name: str) -> None:
        try:
            self.library = ctypes.CDLL(name)
        except OSError as error:
            raise AttachError(
                f"the driver {name} cannot be opened: {error}", remedy="install the NVIDIA driver"
            ) from None

    def __call__(self, entry: str, *arguments: Any) -> None:
        status = getattr(self.library, entry)(*arguments)
        if status != 0:
            raise AttachError(
                f"the probe kernel could not be run: {entry} returned {status}",
                remedy="see whether the GPU works without overlapctl (OVERLAPCTL_DISABLE=1)",
            )


@contextmanager
def _capture_tolerated(call: _Driver) -> Iterator[None]:
    """Let this thread allocate and load although some stream may be under capture."""
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        call.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _prepare(call: _Driver, undo: ExitStack) -> Callable[[str], int]:
    """Load the probe; returns a function that launches it by an entry and reads what it saw."""
    stream, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    word = ctypes.c_uint64()
    call("cuStreamCreate", ctypes.byref(stream), _STREAM_NON_BLOCKING)
    undo.callback(call.library.cuStreamDestroy_v2, stream)
    call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(_PTX))
    undo.callback(call.library.cuModuleUnload, module)
    call("cuModuleGetFunction", ctypes.byref(function), module, PROBE_KERNEL.encode())
    call("cuMemAlloc_v2", ctypes.byref(word), ctypes.c_size_t(4))
    undo.callback(call.library.cuMemFree_v2, word)
    undo.callback(call.library.cuStreamSynchronize, stream)
    arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(word), ctypes.c_void_p))

    def run(entry: str) -> int:
        value = ctypes.c_uint32(_NOT_WRITTEN)
        size = ctypes.c_size_t(4)
        call("cuMemsetD32Async", word, ctypes.c_uint(_NOT_WRITTEN), ctypes.c_size_t(1), stream)
        if entry == "cuLaunchKernelEx":
            config = _LaunchConfig((1, 1, 1), (32, 1, 1), 0, stream, None, 0)
            call(entry, ctypes.byref(config), function, arguments, None)
        else:
            call(entry, function, 1, 1, 1, 32, 1, 1, 0, stream, arguments, None)
        call("cuMemcpyDtoHAsync_v2", ctypes.byref(value), word, size, stream)
        call("cuStreamSynchronize", stream)
        return value.value

    return run
