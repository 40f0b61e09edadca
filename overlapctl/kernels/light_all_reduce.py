"""All-reduce over symmetric memory by few, light blocks: fits beside compute blocks.

The kernel is described in ``light_all_reduce.cu``. torch's own two-shot kernel (1,024 threads, 32
registers) can be run on the same buffer, to compare.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from overlapctl.errors import DeviceError, UsageError
from overlapctl.kernels.cuda_module import KernelContract, load_kernel, stream_handle

if TYPE_CHECKING:
    import torch

__all__ = ["LIGHT_BLOCKS", "LightAllReduce", "contract"]

LIGHT_BLOCKS = 24
"""Default grid: as many blocks as torch's symmetric-memory kernels and NCCL use on NVLink."""

_SUFFIX = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
_ARGUMENT_TYPES = (
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint,
    ctypes.c_uint,
    ctypes.c_ulonglong,
    ctypes.c_ulonglong,
)


def contract(dtype: str) -> KernelContract:
    """Footprint of the kernel for ``"bf16"``, ``"fp16"`` or ``"fp32"``."""
    return KernelContract(
        source="light_all_reduce.cu",
        name=f"overlapctl_comm_light_all_reduce_{dtype}",
        threads=512,
        max_registers=40,
    )


class LightAllReduce:
    """Sums a tensor in symmetric memory over the ranks of a group, in place.

    Parameters
    ----------
    tensor
        Contiguous, allocated by ``torch.distributed._symmetric_memory.empty`` with the same shape
        on every rank; bf16, fp16 or fp32.
    group
        The process group. Constructing is a collective call: every rank of it must.

    Raises
    ------
    UsageError
        If the tensor has another type, is not contiguous, or starts at an odd address.
    DeviceError
        If the GPUs cannot share memory or the kernel cannot be built.
    """

    def __init__(self, tensor: torch.Tensor, group: Any) -> None:
        suffix = _SUFFIX.get(str(tensor.dtype))
        if suffix is None:
            raise UsageError(
                f"tensor.dtype is {tensor.dtype}", remedy="use bfloat16, float16 or float32"
            )
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise UsageError(
                "tensor is not contiguous or not 16-byte aligned",
                remedy="pass a whole tensor made by symmetric memory's empty()",
            )
        import torch.distributed._symmetric_memory as symmetric_memory

        try:
            self._handle = symmetric_memory.rendezvous(tensor, group)
        except RuntimeError as error:
            raise DeviceError(
                f"symmetric memory cannot be set up ({error})",
                remedy="use GPUs of one host with peer access, or the nccl path",
            ) from error
        self._tensor = tensor
        self._group_name = group if isinstance(group, str) else group.group_name
        self._device = tensor.device.index
        self._kernel = load_kernel(contract(suffix), self._device)
        # Handles describe whole allocations; the tensor may start inside one.
        self._offset = tensor.data_ptr() - int(self._handle.buffer_ptrs[self._handle.rank])

    def run(self, stream: torch.cuda.Stream | None = None, blocks: int = LIGHT_BLOCKS) -> None:
        """Enqueue the all-reduce; every rank must, with the same ``blocks``.

        Raises
        ------
        UsageError
            If ``blocks`` is below 1 or more than the signal pad has room for.
        """
        handle = self._handle
        room = int(handle.signal_pad_size) // (4 * handle.world_size)
        if blocks > room:
            raise UsageError(
                f"blocks is {blocks}, the signal pad has room for {room}",
                remedy=f"use at most {room} blocks",
            )
        self._kernel.launch(
            blocks=blocks,
            values=(
                int(handle.buffer_ptrs_dev),
                int(handle.signal_pad_ptrs_dev),
                int(handle.rank),
                int(handle.world_size),
                self._offset,
                self._tensor.numel(),
            ),
            types=_ARGUMENT_TYPES,
            stream=stream_handle(stream, self._device),
        )

    def run_torch(self) -> None:
        """Enqueue torch's own two-shot kernel on the current stream instead."""
        import torch

        torch.ops.symm_mem.two_shot_all_reduce_(self._tensor, "sum", self._group_name)
