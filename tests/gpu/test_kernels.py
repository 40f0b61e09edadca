"""The package's kernels on one GPU: right results, promised footprints."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs one CUDA GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
IS_SM90 = torch.cuda.get_device_capability() >= (9, 0)
needs_sm90 = pytest.mark.skipif(not IS_SM90, reason="bulk copies need compute capability 9.0")

# Empty, shorter than a unit, a unit, around a ring slot, around one slot for each of 132 blocks.
SIZES = (0, 1, 7, 8, 9, 2047, 2048, 2049, 132 * 2048 + 3, 3_000_001)


@needs_sm90
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("blocks", [None, 1, 24])
def test_one_warp_adds_exactly_as_torch_does(dtype, size, blocks):
    from overlapctl.kernels.one_warp import OneWarpKernel

    guard = 64
    torch.manual_seed(size)
    whole = torch.randn(size + guard, device="cuda", dtype=dtype)
    src = torch.randn(size + guard, device="cuda", dtype=dtype)
    expected = torch.cat([whole[:size] + src[:size], whole[size:]])
    OneWarpKernel().add(whole[:size], src[:size], blocks=blocks)
    assert torch.equal(whole, expected)  # the guard behind the end is untouched as well


@needs_sm90
@pytest.mark.parametrize("size", [*SIZES, 4096 * 132 * 5 + 15])
def test_one_warp_copies_any_number_of_bytes(size):
    from overlapctl.kernels.one_warp import OneWarpKernel

    src = torch.randint(0, 256, (size,), device="cuda", dtype=torch.uint8)
    dst = torch.zeros(size + 64, device="cuda", dtype=torch.uint8)
    OneWarpKernel().copy(dst[:size], src)
    assert torch.equal(dst[:size], src)
    assert not dst[size:].any()


@needs_sm90
def test_one_warp_runs_on_the_stream_it_is_given():
    from overlapctl.kernels.one_warp import OneWarpKernel

    kernel = OneWarpKernel()
    a = torch.zeros(1 << 20, device="cuda")
    b = torch.ones(1 << 20, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(priority=-1)
    torch.cuda._sleep(200_000_000)  # about 0.1 s on the current stream
    busy = torch.cuda.Event()
    busy.record()
    kernel.add(a, b, stream)
    stream.synchronize()
    assert not busy.query()
    assert bool((a == 1).all())


@pytest.mark.parametrize("size", [0, 5, 16, 10_880 * 8, 10_880 * 8 * 24 * 3 + 11])
def test_the_standin_copies_exactly(size):
    from overlapctl.kernels.standin import StandIn

    src = torch.randint(0, 256, (size,), device="cuda", dtype=torch.uint8)
    dst = torch.zeros(size + 64, device="cuda", dtype=torch.uint8)
    StandIn().copy(dst[:size], src)
    assert torch.equal(dst[:size], src)
    assert not dst[size:].any()


def test_the_standin_keeps_to_the_rate_it_is_given():
    from overlapctl.kernels.standin import StandIn

    standin = StandIn()
    src = torch.zeros(256 << 20, device="cuda", dtype=torch.uint8)
    dst = torch.empty_like(src)

    def milliseconds(gbps):
        standin.copy(dst, src, gbps=gbps)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        standin.copy(dst, src, gbps=gbps)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    assert milliseconds(100.0) == pytest.approx((256 << 20) / 100e9 * 1e3, rel=0.1)
    assert milliseconds(0.0) < milliseconds(100.0)


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((512, 512, 512), (64, 64, 64, 4, 3)),
        ((500, 333, 257), (64, 64, 64, 4, 3)),
        ((1, 1, 1), (16, 16, 16, 4, 2)),
        ((256, 384, 512), (128, 128, 32, 8, 2)),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_triton_gemm_is_a_gemm(shape, tile, dtype):
    from overlapctl.kernels.triton_gemm import gemm

    torch.manual_seed(0)
    m, n, k = shape
    a = torch.randn(m, k, device="cuda", dtype=dtype)
    b = torch.randn(k, n, device="cuda", dtype=dtype) / k**0.5
    out = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
    gemm(a, b, out, tile)
    exact = a.double() @ b.double()
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [1, 2048, 1_000_003])
def test_scale_and_shift(size):
    from overlapctl.kernels.triton_elementwise import scale_shift

    x = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    y = torch.full_like(x, float("nan"))
    scale_shift(x, 1.5, -2.0, y)
    torch.testing.assert_close(y, (x.float() * 1.5 - 2.0).bfloat16())


def test_nccl_copies_to_the_own_rank_through_a_kernel():
    from overlapctl.measure.nccl_self import NcclSelf

    src = torch.randint(0, 256, (8 << 20,), device="cuda", dtype=torch.uint8)
    dst = torch.zeros_like(src)
    nccl = NcclSelf()
    stream = int(torch.cuda.current_stream().cuda_stream)
    nccl.copy(dst.data_ptr(), src.data_ptr(), src.numel(), stream)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        nccl.copy(dst.data_ptr(), src.data_ptr(), src.numel(), stream)
        torch.cuda.synchronize()
    nccl.close()
    nccl.close()
    assert torch.equal(dst, src)
    assert any("nccl" in event.key.lower() for event in seen.key_averages())
