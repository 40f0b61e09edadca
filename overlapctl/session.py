"""`overlap()`: choose a policy, put it in force, show what it did, take it back.

::

    arguments + profile or heuristic -> Policy -> shim (push) -> the step -> shim (pop)
                                          ^              +-> stats(), explain()
                     learning (no profile): observed kernels -> plan

A *region* is one place in the program that calls `overlap()` with certain arguments. It keeps its
policy and what it learned over all entries, also where the loop calls `overlap()` anew each time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from overlapctl import env
from overlapctl.errors import OverlapctlError, OverlapctlWarning, ProfileError, UsageError
from overlapctl.records import Applied, DeviceFacts, KernelRule, Policy, PolicyChange
from overlapctl.specs import parse_size

if TYPE_CHECKING:
    from overlapctl.launch.attach import Attachment
    from overlapctl.launch.shim import Counters, Snapshot
    from overlapctl.learning import Learner, Step

__all__ = ["Explanation", "Overlap", "Session", "Stats", "overlap"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """Launch counts of one region (all threads of the process, while it was in force)."""

    launches: int
    shaped: int
    prioritised: int
    carved: int
    failed: int
    cooperative: int
    captured: int
    graph_launches: int
    unknown: int


_STATS = tuple(field.name for field in dataclasses.fields(Stats))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """Which policy was in force, why, and what it did to each kernel; prints as a table."""

    policy: Policy
    reason: str
    attachment: str
    kernels: tuple[Applied, ...]
    history: tuple[PolicyChange, ...] = ()

    def __str__(self) -> str:
        """Render as text."""
        from overlapctl.reports.text import explanation_table

        return explanation_table(
            self.policy, self.reason, self.attachment, self.kernels, self.history
        )


class _Order:
    """Sessions in force, in the order of the shim's stack; all pushes and pops hold the lock.

    ``last`` is what the session that ended last read.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.sessions: list[Session] = []
        self.last: tuple[Counters, Snapshot] | None = None


class Session:
    """What `with overlap() as session` gives: the policy and what it did.

    Attributes
    ----------
    policy
        The policy in force.
    reason
        Where it comes from: the profile, the heuristic, what was learned, or the arguments.
    active
        False if nothing could be attached and the region changes nothing.
    history
        The region's policies so far, oldest first.
    """

    def __init__(
        self,
        policy: Policy,
        reason: str,
        attachment: Attachment | None,
        learner: Learner | None = None,
        *,
        strict: bool = False,
    ) -> None:
        self.policy = policy
        self.reason = reason
        self._attachment = attachment
        self._learner = learner
        self._strict = strict
        self._step: Step | None = None
        self._process = os.getpid()
        self._thread = threading.get_ident()
        self._token: int | None = None
        self._pending: tuple[Policy, str] | None = None
        self._kernels_at_start: Snapshot | None = None
        self._counters_at_start: Counters | None = None
        self._end: tuple[Counters, Snapshot] | None = None

    @property
    def active(self) -> bool:
        """True while or after the policy was in force."""
        return self._attachment is not None

    @property
    def history(self) -> tuple[PolicyChange, ...]:
        """The region's policies so far; empty where nothing is learned."""
        return tuple(self._learner.history) if self._learner is not None else ()

    def stats(self) -> Stats:
        """Launch counts since the region was entered (until it was left)."""
        before = self._counters_at_start
        if self._attachment is None or before is None:
            return Stats(**dict.fromkeys(_STATS, 0))
        now = self._end[0] if self._end is not None else self._attachment.shim.counters()
        return Stats(**{name: getattr(now, name) - getattr(before, name) for name in _STATS})

    def explain(self) -> Explanation:
        """Per kernel: launches, size before and after, residency, and the rule that decided."""
        kernels = self._kernels()
        where = self._attachment.kind if self._attachment is not None else "not attached"
        progress = self._learner.progress if self._learner is not None else ""
        return Explanation(
            policy=self.policy,
            reason=f"{self.reason}; {progress}" if progress else self.reason,
            attachment=where,
            kernels=kernels,
            history=self.history,
        )

    def _kernels(self) -> tuple[Applied, ...]:
        if self._attachment is None or self._kernels_at_start is None:
            return ()
        from overlapctl.launch.rows import rows_since

        now = self._end[1] if self._end is not None else self._attachment.shim.snapshot()
        grown = rows_since(now.rows(), self._kernels_at_start.rows())
        return tuple(sorted(grown, key=lambda row: -row.launches))

    def _start(self) -> None:
        if self._attachment is None:
            return
        self._counters_at_start = self._attachment.shim.counters()
        counters, snapshot = _order.last or (None, None)
        # Outside of regions nothing is counted: mostly the table is as the last session left it.
        if snapshot is None or counters != self._counters_at_start:
            snapshot = self._attachment.shim.snapshot()
        self._kernels_at_start = snapshot
        with _order.lock:
            self._token = self._attachment.shim.push(self.policy)
            _order.sessions.append(self)
        learner = self._learner
        if learner is None or (learner.settled and learner.policy is self.policy):
            return
        self._step = learner.enter(self._adopt)
        if learner.policy is not self.policy:  # settled since this session was made
            self._adopt(learner.policy, learner.reason)

    def _adopt(self, policy: Policy, reason: str) -> None:
        """Switch to another policy: now, or once the regions inside this one have been left."""
        with _order.lock:
            if self._token is None:
                return
            self._pending = policy, reason
            if _order.sessions[-1] is self:
                self._switch()

    def _switch(self) -> None:
        """With the lock held, and this session's policy on top: put the pending one there."""
        if self._pending is None or self._attachment is None or self._token is None:
            return
        (policy, reason), self._pending = self._pending, None
        shim, old = self._attachment.shim, self._token
        try:
            self._token = shim.push(policy)
        except OverlapctlError as error:
            _warn_once(f"overlap() keeps its policy: {error}")
            return
        shim.pop(old)
        self.policy, self.reason = policy, reason

    def _stop(self, *, completed: bool) -> None:
        # A forked child inherits open sessions, but starts with no policy in force.
        if self._attachment is None or self._token is None or self._process != os.getpid():
            return
        with _order.lock:
            token, self._token = self._token, None
            _order.sessions.remove(self)
            try:
                self._attachment.shim.pop(token)
            except OverlapctlError as error:
                if self._strict and completed:
                    raise
                _warn_once(f"overlap() could not take its policy back: {error}")
            if _order.sessions:
                _order.sessions[-1]._switch()
        shim, before = self._attachment.shim, self._counters_at_start
        # In this order: a launch between the two readings makes the pair useless, not wrong.
        self._end = _order.last = shim.counters(), shim.snapshot()
        if self._learner is not None and self._step is not None:
            launches = self._end[0].launches - (before.launches if before is not None else 0)
            self._learner.leave(self._step, launches=launches, completed=completed)


