"""Memory that peers see: a pool with the same layout on every rank, and registered tensors.

Everything another rank reads or writes lies here. Ordinary tensors are touched by their own rank
only, unless they were registered, so that a tensor can be freed at any time and a peer that wakes
late writes nowhere that matters.

The pool needs no talk between ranks: they take and give blocks of the same sizes in the same
order, so a block has the same place everywhere. Only growing is a meeting. A block may be taken
again as soon as it was given back: calls of a group run one after the other, and none touches a
peer before that peer has begun the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from overlapctl.collectives.driver import Driver
from overlapctl.errors import DeviceError, OverlapctlError

__all__ = ["Block", "Exported", "PeerMemory", "Place", "Pool", "Registry", "Shared", "size_class"]

Exchange = Callable[[bytes], Sequence[bytes]]

_ALIGNMENT = 512
"""Start and size of blocks in bytes: what torch's allocator promises too."""

_SEGMENT_BYTES = 64 << 20
"""Least size of a segment: one meeting of the ranks serves many small calls."""

_STEPS = 4
"""Size classes per power of two: at most a fifth of a block is lost to rounding."""

_OK = b"\x00"


@dataclass(frozen=True)
class Block:
    """``size`` bytes at ``offset`` in segment number ``segment``, on every rank."""

    segment: int
    offset: int
    size: int


@dataclass(frozen=True)
class Place:
    """Memory that every rank has: where it starts within an area that the ranks know alike."""

    area: str
    offset: int
    bases: tuple[int, ...]

    def address(self, rank: int) -> int:
        """Return where a rank's copy is, in this process."""
        return self.bases[rank] + self.offset


@dataclass(frozen=True)
class Exported:
    """What a rank shares: memory at ``offset`` in the allocation at ``base`` with ``handle``."""

    base: int
    handle: bytes
    offset: int = 0


@dataclass(frozen=True)
class Shared:
    """Where every rank's memory is, in this process, and which mappings that uses."""

    addresses: tuple[int, ...]
    keys: tuple[tuple[int, bytes], ...]


@dataclass
class _Mapping:
    address: int
    users: int = 0


