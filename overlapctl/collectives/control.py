"""What the ranks of one host share: a small file of flags, call records and states.

The file lies in ``/dev/shm``, is readable by its user only, and loses its name as soon as every
rank has mapped it: nothing stays behind, however a process ends. The GPUs use it too: the flag
words are written and polled by their streams. Since they are host memory, a host can read who has
signalled, and can release a stuck wait with a store, without a call into the driver.

Layout, per rank: a header of 64-bit words, a ring of call records, a mailbox, the flag words that
its GPU waits on (64 bytes apart: polled words share no cache line).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from overlapctl.collectives.driver import FLAG_MODULUS
from overlapctl.collectives.schedule import flag_slots
from overlapctl.errors import CollectiveError, DeviceError

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "BROKEN",
    "DIFFERENT",
    "MISSING",
    "Abort",
    "Control",
    "Record",
    "create_file",
    "file_size",
    "open_file",
]

_FOLDER = Path("/dev/shm")
_PID, _HEARTBEAT, _ISSUED, _ABORT, _ABORT_CALL, _ABORT_RANKS, _ROUND, _LENGTH, _GATE, _LEFT = (
    0, 1, 2, 3, 4, 5, 6, 8, 16, 24,
)  # fmt: skip
_HEADER_WORDS = 32
_RECORDS = 256
_RECORD_WORDS = 8
_MAILBOX_BYTES = 2048
_FLAG_STRIDE = 64
_POLL_S = 50e-6

MISSING, DIFFERENT, BROKEN = 1, 2, 3
"""Kinds of :class:`Abort`: a rank did not come; ranks issued different calls; a driver failed."""

_FAR = 1 << 30  # how far the gate is opened ahead: half of what 32-bit words can compare


class Record(NamedTuple):
    """One call as its rank issued it; ranks compare these.

    ``call`` is the call's number in the group, from 1. The others are codes whose meaning the
    group knows; what may differ between ranks is not in it.
    """

    call: int
    op: int
    dtype: int
    numel: int
    detail: int


class Abort(NamedTuple):
    """Why a group was given up: kind, number of the call, ranks at fault (one bit each)."""

    kind: int
    call: int
    ranks: int

    def rank_list(self) -> list[int]:
        """Return the ranks at fault."""
        return [r for r in range(self.ranks.bit_length()) if self.ranks >> r & 1]


class Control:
    """One rank's view of the shared file.

    Parameters
    ----------
    file
        Descriptor of the file; closed here.
    rank, world
        This rank and the number of ranks.
    limit_s
        Longest time :meth:`exchange` waits for a peer.
    """

    def __init__(self, file: int, rank: int, world: int, *, limit_s: float) -> None:
        import numpy as np

        self.rank, self.world = rank, world
        self._limit_s = limit_s
        size = file_size(world)
        try:
            self._map = mmap.mmap(file, size)
        finally:
            os.close(file)
        self._bytes: np.ndarray[Any, Any] = np.frombuffer(self._map, dtype=np.uint8)
        self._words: np.ndarray[Any, Any] = self._bytes.view(np.int64)
        self._flags: np.ndarray[Any, Any] = self._bytes.view(np.uint32)
        self._rounds = 0
        self.address = int(self._bytes.ctypes.data)
        self.size = size
        self._set(_PID, os.getpid())
        self.set_gate(_FAR)

    # --- calls -------------------------------------------------------------------------------

    def post(self, record: Record) -> None:
        """Tell the peers which call this rank issues; the number goes last: it validates."""
        start = self._record_start(self.rank, record.call)
        self._words[start] = 0
        self._words[start + 1 : start + len(record)] = record[1:]
        self._words[start] = record.call
        self._set(_ISSUED, record.call)

    def record_of(self, rank: int, call: int) -> Record | None:
        """Return what a rank issued as a call; ``None``: nothing yet (or long ago)."""
        start = self._record_start(rank, call)
        found = self._words[start : start + len(Record._fields)].tolist()
        return Record(*found) if found[0] == call else None

    def issued(self, rank: int) -> int:
        """Return the number of the last call a rank issued."""
        return self._get(rank, _ISSUED)

    # --- life and abort ----------------------------------------------------------------------

    def beat(self) -> None:
        """Show the peers that this process runs."""
        self._set(_HEARTBEAT, self._get(self.rank, _HEARTBEAT) + 1)

    def heartbeat(self, rank: int) -> int:
        """Return a number that changes while a rank's process runs."""
        return self._get(rank, _HEARTBEAT)

    def abort(self, why: Abort) -> None:
        """Tell the peers that this rank has given the group up (the first reason stays)."""
        if self._get(self.rank, _ABORT) == 0:
            self._set(_ABORT_CALL, why.call)
            self._set(_ABORT_RANKS, why.ranks)
            self._set(_ABORT, why.kind)

    def aborted(self) -> Abort | None:
        """Return the reason of the lowest rank that has given the group up, if any has."""
        for rank in range(self.world):
            kind = self._get(rank, _ABORT)
            if kind:
                return Abort(kind, self._get(rank, _ABORT_CALL), self._get(rank, _ABORT_RANKS))
        return None

    def leave(self) -> None:
        """Tell the peers that this rank closes the group."""
        self._set(_LEFT, 1)

    def has_left(self, rank: int) -> bool:
        """Tell whether a rank has closed the group."""
        return self._get(rank, _LEFT) != 0

    # --- flags -------------------------------------------------------------------------------

    def flag_offset(self, rank: int, slot: int) -> int:
        """Return the offset in the file of a flag word that ``rank`` waits on."""
        return rank * _block_size(self.world) + _flags_start() + slot * _FLAG_STRIDE

    def flag(self, rank: int, slot: int) -> int:
        """Read a flag word."""
        return int(self._flags[self.flag_offset(rank, slot) // 4])

    def set_flag(self, rank: int, slot: int, value: int) -> None:
        """Write a flag word from the host, which releases streams that wait for it."""
        self._flags[self.flag_offset(rank, slot) // 4] = value

    @property
    def gate_offset(self) -> int:
        """Offset in the file of the gate: the last thing each of this rank's calls waits for."""
        return self.rank * _block_size(self.world) + 8 * _GATE

    def set_gate(self, call: int) -> None:
        """Let calls up to a number end (32 bits, on the circle)."""
        self._flags[self.gate_offset // 4] = call % FLAG_MODULUS

    def open_gate_beyond(self, call: int) -> None:
        """Keep the gate open, far ahead of a call that is about to be issued."""
        gate = int(self._flags[self.gate_offset // 4])
        if (gate - call) % FLAG_MODULUS < _FAR // 2:
            self.set_gate(call + _FAR)

    # --- exchange ----------------------------------------------------------------------------

    def exchange(self, payload: bytes) -> list[bytes]:
        """Give every rank a few bytes of every rank; all ranks call this in the same order.

        Raises
        ------
        CollectiveError
            A peer did not come within the limit, or the group was given up meanwhile.
        """
        room = _MAILBOX_BYTES // 2
        if len(payload) > room:
            raise ValueError(f"{len(payload)} B to exchange, there is room for {room}")
        # Two halves in turn: a peer can be one round ahead, not two.
        self._rounds += 1
        half = self._rounds % 2
        start = self._mailbox(self.rank) + half * room
        self._bytes[start : start + len(payload)] = bytearray(payload)
        self._set(_LENGTH + half, len(payload))
        self._set(_ROUND, self._rounds)
        received = []
        for peer in range(self.world):
            self._await_round(peer)
            start = self._mailbox(peer) + half * room
            received.append(bytes(self._bytes[start : start + self._get(peer, _LENGTH + half)]))
        return received

    def close(self) -> None:
        """Unmap the file. The GPU must not use it any more."""
        del self._words, self._flags, self._bytes
        with contextlib.suppress(BufferError):  # somebody still looks at a word: unmapped later
            self._map.close()

    # --- plumbing ----------------------------------------------------------------------------

    def _await_round(self, peer: int) -> None:
        deadline = time.monotonic() + self._limit_s
        while self._get(peer, _ROUND) < self._rounds:
            if self.aborted() is not None or time.monotonic() > deadline:
                raise CollectiveError(
                    f"rank {peer} did not take part in an exchange within {self._limit_s:g} s",
                    remedy="see that all ranks issue the same collectives in the same order",
                )
            time.sleep(_POLL_S)

    def _get(self, rank: int, word: int) -> int:
        return int(self._words[rank * _block_size(self.world) // 8 + word])

    def _set(self, word: int, value: int) -> None:
        self._words[self.rank * _block_size(self.world) // 8 + word] = value

    def _record_start(self, rank: int, call: int) -> int:
        ring = rank * _block_size(self.world) // 8 + _HEADER_WORDS
        return ring + call % _RECORDS * _RECORD_WORDS

    def _mailbox(self, rank: int) -> int:
        return rank * _block_size(self.world) + 8 * (_HEADER_WORDS + _RECORDS * _RECORD_WORDS)


def create_file(world: int) -> tuple[int, Path]:
    """Create the shared file; return its descriptor and its path, to be removed by the caller.

    Raises
    ------
    DeviceError
        The folder of shared memory cannot be written to.
    """
    path = _FOLDER / f"overlapctl-{os.getuid()}-{secrets.token_hex(16)}"
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise DeviceError(
            f"cannot create {path} ({error.strerror})",
            remedy="mount /dev/shm writable, or use collectives='nccl'",
        ) from error
    try:
        os.posix_fallocate(file, 0, file_size(world))
    except OSError as error:
        os.close(file)
        path.unlink()
        raise DeviceError(
            f"no room for {file_size(world)} B in {_FOLDER} ({error.strerror})",
            remedy="enlarge /dev/shm, or use collectives='nccl'",
        ) from error
    return file, path


def open_file(path: Path, world: int) -> int:
    """Open the file that rank 0 created, and return its descriptor.

    Raises
    ------
    DeviceError
        It cannot be opened, is not this user's own, or has another size.
    """
    remedy = "run all ranks as one user with one /dev/shm, or use collectives='nccl'"
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        raise DeviceError(f"cannot open {path} ({error.strerror})", remedy=remedy) from error
    found = os.fstat(file)
    is_private = found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) & 0o077 == 0
    if not is_private or found.st_size != file_size(world):
        os.close(file)
        raise DeviceError(f"{path} is not the private file of this group", remedy=remedy)
    return file


def file_size(world: int) -> int:
    """Return the file's size in bytes: whole pages."""
    return world * _block_size(world)


def _flags_start() -> int:
    return 8 * (_HEADER_WORDS + _RECORDS * _RECORD_WORDS) + _MAILBOX_BYTES


def _block_size(world: int) -> int:
    used = _flags_start() + flag_slots(world) * _FLAG_STRIDE
    return -(-used // mmap.PAGESIZE) * mmap.PAGESIZE
