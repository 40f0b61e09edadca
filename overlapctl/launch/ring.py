"""The ring of launch records, as Python reads it."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import Any

from overlapctl.records import Role, Rule

__all__ = ["ROLES", "RULES", "LaunchRecord", "NativeRecord", "RecordReader"]

ROLES = (Role.COMPUTE, Role.COMMUNICATION, Role.IGNORED)
"""In the order of ``ovl_role``."""

RULES = tuple(Rule)
"""In the order of ``ovl_rule``."""

_CHUNK = 4096
_MOST_CHUNKS = 4
"""More than the ring holds: a job that launches as fast as it is read must not keep the reader."""


class NativeRecord(ctypes.Structure):
    """``ovl_record``, field by field."""

    _fields_ = (
        ("sequence", ctypes.c_uint64),
        ("ticks", ctypes.c_uint64),
        ("function", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("blocks", ctypes.c_uint64),
        ("thread_id", ctypes.c_uint32),
        ("threads", ctypes.c_int32),
        ("before", ctypes.c_int32),
        ("after", ctypes.c_int32),
        ("result", ctypes.c_int32),
        ("cluster", ctypes.c_uint16),
        ("role", ctypes.c_uint8),
        ("rule", ctypes.c_uint8),
        ("actions", ctypes.c_uint8),
    )


@dataclass(frozen=True, kw_only=True)
class LaunchRecord:
    """One launch from the ring.

    Parameters
    ----------
    sequence
        Number of the launch; gaps are records overwritten before they were read.
    ticks
        Monotonic clock in ns.
    function, stream
        Handles.
    blocks, threads, cluster
        Blocks in the grid, threads per block, blocks per cluster.
    before, after
        Dynamic shared memory per block in bytes: as asked, as launched.
    result
        The driver's answer, 0: success.
    """

    sequence: int
    ticks: int
    function: int
    stream: int
    blocks: int
    thread_id: int
    threads: int
    cluster: int
    before: int
    after: int
    result: int
    role: Role
    rule: Rule
    padded: bool
    prioritised: bool
    carved: bool
    captured: bool
    failed: bool


class RecordReader:
    """A place in the ring; safe from any thread, each record is read once.

    Parameters
    ----------
    library
        The loaded shim. Reading starts with the oldest record the ring has.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._next = ctypes.c_uint64(0)
        self._reading = threading.Lock()

    def read(self) -> list[LaunchRecord]:
        """Read what was recorded since the last call, oldest first, as far as the ring has it."""
        found: list[LaunchRecord] = []
        chunk = (NativeRecord * _CHUNK)()
        with self._reading:
            for _ in range(_MOST_CHUNKS):
                got = self._copy(chunk)
                found += [_record(chunk[i]) for i in range(got)]
                if got < _CHUNK:
                    break
        return found

    def skip(self) -> None:
        """Go past everything recorded so far."""
        chunk = (NativeRecord * _CHUNK)()
        with self._reading:
            for _ in range(_MOST_CHUNKS):
                if self._copy(chunk) < _CHUNK:
                    break

    def _copy(self, chunk: Any) -> int:
        return int(self._library.ovl_records_read(ctypes.byref(self._next), chunk, len(chunk)))


def _record(native: Any) -> LaunchRecord:
    actions: int = native.actions
    return LaunchRecord(
        sequence=native.sequence,
        ticks=native.ticks,
        function=native.function,
        stream=native.stream,
        blocks=native.blocks,
        thread_id=native.thread_id,
        threads=native.threads,
        cluster=native.cluster,
        before=native.before,
        after=native.after,
        result=native.result,
        role=ROLES[native.role],
        rule=RULES[native.rule],
        padded=actions & 1 != 0,
        prioritised=actions & 2 != 0,
        carved=actions & 4 != 0,
        captured=actions & 8 != 0,
        failed=actions & 16 != 0,
    )