def size_class(size: int) -> int:
    """Return the size in bytes that a request is rounded to.

    >>> size_class(1), size_class(5000), size_class(3 << 20)
    (512, 5120, 3145728)
    """
    size = max(size, _ALIGNMENT)
    step = max(_ALIGNMENT, (1 << (size - 1).bit_length()) // 2 // _STEPS)
    return -(-size // step) * step


class PeerMemory:
    """Opens the ranks' allocations in each other, each handle once.

    Parameters
    ----------
    driver, rank
        The GPU and this rank.
    exchange
        Gives every rank a few bytes of every rank; raises if a peer does not come.
    """

    def __init__(self, driver: Driver, rank: int, exchange: Exchange) -> None:
        self._driver, self._rank, self._exchange = driver, rank, exchange
        self._opened: dict[tuple[int, bytes], _Mapping] = {}

    def share(self, what: str, export: Callable[[], Exported]) -> Shared:
        """Open each other's memory; all ranks call this in the same order.

        Parameters
        ----------
        what
            For errors: what is being shared.
        export
            Says what this rank shares.

        Raises
        ------
        DeviceError
            On every rank, if one of them could not export, or not open what a peer exported.
        """
        own = None
        try:
            own = export()
            answer = _OK + own.offset.to_bytes(8, "little") + own.handle
        except OverlapctlError as error:
            answer = _failure(error)
        answers = self._agree(what, answer)
        if own is None:  # the agreement has raised: this rank's own answer was a failure
            raise AssertionError(what)
        addresses: list[int] = []
        keys: list[tuple[int, bytes]] = []
        answer = _OK
        try:
            for peer, theirs in enumerate(answers):
                if peer == self._rank:
                    addresses.append(own.base + own.offset)
                    continue
                key = (peer, theirs[8:])
                if key not in self._opened:
                    self._opened[key] = _Mapping(self._driver.open(theirs[8:]))
                self._opened[key].users += 1
                keys.append(key)
                offset = int.from_bytes(theirs[:8], "little")
                addresses.append(self._opened[key].address + offset)
        except OverlapctlError as error:
            answer = _failure(error)
        shared = Shared(tuple(addresses), tuple(keys))
        try:
            self._agree(what, answer)
        except OverlapctlError:
            self.release(shared)
            raise
        return shared

    def release(self, shared: Shared) -> None:
        """Unmap what :meth:`share` mapped, unless another share uses the same allocation."""
        for key in shared.keys:
            mapping = self._opened[key]
            mapping.users -= 1
            if mapping.users == 0:
                del self._opened[key]
                self._driver.close(mapping.address)

    def close(self) -> None:
        """Unmap everything that was opened."""
        for mapping in self._opened.values():
            self._driver.close(mapping.address)
        self._opened.clear()

    def _agree(self, what: str, answer: bytes) -> list[bytes]:
        answers = self._exchange(answer)
        failures = [
            f"rank {rank}: {a[1:].decode(errors='replace')}"
            for rank, a in enumerate(answers)
            if a[:1] != _OK
        ]
        if failures:
            raise DeviceError(
                f"{what} cannot be shared with peers: {'; '.join(failures)}",
                remedy="free memory or see that peer access works; until then NCCL runs instead",
            )
        return [a[1:] for a in answers]


def _failure(error: OverlapctlError) -> bytes:
    return b"\x01" + str(error).encode()[:400]


@dataclass
class _Segment:
    addresses: tuple[int, ...]
    size: int
    free: dict[int, int] = field(default_factory=dict)  # offset -> size

    def __post_init__(self) -> None:
        self.free[0] = self.size


class Pool:
    """Blocks of memory at the same place on every rank.

    Parameters
    ----------
    driver, rank
        The GPU and this rank.
    peers
        Opens segments in the peers.
    segment_bytes
        Least size of a segment.
    """

    def __init__(
        self, driver: Driver, rank: int, peers: PeerMemory, *, segment_bytes: int = _SEGMENT_BYTES
    ) -> None:
        self._driver, self._rank, self._peers = driver, rank, peers
        self._segment_bytes = segment_bytes
        self._segments: list[_Segment] = []

    @property
    def total_bytes(self) -> int:
        """Bytes allocated on this GPU."""
        return sum(s.size for s in self._segments)

    @property
    def free_bytes(self) -> int:
        """Bytes of these that no block holds."""
        return sum(sum(s.free.values()) for s in self._segments)

    def take(self, size: int) -> Block:
        """Take a block; all ranks take the same sizes in the same order.

        Raises
        ------
        DeviceError
            On every rank, if one of them has no memory left or cannot reach a peer's. Nothing has
            changed then.
        CollectiveError
            The pool had to grow and a peer did not come.
        """
        size = size_class(size)
        # Best fit, the lowest place first: decided by what all ranks know alike.
        fits = [
            (free, number, offset)
            for number, segment in enumerate(self._segments)
            for offset, free in segment.free.items()
            if free >= size
        ]
        if not fits:
            self._grow(max(size, self._segment_bytes))
            return self.take(size)
        free, number, offset = min(fits)
        places = self._segments[number].free
        del places[offset]
        if free > size:
            places[offset + size] = free - size
        return Block(number, offset, size)

    def give(self, block: Block) -> None:
        """Give a block back; all ranks do so in the same order among their takes."""
        places = self._segments[block.segment].free
        offset, size = block.offset, block.size
        for start, length in sorted(places.items()):
            if start + length == offset:
                offset, size = start, size + length
                del places[start]
            elif offset + size == start:
                size += length
                del places[start]
        places[offset] = size

    def address(self, block: Block, rank: int) -> int:
        """Return where a rank's copy of a block is, in this process."""
        return self._segments[block.segment].addresses[rank] + block.offset

    def find(self, address: int, size: int) -> Place | None:
        """Return where peers have ``size`` bytes at an address; ``None``: not of this pool."""
        for number, segment in enumerate(self._segments):
            offset = address - segment.addresses[self._rank]
            if offset >= 0 and offset + size <= segment.size:
                return Place(f"pool {number}", offset, segment.addresses)
        return None

    def close(self) -> None:
        """Free this GPU's segments; peers must have closed theirs of it before."""
        for segment in self._segments:
            self._driver.free(segment.addresses[self._rank])
        self._segments.clear()

    def _grow(self, size: int) -> None:
        own: list[int] = []

        def export() -> Exported:
            own.append(self._driver.allocate(size))
            return Exported(own[0], self._driver.export(own[0]))

        try:
            addresses = self._peers.share(f"a segment of {size >> 20} MiB", export).addresses
        except OverlapctlError:
            for address in own:
                self._driver.free(address)
            raise
        self._segments.append(_Segment(addresses, size))


@dataclass(frozen=True)
class _Entry:
    start: int
    size: int
    base: int
    shared: Shared
    storage: Any


class Registry:
    """Ordinary tensors that peers were let into.

    A tensor of torch's allocator lies in a segment with others, and the segment's handle is what
    CUDA exports: it is made once and opened once in each peer, however many tensors of it are
    registered. Memory that cannot be exported (expandable segments) is refused on every rank;
    such tensors go through the pool.
    """

    def __init__(self, driver: Driver, rank: int, peers: PeerMemory) -> None:
        self._driver, self._rank, self._peers = driver, rank, peers
        self._entries: dict[int, _Entry] = {}
        self._handles: dict[int, bytes] = {}
        self._made = 0

    def register(self, tensor: Any) -> int:
        """Let peers into a tensor's storage, and keep it alive until it is given up.

        All ranks register the corresponding tensor, in the same order.

        Returns
        -------
        int
            The registration's number, the same on every rank.

        Raises
        ------
        DeviceError
            On every rank, if one of them cannot export its tensor or open a peer's.
        """
        storage = tensor.untyped_storage()
        start, size = int(storage.data_ptr()), int(storage.nbytes())
        base = start

        def export() -> Exported:
            nonlocal base
            base, _ = self._driver.allocation(start)
            if base not in self._handles:
                self._handles[base] = self._driver.export(base)
            return Exported(base, self._handles[base], start - base)

        shared = self._peers.share(f"a tensor of {size} B", export)
        self._made += 1
        self._entries[self._made] = _Entry(start, size, base, shared, storage)
        return self._made

    def unregister(self, number: int) -> None:
        """Shut peers out again; all ranks do so, once no call with the tensor is in flight."""
        entry = self._entries.pop(number)
        self._peers.release(entry.shared)
        if all(e.base != entry.base for e in self._entries.values()):
            self._handles.pop(entry.base, None)  # the allocator may now give the segment back

    def find(self, address: int, size: int) -> Place | None:
        """Return where peers have ``size`` bytes at an address; ``None``: not registered."""
        for number, entry in self._entries.items():
            offset = address - entry.start
            if offset >= 0 and offset + size <= entry.size:
                return Place(f"tensor {number}", offset, entry.shared.addresses)
        return None

    def close(self) -> None:
        """Drop all registrations; mappings are closed with the peers'."""
        self._entries.clear()
        self._handles.clear()
