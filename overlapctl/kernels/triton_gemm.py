"""A plain Triton GEMM: one block per tile, no swizzle, fp32 accumulation.

The compute side of many trials. It is kept plain on purpose: many waves of ordinary blocks, whose
residency is set by the tile (shared memory and registers) and can be lowered by a pad. Blocks are
numbered row by row over the tiles of C.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from overlapctl.errors import DeviceError, UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["check_tile", "gemm", "gemm_kernel", "grid_blocks"]


def check_tile(tile: tuple[int, ...]) -> tuple[int, int, int, int, int]:
    """Check a tile (block M, block N, block K, warps, stages) and return it.

    Raises
    ------
    UsageError
        If it has not five entries, a block side is no power of two of at least 16, or warps or
        stages are out of range.
    """
    if len(tile) != 5:
        raise UsageError(
            f"tile is {tile}", remedy="give block M, block N, block K, warps and stages"
        )
    block_m, block_n, block_k, warps, stages = tile
    for name, side in (("M", block_m), ("N", block_n), ("K", block_k)):
        if side < 16 or side & (side - 1):
            raise UsageError(
                f"block {name} of the tile is {side}", remedy="use a power of two from 16 up"
            )
    if warps not in (1, 2, 4, 8, 16, 32):
        raise UsageError(f"warps of the tile is {warps}", remedy="use 1, 2, 4, 8, 16 or 32")
    if not 1 <= stages <= 8:
        raise UsageError(f"stages of the tile is {stages}", remedy="use 1 to 8")
    return block_m, block_n, block_k, warps, stages


def grid_blocks(m: int, n: int, tile: tuple[int, ...]) -> int:
    """Blocks the GEMM launches for an M x N result."""
    block_m, block_n, *_ = check_tile(tile)
    return -(-m // block_m) * -(-n // block_n)


def gemm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, tile: tuple[int, ...]) -> None:
    """Enqueue ``out = a @ b`` on the current stream.

    Parameters
    ----------
    a, b, out
        Row-major, contiguous: (M, K), (K, N) and (M, N), all of one type (bf16, fp16 or fp32).
        fp32 is computed in full precision, not in TF32.
    tile
        (block M, block N, block K, warps, stages).

    Raises
    ------
    UsageError
        If shapes, types or the tile do not fit.
    DeviceError
        If Triton is not installed.
    """
    block_m, block_n, block_k, warps, stages = check_tile(tile)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise UsageError(
            f"shapes are {tuple(a.shape)} and {tuple(b.shape)}", remedy="pass (M, K) and (K, N)"
        )
    (m, k), n = a.shape, b.shape[1]
    if tuple(out.shape) != (m, n) or not a.dtype == b.dtype == out.dtype:
        raise UsageError(
            f"out is {tuple(out.shape)} of {out.dtype}", remedy=f"pass ({m}, {n}) of {a.dtype}"
        )
    if not (a.is_contiguous() and b.is_contiguous() and out.is_contiguous()):
        raise UsageError("a, b or out is not contiguous", remedy="pass contiguous tensors")
    gemm_kernel()[(grid_blocks(m, n, tile),)](
        a,
        b,
        out,
        m,
        n,
        k,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        # Without masks the inner loop is loads and matrix instructions only.
        EVEN=m % block_m == 0 and n % block_n == 0 and k % block_k == 0,
        num_warps=warps,
        num_stages=stages,
    )


@functools.cache
def gemm_kernel() -> Any:
    """Return the Triton kernel; Triton is imported here and not before.

    Raises
    ------
    DeviceError
        If Triton is not installed.
    """
    try:
        from overlapctl.kernels import _triton_kernels
    except ImportError as error:
        raise DeviceError(
            f"Triton cannot be imported ({error})", remedy="install triton, or use no tile"
        ) from error
    return _triton_kernels.overlapctl_gemm
