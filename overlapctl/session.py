"""`overlap()`: choose a policy, put it in force, show what it did, take it back.

::

    arguments + profile or heuristic -> Policy -> shim (push) -> the step -> shim (pop)
                                                        +-> stats(), explain()
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from overlapctl import env
from overlapctl.errors import OverlapctlError, OverlapctlWarning, UsageError
from overlapctl.records import Applied, KernelRule, Policy
from overlapctl.specs import parse_size

if TYPE_CHECKING:
    from overlapctl.launch.attach import Attachment
    from overlapctl.launch.shim import Snapshot

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """Which policy was in force, why, and what it did to each kernel; prints as a table."""

    policy: Policy
    reason: str
    attachment: str
    kernels: tuple[Applied, ...]

    def __str__(self) -> str:
        """Render as text."""
        from overlapctl.reports.text import explanation_table

        return explanation_table(self.policy, self.reason, self.attachment, self.kernels)


class Session:
    """What `with overlap() as session` gives: the policy and what it did.

    Attributes
    ----------
    policy
        The policy in force.
    reason
        Where it comes from: the profile, the heuristic, or the arguments.
    active
        False if nothing could be attached and the region changes nothing.
    """

    def __init__(self, policy: Policy, reason: str, attachment: Attachment | None) -> None:
        self.policy = policy
        self.reason = reason
        self._attachment = attachment
        self._token: int | None = None
        self._kernels_at_start: Snapshot | None = None
        self._stats_at_start: Stats | None = None
        self._end: tuple[Stats, Snapshot] | None = None

    @property
    def active(self) -> bool:
        """True while or after the policy was in force."""
        return self._attachment is not None

    def stats(self) -> Stats:
        """Launch counts since the region was entered (until it was left)."""
        if self._end is not None:
            return self._end[0]
        now = _read_stats(self._attachment)
        return _minus(now, self._stats_at_start) if self._stats_at_start else now

    def explain(self) -> Explanation:
        """Per kernel: launches, size before and after, residency, and the rule that decided."""
        kernels = self._kernels()
        where = self._attachment.kind if self._attachment is not None else "not attached"
        return Explanation(
            policy=self.policy, reason=self.reason, attachment=where, kernels=kernels
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
        self._stats_at_start = _read_stats(self._attachment)
        self._kernels_at_start = self._attachment.shim.snapshot()
        self._token = self._attachment.shim.push(self.policy)

    def _stop(self) -> None:
        if self._attachment is None or self._token is None:
            return
        token, self._token = self._token, None
        self._attachment.shim.pop(token)
        self._end = (self.stats(), self._attachment.shim.snapshot())


class Overlap(contextlib.AbstractContextManager[Session]):
    """The region `overlap()` returns: a context manager and a decorator, reusable and nestable."""

    def __init__(self, choose: Callable[[], tuple[Policy, str]], *, strict: bool) -> None:
        self._choose = choose
        self._strict = strict
        self._open = threading.local()

    def __enter__(self) -> Session:
        """Put the policy in force, process-wide."""
        session = Session(*self._attach())
        session._start()
        self._stack().append(session)
        return session

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        """Take the policy back, whatever happened inside."""
        self._stack().pop()._stop()
        return False

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorate `function`: each call runs inside the region."""

        @functools.wraps(function)
        def inside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self:
                return function(*args, **kwargs)

        return inside

    def _stack(self) -> list[Session]:
        if not hasattr(self._open, "sessions"):
            self._open.sessions = []
        sessions: list[Session] = self._open.sessions
        return sessions

    def _attach(self) -> tuple[Policy, str, Attachment | None]:
        if env.is_disabled():
            return Policy(), f"{env.DISABLE} is set: nothing is changed", None
        try:
            from overlapctl.launch.attach import ensure_attached

            attachment = ensure_attached()
            policy, reason = self._choose()
        except OverlapctlError as error:
            if self._strict or isinstance(error, UsageError):
                raise
            _warn_once(f"overlap() changes nothing: {error}")
            return Policy(), f"not attached: {error}", None
        return policy, reason, attachment


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
        stated heuristic. Bytes per block, as a number or like ``"48KiB"``: added to the dynamic
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
        "include": tuple(include) or None,
        "exclude": tuple(exclude) or None,
        "rules": tuple(rules) or None,
        "shape_captures": None if shape_captures else False,
    }
    given = {name: value for name, value in overrides.items() if value is not None}

    def explicit() -> tuple[Policy, str]:
        base = Policy(pad_bytes=pad, comm_priority=True)
        return dataclasses.replace(base, **given), "as the arguments say"

    def automatic() -> tuple[Policy, str]:
        policy, reason = _automatic_policy()
        if not given:
            return policy, reason
        names = ", ".join(given)
        return dataclasses.replace(policy, **given), f"{reason}; arguments override {names}"

    return Overlap(automatic if auto else explicit, strict=strict)


def _parse_reserve(value: int | str | None) -> tuple[bool, int]:
    if value == "auto":
        return True, 0
    if value is None:
        return False, 0
    pad = parse_size(value)
    # No GPU has more shared memory per block than this by an order of magnitude: a larger number
    # is a slip of units. Whether a pad fits a kernel is decided (and explained) per launch.
    _check_range("smem_reserve", pad, 0, 1 << 20)
    return False, pad


def _check_range(field: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not (isinstance(value, int) and low <= value <= high):
        raise UsageError(
            f"{field}={value!r} is out of range", remedy=f"use a whole number from {low} to {high}"
        )


@functools.cache
def _automatic_policy() -> tuple[Policy, str]:
    from overlapctl.device import open_device
    from overlapctl.plan.heuristic import heuristic_policy
    from overlapctl.profiles import ProfileStore, profile_key
    from overlapctl.records import Profile

    device = open_device("cuda")
    found = ProfileStore().load(profile_key(device))
    if isinstance(found, Profile):
        return found.policy, f"profile of {found.created}: {found.reason}"
    policy, reason = heuristic_policy(device.facts())
    return policy, f"{reason}; {found}"


def _read_stats(attachment: Attachment | None) -> Stats:
    fields = [f.name for f in dataclasses.fields(Stats)]
    if attachment is None:
        return Stats(**dict.fromkeys(fields, 0))
    counters = attachment.shim.counters()
    return Stats(**{name: getattr(counters, name) for name in fields})


def _minus(now: Stats, before: Stats) -> Stats:
    values = {
        f.name: getattr(now, f.name) - getattr(before, f.name) for f in dataclasses.fields(Stats)
    }
    return Stats(**values)


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, OverlapctlWarning, stacklevel=4)
