"""One rank's part of a trial: what is run in which order, and how ranks are merged.

Everything that touches a GPU is behind :class:`Backend`, so the order of steps, the checks and the
merging are tested without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from overlapctl.errors import MeasurementError
from overlapctl.measure.trial import interleaved_order
from overlapctl.records import Applied, Arm, Case, Clocks, KernelFootprint, Policy, Sample, Trial

__all__ = ["ArmResult", "Backend", "RankResult", "RankRunner", "Timing", "merge_ranks"]

WARM_UP_ROUNDS = 1
"""Untimed rounds over all steps at the start of each run, after the checks: clocks settle."""


@dataclass(frozen=True)
class Timing:
    """Ends of one step in ms after its start; ``None``: not part of the step."""

    compute_end: float | None = None
    comm_issue: float | None = None
    comm_end: float | None = None


class Backend(Protocol):
    """Runs single steps on one rank's device; ranks meet inside of each call."""

    def prepare(self, case: Case) -> None:
        """Allocate and warm up a case; free the one before. Does nothing if it is prepared."""
        ...

    def measure(self, kind: Literal["compute", "comm", "overlap"], policy: Policy | None) -> Timing:
        """Run one step under a policy (``None``: none in force) and time it."""
        ...

    def check(self, policy: Policy) -> tuple[Applied, ...]:
        """Run the case once under a policy, compare the results, and say what was applied.

        Raises
        ------
        MeasurementError
            If the compute result differs from the unshaped one, or the collective's is wrong.
        """
        ...

    def footprint(self) -> KernelFootprint | None:
        """Observe the prepared compute workload's dominant kernel."""
        ...

    def clocks(self) -> Clocks | None:
        """Read clocks and power, if the device tells."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


@dataclass
class ArmResult:
    """What one rank measured of one arm."""

    samples: list[Timing] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    clocks: list[Clocks | None] = field(default_factory=list)
    applied: tuple[Applied, ...] = ()


@dataclass
class RankResult:
    """What one rank measured in one run."""

    compute_alone: list[float] = field(default_factory=list)
    comm_alone: list[float] = field(default_factory=list)
    arms: list[ArmResult] = field(default_factory=list)


class RankRunner:
    """Runs trials on one rank.

    Parameters
    ----------
    backend
        The rank's device.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._checked: dict[tuple[Case, Policy], tuple[Applied, ...]] = {}
        self._repetition = 0

    def run(
        self,
        case: Case,
        arms: Sequence[Arm],
        repeats: int,
        on_repetition: Callable[[], None] = lambda: None,
    ) -> RankResult:
        """Run all arms of a case, interleaved; every rank must, with the same arguments.

        ``on_repetition`` is called after each step that shows the run is alive.
        """
        backend = self._backend
        backend.prepare(case)
        result = RankResult(arms=[ArmResult() for _ in arms])
        for arm, arm_result in zip(arms, result.arms, strict=True):
            if (case, arm.policy) not in self._checked:
                self._checked[case, arm.policy] = backend.check(arm.policy)
                on_repetition()
            arm_result.applied = self._checked[case, arm.policy]
        for round_ in range(WARM_UP_ROUNDS + repeats):
            keep = result if round_ >= WARM_UP_ROUNDS else None
            self._one_round(arms, keep)
            on_repetition()
        return result

    def footprint(self, case: Case) -> tuple[KernelFootprint | None, float, float]:
        """Return the compute kernel's footprint, and compute and collective alone in ms."""
        self._backend.prepare(case)
        footprint = self._backend.footprint()
        compute = _need(self._backend.measure("compute", None).compute_end, "compute_end")
        comm = _comm_alone(self._backend.measure("comm", None))
        return footprint, compute, comm

    def _one_round(self, arms: Sequence[Arm], keep: RankResult | None) -> None:
        # Counting on over runs: a later run of the same case must not repeat the same orders.
        order = interleaved_order(arms, self._repetition)
        self._repetition += 1
        for step in order:
            policy = None if step.arm is None else arms[step.arm].policy
            timing = self._backend.measure(
                step.kind, None if policy is None or policy.is_default else policy
            )
            if keep is None:
                continue
            if step.kind == "overlap" and step.arm is not None:
                keep.arms[step.arm].samples.append(timing)
                keep.arms[step.arm].clocks.append(self._backend.clocks())
            elif step.kind == "comm":
                keep.comm_alone.append(_comm_alone(timing))
            else:
                alone = keep.compute_alone if step.arm is None else keep.arms[step.arm].alone
                alone.append(_need(timing.compute_end, "compute_end"))


def merge_ranks(case: Case, arms: Sequence[Arm], ranks: Sequence[RankResult]) -> list[Trial]:
    """Merge what the ranks measured: each value is the maximum over the ranks.

    Clocks are those of the rank with the slowest SM clock of that sample; what was applied is
    rank 0's.

    Raises
    ------
    MeasurementError
        If ranks bring different numbers of values, or none.
    """
    if not ranks:
        raise MeasurementError("no rank returned results", remedy="run the trial again")
    compute_alone = _maxima([r.compute_alone for r in ranks], "compute_alone")
    comm_alone = _maxima([r.comm_alone for r in ranks], "comm_alone")
    trials = []
    for index, arm in enumerate(arms):
        parts = [r.arms[index] for r in ranks]
        ends = _maxima([[_need(t.compute_end, "") for t in p.samples] for p in parts], arm.name)
        issues = _maxima([[_need(t.comm_issue, "") for t in p.samples] for p in parts], arm.name)
        comms = _maxima([[_need(t.comm_end, "") for t in p.samples] for p in parts], arm.name)
        samples = tuple(
            Sample(
                compute_end=end,
                comm_issue=issue,
                comm_end=comm,
                clocks=_slowest([p.clocks[at] for p in parts]),
            )
            for at, (end, issue, comm) in enumerate(zip(ends, issues, comms, strict=True))
        )
        alone = _maxima([p.alone for p in parts], arm.name)
        trials.append(
            Trial(
                case=case,
                arm=arm,
                samples=samples,
                compute_alone=compute_alone,
                comm_alone=comm_alone,
                # An arm that changes nothing shares the untouched kernel's times.
                arm_compute_alone=compute_alone if arm.policy.is_default else alone,
                applied=parts[0].applied,
            )
        )
    return trials


def _maxima(per_rank: Sequence[Sequence[float]], what: str) -> tuple[float, ...]:
    if len({len(values) for values in per_rank}) != 1:
        raise MeasurementError(
            f"ranks brought {[len(v) for v in per_rank]} values of {what}",
            remedy="run the trial again; every rank must take part in every step",
        )
    return tuple(max(values) for values in zip(*per_rank, strict=True))


def _slowest(clocks: Sequence[Clocks | None]) -> Clocks | None:
    known = [c for c in clocks if c is not None]
    if not known:
        return None
    return min(known, key=lambda c: c.sm_mhz if c.sm_mhz is not None else 1 << 30)


def _comm_alone(timing: Timing) -> float:
    return _need(timing.comm_end, "comm_end") - _need(timing.comm_issue, "comm_issue")


def _need(value: float | None, name: str) -> float:
    if value is None:
        raise MeasurementError(
            f"a step was run without measuring {name}", remedy="report this as a bug"
        )
    return value
