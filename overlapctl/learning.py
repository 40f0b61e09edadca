"""Learning in place: watch a region under the heuristic, then plan its kernels and switch.

::

    warm-up -> observed steps (ring -> ObservedKernel ...) -> plan -> settled
               under the heuristic policy                     kernel rules

A *region* is one place in a program that calls ``overlap()``, entered every step or once around
many steps:

- entered every step: the first step is left out (it compiles, allocates, tunes), the next two are
  observed, and the plan is made when the last of them is left. The next step runs under it.
- open for long (around a whole loop): after ten seconds a thread observes launches for two seconds
  (up to thirty while no communication kernel shows up), plans, and has the open region switch.

Nothing here may harm the job: an error while learning is counted, warned of once, and leaves the
heuristic in force. Ranks learn by themselves, without talking to each other (a collective that not
all ranks enter would hang the job); the same launches give the same plan everywhere, and a plan
changes only how a rank launches its own kernels.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from overlapctl.launch.observe import ObservedKernel, observe_kernels
from overlapctl.plan.heuristic import heuristic_policy, plan_kernels
from overlapctl.records import DeviceFacts, Policy, PolicyChange, Role

if TYPE_CHECKING:
    from overlapctl.launch.ring import LaunchRecord, RecordReader
    from overlapctl.launch.shim import Shim

__all__ = ["Learner", "Pace", "Step", "plan_observed"]

MAX_RECORDS = 1 << 15
"""Launches kept of one observation; the steps of larger jobs are known by their last launches."""

SMALLEST_SHARE = 0.002
"""Compute kernels with a smaller share of the work are not planned, but left alone."""

_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long a region is watched before it is planned.

    Parameters
    ----------
    warm_up_steps, observed_steps
        Of a region entered every step. Steps that launch nothing, or end with an exception, do
        not count.
    long_after_s
        A region open for longer than this is observed while it is open.
    window_s, patience_s
        How long that takes: at least, and at most if no communication kernel is seen.
    poll_s
        How often the ring is emptied meanwhile.
    """

    warm_up_steps: int = 1
    observed_steps: int = 2
    long_after_s: float = 10.0
    window_s: float = 2.0
    patience_s: float = 30.0
    poll_s: float = 0.25


Planner = Callable[[Sequence[ObservedKernel]], tuple[Policy, str]]


@dataclass(eq=False)
class Step:
    """One stay in the region, from :meth:`Learner.enter` to :meth:`Learner.leave`."""

    adopt: Callable[[Policy, str], None]
    listening: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    observed: bool = False
    left: threading.Event = field(default_factory=threading.Event)