@dataclasses.dataclass(frozen=True)
class _Choice:
    """A policy, why, and the GPU's facts where a plan of the region's own shall follow."""

    policy: Policy
    reason: str
    learn_on: DeviceFacts | None = None


class _Region:
    """What all entries of one region share."""

    def __init__(self, choose: Callable[[], _Choice], given: dict[str, Any], strict: bool) -> None:
        self._choose = choose
        self._given = given
        self._strict = strict
        self._lock = threading.Lock()
        self._choice: _Choice | None = None
        self._learner: Learner | None = None
        self._failed = ""

    def session(self) -> Session:
        """Make the session of one entry; raises as :func:`overlap` says."""
        if env.is_disabled():
            return Session(Policy(), f"{env.DISABLE} is set: nothing is changed", None)
        if self._failed:  # tried once: trying again in every step costs more than it brings
            return Session(Policy(), self._failed, None)
        try:
            from overlapctl.launch.attach import ensure_attached

            attachment = ensure_attached()
            with self._lock:
                if self._choice is None:
                    self._choice = self._choose()
                    self._learner = self._learn(self._choice, attachment)
        except OverlapctlError as error:
            if self._strict or isinstance(error, UsageError):
                raise
            _warn_once(f"overlap() changes nothing: {error}")
            self._failed = f"not attached: {error}"
            return Session(Policy(), self._failed, None)
        learner, choice = self._learner, self._choice
        if learner is not None:
            choice = _Choice(learner.policy, learner.reason)
        return Session(choice.policy, choice.reason, attachment, learner, strict=self._strict)

    def _learn(self, choice: _Choice, attachment: Attachment) -> Learner | None:
        facts = choice.learn_on
        if facts is None:
            return None
        from overlapctl.learning import Learner, plan_observed

        def planner(kernels: Sequence[Any]) -> tuple[Policy, str]:
            policy, reason = plan_observed(facts, kernels)
            return _overridden(policy, reason, self._given)

        return Learner(
            attachment.shim, choice.policy, choice.reason, planner, on_error=self._learning_failed
        )

    def _learning_failed(self, error: Exception) -> None:
        if self._strict:
            raise error
        _warn_once(f"overlap() keeps the heuristic, learning failed: {error}")


