"""Which algorithm the links between the ranks call for."""

from __future__ import annotations

from collections.abc import Sequence

from overlapctl.collectives.algorithms import Recipe, direct, hierarchical, ring
from overlapctl.collectives.schedule import DTYPE_BYTES, Call
from overlapctl.errors import UsageError
from overlapctl.records import Topology

__all__ = ["recipe_for", "ring_order"]

CHUNK_BYTES = 8 << 20
"""Least chunk: peer copies on H200 reach 303-323 GB/s at 8 MB, of 366-389 at 128 MB and more."""
MOST_CHUNKS = 4
_SLOW = {"pcie", "system"}


def recipe_for(
    call: Call,
    topology: Topology,
    devices: Sequence[int] | None = None,
    hosts: Sequence[int] | None = None,
) -> Recipe:
    """Choose how to carry out a call.

    Full meshes of fast links go direct; PCIe and partial meshes go around a ring of ranks with
    peer access; several hosts with as many ranks each go hierarchical; what is left goes to the
    inner group.

    Parameters
    ----------
    call
        The call.
    topology
        Links between the devices of a host (hosts are taken to be alike).
    devices
        Index of each rank's device in ``topology`` (none: rank r uses device r).
    hosts
        Host of each rank (none: all on one).

    Raises
    ------
    UsageError
        If devices or hosts are not one per rank.
    """
    n = call.world
    devices = range(n) if devices is None else devices
    hosts = [0] * n if hosts is None else hosts
    for name, given in (("devices", devices), ("hosts", hosts)):
        if len(given) != n:
            raise UsageError(f"{len(given)} {name} for {n} ranks", remedy="pass one per rank")
    access = {(e.source, e.target): e.kind for e in topology.links if e.peer_access}
    reach = {
        (a, b): "same" if devices[a] == devices[b] else access[devices[a], devices[b]]
        for a in range(n)
        for b in range(n)
        if a != b
        and hosts[a] == hosts[b]
        and (devices[a] == devices[b] or (devices[a], devices[b]) in access)
    }
    chunks = _chunks(call)
    if len(set(hosts)) > 1:
        alike = len({list(hosts).count(h) for h in hosts}) == 1
        full = all(
            (a, b) in reach or a == b or hosts[a] != hosts[b] for a in range(n) for b in range(n)
        )
        if alike and full and call.op in hierarchical.BUILDERS:
            return Recipe(algorithm="hierarchical", hosts=tuple(hosts), chunks=chunks)
        return Recipe(algorithm="inner")
    needed = _pairs(call)
    direct_works = all(pair in reach for pair in needed)
    slow = any(reach.get(pair) in _SLOW for pair in needed)
    if n > 2 and call.op in ring.BUILDERS and (slow or not direct_works):
        order = ring_order(n, set(reach))
        if order:
            return Recipe(algorithm="ring", order=order, chunks=chunks)
    if direct_works and call.op in direct.BUILDERS:
        return Recipe(chunks=chunks, depth=2 if chunks > 2 else 0)
    return Recipe(algorithm="inner")


def _pairs(call: Call) -> set[tuple[int, int]]:
    """Return the pairs of ranks that a direct schedule connects."""
    n = call.world
    everybody = {(a, b) for a in range(n) for b in range(n) if a != b}
    if call.op == "send_recv":
        return {(call.root, call.peer), (call.peer, call.root)}
    if call.op in {"gather", "scatter"}:
        return {pair for pair in everybody if call.root in pair}
    return everybody


def _chunks(call: Call) -> int:
    """Return into how many chunks of at least :data:`CHUNK_BYTES` a transfer of a pair is cut."""
    count = call.count
    if call.op in {"all_reduce", "broadcast", "reduce"}:
        count //= call.world
    if call.splits:
        count = max(map(max, call.splits))
    return max(1, min(MOST_CHUNKS, count * DTYPE_BYTES[call.dtype] // CHUNK_BYTES))


def ring_order(world: int, reach: set[tuple[int, int]]) -> tuple[int, ...] | None:
    """Find a ring through all ranks whose neighbours reach each other both ways.

    Returns
    -------
    tuple or None
        The ranks in ring order, starting with rank 0, or ``None`` if there is no such ring.
    """
    near = [[b for b in range(world) if (a, b) in reach and (b, a) in reach] for a in range(world)]
    path, seen = [0], {0}

    def extend() -> bool:
        if len(path) == world:
            return world == 1 or 0 in near[path[-1]]
        for rank in near[path[-1]]:
            if rank not in seen:
                path.append(rank)
                seen.add(rank)
                if extend():
                    return True
                seen.remove(path.pop())
        return False

    return tuple(path) if extend() else None
