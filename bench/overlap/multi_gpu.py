"""Priority of existing process groups, on two GPUs or more: `multi_gpu.py OUT_DIR`.

While a Triton GEMM of many waves runs, an all-reduce of 896 MB is issued (a) on an ordinary group,
(b) on an ordinary group inside a region with communication priority, (c) on a group made with
``overlapctl.process_group_options(high_priority=True)``. (b) must end within 10% of (c). Arms are
interleaved; the sum is checked exactly; times are maxima over the ranks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[1]))
import overlapctl
import results_file
from overlapctl.device import open_device
from overlapctl.measure.workloads import build_workload
from overlapctl.specs import parse_compute

REPEATS = 9
BYTES = 896 << 20
ARMS = ("ordinary group", "ordinary group + launch attribute", "high-priority group")


def rank_main(rank: int, world: int, port: int, out: str) -> None:
    """Measure on one rank; rank 0 writes."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device)
    groups = {
        False: dist.new_group(pg_options=overlapctl.process_group_options(high_priority=False)),
        True: dist.new_group(pg_options=overlapctl.process_group_options(high_priority=True)),
    }
    gemm = build_workload(parse_compute("gemm:8192x8192x8192:bf16:64x64x64"), device)
    payload = torch.empty(BYTES // 2, device=device, dtype=torch.bfloat16)
    expected = sum(range(1, world + 1))
    samples: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    touched, exact = 0, True
    side = torch.cuda.Stream()
    for repeat in range(REPEATS + 2):
        for arm in ARMS:
            payload.fill_(rank + 1)
            region: Any = contextlib.nullcontext()
            if "attribute" in arm:
                region = overlapctl.overlap(None, strict=True)
            group = groups[arm.startswith("high")]
            with region as session:
                ends = trial(gemm.launch, payload, group, side)
            if session is not None:
                touched += session.stats().prioritised
            exact = exact and bool((payload == expected).all())
            slowest = torch.tensor(ends, device=device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if repeat >= 2:
                samples[arm].append(slowest.tolist())
    if rank == 0:
        clocks = open_device(f"cuda:{rank}").clocks()
        rows = [
            {
                "arm": arm,
                "gemm_end_ms": statistics.median(v[0] for v in values),
                "comm_end_ms": statistics.median(v[1] for v in values),
                "lowest": min(v[1] for v in values),
                "highest": max(v[1] for v in values),
                "launches_prioritised": touched if "attribute" in arm else 0,
                "exact": exact,
                "sm_mhz": clocks.sm_mhz,
            }
            for arm, values in samples.items()
        ]
        results_file.write(Path(out), "group-priority", rows, spec="cuda")
        for row in rows:
            print(row)
    dist.destroy_process_group()


def trial(
    gemm: Callable[[], None], payload: torch.Tensor, group: Any, side: torch.cuda.Stream
) -> list[float]:
    """Return the ends of GEMM and all-reduce in ms after the GEMM's start."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start, end, done = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    gemm()
    end.record()
    begin = time.perf_counter()
    while time.perf_counter() - begin < 150e-6:
        pass
    with torch.cuda.stream(side):
        dist.all_reduce(payload, group=group, async_op=True).wait()
        done.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end), start.elapsed_time(done)]


def main() -> None:
    """Start a process per GPU."""
    world = torch.cuda.device_count()
    if world < 2:
        raise SystemExit("needs two GPUs or more; on one, use bench/overlap/priority.py")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, args=(world, port, sys.argv[1]), nprocs=world)


if __name__ == "__main__":
    main()
