"""``y = x * scale + shift`` in Triton: a kernel bound by memory bandwidth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlapctl.errors import DeviceError, UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["BLOCK_ELEMENTS", "scale_shift"]

BLOCK_ELEMENTS = 2048
"""Elements per block: 128 threads with one or two 16-byte accesses each."""


def scale_shift(x: torch.Tensor, scale: float, shift: float, out: torch.Tensor) -> None:
    """Enqueue ``out = x * scale + shift`` (computed in fp32) on the current stream.

    Parameters
    ----------
    x, out
        Contiguous, same number of elements and type; any floating-point type of up to 4 bytes.

    Raises
    ------
    UsageError
        If the tensors do not fit together.
    DeviceError
        If Triton is not installed.
    """
    if x.dtype != out.dtype or x.numel() != out.numel():
        raise UsageError(
            f"x is {x.numel()} x {x.dtype}, out is {out.numel()} x {out.dtype}",
            remedy="pass tensors of the same type and number of elements",
        )
    if not (x.is_contiguous() and out.is_contiguous()):
        raise UsageError("x or out is not contiguous", remedy="pass contiguous tensors")
    try:
        from overlapctl.kernels import _triton_kernels
    except ImportError as error:
        raise DeviceError(
            f"Triton cannot be imported ({error})", remedy="install triton"
        ) from error
    blocks = -(-x.numel() // BLOCK_ELEMENTS)
    _triton_kernels.overlapctl_scale_shift[(blocks,)](
        x, out, x.numel(), scale, shift, BLOCK=BLOCK_ELEMENTS, num_warps=4
    )
