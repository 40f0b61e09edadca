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
from overlapctl.plan.levers import Option, options
from overlapctl.plan.parameters import SimulationParameters, parameters_for
from overlapctl.plan.residency import (
    blocks_per_sm,
    grid_is_coresident,
    is_persistent,
    pad_for_blocks,
)
from overlapctl.plan.room import room_beside
from overlapctl.plan.rules import Situation, fewest_blocks, first_rule, may_pad
from overlapctl.plan.simulate import CommWork, ComputeWork, Shape, SimulationResult, simulate
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

MODEL_ERROR = 0.045
"""Median error of a predicted ratio of two arms' times, over 405 pairs of arms recorded on 2x H200
(``tests/unit/plan/test_choose.py`` checks both it and the choices it leads to)."""

TIE = 0.03
"""Candidates predicted this close to the best count as equally good: the simplest is taken."""

_RUNNERS_UP = 3


@dataclass(frozen=True)
class Planned:
    """A plan, and the predicted timeline of each candidate that could be simulated, by name."""

    plan: Plan
    timelines: Mapping[str, SimulationResult]


@dataclass(frozen=True)
class _Inputs:
    """One case in the simulation's terms."""

    facts: DeviceFacts
    case: Case
    compute: ComputeWork
    comm: CommWork
    world: int
    nccl_version: str
    parameters: SimulationParameters

    @property
    def depth(self) -> int | None:
        return self.case.depth if self.case.form == "pipeline" else None


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
    inputs = _Inputs(
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
        candidate, timeline = _predict(inputs, option)
        candidates.append(candidate)
        if timeline is not None:
            timelines[candidate.name] = timeline
    pads = may_pad(inputs.compute.alone_ms, inputs.comm.alone_ms)
    natural = blocks_per_sm(facts, inputs.compute.footprint)
    least = fewest_blocks(natural) if pads else natural
    usable = _usable(candidates, least)
    chosen = choose(candidates, least_blocks=least, margin=margin)
    plan = _explain(inputs, candidates, usable, chosen, timelines[DEFAULT], margin)
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
    """
    default, usable = _default(candidates), _usable(candidates, least_blocks)
    most = _total(default) * (1 - margin)
    best = min(_total(c) for c in usable)
    if best > most:
        return default
    good = [c for c in usable if _total(c) <= min(most, best * (1 + TIE))]
    return min(good, key=_changes)


def _default(candidates: Sequence[Candidate]) -> Candidate:
    for candidate in candidates:
        if candidate.name == DEFAULT and candidate.total is not None:
            return candidate
    raise UsageError("no candidate is the default", remedy="predict the default as well")


def _usable(candidates: Sequence[Candidate], least_blocks: int) -> list[Candidate]:
    """List the candidates overlapctl can apply alone, without pads that are ruled out."""
    return [
        c
        for c in candidates
        if c.legal
        and not c.settings
        and c.total is not None
        and not 0 < c.policy.max_blocks_per_sm < least_blocks
    ]


def _total(candidate: Candidate) -> float:
    assert candidate.total is not None
    return candidate.total


def _changes(candidate: Candidate) -> tuple[int, int, int]:
    """Rank by how much a candidate changes: levers used, then how far residency is reduced."""
    policy = candidate.policy
    shaped = split_arm_name(candidate.name)[1] != NO_SHAPE
    return shaped + policy.comm_priority, -policy.max_blocks_per_sm, policy.pad_bytes


# --- predicting --------------------------------------------------------------------------------


def _predict(inputs: _Inputs, option: Option) -> tuple[Candidate, SimulationResult | None]:
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


def _simulate(inputs: _Inputs, option: Option) -> SimulationResult:
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


def _comm(inputs: _Inputs, option: Option) -> CommWork:
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


def _modelled(inputs: _Inputs, option: Option) -> CommWork:
    spec = inputs.case.comm
    return comm_work(
        inputs.facts,
        replace(spec, path=option.path or spec.path),
        world=inputs.world,
        nccl_version=inputs.nccl_version,
        max_blocks=option.max_blocks,
        parameters=inputs.parameters,
    )


# --- explaining --------------------------------------------------------------------------------


def _explain(
    inputs: _Inputs,
    candidates: Sequence[Candidate],
    usable: Sequence[Candidate],
    chosen: Candidate,
    untouched: SimulationResult,
    margin: float,
) -> Plan:
    stages = inputs.depth or 1
    compute_ms, comm_ms = inputs.compute.alone_ms * stages, inputs.comm.alone_ms * stages
    default = _default(candidates)
    others = sorted((c for c in usable if c is not chosen), key=_total)
    best = min(usable, key=_total)
    ideal = max(compute_ms, comm_ms)
    situation = _situation(inputs, untouched, chosen, default, ideal, margin)
    rule = first_rule(situation)
    return Plan(
        case=inputs.case,
        gpu=inputs.facts.name,
        rule=rule.name,
        rule_text=rule.text,
        chosen=chosen.name,
        policy=chosen.policy,
        reason=_reason(chosen, default, best, margin),
        gain=1 - _total(chosen) / _total(default),
        margin=margin,
        compute_alone=compute_ms,
        comm_alone=comm_ms,
        serial=compute_ms + comm_ms,
        ideal=ideal,
        runners_up=tuple(c.name for c in others[:_RUNNERS_UP]),
        advice=_advice(candidates, chosen, margin),
        candidates=tuple(candidates),
    )


def _situation(
    inputs: _Inputs,
    untouched: SimulationResult,
    chosen: Candidate,
    default: Candidate,
    ideal: float,
    margin: float,
) -> Situation:
    facts, kernel, comm = inputs.facts, inputs.compute.footprint, inputs.comm
    natural = blocks_per_sm(facts, kernel)
    beside = natural - 1 if natural > 1 else natural
    gap = 2 * inputs.parameters.launch_gap_us / 1000
    waits = any(
        span.last_placed > span.ready + gap
        for span in untouched.spans
        if span.name.startswith("comm")
    )
    return Situation(
        persistent=is_persistent(facts, kernel),
        resident=grid_is_coresident(facts, kernel),
        memory_bound=inputs.compute.bound == "memory",
        light=comm.uses_sms and room_beside(facts, kernel, beside, comm.footprint) > 0,
        waits=comm.uses_sms and waits,
        compute_ms=inputs.compute.alone_ms,
        comm_ms=comm.alone_ms,
        headroom=1 - ideal / _total(default),
        gain=1 - _total(chosen) / _total(default),
        padded=chosen.policy.max_blocks_per_sm > 0,
        margin=margin,
    )


def _reason(chosen: Candidate, default: Candidate, best: Candidate, margin: float) -> str:
    if chosen is default:
        if best is default:
            return "no other setting is predicted to be faster"
        gain = 1 - _total(best) / _total(default)
        return (
            f"the best other setting, {best.name}, is predicted to save {gain:.1%}: "
            f"no more than the model's error of {margin:.1%}"
        )
    change = _total(chosen) / _total(default) - 1
    parts = [
        f"predicted {_total(chosen):.2f} ms against {_total(default):.2f} ms by default "
        f"({change:+.1%}, model's error {margin:.1%})"
    ]
    for side, now, before in (
        ("compute", chosen.compute_end, default.compute_end),
        ("the collective", chosen.comm_end, default.comm_end),
    ):
        assert now is not None
        assert before is not None
        parts.append(f"{side} ends at {now:.2f} instead of {before:.2f} ms")
    if best is not chosen:
        parts.append(
            f"{best.name} is predicted {_total(best) / _total(chosen) - 1:+.1%}: "
            "a tie, the simpler setting is taken"
        )
    return "; ".join(parts)


def _advice(candidates: Sequence[Candidate], chosen: Candidate, margin: float) -> tuple[str, ...]:
    """Say what the job itself could gain: the best legal candidate of each lever, if it pays."""
    best: dict[str, Candidate] = {}
    for candidate in candidates:
        if candidate.legal and candidate.settings and candidate.total is not None:
            known = best.get(candidate.lever)
            if known is None or _total(candidate) < _total(known):
                best[candidate.lever] = candidate
    return tuple(
        f"{c.name}: predicted {_total(c):.2f} ms ({_total(c) / _total(chosen) - 1:+.1%}); "
        f"the job would have to: {'; '.join(c.settings)}"
        for c in sorted(best.values(), key=_total)
        if _total(c) < _total(chosen) * (1 - margin)
    )


def _as_rule(policy: Policy, kernel: str) -> Policy:
    """Turn the settings for all compute kernels into a rule for the observed one."""
    rule = KernelRule(
        pattern=kernel,
        pad_bytes=policy.pad_bytes,
        max_blocks_per_sm=policy.max_blocks_per_sm,
        carveout=policy.carveout,
    )
    return Policy(comm_priority=policy.comm_priority, rules=(rule,))
