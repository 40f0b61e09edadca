"""From verdicts over single cases to the one policy that ``"auto"`` applies.

A job launches one kernel in many cases: the same GEMM beside short and long collectives. So the
decision is made per kernel (the pattern in its verdict's rule): of the shapes that won one of its
cases, and of none at all, the one with the best mean time that is measurably worse than the default
in no case. Priority is one switch for all kernels: on, if that gives the better mean over
everything and harms no case measurably.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from overlapctl.plan.arms import (
    DEFAULT,
    NO_SHAPE,
    PRIORITY,
    arm_name,
    split_arm_name,
    target_of_shape,
)
from overlapctl.records import KernelRule, Policy, Verdict

__all__ = ["combine_verdicts"]

HARM_FLOOR = 0.01
"""Slower than the default by less than this share is never called harm (timer and clock noise)."""


UNCERTAIN = 0.02
"""Up to this share, three times the spread are no harm: an arm that dropped out after the first
round was measured a few times only, and the ratio of two such medians strays that far."""


def _harm_limit(verdict: Verdict) -> float:
    """Share by which an arm must be slower than the default to count as harm."""
    return max(HARM_FLOOR, verdict.spread, min(3 * verdict.spread, UNCERTAIN))


@dataclass(frozen=True)
class _Kernel:
    """The verdicts of one kernel and the rule of each shape that won one of them."""

    pattern: str
    verdicts: tuple[Verdict, ...]
    rules: dict[str, KernelRule]

    def choose(self, *, priority: bool) -> tuple[float, str] | None:
        """Mean log time against default and shape of the best harmless shape, if there is one."""
        best: tuple[float, str] | None = None
        for shape in self.rules:
            ratios = [_ratio(v, priority=priority, shape=shape) for v in self.verdicts]
            if any(
                ratio is None or ratio > 1 + _harm_limit(v)
                for ratio, v in zip(ratios, self.verdicts, strict=True)
            ):
                continue
            score = sum(math.log(ratio) for ratio in ratios if ratio) / len(ratios)
            if best is None or score < best[0]:
                best = score, shape
        return best


def combine_verdicts(verdicts: Sequence[Verdict]) -> tuple[Policy, str]:
    """Combine verdicts into one policy.

    Parameters
    ----------
    verdicts
        Each with a policy whose first rule names the case's dominant kernel (a rule that changes
        nothing where the default was kept). A verdict without a rule takes part in the decision
        about priority only.

    Returns
    -------
    policy
        One rule for each kernel that is shaped or known to be better left alone, and the
        communication priority. Kernels that were not measured are not shaped.
    reason
        What was combined, in words.
    """
    if not verdicts:
        return Policy(), "nothing was measured: leave it alone"
    kernels = _by_kernel(verdicts)
    options = {}
    for priority in (False, True):
        choices = [kernel.choose(priority=priority) for kernel in kernels]
        if all(choice is not None for choice in choices):
            found = [choice for choice in choices if choice is not None]
            weight = [len(kernel.verdicts) for kernel in kernels]
            mean = sum(w * c[0] for w, c in zip(weight, found, strict=True)) / sum(weight)
            options[priority] = mean, [shape for _, shape in found]
    wanted = any(split_arm_name(v.chosen)[0] for v in verdicts)
    # Without priority the choice "no shape" is the default itself, so that option always exists.
    priority = wanted and True in options and options[True][0] < options[False][0]
    shapes = options[priority][1]
    rules = tuple(
        kernel.rules[shape] for kernel, shape in zip(kernels, shapes, strict=True) if kernel.pattern
    )
    policy = Policy(comm_priority=priority, rules=rules)
    return policy, _reason(verdicts, kernels, shapes, policy, wanted=wanted)


def _by_kernel(verdicts: Sequence[Verdict]) -> list[_Kernel]:
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        pattern = verdict.policy.rules[0].pattern if verdict.policy.rules else ""
        groups.setdefault(pattern, []).append(verdict)
    kernels = []
    for pattern, members in groups.items():
        rules = {NO_SHAPE: KernelRule(pattern=pattern)}
        for verdict in members:
            shape = split_arm_name(verdict.chosen)[1]
            if shape != NO_SHAPE and verdict.policy.rules:
                rules[shape] = dataclasses.replace(verdict.policy.rules[0], pattern=pattern)
        kernels.append(_Kernel(pattern, tuple(members), rules))
    return kernels


def _ratio(verdict: Verdict, *, priority: bool, shape: str) -> float | None:
    """Time of an arm against the default's in this case; ``None`` if it is not known."""
    if not priority and shape == NO_SHAPE:
        return 1.0
    totals = verdict.totals
    default = totals.get(DEFAULT)
    total = totals.get(arm_name(priority=priority, shape=shape))
    if total is None and _is_gentler_than_measured(totals, shape):
        total = totals.get(arm_name(priority=priority, shape=NO_SHAPE))
    if not default or not total:
        return None
    return total / default


def _is_gentler_than_measured(totals: dict[str, float], shape: str) -> bool:
    """Tell whether a shape allows more blocks per SM than any target tried in this case.

    Targets are tried from just below the natural residency: beyond them nothing changes.
    """
    target = target_of_shape(shape)
    if target is None:
        return False
    measured = [target_of_shape(split_arm_name(name)[1]) for name in totals]
    return target > max((m for m in measured if m is not None), default=0)


def _reason(
    verdicts: Sequence[Verdict],
    kernels: Sequence[_Kernel],
    shapes: Sequence[str],
    policy: Policy,
    *,
    wanted: bool,
) -> str:
    adopted = [v for v in verdicts if not v.policy.is_default]
    if policy.is_default:
        if not adopted:
            return f"leave it alone: in none of {len(verdicts)} cases did an arm beat the default"
        return (
            f"leave it alone: what helps in {len(adopted)} of {len(verdicts)} cases harms another"
        )
    ratios = [
        _ratio(v, priority=policy.comm_priority, shape=shape) or 1.0
        for kernel, shape in zip(kernels, shapes, strict=True)
        for v in kernel.verdicts
    ]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    shaped = sum(shape != NO_SHAPE for shape in shapes)
    parts = [f"{PRIORITY} {'on' if policy.comm_priority else 'off'}"]
    if wanted and not policy.comm_priority:
        parts[0] += " (it helps in some cases, but harms others measurably)"
    parts.append(f"{shaped} of {len(kernels)} kernels shaped")
    return (
        f"{', '.join(parts)}; time against the default over {len(verdicts)} cases: "
        f"mean {mean - 1:+.1%}, best {min(ratios) - 1:+.1%}, worst {max(ratios) - 1:+.1%}"
    )
