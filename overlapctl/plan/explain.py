"""Say why a candidate was chosen: rule, numbers, runners-up, and what the job could do."""

from __future__ import annotations

from collections.abc import Sequence

from overlapctl.plan.prediction import CaseInputs
from overlapctl.plan.residency import blocks_per_sm, grid_is_coresident, is_persistent
from overlapctl.plan.room import room_beside
from overlapctl.plan.rules import Situation, first_rule
from overlapctl.plan.simulate import SimulationResult
from overlapctl.records import Candidate, Plan

__all__ = ["explain", "total_ms"]

_RUNNERS_UP = 3


def total_ms(candidate: Candidate) -> float:
    """Predicted end of a candidate that was predicted, ms."""
    assert candidate.total is not None
    return candidate.total


def explain(
    inputs: CaseInputs,
    candidates: Sequence[Candidate],
    allowed: Sequence[Candidate],
    chosen: Candidate,
    untouched: SimulationResult,
    margin: float,
) -> Plan:
    """Write the plan of a choice.

    Parameters
    ----------
    inputs
        What was planned.
    candidates
        All that were looked at.
    allowed
        Those that are legal, predicted and not ruled out; the default is the first.
    chosen
        One of them.
    untouched
        The default's timeline.
    margin
        What a gain has to exceed.
    """
    compute_ms, comm_ms = inputs.compute_ms, inputs.comm_ms
    default = allowed[0]
    usable = [c for c in allowed if not c.settings]
    others = sorted((c for c in usable if c is not chosen), key=total_ms)
    best = min(usable, key=total_ms)
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
        gain=1 - total_ms(chosen) / total_ms(default),
        margin=margin,
        compute_alone=compute_ms,
        comm_alone=comm_ms,
        serial=compute_ms + comm_ms,
        ideal=ideal,
        runners_up=tuple(c.name for c in others[:_RUNNERS_UP]),
        advice=_advice(allowed, chosen, margin),
        candidates=tuple(candidates),
    )


def _situation(
    inputs: CaseInputs,
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
        headroom=1 - ideal / total_ms(default),
        gain=1 - total_ms(chosen) / total_ms(default),
        padded=chosen.policy.max_blocks_per_sm > 0,
        margin=margin,
    )


def _reason(chosen: Candidate, default: Candidate, best: Candidate, margin: float) -> str:
    if chosen is default:
        if best is default:
            return "no other setting is predicted to be faster"
        gain = 1 - total_ms(best) / total_ms(default)
        return (
            f"the best other setting, {best.name}, is predicted to save {gain:.1%}: "
            f"no more than the model's error of {margin:.1%}"
        )
    change = total_ms(chosen) / total_ms(default) - 1
    parts = [
        f"predicted {total_ms(chosen):.2f} ms against {total_ms(default):.2f} ms by default "
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
            f"{best.name} is predicted {total_ms(best) / total_ms(chosen) - 1:+.1%}: "
            "a tie, the simpler setting is taken"
        )
    return "; ".join(parts)


def _advice(allowed: Sequence[Candidate], chosen: Candidate, margin: float) -> tuple[str, ...]:
    """Say what the job itself could gain: the best legal candidate of each lever, if it pays."""
    best: dict[str, Candidate] = {}
    for candidate in allowed:
        if candidate.settings:
            known = best.get(candidate.lever)
            if known is None or total_ms(candidate) < total_ms(known):
                best[candidate.lever] = candidate
    return tuple(
        f"{c.name}: predicted {total_ms(c):.2f} ms ({total_ms(c) / total_ms(chosen) - 1:+.1%}); "
        f"the job would have to: {'; '.join(c.settings)}"
        for c in sorted(best.values(), key=total_ms)
        if total_ms(c) < total_ms(chosen) * (1 - margin)
    )
