"""A kernel with NCCL's footprint that copies within one GPU.

With one GPU there is no collective to run beside compute. This kernel (``standin.cu``) stands in
for one: it wants as many threads, registers and bytes of shared memory per block as NCCL 2.28's
kernels, and moves data at a settable rate. It takes memory bandwidth of one GPU twice (read and
write), and no NVLink: what it shows about residency and priority carries over, its bandwidth
contention only roughly.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from overlapctl.errors import UsageError
from overlapctl.kernels.cuda_module import KernelContract, load_kernel, stream_handle
from overlapctl.kernels.one_warp import check_operands

if TYPE_CHECKING:
    import torch

__all__ = ["STANDIN_BLOCKS", "STANDIN_CONTRACT", "STANDIN_SMEM", "StandIn", "ns_per_tile"]

STANDIN_BLOCKS = 24
"""Blocks NCCL 2.28.9 launches for an all-reduce over NVLink on H200 (measured)."""

STANDIN_SMEM = 21_568 + 82_240
"""Shared memory of an NCCL 2.28.9 block on sm_90, static and dynamic, in bytes.

As the driver reports it: the 22,592 B that cuobjdump lists include the 1 KiB reserve.
"""

STANDIN_CONTRACT = KernelContract(
    source="standin.cu",
    name="overlapctl_comm_standin",
    threads=544,
    # Registers are allocated by 8 per thread: 89 to 96 take as much of an SM as NCCL's 96.
    min_registers=89,
    max_registers=96,
)

_TILE_BYTES = 544 * 20 * 16
_ARGUMENT_TYPES = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_float)


def ns_per_tile(blocks: int, gbps: float) -> float:
    """Time one block may spend on a tile so that all blocks copy ``gbps`` GB/s together, ns.

    0 for ``gbps`` = 0: no limit.
    """
    return blocks * _TILE_BYTES / gbps if gbps > 0 else 0.0


class StandIn:
    """The stand-in kernel on one GPU.

    Raises
    ------
    DeviceError
        If the kernel cannot be built with NCCL's footprint.
    """

    def __init__(self, device: int | None = None) -> None:
        import torch

        self._device = torch.cuda.current_device() if device is None else device
        self._kernel = load_kernel(STANDIN_CONTRACT, self._device)
        limit = torch.cuda.get_device_properties(self._device).shared_memory_per_block_optin
        self._smem = min(STANDIN_SMEM, limit)

    def copy(
        self,
        dst: torch.Tensor,
        src: torch.Tensor,
        stream: torch.cuda.Stream | None = None,
        *,
        blocks: int = STANDIN_BLOCKS,
        gbps: float = 0.0,
    ) -> None:
        """Enqueue ``dst = src``.

        Parameters
        ----------
        dst, src
            Contiguous tensors of equal size and type, 16-byte aligned, not overlapping.
        blocks
            Blocks in the grid; NCCL: one for each channel.
        gbps
            Bytes copied per ns by all blocks together, at most; 0: as fast as it goes.

        Raises
        ------
        UsageError
            If the tensors do not fit together, ``blocks`` is below 1 or ``gbps`` below 0.
        """
        if gbps < 0:
            raise UsageError(f"gbps is {gbps}", remedy="pass a rate of 0 (no limit) or more")
        check_operands(dst, src)
        self._kernel.launch(
            blocks=blocks,
            values=(
                dst.data_ptr(),
                src.data_ptr(),
                dst.numel() * dst.element_size(),
                ns_per_tile(blocks, gbps),
            ),
            types=_ARGUMENT_TYPES,
            stream=stream_handle(stream, self._device),
            dynamic_smem=self._smem,
        )
