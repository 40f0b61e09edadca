"""Choose how to run a case without measuring it: predict every option, take the simplest good one.

::

    facts, case --options--> Option --simulate--> Candidate (ends) --choose--> Plan (rule, reason)

The default is left only for a predicted gain above the model's own error, and the choice is the
candidate that changes least among those predicted about as good as the best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from overlapctl.errors import UsageError
from overlapctl.plan.arms import DEFAULT, NO_SHAPE, split_arm_name
from overlapctl.plan.explain import explain, total_ms
from overlapctl.plan.levers import options
from overlapctl.plan.parameters import SimulationParameters, parameters_for
from overlapctl.plan.prediction import CaseInputs, predict_option
from overlapctl.plan.residency import blocks_per_sm
from overlapctl.plan.rules import fewest_blocks, may_pad
from overlapctl.plan.simulate import SimulationResult
from overlapctl.plan.workload_model import comm_work, compute_work
from overlapctl.records import (
    Candidate,
    Case,
    DeviceFacts,
    KernelFootprint,
    KernelRule,
    Plan,
    Policy,
)

__all__ = ["MODEL_ERROR", "TIE", "Planned", "choose", "plan_case"]

MODEL_ERROR = 0.04
"""Median error of a predicted ratio of two arms' times: 3.9 % over the 405 pairs of an arm and its
default recorded on 2x H200, each compute kernel left out of the fit that predicts it."""

TIE = 0.03
"""Candidates predicted this close to the best count as equally good: the simplest is taken."""


@dataclass(frozen=True)
class Planned:
    """A plan, and the predicted timeline of each candidate that could be simulated, by name."""

    plan: Plan
    timelines: Mapping[str, SimulationResult]


def plan_case(
    facts: DeviceFacts,
    case: Case,
    *,
    footprint: KernelFootprint | None = None,
    compute_alone: float | None = None,
    comm_footprint: KernelFootprint | None = None,
    comm_alone: float | None = None,
    world: int = 2,
    nccl_version: str = "none",
    parameters: SimulationParameters | None = None,
    margin: float = MODEL_ERROR,
) -> Planned:
    """Plan one case from facts, footprints and times alone.

    Parameters
    ----------
    facts
        The GPU.
    case
        Compute and communication; a pair or a pipeline.
    footprint, compute_alone
        Of the untouched compute kernel, as observed: all repeats, of one stage in a pipeline, ms.
        Estimated from the GPU's rates where ``None``.
    comm_footprint, comm_alone
        The same of the collective.
    world
        Ranks, all linked alike.
    nccl_version
        Decides NCCL's footprint; ``"none"``: the version of the recorded measurements.
    parameters
        Of the simulation; those of the GPU model if ``None``.
    margin
        Share of the default's time that a candidate must be predicted to save.

    Raises
    ------
    UsageError
        If a kernel of the case cannot run on this GPU at all.
    """
    parameters = parameters or parameters_for(facts)
    inputs = CaseInputs(
        facts=facts,
        case=case,
        compute=compute_work(
            facts,
            case.compute,
            footprint=footprint,
            alone_ms=compute_alone,
            parameters=parameters,
        ),
        comm=comm_work(
            facts,
            case.comm,
            footprint=comm_footprint,
            alone_ms=comm_alone,
            world=world,
            nccl_version=nccl_version,
            parameters=parameters,
        ),
        world=world,
        nccl_version=nccl_version,
        parameters=parameters,
    )
    kernel = inputs.comm.footprint if inputs.comm.uses_sms else None
    candidates: list[Candidate] = []
    timelines: dict[str, SimulationResult] = {}
    for option in options(facts, case, inputs.compute.footprint, kernel):
        candidate, timeline = predict_option(inputs, option)
        candidates.append(candidate)
        if timeline is not None:
            timelines[candidate.name] = timeline
    pads = may_pad(inputs.compute.alone_ms, inputs.comm.alone_ms)
    natural = blocks_per_sm(facts, inputs.compute.footprint)
    least = fewest_blocks(natural) if pads else natural
    why = (
        f"not without measuring: below half of the natural {natural} blocks per SM"
        if pads
        else "not considered: compute takes much longer than the collective"
    )
    candidates = [
        c if not c.legal or _is_allowed(c, least) else replace(c, reason=why) for c in candidates
    ]
    chosen = choose(candidates, least_blocks=least, margin=margin)
    allowed = _allowed(candidates, least)
    plan = explain(inputs, candidates, allowed, chosen, timelines[DEFAULT], margin)
    if footprint is not None:
        plan = replace(plan, policy=_as_rule(plan.policy, footprint.name))
    return Planned(plan, timelines)


def choose(
    candidates: Sequence[Candidate],
    *,
    least_blocks: int = 1,
    margin: float = MODEL_ERROR,
) -> Candidate:
    """Choose among what overlapctl can apply by itself.

    Parameters
    ----------
    candidates
        With predicted ends; the default is among them.
    least_blocks
        Residency targets below this are not considered (see :mod:`overlapctl.plan.rules`).
    margin
        As in :func:`plan_case`.

    Returns
    -------
    Candidate
        The default, unless another one is predicted to save more than ``margin`` of its time; of
        those within :data:`TIE` of the best, the one that changes least.

    Raises
    ------
    UsageError
        If the default is not among the candidates, or was not predicted.
    """
    usable = [c for c in _allowed(candidates, least_blocks) if not c.settings]
    default = next((c for c in usable if c.name == DEFAULT), None)
    if default is None:
        raise UsageError("no candidate is the default", remedy="predict the default as well")
    most = total_ms(default) * (1 - margin)
    best = min(total_ms(c) for c in usable)
    if best > most:
        return default
    good = [c for c in usable if total_ms(c) <= min(most, best * (1 + TIE))]
    return min(good, key=_changes)


def _allowed(candidates: Sequence[Candidate], least_blocks: int) -> list[Candidate]:
    """List the candidates that are legal, predicted and not ruled out; the default first."""
    return [
        c for c in candidates if c.legal and c.total is not None and _is_allowed(c, least_blocks)
    ]


def _is_allowed(candidate: Candidate, least_blocks: int) -> bool:
    return not 0 < candidate.policy.max_blocks_per_sm < least_blocks


def _changes(candidate: Candidate) -> tuple[int, int, int]:
    """Rank by how much a candidate changes: levers used, then how far residency is reduced."""
    policy = candidate.policy
    shaped = split_arm_name(candidate.name)[1] != NO_SHAPE
    return shaped + policy.comm_priority, -policy.max_blocks_per_sm, policy.pad_bytes


def _as_rule(policy: Policy, kernel: str) -> Policy:
    """Turn the settings for all compute kernels into a rule for the observed one."""
    rule = KernelRule(
        pattern=kernel,
        pad_bytes=policy.pad_bytes,
        max_blocks_per_sm=policy.max_blocks_per_sm,
        carveout=policy.carveout,
    )
    return Policy(comm_priority=policy.comm_priority, rules=(rule,))