class Learner:
    """One region's way from the heuristic to a plan of its own; safe from any thread.

    Parameters
    ----------
    shim
        The attached shim.
    start, reason
        Policy until the plan is there, and why.
    planner
        Makes the plan from what was observed.
    on_error
        Told about an exception while learning; may raise it (in :meth:`leave` only).
    pace
        How long to watch.
    """

    def __init__(
        self,
        shim: Shim,
        start: Policy,
        reason: str,
        planner: Planner,
        *,
        on_error: Callable[[Exception], None],
        pace: Pace | None = None,
    ) -> None:
        self.policy = start
        self.reason = reason
        self.settled = False
        self.errors = 0
        self.history: list[PolicyChange] = [_change(start, reason)]
        self._shim = shim
        self._planner = planner
        self._on_error = on_error
        self._pace = pace or Pace()
        self._lock = threading.Lock()
        self._planning = False
        self._open: list[Step] = []
        self._steps = 0
        self._reader: RecordReader | None = None
        self._records: list[LaunchRecord] = []
        self._unraised: Exception | None = None

    def enter(self, adopt: Callable[[Policy, str], None]) -> Step:
        """Begin a step.

        Parameters
        ----------
        adopt
            Called, perhaps from another thread, if the plan comes while this step goes on.
        """
        step = Step(adopt)
        with self._lock:
            self._open.append(step)
            if self.settled:
                return step
            first = self._steps == 0 and len(self._open) == 1
            if self._steps >= self._pace.warm_up_steps:
                self._listen(step)
        if first:
            name = "overlapctl-learner"
            watcher = threading.Thread(target=self._watch, args=(step,), name=name, daemon=True)
            # No more threads to be had: then only a region entered every step is learned.
            with contextlib.suppress(RuntimeError):
                watcher.start()
        return step

    def leave(self, step: Step, *, launches: int, completed: bool) -> None:
        """End a step, and plan if enough has been observed.

        Parameters
        ----------
        step
            From :meth:`enter`.
        launches
            Seen during the step.
        completed
            False if it ended with an exception: then nothing is learned from it.
        """
        step.left.set()
        with self._lock:
            self._open.remove(step)
            records = self._collect() if step.observed else []
            step.listening.close()
            if self.settled:
                error, self._unraised = self._unraised, None
                enough = False
            else:
                error = None
                enough = completed and launches > 0 and self._count(step, records)
        if enough:
            error = self._settle(f"{self._pace.observed_steps} steps")
        if error is not None and completed:
            self._on_error(error)

    @property
    def progress(self) -> str:
        """How far the observation is, in words; empty when it is over."""
        if self.settled:
            return ""
        needed = self._pace.warm_up_steps + self._pace.observed_steps
        return f"learning: {self._steps} of {needed} steps seen"

    def _count(self, step: Step, records: list[LaunchRecord]) -> bool:
        """With the lock held: count the step; whether it was the last one to observe."""
        self._steps += 1
        if step.observed:
            self._records = [*self._records, *records][-MAX_RECORDS:]
        return self._steps >= self._pace.warm_up_steps + self._pace.observed_steps

    # --- a region that stays open ------------------------------------------------------------

    def _watch(self, step: Step) -> None:
        """Observe a first step that goes on for long; runs in a thread of its own."""
        pace = self._pace
        if step.left.wait(pace.long_after_s):
            return
        seconds, communicates = 0.0, False
        while not step.left.wait(pace.poll_s if seconds else 0.0):
            with self._lock:
                if self.settled or step.left.is_set():
                    return
                if step.observed:
                    records = self._collect()
                    self._records = [*self._records, *records][-MAX_RECORDS:]
                    communicates |= any(r.role is Role.COMMUNICATION for r in records)
                else:
                    self._listen(step)
            seconds += pace.poll_s
            if seconds > pace.window_s and (communicates or seconds > pace.patience_s):
                error = self._settle(f"{seconds:.0f} s")
                with self._lock:
                    step.listening.close()
                    self._unraised = error
                return

    def _listen(self, step: Step) -> None:
        """With the lock held: have the shim record the step's launches."""
        if self._reader is None:
            self._reader = self._shim.reader()
        elif not any(other.observed for other in self._open):
            self._reader.skip()
        step.listening.enter_context(self._shim.listening())
        step.observed = True

    def _collect(self) -> list[LaunchRecord]:
        return self._reader.read() if self._reader is not None else []

    # --- the plan ------------------------------------------------------------------------------

    def _settle(self, watched: str) -> Exception | None:
        """Plan, once, and switch; the error if there was one."""
        with self._lock:
            if self.settled or self._planning:
                return None
            self._planning = True
            records, self._records = self._records, []
        error: Exception | None = None
        try:
            functions = self._shim.snapshot().functions()
            policy, why = self._planner(observe_kernels(records, functions))
            reason = f"learned from {watched}: {why}"
        # Whatever goes wrong here, the job runs on as it did before.
        except Exception as caught:
            error = caught
            policy = self.policy
            reason = f"{self.reason}; learning failed: {type(caught).__name__}: {caught}"
        with self._lock:
            self.errors += error is not None
            self.policy, self.reason = policy, reason
            self.history.append(_change(policy, reason))
            self.settled, self._planning = True, False
            self._reader = None
            going_on = list(self._open)
        for step in going_on:
            step.adopt(policy, reason)
        return error


def _change(policy: Policy, reason: str) -> PolicyChange:
    return PolicyChange(when=time.strftime("%Y-%m-%dT%H:%M:%S"), policy=policy, reason=reason)


def plan_observed(facts: DeviceFacts, kernels: Sequence[ObservedKernel]) -> tuple[Policy, str]:
    """Plan the kernels of a region that was observed.

    Parameters
    ----------
    facts
        The GPU.
    kernels
        What was seen (:func:`overlapctl.launch.observe.observe_kernels`).

    Returns
    -------
    policy
        That of :func:`overlapctl.plan.heuristic.plan_kernels` for the compute kernels that can run
        beside communication; the heuristic's where nothing can.
    reason
        In words; names what is done to the largest kernels.
    """
    start, _ = heuristic_policy(facts)
    communication = [k for k in kernels if k.role is Role.COMMUNICATION]
    if not communication:
        return start, "no communication kernel was launched: nothing to plan"
    together = [k for k in communication if k.beside]
    if not together:
        return start, (
            f"{_names(communication)} only ran on the streams of the compute kernels: nothing runs "
            "at the same time"
        )
    compute = [
        k for k in kernels if k.role is Role.COMPUTE and k.beside and k.share >= SMALLEST_SHARE
    ]
    policy, reasons = plan_kernels(
        facts, [k.footprint for k in compute], [k.footprint for k in together]
    )
    told = [f"{_short(name)}: {why}" for name, why in list(reasons.items())[:_NAMED]]
    more = len(reasons) - len(told)
    if more > 0:
        told.append(f"{more} smaller kernels likewise planned")
    return policy, f"beside {_names(together)}: {'; '.join(told) or 'no compute kernel to plan'}"


def _names(kernels: Sequence[ObservedKernel]) -> str:
    names = list(dict.fromkeys(_short(k.footprint.name) for k in kernels))
    return ", ".join(names[:_NAMED]) + (" and others" if len(names) > _NAMED else "")


def _short(name: str, most: int = 48) -> str:
    return name if len(name) <= most else f"{name[: most - 3]}..."
