"""What trials read from the shim's rows and records."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest

from overlapctl.launch.observe import ObservedKernel
from overlapctl.launch.ring import LaunchRecord
from overlapctl.launch.rows import rows_since
from overlapctl.measure import shaping
from overlapctl.measure.shaping import Observation, ShimShaping
from overlapctl.records import Applied, KernelFootprint, Policy, Role, Rule

GEMM = Applied(
    kernel="gemm",
    role=Role.COMPUTE,
    threads=128,
    registers=62,
    static_smem=0,
    launches=4,
    shaped=3,
    prioritised=0,
    carved=0,
    failed=0,
    captured=0,
    before=49152,
    after=60000,
    blocks_before=4,
    blocks_after=3,
    rule=Rule.PADDED_TO_TARGET,
)
NCCL = dataclasses.replace(
    GEMM, kernel="ncclDevKernel", role=Role.COMMUNICATION, threads=544, before=82240, shaped=0
)


def test_growth_only_with_counts_since_then():
    grown = dataclasses.replace(GEMM, launches=7, shaped=5, after=70000)
    assert rows_since([grown, NCCL], [GEMM, NCCL]) == (
        dataclasses.replace(grown, launches=3, shaped=2),
    )
    assert rows_since([GEMM], []) == (GEMM,)
    assert rows_since([GEMM], [GEMM]) == ()


def test_a_kernel_loaded_twice_is_added_up():
    (row,) = rows_since([GEMM, GEMM], [GEMM])
    assert (row.launches, row.shaped) == (4, 3)


def test_the_dominant_kernel_is_the_compute_kernel_with_the_largest_share():
    def kernel(name, role, share):
        footprint = KernelFootprint(name=name, threads=128, registers=62, blocks=64)
        return ObservedKernel(footprint=footprint, role=role, launches=1, share=share, streams=(0,))

    gemm = kernel("gemm", Role.COMPUTE, 0.9)
    nccl = kernel("nccl", Role.COMMUNICATION, 1.0)
    seen = Observation((nccl, gemm, kernel("split_k_reduce", Role.COMPUTE, 0.1)))
    assert seen.dominant() == gemm.footprint
    assert Observation((nccl,)).dominant() is None


class FakeShim:
    def __init__(self):
        self.stack, self.rows, self.ring = [], [NCCL], [self.record(7)]
        self.listeners = 0

    def push(self, policy):
        self.stack.append(policy)
        return len(self.stack)

    def pop(self, token):
        assert token == len(self.stack)
        self.stack.pop()

    def kernels(self):
        return list(self.rows)

    def snapshot(self):
        return SimpleNamespace(functions=lambda: {0xF: GEMM})

    @contextlib.contextmanager
    def listening(self):
        self.listeners = self.listeners + 1
        yield
        self.listeners = self.listeners - 1

    def reader(self):
        start = len(self.ring)
        return SimpleNamespace(read=lambda: self.ring[start:])

    def record(self, blocks):
        return LaunchRecord(
            **{field.name: 0 for field in dataclasses.fields(LaunchRecord)}
            | {"function": 0xF, "threads": 128, "before": 49152, "blocks": blocks, "cluster": 1}
            | {"role": Role.COMPUTE, "rule": Rule.NOTHING_ASKED}
        )


@pytest.fixture
def shim(monkeypatch):
    fake = FakeShim()
    monkeypatch.setattr(shaping, "_shim", lambda: fake)
    return fake


def test_observing_pushes_a_policy_that_changes_nothing_and_forgets_what_was_before(shim):
    with ShimShaping().observed() as seen:
        assert shim.stack == [Policy()]
        assert shim.listeners == 1
        shim.ring += [shim.record(100), shim.record(50)]
    assert shim.stack == []
    assert shim.listeners == 0
    (kernel,) = seen.kernels
    assert (kernel.footprint.name, kernel.launches) == ("gemm", 2)
    footprint = seen.dominant()
    assert (footprint.blocks, footprint.smem, footprint.registers) == (100, 49152, 62)


def test_rows_since_earlier_ones(shim):
    before = ShimShaping().rows()
    shim.rows.append(GEMM)
    assert ShimShaping().since(before) == (GEMM,)


def test_a_policy_is_popped_after_an_error(shim):
    with contextlib.suppress(KeyError), ShimShaping().in_force(Policy(pad_bytes=64)):
        assert shim.stack == [Policy(pad_bytes=64)]
        raise KeyError
    assert shim.stack == []
