"""The metrics, checked on the headline numbers and at their edges."""

from __future__ import annotations

import dataclasses

import pytest

from overlapctl.errors import MeasurementError, UsageError
from overlapctl.measure.metrics import evaluate, mean_gain_share
from overlapctl.records import Arm, Case, Clocks, CommSpec, ComputeSpec, Sample, Trial

CASE = Case(
    compute=ComputeSpec(op="gemm", shape=(8192, 8192, 8192), tile=(64, 64, 64, 4, 3)),
    comm=CommSpec(op="all_reduce", size_bytes=896 << 20),
)


def trial(name, compute_end, comm_end, *, issue=0.15, compute=3.90, comm=2.93, clocks=None):
    sample = Sample(compute_end=compute_end, comm_issue=issue, comm_end=comm_end, clocks=clocks)
    return Trial(
        case=CASE,
        arm=Arm(name=name),
        samples=(sample,) * 3,
        compute_alone=(compute,) * 3,
        comm_alone=(comm,) * 3,
    )


DEFAULT = trial("default", 3.93, 6.85)


def test_the_shaped_arm_of_the_headline_case():
    m = evaluate(trial("priority, 3 blocks", 3.96, 3.63), DEFAULT)
    assert m.serial == pytest.approx(6.83)
    assert m.ideal == pytest.approx(3.90)
    assert m.total == 3.96
    assert m.speedup == pytest.approx(1.7247, abs=1e-4)
    assert m.gain_share == pytest.approx((6.83 - 3.96) / 2.93)
    assert m.speedup_share == pytest.approx((6.83 / 3.96 - 1) / (6.83 / 3.90 - 1))
    assert m.against_default == pytest.approx(3.96 / 6.85)
    assert m.compute_slowdown == pytest.approx(3.96 / 3.90)
    assert m.comm_latency == pytest.approx(3.48)
    assert m.hidden_share == 1.0


def test_the_default_is_serial_and_a_bit_worse_and_nothing_is_clipped():
    m = evaluate(DEFAULT, DEFAULT)
    assert m.against_default == 1.0
    assert m.gain_share == pytest.approx(-0.02 / 2.93)
    assert m.hidden_share == pytest.approx(1 - 2.92 / 2.93)
    beyond = evaluate(trial("better than ideal", 3.5, 3.4), DEFAULT)
    assert beyond.gain_share > 1
    late = evaluate(trial("starved", 3.93, 9.0), DEFAULT)
    assert late.hidden_share < 0


def test_clocks_are_medians_and_none_where_the_device_is_silent():
    clocks = Clocks(sm_mhz=1500, memory_mhz=None, power_w=612.5, temperature_c=50)
    m = evaluate(trial("a", 4.0, 4.0, clocks=clocks), DEFAULT)
    assert (m.sm_mhz, m.power_w) == (1500, 612.5)
    assert evaluate(DEFAULT, DEFAULT).sm_mhz is None


def test_means_leave_out_cases_with_nothing_to_gain():
    much = evaluate(trial("a", 3.9, 3.9), DEFAULT)
    small = trial("a", 3.9, 4.4, comm=0.3)  # S/I = 1.077
    little = evaluate(small, small)
    assert little.ideal_speedup < 1.1
    assert mean_gain_share([much, little]) == pytest.approx(1.0)
    assert mean_gain_share([little]) is None


def test_missing_or_impossible_times_name_the_arm_and_the_field():
    with pytest.raises(MeasurementError, match=r"'default' has compute_alone = \[\]"):
        evaluate(dataclasses.replace(DEFAULT, compute_alone=()), DEFAULT)
    with pytest.raises(MeasurementError, match="comm_alone"):
        evaluate(dataclasses.replace(DEFAULT, comm_alone=(0.0,)), DEFAULT)
    with pytest.raises(MeasurementError, match="'empty' has"):
        evaluate(dataclasses.replace(DEFAULT, arm=Arm(name="empty"), samples=()), DEFAULT)


def test_arms_of_different_cases_are_not_compared():
    other = dataclasses.replace(
        DEFAULT, case=dataclasses.replace(CASE, form="pipeline"), arm=Arm(name="x")
    )
    with pytest.raises(UsageError, match="different cases"):
        evaluate(other, DEFAULT)
