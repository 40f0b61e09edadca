"""Compile (NVRTC), load and launch the ``.cu`` files of this folder.

A kernel comes with the footprint it promises; :func:`load_kernel` compares the promise with what
the driver reports for the loaded code and refuses a kernel that breaks it, since a heavier kernel
would silently not fit where it was made to fit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlapctl.errors import DeviceError, UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["CudaKernel", "KernelContract", "check_contract", "load_kernel", "stream_handle"]

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class KernelContract:
    """The footprint a kernel promises.

    Parameters
    ----------
    source, name
        File in this folder and the kernel's (unmangled) name in it.
    threads
        Threads per block it is launched with.
    min_registers, max_registers
        Registers per thread the compiler may have given it.
    max_static_smem
        Static shared memory per block in bytes it may use.
    min_compute_capability
        Lowest (major, minor) it runs on.
    """

    source: str
    name: str
    threads: int
    max_registers: int
    min_registers: int = 0
    max_static_smem: int = 0
    min_compute_capability: tuple[int, int] = (8, 0)


def check_contract(contract: KernelContract, *, registers: int, static_smem: int) -> None:
    """Compare a loaded kernel with its promise.

    Raises
    ------
    DeviceError
        If the kernel got more (or fewer) registers or more shared memory than promised.
    """
    if not contract.min_registers <= registers <= contract.max_registers:
        raise DeviceError(
            f"kernel {contract.name} was compiled to {registers} registers per thread, "
            f"promised are {contract.min_registers} to {contract.max_registers}",
            remedy="use the NVRTC of CUDA 12.8 or newer, or report this compiler version",
        )
    if static_smem > contract.max_static_smem:
        raise DeviceError(
            f"kernel {contract.name} was compiled to {static_smem} B of static shared memory, "
            f"promised are at most {contract.max_static_smem} B",
            remedy="use the NVRTC of CUDA 12.8 or newer, or report this compiler version",
        )


class CudaKernel:
    """A loaded kernel; made by :func:`load_kernel`.

    Attributes
    ----------
    contract
        The promised footprint.
    registers, static_smem
        What the driver reports: registers per thread, static shared memory per block in bytes.
    """

    def __init__(
        self, contract: KernelContract, device: int, function: Any, registers: int, static_smem: int
    ) -> None:
        self.contract = contract
        self.registers = registers
        self.static_smem = static_smem
        self._device = device
        self._function = function
        self._allowed_smem = 48 * 1024 - static_smem  # without asking the driver for more

    def launch(
        self,
        *,
        blocks: int,
        values: Sequence[int | float],
        types: Sequence[Any],
        stream: int,
        dynamic_smem: int = 0,
    ) -> None:
        """Launch on a stream (its handle as an integer) and return at once.

        Raises
        ------
        UsageError
            If ``blocks`` is below 1.
        DeviceError
            If the driver refuses the launch.
        """
        if blocks < 1:
            raise UsageError(f"blocks is {blocks}", remedy="launch at least 1 block")
        import torch
        from cuda.bindings import driver

        with torch.cuda.device(self._device):  # its context must be this thread's current one
            if dynamic_smem > self._allowed_smem:
                _check(
                    driver.cuFuncSetAttribute(
                        self._function,
                        driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                        dynamic_smem,
                    ),
                    f"allowing {self.contract.name} {dynamic_smem} B of dynamic shared memory",
                )
                self._allowed_smem = dynamic_smem
            _check(
                driver.cuLaunchKernel(
                    self._function,
                    *(blocks, 1, 1),
                    *(self.contract.threads, 1, 1),
                    dynamic_smem,
                    stream,
                    (tuple(values), tuple(types)),
                    0,
                ),
                f"launching {self.contract.name} with {blocks} blocks",
            )


@functools.cache
def load_kernel(contract: KernelContract, device: int) -> CudaKernel:
    """Compile and load a kernel for one GPU; the second call returns the same object.

    Parameters
    ----------
    contract
        Which kernel, and the footprint it must have.
    device
        CUDA device index as torch counts.

    Raises
    ------
    DeviceError
        If the GPU is too old, NVRTC or the driver refuses, or the footprint is broken.
    """
    import torch
    from cuda.bindings import driver

    capability = torch.cuda.get_device_capability(device)
    if capability < contract.min_compute_capability:
        need = ".".join(map(str, contract.min_compute_capability))
        have = ".".join(map(str, capability))
        raise DeviceError(
            f"kernel {contract.name} needs compute capability {need}, cuda:{device} has {have}",
            remedy="use another communication path on this GPU",
        )
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the primary context current
        module = _module(contract.source, device)
        function = _check(
            driver.cuModuleGetFunction(module, contract.name.encode()),
            f"looking up {contract.name} in {contract.source}",
        )
        attribute = driver.CUfunction_attribute
        registers, static_smem = (
            int(_check(driver.cuFuncGetAttribute(which, function), f"asking for {which.name}"))
            for which in (
                attribute.CU_FUNC_ATTRIBUTE_NUM_REGS,
                attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
            )
        )
    check_contract(contract, registers=registers, static_smem=static_smem)
    return CudaKernel(contract, device, function, registers, static_smem)


def stream_handle(stream: torch.cuda.Stream | None, device: int) -> int:
    """Return a stream's handle as an integer; ``None`` is torch's current stream."""
    import torch

    return int((stream or torch.cuda.current_stream(device)).cuda_stream)


@functools.cache
def _module(source: str, device: int) -> Any:
    """Load a source file's cubin into the current context (once for each GPU)."""
    import torch
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device)
    cubin = _compile(source, f"sm_{major}{minor}")
    return _check(driver.cuModuleLoadData(cubin), f"loading {source} on cuda:{device}")


@functools.cache
def _compile(source: str, arch: str) -> bytes:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise DeviceError(
            f"cuda-bindings cannot be imported ({error})",
            remedy="install cuda-bindings 12.8 or newer",
        ) from error

    text = (_FOLDER / source).read_text()
    try:
        program = _check(
            nvrtc.nvrtcCreateProgram(text.encode(), source.encode(), 0, [], []),
            f"creating the NVRTC program of {source}",
        )
    except (RuntimeError, OSError) as error:  # the bindings' way to say that libnvrtc is missing
        raise DeviceError(
            f"NVRTC cannot be used ({' '.join(str(error).split())})",
            remedy="install the nvidia-cuda-nvrtc package that fits torch's CUDA version",
        ) from error
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status) != 0:
        size = _check(nvrtc.nvrtcGetProgramLogSize(program), "asking for NVRTC's log")
        log = b" " * size
        _check(nvrtc.nvrtcGetProgramLog(program, log), "reading NVRTC's log")
        raise DeviceError(
            f"NVRTC cannot compile {source} for {arch}: {log.decode(errors='replace').strip()}",
            remedy="use an NVRTC that knows this GPU",
        )
    size = _check(nvrtc.nvrtcGetCUBINSize(program), f"asking for the size of {source}'s cubin")
    cubin = b" " * int(size)
    _check(nvrtc.nvrtcGetCUBIN(program, cubin), f"reading {source}'s cubin")
    return bytes(cubin)


def _check(result: tuple[Any, ...], doing: str) -> Any:
    """Unpack a binding's ``(status, value)``; raise if the status is an error."""
    status, *values = result
    if int(status) != 0:
        raise DeviceError(
            f"{doing} failed: {getattr(status, 'name', status)}",
            remedy="see the CUDA driver's documentation of this error",
        )
    return values[0] if values else None
