"""Calibration finds parameters again, sees nothing of the outcomes, and reads trials."""

from __future__ import annotations

import dataclasses

import pytest

from overlapctl.measure.simulated import SimulatedRunner
from overlapctl.plan.calibration import Observation, calibrate, observe, predict
from overlapctl.plan.parameters import SimulationParameters
from overlapctl.plan.simulate import Shape
from overlapctl.plan.workload_model import comm_work, compute_work
from overlapctl.records import Arm, Case, CommSpec, ComputeSpec, DeviceFacts, Policy

GEMM = ComputeSpec(op="gemm", shape=(8192, 8192, 8192), tile=(64, 64, 64, 4, 2))
ALL_REDUCE = CommSpec(op="all_reduce", size_bytes=896 * 2**20)


def case(facts: DeviceFacts, pad: int = 0, *, priority: bool = True) -> Observation:
    compute, comm = compute_work(facts, GEMM), comm_work(facts, ALL_REDUCE)
    return Observation(
        compute=GEMM,
        footprint=compute.footprint,
        compute_alone=compute.alone_ms,
        comm=ALL_REDUCE,
        comm_footprint=comm.footprint,
        comm_alone=comm.alone_ms,
        shape=Shape(pad=pad, comm_priority=priority),
        total=1.0,
    )


def with_outcomes(
    facts: DeviceFacts, seen: Observation, parameters: SimulationParameters
) -> Observation:
    said = predict(facts, seen, parameters)
    return dataclasses.replace(
        seen, total=said.total, compute_end=said.compute_end, comm_end=said.comm_end
    )


def test_finds_the_parameters_that_made_the_outcomes(h200: DeviceFacts) -> None:
    truth = dataclasses.replace(SimulationParameters(), load_latency_us=1.1, comm_latency_gemm=0.3)
    pads = (0, 8000, 25000, 60000)
    seen = [with_outcomes(h200, case(h200, pad), truth) for pad in pads]
    start = {"load_latency_us": 0.6, "comm_latency_gemm": 0.1}
    found = calibrate(h200, seen, start)
    for observation in seen:
        said = predict(h200, observation, found)
        assert said.total == pytest.approx(observation.total, rel=0.05)
    assert found.load_latency_us == pytest.approx(1.1, rel=0.1)
    untouched = SimulationParameters()
    assert found.memory_sharpness == untouched.memory_sharpness


def test_a_prediction_does_not_depend_on_the_outcomes(h200: DeviceFacts) -> None:
    parameters = SimulationParameters()
    seen = case(h200)
    other = dataclasses.replace(seen, total=77.0, compute_end=3.0, comm_end=1.0)
    assert predict(h200, seen, parameters) == predict(h200, other, parameters)


def test_a_trial_becomes_an_observation_that_is_predicted(h200: DeviceFacts) -> None:
    runner = SimulatedRunner(h200)
    arm = Arm(name="a", policy=Policy(comm_priority=True, max_blocks_per_sm=3))
    for form in ("pair", "pipeline"):
        trial = runner.run(
            Case(compute=GEMM, comm=ALL_REDUCE, form=form, depth=3),  # type: ignore[arg-type]
            [arm],
            repeats=9,
        )[0]
        footprint = compute_work(h200, GEMM).footprint
        seen = observe(trial, footprint, comm_work(h200, ALL_REDUCE).footprint)
        assert seen.shape.pad > 0
        assert seen.shape.comm_priority
        assert seen.depth == (3 if form == "pipeline" else None)
        said = predict(h200, seen, SimulationParameters())
        # The runner's noise is 0.7 %.
        assert said.total == pytest.approx(seen.total, rel=0.03)
