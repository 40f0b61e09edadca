"""Fit the simulation's parameters to what was observed on one GPU model.

::

    observations (inputs, outcomes) -> coordinate descent on log errors -> SimulationParameters

An observation is one arm of one case: footprints and times alone as inputs, ends as outcomes. It is
what a trial holds, so any tuning run can calibrate the GPU it ran on.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from overlapctl.plan.parameters import SimulationParameters
from overlapctl.plan.simulate import Shape, compute_alone_ms, simulate
from overlapctl.plan.workload_model import comm_work, compute_work
from overlapctl.records import (
    CommSpec,
    ComputeSpec,
    DeviceFacts,
    KernelFootprint,
    Role,
    Trial,
)

__all__ = ["START", "Observation", "Prediction", "calibrate", "observe", "predict"]

START: Mapping[str, float] = {
    "load_latency_us": 1.0,
    "memory_latency_us": 1.0,
    "gemm_sharpness": 4.0,
    "memory_sharpness": 2.0,
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
"""The parameters that are fitted, and round values to start from. The cache effect, the scheduler's
rate and the launch gap are not: few observations show them."""

_STEPS = (1.35, 1.1)
_PASSES = 2
_END_WEIGHT = 0.2

_GEMM_ONLY = (
    "load_latency_us",
    "gemm_sharpness",
    "comm_latency_gemm",
    "compute_on_comm_gemm",
    "queueing_onset",
)
_MEMORY_ONLY = (
    "memory_sharpness",
    "memory_latency_us",
    "comm_latency_memory",
    "compute_on_comm_memory",
)
_LIGHT_ONLY = ("light_traffic", "light_sensitivity", "crowded_comm")
_DEFAULTS = SimulationParameters()


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One arm of one case.

    Parameters
    ----------
    compute, footprint, compute_alone
        The compute workload, its untouched footprint and its untouched time alone in ms (all
        repeats; of one stage in a pipeline).
    comm, comm_footprint, comm_alone, comm_launches
        The same of the collective; ``comm_alone`` is for all launches.
    shape, depth
        What was done to the launches; stages of a pipeline or ``None`` for a pair.
    total, compute_end, comm_end
        Outcomes in ms; ``None`` where an end was not recorded.
    """

    compute: ComputeSpec
    footprint: KernelFootprint
    compute_alone: float
    comm: CommSpec
    comm_footprint: KernelFootprint
    comm_alone: float
    comm_launches: int = 1
    shape: Shape = field(default_factory=Shape)
    depth: int | None = None
    total: float
    compute_end: float | None = None
    comm_end: float | None = None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the simulation says of an observation, ms; ``compute_alone`` is under its shape."""

    compute_alone: float
    compute_end: float
    comm_end: float

    @property
    def total(self) -> float:
        """End of whatever ended last."""
        return max(self.compute_end, self.comm_end)


def observe(
    trial: Trial, footprint: KernelFootprint, comm_footprint: KernelFootprint
) -> Observation:
    """Turn a trial into an observation (medians of its samples).

    Parameters
    ----------
    trial
        Of one arm.
    footprint, comm_footprint
        Of the untouched kernels.
    """
    case = trial.case
    stages = case.depth if case.form == "pipeline" else 1
    pad, carveout, priority = 0, -1, trial.arm.policy.comm_priority
    for row in trial.applied:
        if row.role is Role.COMPUTE and row.shaped:
            pad = row.after - row.before
        if row.role is Role.COMPUTE and row.carved:
            carveout = trial.arm.policy.carveout
    ends = [(s.compute_end, s.comm_end) for s in trial.samples]
    return Observation(
        compute=case.compute,
        footprint=footprint,
        compute_alone=statistics.median(trial.compute_alone) / stages,
        comm=case.comm,
        comm_footprint=comm_footprint,
        comm_alone=statistics.median(trial.comm_alone) / stages,
        shape=Shape(pad=pad, carveout=carveout, comm_priority=priority),
        depth=stages if case.form == "pipeline" else None,
        total=statistics.median(s.total for s in trial.samples),
        compute_end=_median([c for c, _ in ends if c is not None]),
        comm_end=_median([m for _, m in ends if m is not None]),
    )


def predict(
    facts: DeviceFacts, observation: Observation, parameters: SimulationParameters
) -> Prediction:
    """Simulate an observation from its inputs alone."""
    blind = replace(observation, total=0.0, compute_end=None, comm_end=None)
    return _predict(facts, blind, _relevant(observation, parameters))


def calibrate(
    facts: DeviceFacts,
    observations: Sequence[Observation],
    start: Mapping[str, float] = START,
) -> SimulationParameters:
    """Fit the parameters named in ``start`` to observations; deterministic.

    Coordinate descent on the mean absolute log error of the total, plus a share of those of both
    ends. A few hundred observations take minutes.
    """
    best = replace(_DEFAULTS, **start)
    least = _loss(facts, observations, best)
    for step in _STEPS:
        for _ in range(_PASSES):
            before = least
            for name in start:
                for factor in (step, 1 / step):
                    value = round(getattr(best, name) * factor, 4)
                    if name == "kept_beside_comm":
                        value = min(value, 1.0)
                    trial = replace(best, **{name: value})
                    now = _loss(facts, observations, trial)
                    if now < least - 1e-6:
                        best, least = trial, now
                        break
            if least == before:
                break
    return best


def _loss(
    facts: DeviceFacts, observations: Sequence[Observation], parameters: SimulationParameters
) -> float:
    total = 0.0
    for seen in observations:
        said = predict(facts, seen, parameters)
        total += abs(math.log(said.total / seen.total))
        if seen.compute_end and seen.comm_end:
            total += _END_WEIGHT * abs(math.log(said.compute_end / seen.compute_end))
            total += _END_WEIGHT * abs(math.log(said.comm_end / seen.comm_end))
    return total / len(observations)


def _relevant(observation: Observation, parameters: SimulationParameters) -> SimulationParameters:
    """Put parameters that cannot matter back to their defaults: more predictions are cached."""
    memory = observation.compute.op in ("elementwise", "layernorm")
    idle: tuple[str, ...] = _GEMM_ONLY if memory else _MEMORY_ONLY
    idle += () if observation.comm.path == "light" else _LIGHT_ONLY
    return replace(parameters, **{name: getattr(_DEFAULTS, name) for name in idle})


@functools.lru_cache(maxsize=20_000)
def _predict(
    facts: DeviceFacts, observation: Observation, parameters: SimulationParameters
) -> Prediction:
    compute = compute_work(
        facts,
        observation.compute,
        footprint=observation.footprint,
        alone_ms=observation.compute_alone,
        parameters=parameters,
    )
    comm = replace(
        comm_work(
            facts,
            observation.comm,
            footprint=observation.comm_footprint,
            alone_ms=observation.comm_alone,
            parameters=parameters,
        ),
        launches=observation.comm_launches,
    )
    result = simulate(
        facts,
        compute,
        comm,
        observation.shape,
        depth=observation.depth,
        parameters=parameters,
    )
    shape = observation.shape
    alone = compute_alone_ms(facts, compute, shape.pad, shape.carveout)
    return Prediction(
        compute_alone=alone * (observation.depth or 1),
        compute_end=result.compute_end,
        comm_end=result.comm_end,
    )


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
