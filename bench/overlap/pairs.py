"""Pairs of findings, interleaved: `pairs.py OUT_DIR [--runs 3] [--repeats 9]` (any number of GPUs).

The Triton GEMM 8192^3 (bf16, tile 64x64x64, 4 warps, 3 stages) and cuBLAS's, with the collective of
896 MB issued while they run, under: the default; arms that must change nothing (4 blocks per SM is
the GEMM's own residency); priority; residency targets with and without priority. Each run is a
process of its own. On one GPU the collective is the stand-in with NCCL's footprint at link speed.
The runner checks that the GEMM's result is bit-identical in every arm and the collective's correct.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import results_file
from overlapctl.device import open_device
from overlapctl.measure.gpu import GpuRunner
from overlapctl.measure.metrics import evaluate
from overlapctl.records import Arm, Case, Policy
from overlapctl.specs import format_comm, format_compute, parse_comm, parse_compute

COMPUTE = ("gemm:8192x8192x8192:bf16:64x64x64", "gemm:8192x8192x8192:bf16")
COMMS = ("all_reduce:896MB", "all_to_all:896MB")
ONE_GPU_COMMS = ("local_copy:896MB:standin", "local_copy:896MB:nccl")

ARMS = [
    Arm(name="default"),
    Arm(name="default again"),
    Arm(name="4/SM", policy=Policy(max_blocks_per_sm=4)),
    Arm(name="priority", policy=Policy(comm_priority=True)),
    Arm(name="priority+4/SM", policy=Policy(comm_priority=True, max_blocks_per_sm=4)),
    Arm(name="3/SM", policy=Policy(max_blocks_per_sm=3)),
    Arm(name="priority+3/SM", policy=Policy(comm_priority=True, max_blocks_per_sm=3)),
    Arm(name="priority+2/SM", policy=Policy(comm_priority=True, max_blocks_per_sm=2)),
    Arm(name="priority+carveout100", policy=Policy(comm_priority=True, carveout=100)),
]


def one_run(repeats: int) -> list[dict[str, Any]]:
    """Measure every pair once, in this process."""
    device = open_device("cuda")
    gpus = len(device.topology().devices)
    rows = []
    runner = GpuRunner()
    try:
        for compute in COMPUTE:
            for comm in COMMS if gpus > 1 else ONE_GPU_COMMS:
                case = Case(compute=parse_compute(compute), comm=parse_comm(comm))
                trials = runner.run(case, ARMS, repeats=repeats)
                for trial in trials:
                    metrics = evaluate(trial, trials[0])
                    ends = [s.comm_end for s in trial.samples if s.comm_end is not None]
                    rows.append(
                        {
                            "compute": format_compute(case.compute),
                            "comm": format_comm(case.comm),
                            "arm": trial.arm.name,
                            "compute_alone": metrics.compute_alone,
                            "arm_compute_alone": metrics.arm_compute_alone,
                            "comm_alone": metrics.comm_alone,
                            "comm_end": sorted(ends)[len(ends) // 2],
                            "total": metrics.total,
                            "spread": metrics.total_spread,
                            "against_default": metrics.against_default,
                            "gain_share": metrics.gain_share,
                            "speedup_share": metrics.speedup_share,
                            "compute_slowdown": metrics.compute_slowdown,
                            "hidden_share": metrics.hidden_share,
                            "sm_mhz": metrics.sm_mhz,
                            "power_w": metrics.power_w,
                        }
                    )
    finally:
        runner.close()
    return rows


def main() -> None:
    """Run as many processes as asked for and write their rows together."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--inside", action="store_true", help="measure here, print JSON")
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(one_run(options.repeats)))
        return
    rows = []
    for run in range(options.runs):
        command = [sys.executable, __file__, str(options.out), "--inside"]
        command += ["--repeats", str(options.repeats)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows += [{"run": run, **row} for row in json.loads(done.stdout.splitlines()[-1])]
    results_file.write(options.out, "pairs", rows, spec="cuda")
    for row in rows:
        print(
            f"{row['run']} {row['compute'][:34]:34s} {row['comm'][:16]:16s} {row['arm']:21s} "
            f"{row['total']:.3f} +-{row['spread']:.1%}, {row['against_default']:.3f} of default"
        )


if __name__ == "__main__":
    main()
