"""Fit the simulation's parameters to recorded trials: coordinate descent on log errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from recorded import Row, predict

from overlapctl.plan.parameters import SimulationParameters
from overlapctl.records import DeviceFacts

# Where the fit starts: round values without knowledge of the outcomes. What is not listed is not
# fitted here: the cache effect has one observation (three-stage 64x64x64 at 3 and 4 blocks, not in
# the tables), the scheduler's rate and the launch gap were read off the add4GB rows and traces.
START = {
    "load_latency_us": 1.0,
    "gemm_sharpness": 4.0,
    "memory_sharpness": 2.0,
    "memory_knee_warps": 20.0,
    "comm_latency_memory": 0.1,
    "comm_latency_gemm": 0.1,
    "light_traffic": 0.5,
    "light_sensitivity": 1.5,
    "compute_on_comm_memory": 0.2,
    "compute_on_comm_gemm": 0.3,
    "queueing_onset": 1.0,
    "crowded_comm": 1.2,
    "kept_beside_comm": 0.5,
}
STEPS = (1.4, 1.15, 1.06)
PASSES = 2


def loss(facts: DeviceFacts, rows: Sequence[Row], parameters: SimulationParameters) -> float:
    """Mean absolute log error of the total, plus a share of those of both ends."""
    total = 0.0
    for row in rows:
        p = predict(facts, row, parameters)
        total += abs(math.log(p.total / row.total))
        if row.compute_end and row.comm_end:
            total += 0.2 * abs(math.log(p.compute_end / row.compute_end))
            total += 0.2 * abs(math.log(p.comm_end / row.comm_end))
    return total / len(rows)


def fit(facts: DeviceFacts, rows: Sequence[Row]) -> SimulationParameters:
    """Parameters that fit the rows best, from ``START``; deterministic."""
    best = replace(SimulationParameters(), **START)
    least = loss(facts, rows, best)
    for step in STEPS:
        improved, passes = True, 0
        while improved and passes < PASSES:
            improved, passes = False, passes + 1
            for name in START:
                for factor in (step, 1 / step):
                    value = round(getattr(best, name) * factor, 4)
                    if name == "kept_beside_comm":
                        value = min(value, 1.0)
                    trial = replace(best, **{name: value})
                    now = loss(facts, rows, trial)
                    if now < least - 1e-6:
                        best, least, improved = trial, now, True
                        break
    return best
