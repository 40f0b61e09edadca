"""Verdicts for simulated GPUs change the right way with the GPU, the link and the footprint."""

import pytest

from overlapctl.device import open_device
from overlapctl.measure.simulated import SimulatedRunner
from overlapctl.records import Case
from overlapctl.specs import parse_comm, parse_compute
from overlapctl.tuning import tune

GEMM = "gemm:8192x8192x8192:bf16:64x64x64"


@pytest.fixture(scope="module")
def verdict():
    known = {}

    def find(device, compute, comm):
        key = device, compute, comm
        if key not in known:
            simulated = open_device(device)
            case = Case(compute=parse_compute(compute), comm=parse_comm(comm))
            runner = SimulatedRunner(simulated.facts())
            known[key] = tune(simulated, [case], runner, budget_s=60).evidence[0].verdict
        return known[key]

    return find


def test_fewer_sms_turn_a_resident_grid_into_waves_that_priority_can_pass(verdict):
    # 512 blocks, four to an SM: all resident at once on 132 SMs, in waves on 40.
    small = "gemm:2048x1024x8192:bf16:64x64x64"
    whole = verdict("sim:h200", small, "all_reduce:64MB")
    waves = verdict("sim:h200,sms=40", small, "all_reduce:64MB")
    assert whole.chosen == "default"
    assert waves.chosen.startswith("priority")
    assert waves.gain > 0.05


def test_a_faster_link_leaves_less_to_gain(verdict):
    gains = [
        verdict(f"sim:h200,link={link}", GEMM, "all_reduce:896MB").gain
        for link in (370, 1500, 9000)
    ]
    assert gains[0] > gains[1] > gains[2]
    assert gains[0] > 0.3


def test_a_light_footprint_gains_more_from_padding_than_nccls(verdict):
    # Longer than the GEMM: beside two blocks of it the light kernel fits, NCCL's does not.
    def padding_gain(path):
        totals = verdict("sim:h200", GEMM, f"all_reduce:1792MB:{path}").totals
        return 1 - min(totals.values()) / totals["priority"]

    assert padding_gain("light") > padding_gain("nccl") + 0.1


def test_a_persistent_kernel_is_left_alone_beside_nccl(verdict):
    found = verdict("sim:h200", "gemm:8192x8192x8192:bf16", "all_reduce:512MB")
    assert found.chosen == "default"
    assert "persistent" in found.reason
