"""Ring algorithms: only neighbours talk, for PCIe and partial meshes. All copies push."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from overlapctl.collectives.algorithms.builder import Builder
from overlapctl.collectives.algorithms.phases import average
from overlapctl.collectives.algorithms.recipe import parts
from overlapctl.collectives.schedule import Region, Wait

__all__ = ["BUILDERS"]

Gates = dict[tuple[int, int], Wait]
"""The wait for chunk ``c`` of the block of a rank, by (rank, c)."""


def all_gather(b: Builder) -> None:
    """Every rank passes on what it got last to its right neighbour."""
    n, count = b.call.world, b.call.count
    outputs = [b.buffer(r, "output", n * count) for r in range(n)]
    b.outputs += outputs
    sources = []
    for r in range(n):
        own = outputs[r].part(r * count, count)
        sources.append(own if b.call.in_place else b.buffer(r, "input", count))
        b.local(sources[r], own)
    b.inputs += sources
    _pass_on(b, sources, lambda rank, owner: outputs[rank].part(owner * count, count), gates={})


def _pass_on(
    b: Builder,
    sources: Sequence[Region],
    place: Callable[[int, int], Region],
    gates: Gates,
) -> None:
    """Bring everybody's block to its place on every rank, in n - 1 steps around the ring.

    ``gates`` are waited for by a block's owner before it sends a chunk.
    """
    order, n = _order(b), b.call.world
    arrived = dict(gates)
    for step in range(n - 1):
        sent: Gates = {}
        for i, rank in enumerate(order):
            owner, right = order[(i - step) % n], order[(i + 1) % n]
            source = sources[rank] if step == 0 else place(rank, owner)
            pairs = zip(b.chunks(source), b.chunks(place(right, owner)), strict=True)
            for c, (chunk, target) in enumerate(pairs):
                sent[right, c] = b.transfer(chunk, target, (arrived.get((rank, c)),))
        arrived = sent


def _accumulate(
    b: Builder,
    part: Callable[[int, int], Region],
    output: Callable[[int], Region],
) -> Gates:
    """Reduce each owner's block on its way around the ring, ending at the owner.

    ``part(rank, owner)`` is a rank's contribution to the owner's block. Addition starts at the
    owner's right neighbour and follows the ring. Returns the waits for the chunks of each
    owner's result on its other streams.
    """
    order, n, call = _order(b), b.call.world, b.call
    largest = max(output(r).count for r in order)
    ready: Gates = {}
    if n == 1:
        for chunk, target in zip(b.chunks(part(0, 0)), b.chunks(output(0)), strict=True):
            b.reduce((chunk,), target, scales=(call.factor,), output_scale=average(b))
        return ready
    first = {r: b.buffer(r, "staging", largest) for r in order}
    later = (
        {r: b.buffer(r, "partials", (n - 1) * largest, b.partial_dtype) for r in order}
        if n > 2
        else {}
    )
    for step in range(n - 1):
        reduced: Gates = {}
        for i, rank in enumerate(order):
            owner, right = order[(i - 1 - step) % n], order[(i + 1) % n]
            mine = part(right, owner)
            if step == 0:
                source, slot = part(rank, owner), first[right].part(0, mine.count)
            else:
                source = later[rank].part((step - 1) * largest, mine.count)
                slot = later[right].part(step * largest, mine.count)
            last = step == n - 2
            target = output(owner) if last else later[right].part(step * largest, mine.count)
            chunks = zip(*(b.chunks(x) for x in (source, slot, mine, target)), strict=True)
            for c, (sent, got, own, result) in enumerate(chunks):
                arrival = b.transfer(sent, got, (ready.get((rank, c)),))
                b.wait("reduce", arrival)
                b.reduce(
                    (got, own),
                    result,
                    scales=(call.factor if step == 0 else 1.0, call.factor),
                    output_scale=average(b) if last else 1.0,
                )
                reduced[right, c] = b.signal(right, "reduce", right, "data")
        ready = reduced
    return ready


def reduce_scatter(b: Builder) -> None:
    """Every rank's block travels around the ring and collects everybody's part."""
    n, count = b.call.world, b.call.count
    inputs = [b.buffer(r, "input", n * count) for r in range(n)]
    b.inputs += inputs

    def part(rank: int, owner: int) -> Region:
        return inputs[rank].part(owner * count, count)

    b.outputs += [part(r, r) if b.call.in_place else b.buffer(r, "output", count) for r in range(n)]
    _accumulate(b, part, lambda owner: b.outputs[owner])


def all_reduce(b: Builder) -> None:
    """Reduce-scatter around the ring, then all-gather around it."""
    n, count = b.call.world, b.call.count
    outputs = [b.buffer(r, "output", count) for r in range(n)]
    inputs = outputs if b.call.in_place else [b.buffer(r, "input", count) for r in range(n)]
    b.inputs += inputs
    b.outputs += outputs
    shards = parts(count, n, b.recipe.align)

    def place(rank: int, owner: int) -> Region:
        return outputs[rank].part(*shards[owner])

    gates = _accumulate(
        b,
        lambda rank, owner: inputs[rank].part(*shards[owner]),
        lambda owner: place(owner, owner),
    )
    _pass_on(b, [place(r, r) for r in range(n)], place, gates)


def _chain(b: Builder, last: int) -> list[int]:
    """Return the ranks in ring order such that ``last`` ends it."""
    order = _order(b)
    at = order.index(last)
    return [*order[at + 1 :], *order[: at + 1]]


def broadcast(b: Builder) -> None:
    """Chunks travel from the root around the ring."""
    root = b.call.root
    tensors = {r: b.buffer(r, "output", b.call.count) for r in range(b.call.world)}
    b.inputs.append(tensors[root])
    b.outputs += tensors.values()
    chain = [root, *_chain(b, root)[:-1]]
    for c, chunk in enumerate(b.chunks(tensors[root])):
        gate: Wait | None = None
        for left, right in pairwise(chain):
            source = b.chunks(tensors[left])[c] if left != root else chunk
            target = tensors[right].part(chunk.offset, chunk.count)
            gate = b.transfer(source, target, (gate,))


def reduce(b: Builder) -> None:
    """Chunks travel around the ring to the root and collect everybody's part."""
    n, count, root, call = b.call.world, b.call.count, b.call.root, b.call
    output = b.buffer(root, "output", count)
    inputs = {
        r: output if r == root and call.in_place else b.buffer(r, "input", count) for r in range(n)
    }
    b.inputs += inputs.values()
    b.outputs.append(output)
    chain = _chain(b, root)
    slots: dict[int, Region] = {}
    for i, rank in enumerate(chain[1:], 1):
        dtype = call.dtype if i == 1 else b.partial_dtype
        slots[rank] = b.buffer(rank, "staging", count, dtype)
    sums = {rank: b.buffer(rank, "partials", count, b.partial_dtype) for rank in chain[1:-1]}
    for chunk in b.chunks(output):
        at = (chunk.offset, chunk.count)
        if n == 1:
            b.reduce((inputs[root].part(*at),), chunk, scales=(call.factor,))
        gate: Wait | None = None
        for i, (left, right) in enumerate(pairwise(chain)):
            source = inputs[left] if i == 0 else sums[left]
            b.wait("reduce", b.transfer(source.part(*at), slots[right].part(*at), (gate,)))
            last = right == root
            b.reduce(
                (slots[right].part(*at), inputs[right].part(*at)),
                chunk if last else sums[right].part(*at),
                scales=(call.factor if i == 0 else 1.0, call.factor),
                output_scale=average(b) if last else 1.0,
            )
            gate = b.signal(right, "reduce", right, "data")


def _order(b: Builder) -> list[int]:
    return list(b.recipe.order) or list(range(b.call.world))


BUILDERS: dict[str, Callable[[Builder], None]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "reduce": reduce,
}
