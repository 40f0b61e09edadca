"""Does the room model say who gets in beside a persistent kernel? `persistent.py OUT_DIR` (sm_90+).

For each persistent kernel (vendor GEMMs of several shapes and layouts, attention forward and
backward, convolution, Triton persistent GEMMs) and each way of launching it (untouched, padded by
4 KiB, padded as the model proposes, carve-out 100), a row holds what `overlapctl.plan.room`
predicts for the one-warp kernel - beside it or after it - and what was measured: the latency of a
one-warp add issued 200 us after the kernel's start. The prediction is made from the footprint the
shim saw, before anything is timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[1]))
import overlapctl
import results_file
from overlapctl.device import open_device
from overlapctl.device.footprints import one_warp_footprint
from overlapctl.kernels.one_warp import OneWarpKernel
from overlapctl.measure.shaping import Observation, ShimShaping
from overlapctl.plan.residency import blocks_per_sm, padded
from overlapctl.plan.room import pad_or_carveout_for_room, room_beside
from overlapctl.records import DeviceFacts, KernelFootprint

REPEATS = 5
ADD_ELEMENTS = 16 * 1024 * 1024
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


@triton.jit
def persistent_gemm(
    a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr
):
    """Multiply with one block per SM that walks over the tiles."""
    tiles_n = tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), tl.cdiv(M, BM) * tiles_n, BLOCKS):
        rows = (tile // tiles_n) * BM + tl.arange(0, BM)
        cols = (tile % tiles_n) * BN + tl.arange(0, BN)
        inner = tl.arange(0, BK)
        a_at = a + rows[:, None] * K + inner[None, :]
        b_at = b + inner[:, None] * N + cols[None, :]
        total = tl.zeros((BM, BN), tl.float32)
        for _ in range(0, K, BK):
            total = tl.dot(tl.load(a_at), tl.load(b_at), total)
            a_at += BK
            b_at += BK * N
        tl.store(c + rows[:, None] * N + cols[None, :], total.to(tl.bfloat16))


def kernels() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the kernels by name; inputs live as long as the caller keeps the function."""

    def mm(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, layout: str = "NN") -> Any:
        a = torch.randn(m, k, device="cuda").to(dtype)
        b = (torch.randn(k, n, device="cuda") / k**0.5).to(dtype)
        a = a.T.contiguous().T if layout[0] == "T" else a
        b = b.T.contiguous().T if layout[1] == "T" else b
        out = torch.empty(m, n, device="cuda", dtype=dtype)
        return lambda: torch.mm(a, b, out=out)

    yield "mm bf16 8192x8192x32768", mm(8192, 8192, 32768)
    yield "mm bf16 4096x8192x65536", mm(4096, 8192, 65536)
    yield "mm bf16 16384x16384x8192", mm(16384, 16384, 8192)
    yield "mm bf16 8192x28672x8192", mm(8192, 28672, 8192)
    yield "mm bf16 NT 8192x8192x32768", mm(8192, 8192, 32768, layout="NT")
    yield "mm bf16 TN 8192x8192x32768", mm(8192, 8192, 32768, layout="TN")
    yield "mm bf16 4096x4096x65536", mm(4096, 4096, 65536)
    yield "mm bf16 2048x16384x32768", mm(2048, 16384, 32768)
    yield "mm fp16 8192x8192x32768", mm(8192, 8192, 32768, torch.float16)
    yield "mm fp16 4096x14336x16384", mm(4096, 14336, 16384, torch.float16)
    x, y = torch.randn(48, 4096, 4096, **BF16), torch.randn(48, 4096, 4096, **BF16)
    yield "bmm bf16 48x4096^3", lambda: torch.bmm(x, y)
    q = torch.randn(4, 32, 8192, 128, **BF16, requires_grad=True)
    attention = torch.nn.functional.scaled_dot_product_attention
    cudnn = torch.nn.attention.SDPBackend.CUDNN_ATTENTION

    def forward() -> Any:
        with torch.nn.attention.sdpa_kernel(cudnn):
            return attention(q, q, q, is_causal=False)

    yield "attention forward 4x32x8192x128", forward
    grad = torch.randn_like(q)
    k, v = torch.randn_like(q).requires_grad_(), torch.randn_like(q).requires_grad_()
    with torch.nn.attention.sdpa_kernel(cudnn):
        o = attention(q, k, v)
    yield (
        "attention backward 4x32x8192x128",
        lambda: torch.autograd.grad(o, (q, k, v), grad, retain_graph=True),
    )
    image, weight = torch.randn(256, 256, 56, 56, **BF16), torch.randn(512, 256, 3, 3, **BF16)
    image = image.contiguous(memory_format=torch.channels_last)
    weight = weight.contiguous(memory_format=torch.channels_last)
    yield (
        "conv bf16 256x256x56x56 -> 512",
        lambda: torch.nn.functional.conv2d(image, weight, padding=1),
    )
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    a, b = torch.randn(8192, 16384, **BF16), torch.randn(16384, 8192, **BF16)
    c = torch.empty(8192, 8192, **BF16)
    for bm, bn, bk, warps, stages in (
        (128, 256, 64, 8, 3),
        (128, 256, 64, 8, 4),
        (128, 128, 64, 8, 5),
        (128, 128, 64, 4, 3),
        (256, 128, 64, 8, 3),
    ):
        yield (
            f"Triton persistent {bm}x{bn}x{bk} {warps}w{stages}s",
            lambda bm=bm, bn=bn, bk=bk, warps=warps, stages=stages: persistent_gemm[(sms,)](
                a, b, c, 8192, 8192, 16384, bm, bn, bk, sms, num_warps=warps, num_stages=stages
            ),
        )


