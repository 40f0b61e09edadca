"""The Triton kernels themselves; importing this needs Triton."""

# Triton reads signatures itself: only constexpr may be annotated.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

__all__ = ["overlapctl_gemm", "overlapctl_scale_shift"]


@triton.jit
def overlapctl_gemm(
    a,
    b,
    c,
    m,
    n,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """C (m, n) = A (m, k) @ B (k, n), row-major; one block computes one tile of C.

    ``EVEN``: all three sizes are multiples of the tile, so nothing is masked.
    """
    tiles_n = tl.cdiv(n, BLOCK_N)
    tile_m = tl.program_id(0) // tiles_n
    tile_n = tl.program_id(0) % tiles_n

    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    # The tile's origin in 64 bits (matrices above 2**31 elements), offsets within it in 32.
    row_0 = tile_m.to(tl.int64) * BLOCK_M
    column_0 = tile_n.to(tl.int64) * BLOCK_N
    a_tile = a + row_0 * k + (rows[:, None] * k + inner[None, :])
    b_tile = b + column_0 + (inner[:, None] * n + columns[None, :])

    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k_0 in range(0, k, BLOCK_K):
        if EVEN:
            a_values = tl.load(a_tile)
            b_values = tl.load(b_tile)
        else:
            a_mask = (rows[:, None] < m - row_0) & (inner[None, :] < k - k_0)
            b_mask = (inner[:, None] < k - k_0) & (columns[None, :] < n - column_0)
            a_values = tl.load(a_tile, mask=a_mask, other=0.0)
            b_values = tl.load(b_tile, mask=b_mask, other=0.0)
        accumulator = tl.dot(a_values, b_values, accumulator, input_precision="ieee")
        a_tile += BLOCK_K
        b_tile += BLOCK_K * n

    c_tile = c + row_0 * n + column_0 + (rows[:, None] * n + columns[None, :])
    result = accumulator.to(c.dtype.element_ty)
    if EVEN:
        tl.store(c_tile, result)
    else:
        c_mask = (rows[:, None] < m - row_0) & (columns[None, :] < n - column_0)
        tl.store(c_tile, result, mask=c_mask)


@triton.jit
def overlapctl_scale_shift(x, y, elements, scale, shift, BLOCK: tl.constexpr):
    """Y = x * scale + shift over ``elements`` elements; one block takes ``BLOCK`` of them."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = start + tl.arange(0, BLOCK)
    mask = index < elements
    value = tl.load(x + index, mask=mask).to(tl.float32) * scale + shift
    tl.store(y + index, value.to(y.dtype.element_ty), mask=mask)
