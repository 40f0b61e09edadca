"""Predict when either side of a case ends under one option."""

from __future__ import annotations

from dataclasses import dataclass, replace

from overlapctl.errors import UsageError
from overlapctl.plan.arms import DEFAULT
from overlapctl.plan.levers import Option
from overlapctl.plan.parameters import SimulationParameters
from overlapctl.plan.residency import pad_for_blocks
from overlapctl.plan.simulate import CommWork, ComputeWork, Shape, SimulationResult, simulate
from overlapctl.plan.workload_model import comm_work
from overlapctl.records import Candidate, Case, DeviceFacts

__all__ = ["CaseInputs", "predict_option"]


@dataclass(frozen=True)
class CaseInputs:
    """One case in the simulation's terms; times alone are of one stage in a pipeline."""

    facts: DeviceFacts
    case: Case
    compute: ComputeWork
    comm: CommWork
    world: int
    nccl_version: str
    parameters: SimulationParameters

    @property
    def depth(self) -> int | None:
        """Stages of a pipeline, ``None`` for a pair."""
        return self.case.depth if self.case.form == "pipeline" else None

    @property
    def compute_ms(self) -> float:
        """Compute alone, all stages, ms."""
        return self.compute.alone_ms * (self.depth or 1)

    @property
    def comm_ms(self) -> float:
        """The collective alone, all stages, ms."""
        return self.comm.alone_ms * (self.depth or 1)


def predict_option(inputs: CaseInputs, option: Option) -> tuple[Candidate, SimulationResult | None]:
    """Candidate of an option with its predicted ends, and the timeline they come from.

    An option that cannot run on this GPU becomes an illegal candidate with the reason.

    Raises
    ------
    UsageError
        If the default cannot run.
    """
    candidate = Candidate(
        name=option.name,
        lever=option.lever,
        policy=option.policy,
        settings=option.settings,
        legal=not option.refusal,
        reason=option.refusal or option.note,
    )
    if not option.predictable:
        return candidate, None
    try:
        result = _simulate(inputs, option)
    except UsageError as error:
        if option.name == DEFAULT:
            raise
        return replace(candidate, legal=False, reason=error.what), None
    predicted = replace(candidate, compute_end=result.compute_end, comm_end=result.comm_end)
    return predicted, result


def _simulate(inputs: CaseInputs, option: Option) -> SimulationResult:
    facts, policy = inputs.facts, option.policy
    pad = policy.pad_bytes
    if policy.max_blocks_per_sm:
        needed = pad_for_blocks(facts, inputs.compute.footprint, policy.max_blocks_per_sm)
        pad = max(pad, needed or 0)
    # Issued at the same time and served first: as if it had been enqueued before the kernel.
    shape = Shape(
        pad=pad,
        carveout=policy.carveout,
        comm_priority=policy.comm_priority or option.comm_first,
    )
    more = {"issue_ms": 0.0} if option.comm_first else {}
    return simulate(
        facts,
        inputs.compute,
        _comm(inputs, option),
        shape,
        depth=inputs.depth,
        parameters=inputs.parameters,
        **more,
    )


def _comm(inputs: CaseInputs, option: Option) -> CommWork:
    """Communication side of an option; its time keeps the ratio to the case's own path."""
    if option.path is None and option.max_blocks is None:
        return inputs.comm
    modelled = _modelled(inputs, Option(name=DEFAULT, lever="none"))
    other = _modelled(inputs, option)
    footprint = other.footprint
    if option.path is None and option.max_blocks is not None:
        blocks = min(option.max_blocks, inputs.comm.footprint.blocks)
        footprint = replace(inputs.comm.footprint, blocks=blocks)
    alone = other.alone_ms * inputs.comm.alone_ms / modelled.alone_ms
    return replace(other, footprint=footprint, alone_ms=alone)


def _modelled(inputs: CaseInputs, option: Option) -> CommWork:
    spec = inputs.case.comm
    return comm_work(
        inputs.facts,
        replace(spec, path=option.path or spec.path),
        world=inputs.world,
        nccl_version=inputs.nccl_version,
        max_blocks=option.max_blocks,
        parameters=inputs.parameters,
    )