def trial(run: Callable[[], Any], add: Callable[[], None], stream: Any) -> tuple[float, float]:
    """Return the kernel's end and the add's end, ms after the kernel's start."""
    torch.cuda.synchronize()
    start, end, added = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    run()
    end.record()
    begin = time.perf_counter()
    while time.perf_counter() - begin < 200e-6:
        pass
    add()
    added.record(stream)
    torch.cuda.synchronize()
    return start.elapsed_time(end), start.elapsed_time(added)


def main() -> None:
    """Predict, measure, compare, write."""
    device = open_device("cuda")
    facts = device.facts()
    one_warp, guest = OneWarpKernel(), one_warp_footprint(facts)
    urgent = torch.cuda.Stream(priority=-3)
    target = torch.zeros(ADD_ELEMENTS, **BF16)
    addend = torch.ones(ADD_ELEMENTS, **BF16)
    add = lambda: one_warp.add(target, addend, urgent)  # noqa: E731
    rows: list[dict[str, Any]] = []
    for name, run in kernels():
        try:
            run()
            with ShimShaping().observed() as seen:
                run()
                torch.cuda.synchronize()
        except Exception as error:
            print(f"{name}: left out, {type(error).__name__}: {error}"[:300])
            continue
        footprint = seen.dominant()
        if "backward" in name:  # its main kernel is the persistent one, among small ones
            footprint = persistent_of(facts, seen)
        if footprint is None or blocks_per_sm(facts, footprint) != 1:
            print(f"{name}: left out, not one block per SM: {footprint}")
            continue
        # Triton loads kernels of more than 48 KiB with the cache preference "shared memory".
        own = 100 if name.startswith("Triton") and footprint.smem > 48 * 1024 else -1
        for arm, arguments, prediction in arms(facts, footprint, guest, own):
            region: Any = contextlib.nullcontext()
            if arguments is not None:
                region = overlapctl.overlap(
                    **arguments, include=[footprint.name], comm_priority=False, strict=True
                )
            with region:
                trial(run, add, urgent)
                values = [trial(run, add, urgent) for _ in range(REPEATS)]
            end = statistics.median(v[0] for v in values)
            added = statistics.median(v[1] for v in values)
            beside = added < 0.2 + 0.5 * (end - 0.2)
            rows.append(
                {
                    "workload": name,
                    "kernel": footprint.name[:60],
                    "threads": footprint.threads,
                    "registers": footprint.registers,
                    "smem": footprint.smem,
                    "blocks": footprint.blocks,
                    "arm": arm,
                    "predicted": "beside" if prediction else "after",
                    "measured": "beside" if beside else "after",
                    "right": bool(prediction) == beside,
                    "kernel_end_ms": end,
                    "add_end_ms": added,
                }
            )
            print({k: v for k, v in rows[-1].items() if k not in ("kernel",)}, flush=True)
    right = sum(row["right"] for row in rows)
    names = {row["kernel"] for row in rows}
    print(f"predicted right: {right} of {len(rows)}; {len(names)} kernels")
    results_file.write(Path(sys.argv[1]), "persistent-room", rows, spec="cuda")


def persistent_of(facts: DeviceFacts, seen: Observation) -> KernelFootprint | None:
    """Return the one-block-per-SM kernel among those seen."""
    for kernel in seen.kernels:
        only = dataclasses.replace(seen, kernels=(kernel,)).dominant()
        if only is not None and blocks_per_sm(facts, only) == 1:
            return only
    return None


def arms(
    facts: DeviceFacts, footprint: KernelFootprint, guest: KernelFootprint, own: int
) -> list[tuple[str, dict[str, Any] | None, bool]]:
    """List arm name, arguments of `overlap`, and whether the guest is predicted to get in."""
    found: list[tuple[str, dict[str, Any] | None, bool]] = [
        ("untouched", None, room_beside(facts, footprint, 1, guest, carveout=own) > 0)
    ]
    pads = {4096}
    maker = pad_or_carveout_for_room(facts, footprint, guest)
    if maker is not None and maker.pad:
        pads.add(maker.pad)
    for pad in sorted(pads):
        after = padded(footprint, pad)
        if after.smem <= facts.smem_per_block_optin:
            room = room_beside(facts, after, 1, guest, carveout=own) > 0
            found.append((f"pad {pad}", {"smem_reserve": pad}, room))
    room = room_beside(facts, footprint, 1, guest, carveout=100) > 0
    found.append(("carve-out 100", {"smem_reserve": None, "carveout": 100}, room))
    return found


if __name__ == "__main__":
    main()
