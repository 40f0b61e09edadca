"""The model against what an H200's driver and hardware said (bench/residency/sweep.py)."""

import csv
from pathlib import Path

import pytest

from overlapctl.device import open_device
from overlapctl.plan.residency import blocks_per_sm
from overlapctl.plan.room import room_beside
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


def test_guests_beside_a_persistent_gemm_are_those_that_were_seen(facts):
    gemm = KernelFootprint(name="nvjet", threads=384, registers=168, dynamic_smem=188636)
    rows = [
        {k: int(v) for k, v in row.items()}
        for row in csv.DictReader((DATA / "h200_room.csv").open())
    ]
    assert len(rows) >= 600
    for row in rows:
        guest = KernelFootprint(name="live", threads=32 * row["warps"], registers=row["registers"])
        per_sm = room_beside(facts, gemm, 1, guest)
        wanted = row["blocks"] * row["launches"]
        if row["warps"] == 1:
            assert row["early_blocks"] == min(wanted, per_sm * facts.sm_count), row
        else:  # On some SMs at most: what the model promises for every SM is none.
            assert per_sm == 0
            assert row["early_sms"] <= facts.sm_count // 2, row
