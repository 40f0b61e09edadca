"""Bulk copy and add by one warp per block: finds room beside a persistent GEMM block.

The kernel is described in ``one_warp.cu``. Measured on H200: an add of 256 MB issued while a
persistent cuBLAS GEMM runs ends after 0.4 ms, where an ordinary add waits for the GEMM's end -
provided the SM's shared-memory carve-out leaves 17.5 KB, which a pad or the carve-out attribute
on the GEMM can arrange.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from overlapctl.errors import UsageError
from overlapctl.kernels.cuda_module import KernelContract, load_kernel, stream_handle

if TYPE_CHECKING:
    import torch

__all__ = ["ONE_WARP_REGISTERS", "ONE_WARP_SMEM", "OneWarpKernel", "contract", "split_bytes"]

ONE_WARP_REGISTERS = 18
"""Most registers per thread the bulk kernels may be compiled to."""

ONE_WARP_SMEM = 4 * 4096 + 128
"""Static shared memory per block in bytes: the ring, and the barriers padded to 128 B."""

_UNIT = 16
_ARGUMENT_TYPES = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong)
_ADD_SUFFIX = {
    "torch.bfloat16": "add_bf16",
    "torch.float16": "add_fp16",
    "torch.float32": "add_fp32",
}


def contract(suffix: str) -> KernelContract:
    """Footprint of the kernel ``overlapctl_comm_one_warp_<suffix>``."""
    tail = suffix.startswith("tail_")
    return KernelContract(
        source="one_warp.cu",
        name=f"overlapctl_comm_one_warp_{suffix}",
        threads=32,
        max_registers=ONE_WARP_REGISTERS,
        max_static_smem=0 if tail else ONE_WARP_SMEM,
        min_compute_capability=(9, 0),
    )


def split_bytes(size: int) -> tuple[int, int]:
    """Split a size in bytes into what the bulk unit moves and the tail behind it (0-15 bytes)."""
    bulk = size // _UNIT * _UNIT
    return bulk, size - bulk


class OneWarpKernel:
    """The one-warp kernels on one GPU.

    Parameters
    ----------
    device
        CUDA device index; the current device if ``None``.

    Raises
    ------
    DeviceError
        If the GPU is older than sm_90 or the kernels cannot be built as light as promised.
    """

    def __init__(self, device: int | None = None) -> None:
        import torch

        self._device = torch.cuda.current_device() if device is None else device
        self._sm_count = torch.cuda.get_device_properties(self._device).multi_processor_count
        load_kernel(contract("copy"), self._device)

    def add(
        self,
        dst: torch.Tensor,
        src: torch.Tensor,
        stream: torch.cuda.Stream | None = None,
        blocks: int | None = None,
    ) -> None:
        """Enqueue ``dst += src``, element by element, rounded to nearest even.

        Parameters
        ----------
        dst, src
            Contiguous tensors of equal size and type (bf16, fp16 or fp32), 16-byte aligned, not
            overlapping. ``dst`` may lie on a peer GPU that this GPU can write to.
        stream
            Where to enqueue; the current stream if ``None``. Its priority decides whether the
            blocks get ahead of waiting compute blocks.
        blocks
            Blocks in the grid; one for each SM if ``None``.

        Raises
        ------
        UsageError
            If the tensors do not fit together or to the kernel.
        """
        suffix = _ADD_SUFFIX.get(str(dst.dtype))
        if suffix is None:
            raise UsageError(
                f"dst.dtype is {dst.dtype}", remedy="use bfloat16, float16 or float32 to add"
            )
        self._enqueue(suffix, dst, src, stream, blocks)

    def copy(
        self,
        dst: torch.Tensor,
        src: torch.Tensor,
        stream: torch.cuda.Stream | None = None,
        blocks: int | None = None,
    ) -> None:
        """Enqueue ``dst = src``; any type, otherwise as :meth:`add`."""
        self._enqueue("copy", dst, src, stream, blocks)

    def _enqueue(
        self,
        suffix: str,
        dst: torch.Tensor,
        src: torch.Tensor,
        stream: torch.cuda.Stream | None,
        blocks: int | None,
    ) -> None:
        if blocks is not None and blocks < 1:
            raise UsageError(f"blocks is {blocks}", remedy="launch at least 1 block")
        check_operands(dst, src)
        handle = stream_handle(stream, self._device)
        bulk, tail = split_bytes(dst.numel() * dst.element_size())
        if bulk:
            load_kernel(contract(suffix), self._device).launch(
                blocks=blocks or self._sm_count,
                values=(dst.data_ptr(), src.data_ptr(), bulk),
                types=_ARGUMENT_TYPES,
                stream=handle,
            )
        if tail:
            load_kernel(contract(f"tail_{suffix}"), self._device).launch(
                blocks=1,
                values=(dst.data_ptr() + bulk, src.data_ptr() + bulk, tail),
                types=_ARGUMENT_TYPES,
                stream=handle,
            )


def check_operands(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Check what the bulk kernels need of their operands.

    Raises
    ------
    UsageError
        If type or size differ, a tensor is not contiguous or not 16-byte aligned, or they overlap.
    """
    if dst.dtype != src.dtype or dst.numel() != src.numel():
        raise UsageError(
            f"dst is {dst.numel()} x {dst.dtype}, src is {src.numel()} x {src.dtype}",
            remedy="pass tensors of the same type and number of elements",
        )
    for name, tensor in (("dst", dst), ("src", src)):
        if not tensor.is_contiguous():
            raise UsageError(f"{name} is not contiguous", remedy="pass contiguous tensors")
        if tensor.data_ptr() % _UNIT:
            raise UsageError(
                f"{name} starts at an address that is not a multiple of {_UNIT}",
                remedy="pass whole tensors, or views that start at a multiple of 16 bytes",
            )
    size = dst.numel() * dst.element_size()
    if dst.data_ptr() < src.data_ptr() + size and src.data_ptr() < dst.data_ptr() + size and size:
        raise UsageError("dst and src overlap", remedy="pass tensors that share no memory")
