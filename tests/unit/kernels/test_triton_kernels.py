"""The Triton kernels: compiled for sm_90 without a GPU, and run by Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

from overlapctl.errors import UsageError
from overlapctl.kernels.triton_gemm import check_tile, grid_blocks

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize("even", [True, False])
def test_the_headline_tile_allows_four_blocks_on_an_sm(even):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from overlapctl.kernels import _triton_kernels

    source = ASTSource(
        _triton_kernels.overlapctl_gemm,
        signature={
            **dict.fromkeys("abc", "*bf16"),
            **dict.fromkeys("mnk", "i32"),
            **dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_K", "EVEN"), "constexpr"),
        },
        constexprs={"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "EVEN": even},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(6)},
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 3}
    )
    assert compiled.metadata.shared == 3 * 2 * 64 * 64 * 2
    assert 233_472 // (compiled.metadata.shared + 1024) == 4


# NumPy 2.4 makes no int of a one-element array any more, which the interpreter of Triton 3.6 does
# for loop bounds. Remove the patch when Triton's interpreter uses .item().
_INTERPRETED = """
import torch
from triton.runtime import interpreter
patch_tensor = interpreter._patch_lang_tensor
def patch_with_item(tensor, scope):
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
interpreter._patch_lang_tensor = patch_with_item
from overlapctl.kernels._triton_kernels import overlapctl_gemm, overlapctl_scale_shift
from overlapctl.kernels.triton_gemm import gemm
from overlapctl.kernels.triton_elementwise import scale_shift
torch.manual_seed(0)
for m, n, k in ((32, 32, 32), (33, 47, 70), (1, 1, 1), (16, 100, 5)):
    a, b = torch.randn(m, k), torch.randn(k, n)
    out = torch.full((m, n), float("nan"))
    gemm(a, b, out, (16, 16, 16, 4, 2))
    torch.testing.assert_close(out, a @ b, rtol=1e-4, atol=1e-4)
for count in (1, 2048, 5000):
    x = torch.randn(count)
    y = torch.full_like(x, float("nan"))
    scale_shift(x, 2.0, 0.5, y)
    torch.testing.assert_close(y, x * 2.0 + 0.5)
print("fine")
"""


def test_results_are_right_for_shapes_that_fill_no_tile(monkeypatch):
    # A process of its own: whether kernels are interpreted is fixed when they are defined.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRETED], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "fine", done.stderr[-2000:]


def test_grids_cover_the_result():
    assert grid_blocks(8192, 8192, (64, 64, 64, 4, 3)) == 16_384
    assert grid_blocks(65, 1, (64, 64, 64, 4, 3)) == 2


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        ((64, 64, 64), "five|block M, block N"),
        ((64, 48, 64, 4, 3), "block N of the tile is 48"),
        ((8, 64, 64, 4, 3), "block M of the tile is 8"),
        ((64, 64, 64, 3, 3), "warps of the tile is 3"),
        ((64, 64, 64, 4, 0), "stages of the tile is 0"),
    ],
)
def test_bad_tiles_are_refused(tile, message):
    with pytest.raises(UsageError, match=message):
        check_tile(tile)
