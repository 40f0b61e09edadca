"""Trials on the simulated device.

Arms are applied with the shim's own safety rules, the block-level simulation gives the ends, and
every sample gets a small, seeded error, so that spread, medians and verdicts are exercised as with
real measurements. The same seed gives the same trials.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from fnmatch import fnmatchcase

from overlapctl.measure.trial import ISSUE_DELAY_MS, check_request
from overlapctl.plan.parameters import SimulationParameters, parameters_for
from overlapctl.plan.residency import (
    blocks_per_sm,
    grid_is_coresident,
    pad_for_blocks,
    padded,
)
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
    Rule,
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
        rng = random.Random(f"{self._seed}/{case!r}")
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
        before = compute.footprint
        pad, carveout, rule = _decide(self._facts, before, policy)
        shape = Shape(pad=pad, carveout=carveout, comm_priority=policy.comm_priority)
        if policy.is_default:
            return shape, ()
        rows = [
            self._row(before, Role.COMPUTE, compute.launches, pad, carveout, rule=rule),
        ]
        if comm.uses_sms:
            rows.append(
                self._row(
                    comm.footprint,
                    Role.COMMUNICATION,
                    comm.launches,
                    rule=Rule.COMMUNICATION,
                    prioritised=policy.comm_priority,
                )
            )
        return shape, tuple(rows)

    def _row(
        self,
        kernel: KernelFootprint,
        role: Role,
        launches: int,
        pad: int = 0,
        carveout: int = -1,
        *,
        rule: Rule,
        prioritised: bool = False,
    ) -> Applied:
        return Applied(
            kernel=kernel.name,
            role=role,
            threads=kernel.threads,
            registers=kernel.registers,
            static_smem=kernel.static_smem,
            launches=launches,
            shaped=launches if pad else 0,
            prioritised=launches if prioritised else 0,
            carved=launches if carveout >= 0 else 0,
            failed=0,
            captured=0,
            before=kernel.dynamic_smem,
            after=kernel.dynamic_smem + pad,
            blocks_before=blocks_per_sm(self._facts, kernel),
            blocks_after=blocks_per_sm(self._facts, padded(kernel, pad)),
            rule=rule,
        )

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


def _decide(facts: DeviceFacts, kernel: KernelFootprint, policy: Policy) -> tuple[int, int, Rule]:
    """Pad, carve-out and rule that the shim would apply to a compute launch."""
    if any(fnmatchcase(kernel.name, pattern) for pattern in policy.exclude):
        return 0, -1, Rule.EXCLUDED
    if policy.include and not any(fnmatchcase(kernel.name, p) for p in policy.include):
        return 0, -1, Rule.NOT_INCLUDED
    wish = next((r for r in policy.rules if fnmatchcase(kernel.name, r.pattern)), policy)
    if kernel.cooperative:
        return 0, -1, Rule.COOPERATIVE
    pad, rule = _wanted_pad(facts, kernel, wish.pad_bytes, wish.max_blocks_per_sm)
    if pad:
        shaped = padded(kernel, pad)
        if kernel.smem + pad > facts.smem_per_block_optin:
            pad, rule = 0, Rule.OPT_IN_LIMIT
        elif grid_is_coresident(facts, kernel) and not grid_is_coresident(facts, shaped):
            pad, rule = 0, Rule.KEEPS_GRID_RESIDENT
        elif blocks_per_sm(facts, shaped) == 0:
            pad, rule = 0, Rule.NO_EFFECT
    return pad, wish.carveout, rule


def _wanted_pad(
    facts: DeviceFacts, kernel: KernelFootprint, pad_bytes: int, target: int
) -> tuple[int, Rule]:
    if target:
        pad = pad_for_blocks(facts, kernel, target)
        if pad is None:
            return 0, Rule.OPT_IN_LIMIT
        if pad == 0 and not pad_bytes:
            return 0, Rule.ALREADY_AT_TARGET
        if pad >= pad_bytes:
            return pad, Rule.PADDED_TO_TARGET
    return (pad_bytes, Rule.PADDED_BYTES) if pad_bytes else (0, Rule.NOTHING_ASKED)
