"""Trials on the simulated device.

Arms are applied with the shim's own safety rules, the block-level simulation gives the ends, and
every sample gets a small, seeded error, so that spread, medians and verdicts are exercised as with
real measurements. The same seed gives the same trials, call by call.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from overlapctl.launch.twin import Decision, TwinLaunch, decide, wish
from overlapctl.measure.trial import ISSUE_DELAY_MS, check_request
from overlapctl.plan.parameters import SimulationParameters, parameters_for
from overlapctl.plan.simulate import (
    CommWork,
    ComputeWork,
    Shape,
    compute_alone_ms,
    simulate,
)
from overlapctl.plan.workload_model import comm_work, compute_footprint, compute_work
from overlapctl.records import (
    Applied,
    Arm,
    Case,
    DeviceFacts,
    KernelFootprint,
    Policy,
    Role,
    Sample,
    Trial,
)

__all__ = ["SimulatedRunner"]

# A pair is simulated in a few ms.
_SECONDS_PER_SIMULATION = 0.01


class SimulatedRunner:
    """Runs trials on a simulated GPU; deterministic.

    Parameters
    ----------
    facts
        The simulated GPU.
    world
        Ranks of the simulated job.
    nccl_version
        NCCL whose kernels' footprint is simulated; ``"none"``: that of the recorded measurements.
    seed
        Of the measurement error.
    parameters
        Fitted parameters; those of the GPU model if ``None``. ``parameters.noise`` is the relative
        standard deviation of a time.
    """

    def __init__(
        self,
        facts: DeviceFacts,
        *,
        world: int = 2,
        nccl_version: str = "none",
        seed: int = 0,
        parameters: SimulationParameters | None = None,
    ) -> None:
        self._facts = facts
        self._world = world
        self._nccl_version = nccl_version
        self._seed = seed
        self._rounds: dict[Case, int] = {}
        self._parameters = parameters or parameters_for(facts)

    def footprint(self, case: Case) -> KernelFootprint | None:
        """See :meth:`~overlapctl.measure.trial.TrialRunner.footprint`."""
        return compute_footprint(self._facts, case.compute)

    def estimate_seconds(self, case: Case, arms: Sequence[Arm], repeats: int) -> float:
        """See :meth:`~overlapctl.measure.trial.TrialRunner.estimate_seconds`."""
        del repeats  # The error is drawn, not simulated.
        stages = case.depth if case.form == "pipeline" else 1
        return _SECONDS_PER_SIMULATION * len(arms) * stages

    def run(self, case: Case, arms: Sequence[Arm], *, repeats: int) -> list[Trial]:
        """See :meth:`~overlapctl.measure.trial.TrialRunner.run`."""
        check_request(arms, repeats)
        compute = compute_work(self._facts, case.compute, parameters=self._parameters)
        comm = comm_work(
            self._facts,
            case.comm,
            world=self._world,
            nccl_version=self._nccl_version,
            parameters=self._parameters,
        )
        # Each call continues where the last one ended, like a further round on a real GPU.
        self._rounds[case] = self._rounds.get(case, 0) + 1
        rng = random.Random(f"{self._seed}/{self._rounds[case]}/{case!r}")
        depth = case.depth if case.form == "pipeline" else 1

        def measured(value: float) -> tuple[float, ...]:
            return tuple(self._noisy(rng, value * depth) for _ in range(repeats))

        compute_alone, comm_alone = measured(compute.alone_ms), measured(comm.alone_ms)
        trials = []
        for arm in arms:
            shape, applied = self._apply(arm.policy, compute, comm)
            alone = compute_alone
            if not arm.policy.is_default:
                alone = measured(compute_alone_ms(self._facts, compute, shape.pad, shape.carveout))
            trials.append(
                Trial(
                    case=case,
                    arm=arm,
                    samples=self._samples(rng, case, compute, comm, shape, repeats),
                    compute_alone=compute_alone,
                    comm_alone=comm_alone,
                    arm_compute_alone=alone,
                    applied=applied,
                )
            )
        return trials

    def close(self) -> None:
        """Nothing is held."""

    def _apply(
        self, policy: Policy, compute: ComputeWork, comm: CommWork
    ) -> tuple[Shape, tuple[Applied, ...]]:
        """Decide for both kernels as the shim would under the policy."""
        if policy.is_default:
            return Shape(), ()
        kernel, collective = compute.footprint, comm.footprint
        mine = decide(self._facts, TwinLaunch(footprint=kernel), wish(policy, kernel.name))
        rows = [_row(kernel, Role.COMPUTE, compute.launches, mine)]
        prioritised = False
        if comm.uses_sms:
            launch = TwinLaunch(footprint=collective, role=Role.COMMUNICATION)
            theirs = decide(self._facts, launch, wish(policy, collective.name))
            prioritised = theirs.priority is not None
            rows.append(_row(collective, Role.COMMUNICATION, comm.launches, theirs))
        shape = Shape(
            pad=mine.dynamic_smem - kernel.dynamic_smem,
            carveout=-1 if mine.carveout is None else mine.carveout,
            comm_priority=prioritised,
        )
        return shape, tuple(rows)

    def _samples(
        self,
        rng: random.Random,
        case: Case,
        compute: ComputeWork,
        comm: CommWork,
        shape: Shape,
        repeats: int,
    ) -> tuple[Sample, ...]:
        result = simulate(
            self._facts,
            compute,
            comm,
            shape,
            depth=case.depth if case.form == "pipeline" else None,
            issue_ms=ISSUE_DELAY_MS,
            parameters=self._parameters,
        )
        return tuple(
            Sample(
                compute_end=self._noisy(rng, result.compute_end),
                comm_issue=result.comm_issue,
                comm_end=self._noisy(rng, result.comm_end),
            )
            for _ in range(repeats)
        )

    def _noisy(self, rng: random.Random, value: float) -> float:
        return value * max(0.5, 1.0 + rng.gauss(0.0, self._parameters.noise))


def _row(kernel: KernelFootprint, role: Role, launches: int, decision: Decision) -> Applied:
    return Applied(
        kernel=kernel.name,
        role=role,
        threads=kernel.threads,
        registers=kernel.registers,
        static_smem=kernel.static_smem,
        launches=launches,
        shaped=launches if decision.dynamic_smem != kernel.dynamic_smem else 0,
        prioritised=launches if decision.priority is not None else 0,
        carved=launches if decision.carveout is not None else 0,
        failed=0,
        captured=0,
        before=kernel.dynamic_smem,
        after=decision.dynamic_smem,
        blocks_before=decision.blocks_before,
        blocks_after=decision.blocks_after,
        rule=decision.rule,
    )
