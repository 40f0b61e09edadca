"""Bounds every wait for a peer: no GPU hangs because another rank died, stalled or erred.

A host thread looks at the calls in flight. If one makes no headway within the limit, or a peer has
given up, the group is given up, in an order that lets nobody take garbage for a result:

1. the gate is closed: no call ends any more;
2. flag words are written from the host, so that stuck streams run on;
3. call by call: once all its steps have run, its outputs are filled with NaN (all bits set), and
   only then the gate lets the call end, which is what consumers wait for;
4. from then on the group refuses work.

Peers that wake late write to the pool and to flag words of this group only. Both are kept until
the process ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from overlapctl.collectives.control import BROKEN, DIFFERENT, MISSING, Abort, Control, Record
from overlapctl.collectives.driver import Driver
from overlapctl.collectives.schedule import Flag, reached
from overlapctl.collectives.streams import Flags
from overlapctl.errors import CollectiveError, OverlapctlError

__all__ = ["InFlight", "Watchdog"]

_POISON = 0xFF  # all bits set is a NaN in every floating-point format
_RELEASE_EVERY_S = 1e-3


@dataclass
class InFlight:
    """A call that was issued and has not ended.

    Parameters
    ----------
    number, what
        The call's number in the group and its text for errors.
    begin
        Event behind which its tensors may be used; ``None``: handed to another group, here only
        so that it is compared with the peers' calls.
    outputs
        (address, size) of the memory that holds its result.
    waits
        The last word this rank waits for of each flag.
    keep
        Tensors that must stay alive until it has ended; dropped once somebody waited for it.
    """

    number: int
    what: str
    begin: Any
    outputs: Sequence[tuple[int, int]] = ()
    waits: dict[Flag, int] = field(default_factory=dict)
    keep: list[Any] = field(default_factory=list)
    worked: Any = None
    end: Any = None
    is_enqueued: bool = False
    started_at: float | None = None


class Watchdog:
    """Watches one rank's calls from a thread of its own.

    Parameters
    ----------
    driver, control, flags
        The GPU, the ranks' shared file, the flags.
    limit_s
        Longest time a call may take from when its inputs are ready and its turn has come.
    describe
        Turns a call record into text.
    """

    def __init__(
        self,
        driver: Driver,
        control: Control,
        flags: Flags,
        *,
        limit_s: float,
        describe: Callable[[Record], str],
    ) -> None:
        self._driver, self._control, self._flags = driver, control, flags
        self._limit_s = limit_s
        self._describe = describe
        self._calls: deque[InFlight] = deque()
        self._lock = threading.Lock()
        self._failure: CollectiveError | None = None
        self._is_over = threading.Event()  # outputs are poisoned and everything is released
        self._stop = threading.Event()
        self._beats: dict[int, tuple[int, float]] = {}
        self._rescue = driver.create_stream()
        self._thread = threading.Thread(target=self._run, name="overlapctl-watchdog", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> CollectiveError | None:
        """Why the group was given up, if it was."""
        return self._failure

    @property
    def is_idle(self) -> bool:
        """True if no call is in flight."""
        return not self._calls

    def add(self, call: InFlight) -> None:
        """Watch a call from now on; called before anything of it is enqueued."""
        with self._lock:
            self._calls.append(call)

    def remove(self, call: InFlight) -> None:
        """Stop watching a call of which nothing was enqueued, or that another group has ended."""
        with self._lock, contextlib.suppress(ValueError):
            self._calls.remove(call)

    def retire(self) -> None:
        """Forget the calls that have ended, and let go of their tensors."""
        with self._lock:
            while self._calls and self._has_ended(self._calls[0]):
                self._calls.popleft()

    def give_up(self, why: Abort) -> None:
        """Give the group up; the thread does the rest."""
        self._control.abort(why)
        if self._failure is None:
            self._failure = self._error(why)

    def compare(self, own: Record) -> None:
        """Compare a call with what peers have issued under its number; give up if they differ.

        Whoever of two ranks issues a call second sees the other's record, so that nothing of
        calls that differ is ever carried out.
        """
        for peer in range(self._control.world):
            theirs = self._control.record_of(peer, own.call)
            if theirs is not None and theirs != own:
                ranks = 1 << peer | 1 << self._control.rank
                self.give_up(Abort(DIFFERENT, own.call, ranks))
                return

    def wait_until_over(self, timeout_s: float) -> bool:
        """After a failure: wait until outputs are poisoned and streams released."""
        return self._is_over.wait(timeout_s)

    def close(self) -> None:
        """End the thread. Calls in flight must have ended, or the group have failed."""
        self._stop.set()
        self._thread.join(self._limit_s)
        if not self._thread.is_alive():
            self._driver.destroy_stream(self._rescue)

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        period = min(0.05, self._limit_s / 20)
        while not self._stop.wait(period):
            try:
                self._tick()
            except (OverlapctlError, RuntimeError):
                # Nothing on this GPU can be relied on any more.
                oldest = self._oldest()
                number = oldest.number if oldest else 0
                self.give_up(Abort(BROKEN, number, 1 << self._control.rank))
            if self._failure is not None:
                with contextlib.suppress(OverlapctlError, RuntimeError):
                    self._clean_up()
                self._is_over.set()

    def _tick(self) -> None:
        now = time.monotonic()
        self._control.beat()
        for peer in range(self._control.world):
            beat = self._control.heartbeat(peer)
            if peer not in self._beats or self._beats[peer][0] != beat:
                self._beats[peer] = (beat, now)
        self.retire()
        theirs = self._control.aborted()
        if theirs is not None:
            self.give_up(theirs)
            return
        oldest = self._oldest()
        if oldest is None:
            return
        own = self._control.record_of(self._control.rank, oldest.number)
        if own is not None:
            self.compare(own)  # two ranks that issued at the same instant
        if oldest.begin is None or not oldest.is_enqueued:
            return
        if oldest.started_at is None:
            if self._driver.is_complete(oldest.begin):
                oldest.started_at = now
        elif now - oldest.started_at > self._limit_s:
            self.give_up(Abort(MISSING, oldest.number, self._missing(oldest, now)))

    def _oldest(self) -> InFlight | None:
        with self._lock:
            return self._calls[0] if self._calls else None

    def _has_ended(self, call: InFlight) -> bool:
        return call.is_enqueued and call.end is not None and self._driver.is_complete(call.end)

    def _missing(self, call: InFlight, now: float) -> int:
        """Ranks that a call waits for, by the best evidence there is."""
        rank, world = self._control.rank, self._control.world
        peers = [p for p in range(world) if p != rank]
        silent = [p for p in peers if now - self._beats[p][1] > self._limit_s / 2]
        absent = [p for p in peers if self._control.issued(p) < call.number]
        unsignalled = [
            flag.source
            for flag, word in call.waits.items()
            if not reached(self._flags.word(flag), word)
        ]
        found = silent or absent or unsignalled
        return sum(1 << p for p in set(found))

    def _clean_up(self) -> None:
        """Release and poison what is in flight, in the order of the calls."""
        call = self._oldest()
        if call is None:
            return
        self._control.set_gate(call.number - 1)
        while call is not None and not self._stop.is_set():
            if call.begin is not None and not self._has_ended(call):
                # The caller may still be enqueueing; its inputs may still be computed.
                while not self._stop.is_set() and not (
                    call.is_enqueued and (call.worked is None or self._done(call.worked))
                ):
                    self._control.beat()
                    self._flags.release()  # again: a late peer may overwrite a word
                    time.sleep(_RELEASE_EVERY_S)
                for address, size in call.outputs:
                    self._driver.fill(address, _POISON, size, self._rescue)
                poisoned = self._driver.record(self._rescue)
                while not self._stop.is_set() and not self._done(poisoned):
                    time.sleep(_RELEASE_EVERY_S)
            self._control.set_gate(call.number)
            with self._lock:
                if self._calls and self._calls[0] is call:
                    self._calls.popleft()
            call = self._oldest()

    def _done(self, event: Any) -> bool:
        return self._driver.is_complete(event)

    def _error(self, why: Abort) -> CollectiveError:
        number, ranks = why.call, why.rank_list()
        own = self._control.record_of(self._control.rank, number)
        what = f"call {number}" if own is None else f"call {number} ({self._describe(own)})"
        if why.kind == DIFFERENT:
            return CollectiveError(
                f"ranks issued different collectives as call {number}: "
                f"{self._texts(number, ranks)}",
                remedy="issue the same collectives, types and sizes in the same order on all "
                "ranks of the group",
            )
        if why.kind == BROKEN:
            return CollectiveError(
                f"{what}: the driver failed on rank {_names(ranks)}",
                remedy="see that rank's error; restart the job from its last checkpoint",
            )
        return CollectiveError(
            f"{what} did not end within {self._limit_s:g} s: rank {_names(ranks)} is missing",
            remedy="see why that rank stopped, died or ran another collective; results of this "
            "call are NaN; restart the job from its last checkpoint",
        )

    def _texts(self, number: int, ranks: Sequence[int]) -> str:
        records = {r: self._control.record_of(r, number) for r in ranks}
        return "; ".join(
            f"rank {r}: {'nothing yet' if record is None else self._describe(record)}"
            for r, record in records.items()
        )


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if ranks else "(unknown)"