_MOST_REGIONS = 256
_order = _Order()
_regions: dict[Hashable, _Region] = {}
_regions_lock = threading.Lock()


def _forget_parent() -> None:
    """In a forked child: no region is in force, and the parent's threads may have held locks."""
    global _order, _regions_lock
    _order, _regions_lock = _Order(), threading.Lock()
    _regions.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)


class Overlap(contextlib.AbstractContextManager[Session]):
    """The region `overlap()` returns: a context manager and a decorator, reusable and nestable.

    Parameters
    ----------
    key
        What tells the region from others.
    make
        Makes the region when it is entered for the first time in this process.
    """

    def __init__(self, key: Hashable, make: Callable[[], _Region]) -> None:
        self._key = key
        self._make = make
        self._open: list[Session] = []

    def __enter__(self) -> Session:
        """Put the policy in force, process-wide."""
        session = self._region().session()
        session._start()
        self._open.append(session)
        return session

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        """Take the policy back, whatever happened inside."""
        self._newest()._stop(completed=kind is None)
        return False

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorate `function`: each call runs inside the region.

        Raises
        ------
        UsageError
            For a generator or coroutine function: its body runs after the call has returned.
        """
        if (
            inspect.isgeneratorfunction(function)
            or inspect.iscoroutinefunction(function)
            or inspect.isasyncgenfunction(function)
        ):
            raise UsageError(
                f"{getattr(function, '__name__', function)!r} is a generator or coroutine function",
                remedy="write `with overlap():` inside it, around the launches",
            )

        @functools.wraps(function)
        def inside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self:
                return function(*args, **kwargs)

        return inside

    def _region(self) -> _Region:
        region = _regions.get(self._key)
        if region is not None:
            return region
        with _regions_lock:
            while len(_regions) >= _MOST_REGIONS:
                del _regions[next(iter(_regions))]
            return _regions.setdefault(self._key, self._make())

    def _newest(self) -> Session:
        """Take the session entered last, by this thread if it entered any."""
        mine = threading.get_ident()
        for session in reversed(self._open):
            if session._thread == mine:
                self._open.remove(session)
                return session
        if not self._open:
            raise RuntimeError("overlap() region left without having been entered")
        return self._open.pop()


def overlap(
    smem_reserve: int | str | None = "auto",
    *,
    max_blocks_per_sm: int | None = None,
    carveout: int | None = None,
    comm_priority: bool | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rules: Sequence[KernelRule] = (),
    shape_captures: bool = True,
    strict: bool = False,
) -> Overlap:
    """Let computation and communication launched inside the region share the GPU.

    Parameters
    ----------
    smem_reserve
        ``"auto"``: what the profile of this machine says (``overlapctl tune`` writes it), else a
        stated heuristic, replaced by a plan of the kernels that the first steps launched
        (``docs/auto.md``). Bytes per block, as a number or like ``"48KiB"``: added to the dynamic
        shared memory of compute launches. ``None``: nothing is added.
    max_blocks_per_sm
        Pad compute launches until at most this many blocks stay resident per SM.
    carveout
        Preferred shared-memory carve-out of compute launches, percent (0-100).
    comm_priority
        Launch communication kernels at the greatest priority. ``None``: as the profile or
        heuristic says with ``"auto"``, else yes.
    include, exclude
        Shell-style kernel-name patterns: compute kernels to shape (empty: all), or to leave.
    rules
        Settings for single kernels; the first whose pattern matches wins.
    shape_captures
        Also shape launches that are captured into a CUDA graph (they stay shaped in each replay).
    strict
        Raise where the region could not take effect, instead of warning once and going on.

    Returns
    -------
    Overlap
        Use it as ``with overlap() as session:`` or as a decorator. The policy is process-wide:
        launches of autograd's and other threads are shaped as well. Explicit arguments override
        the corresponding part of ``"auto"``.

    Raises
    ------
    UsageError
        An argument is out of range (always raised, here).
    DeviceError, AttachError, ProfileError
        On entering, with ``strict=True`` only: no GPU, the shim cannot be attached, the profile is
        broken.
    """
    auto, pad = _parse_reserve(smem_reserve)
    _check_range("max_blocks_per_sm", max_blocks_per_sm, 1, 64)
    _check_range("carveout", carveout, 0, 100)
    overrides: dict[str, Any] = {
        "max_blocks_per_sm": max_blocks_per_sm,
        "carveout": carveout,
        "comm_priority": comm_priority,
        "include": _patterns("include", include) or None,
        "exclude": _patterns("exclude", exclude) or None,
        "rules": _checked(rules) or None,
        "shape_captures": None if shape_captures else False,
    }
    given = {name: value for name, value in overrides.items() if value is not None}

    def explicit() -> _Choice:
        base = Policy(pad_bytes=pad, comm_priority=True)
        return _Choice(dataclasses.replace(base, **given), "as the arguments say")

    def automatic() -> _Choice:
        choice = _automatic_choice(strict)
        policy, reason = _overridden(choice.policy, choice.reason, given)
        # With these given there is nothing left that a plan of the kernels could decide.
        learn_on = None if {"rules", "max_blocks_per_sm"} & given.keys() else choice.learn_on
        return _Choice(policy, reason, learn_on)

    caller = sys._getframe(1)
    place = caller.f_code.co_filename, caller.f_lineno
    key = (*place, auto, pad, tuple(sorted(given.items(), key=lambda item: item[0])), strict)
    return Overlap(key, lambda: _Region(automatic if auto else explicit, given, strict))


def _overridden(policy: Policy, reason: str, given: dict[str, Any]) -> tuple[Policy, str]:
    """Let explicit arguments win over an automatic policy, in its rules for single kernels too."""
    if not given:
        return policy, reason
    shape = {name: given[name] for name in ("max_blocks_per_sm", "carveout") if name in given}
    rules = tuple(dataclasses.replace(rule, **shape) for rule in policy.rules)
    policy = dataclasses.replace(policy, **{"rules": rules, **given})
    return policy, f"{reason}; arguments override {', '.join(given)}"


def _patterns(field: str, value: Sequence[str]) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(pattern, str) for pattern in value):
        raise UsageError(f"{field}={value!r}", remedy=f'give a list of patterns: {field}=["gemm*"]')
    return tuple(value)


def _checked(rules: Sequence[KernelRule]) -> tuple[KernelRule, ...]:
    for rule in rules:
        if not isinstance(rule, KernelRule):
            raise UsageError(f"rules has {rule!r}", remedy="give overlapctl.KernelRule objects")
        _check_range(f"rules[{rule.pattern!r}].pad_bytes", rule.pad_bytes, 0, 1 << 20)
        _check_range(f"rules[{rule.pattern!r}].max_blocks_per_sm", rule.max_blocks_per_sm, 0, 64)
        _check_range(f"rules[{rule.pattern!r}].carveout", rule.carveout, -1, 100)
    return tuple(rules)


def _parse_reserve(value: int | str | None) -> tuple[bool, int]:
    if value == "auto":
        return True, 0
    if value is None:
        return False, 0
    try:
        pad = parse_size(value)
    except UsageError as error:
        raise UsageError(f"smem_reserve: {error.what}", remedy=error.remedy) from None
    # No GPU has more shared memory per block than this by an order of magnitude: a larger number
    # is a slip of units. Whether a pad fits a kernel is decided (and explained) per launch.
    _check_range("smem_reserve", pad, 0, 1 << 20)
    return False, pad


def _check_range(field: str, value: int | None, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(
            f"{field}={value!r} is out of range", remedy=f"use a whole number from {low} to {high}"
        )


def _automatic_choice(strict: bool) -> _Choice:
    """Take the profile's policy, or the heuristic's and learn."""
    from overlapctl.plan.heuristic import heuristic_policy
    from overlapctl.records import Profile

    facts, found = _machine()
    if isinstance(found, Profile):
        return _Choice(found.policy, f"profile of {found.created}: {found.reason}")
    if isinstance(found, ProfileError):
        if strict:
            raise found
        _warn_once(f"overlap() cannot use the profile: {found}")
    policy, reason = heuristic_policy(facts)
    return _Choice(policy, f"{reason}; {found}", facts)


@functools.cache
def _machine() -> tuple[DeviceFacts, object]:
    """Read, once, the GPU and its profile, the miss, or why the profile cannot be used."""
    from overlapctl.device import open_device
    from overlapctl.profiles import ProfileStore, profile_key

    device = open_device("cuda")
    try:
        return device.facts(), ProfileStore().load(profile_key(device))
    except ProfileError as error:
        return device.facts(), error


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, OverlapctlWarning, stacklevel=4)
