"""What a region costs a job of small operations: `python bench/overhead/torch_loop.py OUT_DIR`.

The same loop of small torch operations (launch-bound: the GPU waits for the CPU) runs with nothing
attached, attached but off, in force and changing nothing (observing), and in force shaping every
launch. Arms are interleaved after attaching; "not attached" can only run before and is therefore
compared by medians of the same number of rounds.
"""

from __future__ import annotations

import contextlib
import random
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
from overlapctl.launch.attach import ensure_attached

ROUNDS = 60
LAUNCHES = 1000


def loop(x: torch.Tensor) -> float:
    """Time one round in microseconds per launch."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(LAUNCHES // 2):
        torch.add(x, 1.0, out=x)
        torch.mul(x, 0.5, out=x)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / LAUNCHES * 1e6


def main() -> None:
    """Measure and write."""
    x = torch.randn(1024, device="cuda")
    for _ in range(3):
        loop(x)
    detached = [loop(x) for _ in range(ROUNDS)]
    ensure_attached()
    regions: dict[str, Callable[[], Any]] = {
        "off": contextlib.nullcontext,
        "observing": lambda: overlapctl.overlap(None, comm_priority=False, strict=True),
        "priority only": lambda: overlapctl.overlap(None, strict=True),
        "shaping every launch": lambda: overlapctl.overlap(1024, strict=True),
    }
    times: dict[str, list[float]] = {name: [] for name in regions}
    order = list(regions)
    for _ in range(ROUNDS):
        random.shuffle(order)
        for name in order:
            with regions[name]():
                times[name].append(loop(x))
    base = statistics.median(times["off"])
    rows = [row("not attached", detached, base)]
    rows += [row(name, values, base) for name, values in times.items()]
    results_file.write(Path(sys.argv[1]), "overhead-torch-loop", rows)
    for line in rows:
        print(line)


def row(name: str, values: list[float], base: float) -> dict[str, Any]:
    """Summarise one arm."""
    middle = statistics.median(values)
    return {
        "arm": name,
        "us_per_launch": middle,
        "lowest": min(values),
        "highest": max(values),
        "against_off": middle / base,
    }


if __name__ == "__main__":
    main()
