"""The model against what an H200's driver and hardware said (bench/residency/sweep.py)."""

import csv
from pathlib import Path

import pytest

from overlapctl.device import open_device
from overlapctl.plan.residency import blocks_per_sm
from overlapctl.records import KernelFootprint

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def facts():
    return open_device("sim:h200").facts()


def test_residency_equals_the_driver_on_every_swept_launch(facts):
    rows = list(csv.DictReader((DATA / "h200_occupancy.csv").open()))
    assert len(rows) >= 1600
    for row in rows:
        values = {k: int(v) for k, v in row.items()}
        measured = values.pop("blocks_per_sm")
        footprint = KernelFootprint(name="live", **values)
        assert blocks_per_sm(facts, footprint) == measured, row
