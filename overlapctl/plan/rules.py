"""Why a plan is what it is: the first matching rule is named in it. Pure.

The rules were found on H200; each looks at a :class:`Situation` alone. Their order matters: what
makes every lever useless comes first, then what a pad is for, then what priority is for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["COMPUTE_LONGER", "RULES", "Rule", "Situation", "fewest_blocks", "first_rule", "may_pad"]

COMPUTE_LONGER = 2.0
"""From this ratio of compute to communication time on, nothing is padded: at most the collective's
own slow-down could be won, while a pad changes the whole kernel. (In the trials recorded on H200
no pad gained more than 1 % beyond priority there, and one that the model liked lost 7 %.)"""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What the rules look at.

    Parameters
    ----------
    persistent
        The compute kernel keeps every SM it uses until it ends.
    resident
        All blocks of its grid are resident at once.
    memory_bound
        It is limited by memory bandwidth.
    light
        A block of the collective fits an SM beside all compute blocks but one.
    waits
        Untouched, the collective waits for SMs after its issue.
    compute_ms, comm_ms
        Times alone.
    headroom
        Share of the default's predicted time that perfect overlap would save.
    gain
        Share that the best candidate is predicted to save.
    padded
        Whether that candidate pads the compute kernel.
    margin
        The model's error: a smaller gain counts as none.
    """

    persistent: bool
    resident: bool
    memory_bound: bool
    light: bool
    waits: bool
    compute_ms: float
    comm_ms: float
    headroom: float
    gain: float
    padded: bool
    margin: float

    @property
    def helps(self) -> bool:
        """Whether the predicted gain exceeds the model's error."""
        return self.gain > self.margin


@dataclass(frozen=True)
class Rule:
    """A named condition; ``text`` says what follows from it."""

    name: str
    text: str
    matches: Callable[[Situation], bool]


def may_pad(compute_ms: float, comm_ms: float) -> bool:
    """Whether padding is considered at all: not where compute is much the longer side."""
    return compute_ms < COMPUTE_LONGER * comm_ms


def fewest_blocks(natural: int) -> int:
    """Smallest residency that is aimed at without measuring: half the natural one.

    Below it a kernel waits for memory, by an amount that differs from kernel to kernel: on H200 one
    or two blocks per SM took up to twice the time where four or more are natural.
    """
    return -(-natural // 2)


def first_rule(situation: Situation) -> Rule:
    """Return the first of :data:`RULES` that matches; the last one always does."""
    return next(rule for rule in RULES if rule.matches(situation))


def _bandwidth(s: Situation) -> bool:
    return not s.helps and not s.waits


def _nothing_to_gain(s: Situation) -> bool:
    return not s.helps and s.headroom <= s.margin


def _persistent(s: Situation) -> bool:
    return not s.helps and s.persistent


def _resident(s: Situation) -> bool:
    return not s.helps and s.resident


def _made_room(s: Situation) -> bool:
    return s.helps and s.persistent


def _protected(s: Situation) -> bool:
    return s.helps and s.padded and (s.comm_ms >= s.compute_ms or s.light or s.memory_bound)


def _compute_longer(s: Situation) -> bool:
    return s.helps and not may_pad(s.compute_ms, s.comm_ms)


def _many_waves(s: Situation) -> bool:
    return s.helps


def _memory(s: Situation) -> bool:
    return s.memory_bound


RULES = (
    Rule(
        "bandwidth",
        "the collective runs as soon as it is issued; what slows either side is memory bandwidth, "
        "which no lever here adds to: leave it alone",
        _bandwidth,
    ),
    Rule(
        "nothing to gain",
        "even perfect overlap would save no more than the model's error: leave it alone",
        _nothing_to_gain,
    ),
    Rule(
        "persistent compute",
        "one block keeps every SM until the kernel ends: neither priority nor padding lets a "
        "collective of ordinary size in: leave it alone",
        _persistent,
    ),
    Rule(
        "resident grid",
        "all compute blocks are resident at once: none is pending that priority could overtake, "
        "and padding must not break their co-residency: leave it alone",
        _resident,
    ),
    Rule(
        "room beside a persistent kernel",
        "the collective's blocks fit beside the persistent ones once the SM is configured for it",
        _made_room,
    ),
    Rule(
        "protect communication",
        "the collective is the longer side, or light, or meets a memory-bound kernel: padding "
        "protects it at little cost to compute",
        _protected,
    ),
    Rule(
        "compute the longer side",
        "compute takes much longer than the collective: priority hides it, padding could only lose",
        _compute_longer,
    ),
    Rule(
        "many waves",
        "many waves of compute blocks would keep the collective waiting: priority turns serial "
        "into overlapped; a pad is added only where that gains as well",
        _many_waves,
    ),
    Rule(
        "memory bandwidth",
        "the kernel is bound by memory bandwidth, which the collective needs too: leave it alone",
        _memory,
    ),
    Rule(
        "below the model's error",
        "no lever is predicted to gain more than the model's error: leave it alone",
        lambda _: True,
    ),
)
"""In the order in which they are tried."""
