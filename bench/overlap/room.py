"""Room beside a persistent kernel: `room.py OUT_DIR` (one GPU, sm_90 or newer).

A one-warp kernel adds 256 MB, issued at high priority 200 us after a persistent cuBLAS GEMM
started. It finds room only if registers and the carve-out step the SM is configured to leave some;
a pad or the carve-out attribute on the GEMM can arrange the second. Arms are interleaved; the sum
is checked exactly against an ordinary addition, the GEMM's result bit for bit against the untouched
one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import overlapctl
import results_file
from overlapctl.device import open_device
from overlapctl.kernels.one_warp import OneWarpKernel

REPEATS = 7
ADD_ELEMENTS = 128 * 1024 * 1024

ARMS: dict[str, dict[str, Any] | None] = {
    "untouched": None,
    "pad 4 KiB": {"smem_reserve": 4096},
    "pad 12 KiB": {"smem_reserve": 12288},
    "carve-out 100": {"smem_reserve": None, "carveout": 100},
}


def main() -> None:
    """Measure every GEMM under every arm and write."""
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    one_warp = OneWarpKernel()
    base, addend = torch.randn(ADD_ELEMENTS, **bf16), torch.randn(ADD_ELEMENTS, **bf16)
    total = torch.empty_like(base)
    expected = base + addend
    urgent = torch.cuda.Stream(priority=-3)
    clocks = open_device("cuda")
    rows = []
    for m, n, k in ((8192, 8192, 32768), (4096, 8192, 65536)):
        a = torch.randn(m, k, **bf16)
        b = torch.randn(k, n, **bf16) / k**0.5
        out = torch.empty(m, n, **bf16)
        gemm = lambda a=a, b=b, out=out: torch.mm(a, b, out=out)  # noqa: E731
        gemm()
        reference = out.clone()
        adds: dict[str, Callable[[], None]] = {
            "one warp": lambda: one_warp.add(total, addend, urgent),
            "torch add": lambda: _void(total.add_(addend)),
        }
        samples: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
        facts: dict[str, Any] = {}
        correct: dict[tuple[str, str], bool] = {}
        for repeat in range(REPEATS + 1):
            for arm, arguments in ARMS.items():
                for kind, add in adds.items():
                    total.copy_(base)
                    out.fill_(float("nan"))
                    if arguments is None:
                        sample = trial(gemm, add, urgent)
                    else:
                        with overlapctl.overlap(
                            **arguments, include=["*nvjet*"], comm_priority=False, strict=True
                        ) as session:
                            sample = trial(gemm, add, urgent)
                        facts[arm] = next(
                            (r for r in session.explain().kernels if "nvjet" in r.kernel), None
                        )
                    good = torch.equal(total, expected) and torch.equal(out, reference)
                    correct[arm, kind] = correct.get((arm, kind), True) and good
                    if repeat:
                        samples.setdefault((arm, kind), []).append(sample)
        sm_mhz = clocks.clocks().sm_mhz
        for (arm, kind), values in samples.items():
            columns = zip(*values, strict=True)
            alone, gemm_end, latency = (statistics.median(column) for column in columns)
            row = facts.get(arm)
            rows.append(
                {
                    "gemm": f"{m}x{n}x{k}",
                    "kernel": row.kernel[:48] if row else "",
                    "arm": arm,
                    "add": kind,
                    "dynamic_before": row.before if row else None,
                    "dynamic_after": row.after if row else None,
                    "carved": row.carved if row else None,
                    "rule": row.rule.value if row else None,
                    "gemm_alone_ms": alone,
                    "gemm_end_ms": gemm_end,
                    "add_latency_ms": latency,
                    "latency_low": min(v[2] for v in values),
                    "latency_high": max(v[2] for v in values),
                    "exact": correct[arm, kind],
                    "sm_mhz": sm_mhz,
                }
            )
    results_file.write(Path(sys.argv[1]), "room-beside-persistent", rows, spec="cuda")
    for line in rows:
        print({k: v for k, v in line.items() if k not in ("kernel", "sm_mhz")})


def trial(
    gemm: Callable[[], Any], add: Callable[[], None], urgent: torch.cuda.Stream
) -> tuple[float, float, float]:
    """Return GEMM alone, GEMM's end beside the add, and the add's latency, in ms."""
    torch.cuda.synchronize()
    start, middle, end, issued, added = (torch.cuda.Event(enable_timing=True) for _ in range(5))
    start.record()
    gemm()
    middle.record()
    torch.cuda.synchronize()
    alone = start.elapsed_time(middle)
    start.record()
    gemm()
    end.record()
    begin = time.perf_counter()
    while time.perf_counter() - begin < 200e-6:
        pass
    with torch.cuda.stream(urgent):
        issued.record()
        add()
        added.record()
    torch.cuda.synchronize()
    return alone, start.elapsed_time(end), issued.elapsed_time(added)


def _void(_: object) -> None:
    """Drop a tensor an in-place operation returned."""


if __name__ == "__main__":
    main()
