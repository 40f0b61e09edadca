"""Compute workloads, on the CPU where torch can run them there."""

from __future__ import annotations

import math

import pytest
import torch

from overlapctl.errors import UsageError
from overlapctl.measure.workloads import build_workload, tensor_shapes
from overlapctl.records import ComputeSpec

CPU = torch.device("cpu")
SPECS = [
    ComputeSpec(op="gemm", shape=(32, 48, 64), dtype="fp32"),
    ComputeSpec(op="elementwise", shape=(1000,), dtype="bf16", repeats=3),
    ComputeSpec(op="layernorm", shape=(16, 128), dtype="fp32"),
    ComputeSpec(op="attention", shape=(1, 2, 16, 8), dtype="fp32", repeats=2),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.op)
def test_results_have_the_right_shape_and_are_the_same_every_time(spec):
    work = build_workload(spec, CPU)
    work.launch()
    first = work.bits()
    assert tuple(first.shape) == tensor_shapes(spec)[-1]
    assert torch.isfinite(work.result()).all()
    work.launch()
    assert torch.equal(work.bits(), first)
    # Another rank, or another process, computes the same.
    other = build_workload(spec, CPU)
    other.launch()
    assert torch.equal(other.bits(), first)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.op)
def test_a_launch_that_does_not_happen_is_noticed(spec):
    work = build_workload(spec, CPU)
    work.launch()
    first = work.bits()
    work.spoil()
    assert not torch.equal(work.bits(), first)
    work.launch()
    assert torch.equal(work.bits(), first)


def test_gemm_results_have_realistic_magnitude():
    work = build_workload(ComputeSpec(op="gemm", shape=(64, 64, 4096), dtype="fp32"), CPU)
    work.launch()
    assert float(work.result().std()) == pytest.approx(1.0, rel=0.1)


def test_bits_tell_what_comparison_by_value_does_not():
    work = build_workload(ComputeSpec(op="elementwise", shape=(4,), dtype="fp32"), CPU)
    work.result().copy_(torch.tensor([0.0, -0.0, math.nan, 1.0]))
    zero, minus_zero, nan, _ = work.bits().tolist()
    assert zero != minus_zero
    assert nan == work.bits().tolist()[2]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ComputeSpec(op="gemm", shape=(8, 8)), r"shape of gemm is \(8, 8\)"),
        (ComputeSpec(op="elementwise", shape=(0,)), r"elementwise is \(0,\)"),
        (ComputeSpec(op="layernorm", shape=(8, 8), repeats=0), "repeats is 0"),
        (ComputeSpec(op="elementwise", shape=(8,), tile=(64, 64, 64, 4, 3)), "tile"),
        (ComputeSpec(op="gemm", shape=(8, 8, 8), tile=(64, 60, 64, 4, 3)), "block N .* is 60"),
    ],
)
def test_bad_specs_are_refused(spec, message):
    with pytest.raises(UsageError, match=message):
        build_workload(spec, CPU)
