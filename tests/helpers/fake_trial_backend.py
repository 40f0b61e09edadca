"""A backend without a device, for tests of trial runners; importable by worker processes."""

from __future__ import annotations

import os
import time

from overlapctl.errors import MeasurementError
from overlapctl.measure.rank import Timing
from overlapctl.records import Applied, Clocks, KernelFootprint, Role, Rule

FOOTPRINT = KernelFootprint(name="fake_gemm", threads=128, registers=62, dynamic_smem=49152)


class FakeBackend:
    """Times depend on the rank and the policy only; every call is logged."""

    def __init__(self, rank=0, ranks=1, compute_ms=4.0, comm_ms=3.0):
        self.rank, self.ranks = rank, ranks
        self.compute_ms, self.comm_ms = compute_ms + 0.5 * rank, comm_ms
        self.log = []

    def prepare(self, case):
        self.log.append(("prepare", case))

    def measure(self, kind, policy):
        self.log.append((kind, policy))
        compute = self.compute_ms * (1.1 if policy is not None else 1.0)
        if kind == "compute":
            return Timing(compute_end=compute)
        if kind == "comm":
            return Timing(comm_issue=0.15, comm_end=0.15 + self.comm_ms)
        if policy is None:
            return Timing(compute_end=compute, comm_issue=0.15, comm_end=compute + self.comm_ms)
        return Timing(compute_end=compute, comm_issue=0.15, comm_end=0.15 + self.comm_ms)

    def check(self, policy):
        self.log.append(("check", policy))
        return (
            Applied(
                kernel="fake_gemm",
                role=Role.COMPUTE,
                threads=128,
                registers=62,
                static_smem=0,
                launches=1,
                shaped=int(not policy.is_default),
                prioritised=0,
                carved=0,
                failed=0,
                captured=0,
                before=49152,
                after=49152,
                blocks_before=4,
                blocks_after=4,
                rule=Rule.NOTHING_ASKED,
            ),
        )

    def footprint(self):
        return FOOTPRINT

    def clocks(self):
        return Clocks(
            sm_mhz=1900 - 100 * self.rank, memory_mhz=None, power_w=None, temperature_c=None
        )

    def close(self):
        self.log.append(("close",))


class FailingBackend(FakeBackend):
    """Rank 1 fails in its first check in the way its name says."""

    def __init__(self, rank, ranks, how, patience_s=60.0):
        super().__init__(rank, ranks)
        self.how, self.patience_s = how, patience_s

    def check(self, policy):
        if self.rank == 1:
            if self.how == "raise":
                raise MeasurementError("7 elements differ", remedy="look")
            if self.how == "bug":
                raise ZeroDivisionError("division by zero")
            if self.how == "die":
                os._exit(3)
            if self.how == "kill":
                os.kill(os.getpid(), 9)
        # The others wait for rank 1, as they would on a GPU, until their watchdog bites.
        time.sleep(self.patience_s)
        raise MeasurementError(f"rank {self.rank} hung: no step in time", remedy="look")


def make_fake(rank, ranks):
    return FakeBackend(rank, ranks)


def make_failing(how, rank, ranks):
    return FailingBackend(rank, ranks, how)


def make_failing_in_job(how, rank, ranks):
    return FailingBackend(rank, ranks, how, patience_s=0.2)


def make_broken(rank, ranks):
    raise MeasurementError(f"no GPU for rank {rank}", remedy="plug one in")
