"""The shipped parameters against the trials recorded on 2x H200 (in-sample; see bench/model)."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest

from overlapctl.device import open_device
from overlapctl.plan.calibration import Prediction, predict
from overlapctl.plan.parameters import parameters_for

RECORDED = Path(__file__).parents[3] / "bench" / "model" / "recorded.py"


@pytest.fixture(scope="module")
def recorded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recorded", RECORDED)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["recorded"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def predictions(recorded: ModuleType) -> list[tuple[object, Prediction]]:
    facts = open_device("sim:h200").facts()
    parameters = parameters_for(facts)
    return [
        (row, predict(facts, recorded.observation(facts, row), parameters))
        for row in recorded.pairs() + recorded.pipelines()
    ]


def test_totals_are_predicted(predictions: list[tuple[object, Prediction]]) -> None:
    errors = sorted(abs(p.total / row.total - 1) for row, p in predictions)  # type: ignore[attr-defined]
    assert len(errors) == 557
    assert statistics.median(errors) <= 0.05
    assert errors[int(0.9 * len(errors))] <= 0.12


def test_padded_compute_times_are_predicted(
    predictions: list[tuple[object, Prediction]],
) -> None:
    errors = [
        abs(p.compute_alone / row.padded_alone - 1)  # type: ignore[attr-defined]
        for row, p in predictions
        if row.padded_alone is not None  # type: ignore[attr-defined]
    ]
    assert len(errors) > 200
    assert statistics.median(errors) <= 0.05
