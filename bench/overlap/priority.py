"""Launch-attribute priority against a high-priority stream: `priority.py OUT_DIR` (one GPU).

NCCL's own send kernel (a communicator of one rank that sends to itself: NCCL's footprint on one
GPU) and the stand-in kernel paced at link speed are issued 150 us after a Triton GEMM of many waves
started, on a normal stream, on a normal stream inside a region with communication priority, and on
a high-priority stream. On two GPUs and more, `bench/overlap/multi_gpu.py` does the same for
collectives of ordinary and of high-priority process groups.
"""

from __future__ import annotations

import contextlib
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
from overlapctl.kernels.standin import StandIn
from overlapctl.measure.nccl_self import NcclSelf
from overlapctl.measure.workloads import build_workload
from overlapctl.specs import parse_compute

REPEATS = 9
BYTES = 896 << 20
ARMS = ("normal stream", "normal stream + launch attribute", "high-priority stream")


def main() -> None:
    """Measure both kernels under the three arms and write."""
    device = torch.device("cuda", 0)
    facts = open_device("cuda")
    gemm = build_workload(parse_compute("gemm:8192x8192x8192:bf16:64x64x64"), device)
    source = torch.randint(-9, 9, (BYTES // 2,), device=device).to(torch.bfloat16)
    target = torch.empty_like(source)
    nccl, standin = NcclSelf(), StandIn(0)
    streams = {False: torch.cuda.Stream(), True: torch.cuda.Stream(priority=-3)}
    size = source.numel() * source.element_size()
    kernels: dict[str, Callable[[torch.cuda.Stream], None]] = {
        "nccl send to self": lambda s: nccl.copy(
            target.data_ptr(), source.data_ptr(), size, int(s.cuda_stream)
        ),
        "stand-in at 306 GB/s": lambda s: standin.copy(target, source, s, gbps=306.0),
    }
    rows = []
    for name, issue in kernels.items():
        samples: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
        touched = 0
        exact = True
        for repeat in range(REPEATS + 1):
            for arm in ARMS:
                target.zero_()
                region: Any = contextlib.nullcontext()
                if "attribute" in arm:
                    region = overlapctl.overlap(None, strict=True)
                with region as session:
                    sample = trial(gemm.launch, issue, streams[arm.startswith("high")])
                if session is not None:
                    touched += session.stats().prioritised
                exact = exact and torch.equal(source, target)
                if repeat:
                    samples[arm].append(sample)
        for arm, values in samples.items():
            ends = [v[1] for v in values]
            rows.append(
                {
                    "kernel": name,
                    "arm": arm,
                    "gemm_end_ms": statistics.median(v[0] for v in values),
                    "comm_end_ms": statistics.median(ends),
                    "lowest": min(ends),
                    "highest": max(ends),
                    "launches_prioritised": touched if "attribute" in arm else 0,
                    "exact": exact,
                    "sm_mhz": facts.clocks().sm_mhz,
                }
            )
    nccl.close()
    results_file.write(Path(sys.argv[1]), "launch-priority", rows, spec="cuda")
    for line in rows:
        print(line)


def trial(
    gemm: Callable[[], Any], issue: Callable[[torch.cuda.Stream], None], stream: torch.cuda.Stream
) -> tuple[float, float]:
    """Return the ends of GEMM and communication in ms after the GEMM's start."""
    torch.cuda.synchronize()
    start, end, done = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    gemm()
    end.record()
    begin = time.perf_counter()
    while time.perf_counter() - begin < 150e-6:
        pass
    issue(stream)
    done.record(stream)
    torch.cuda.synchronize()
    return start.elapsed_time(end), start.elapsed_time(done)


if __name__ == "__main__":
    main()
