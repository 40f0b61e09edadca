"""What a trial is, and the one protocol every runner of trials follows.

**Pair trial.** The compute kernel starts at time 0. 150 us later, while it runs, the collective is
issued on another stream *without any dependency on the compute stream*: a dependency kernel on a
stream of normal priority would itself wait behind the running grid and hide what priority does.
A sample holds the end of the compute kernel, the issue and the end of the collective, all in ms
after the start of the compute kernel, each the maximum over the ranks.

**Pipeline trial.** ``depth`` times (compute kernel; collective on its result), all enqueued ahead
of the GPU: each collective waits, by event, for the compute kernel that made its input, and the
compute kernels follow each other without waiting for collectives. This is the shape of tensor
parallelism and of gradient reduction. Isolated times are those of ``depth`` kernels, and of
``depth`` collectives, in a row.

**Interleaving.** GPUs throttle: the same kernel takes 10-15 % longer when the card is hot. So one
repetition runs *everything* once - the untouched kernel alone, the untouched collective alone, and
for every arm the compute kernel alone and the overlapped case - in an order that is drawn anew for
each repetition from a fixed seed. Arms are then compared by values of the same repetition.

The arm named ``"default"`` is the job untouched: no policy is in force while it runs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from overlapctl.errors import UsageError
from overlapctl.records import Arm, Case, KernelFootprint, Trial

__all__ = [
    "DEFAULT_ARM",
    "ISSUE_DELAY_MS",
    "Step",
    "TrialRunner",
    "check_request",
    "interleaved_order",
]

DEFAULT_ARM = "default"
"""Name of the arm that leaves the job untouched."""

ISSUE_DELAY_MS = 0.15
"""How long after the compute kernel's start a pair trial issues the collective, ms."""


@runtime_checkable
class TrialRunner(Protocol):
    """Runs trials on one device; not safe for use by several threads at once."""

    def footprint(self, case: Case) -> KernelFootprint | None:
        """Say what the dominant kernel of ``case.compute`` asks of an SM.

        Returns
        -------
        KernelFootprint or None
            ``None`` if it cannot be observed here.
        """
        ...

    def estimate_seconds(self, case: Case, arms: Sequence[Arm], repeats: int) -> float:
        """Estimate how long :meth:`run` with the same arguments takes, in seconds."""
        ...

    def run(self, case: Case, arms: Sequence[Arm], *, repeats: int) -> list[Trial]:
        """Run every arm of the case, interleaved, ``repeats`` times each.

        Returns
        -------
        list of Trial
            One for each arm, in the order of ``arms``, each with ``repeats`` samples. All share
            the isolated times of the untouched kernel and the untouched collective.

        Raises
        ------
        UsageError
            If ``repeats`` is below 1, or arm names are missing or not unique.
        MeasurementError
            If a rank failed or hung, or results were wrong; the message names the rank.
        """
        ...

    def close(self) -> None:
        """Free the device and end worker processes; may be called twice."""
        ...


@dataclass(frozen=True)
class Step:
    """One thing to run in a repetition.

    ``kind`` is ``"compute"`` (kernel alone), ``"comm"`` (collective alone) or ``"overlap"`` (the
    case itself); ``arm`` is an index into the arms, or ``None`` for untouched.
    """

    kind: Literal["compute", "comm", "overlap"]
    arm: int | None


def check_request(arms: Sequence[Arm], repeats: int) -> None:
    """Check what every runner must refuse.

    Raises
    ------
    UsageError
        If ``repeats`` is below 1, ``arms`` is empty, or two arms share a name.
    """
    if repeats < 1:
        raise UsageError(f"repeats is {repeats}", remedy="ask for at least 1 repetition")
    if not arms:
        raise UsageError("arms is empty", remedy="pass at least the default arm")
    names = [arm.name for arm in arms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(
            f"arm name {twice[0]!r} is used {names.count(twice[0])} times",
            remedy="give every arm its own name",
        )


def interleaved_order(arms: Sequence[Arm], repetition: int, *, seed: int = 0) -> list[Step]:
    """List the steps of one repetition, in the order in which to run them.

    Every repetition holds the same steps; their order is shuffled by ``seed`` and ``repetition``
    alone, so that all ranks draw the same order without talking. Arms that change nothing
    (default) need no compute-alone step of their own: the untouched one is theirs.
    """
    steps = [Step("compute", None), Step("comm", None)]
    for index, arm in enumerate(arms):
        steps.append(Step("overlap", index))
        if not arm.policy.is_default:
            steps.append(Step("compute", index))
    random.Random(f"{seed}/{repetition}").shuffle(steps)
    return steps
