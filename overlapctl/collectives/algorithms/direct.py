"""Direct algorithms: every pair of ranks at once, for full meshes (NVLink switches)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from overlapctl.collectives.algorithms.builder import Builder
from overlapctl.collectives.algorithms.phases import Block, Job, exchange, reduce_jobs, rounds
from overlapctl.collectives.algorithms.recipe import parts
from overlapctl.collectives.schedule import Region, Wait

__all__ = ["BUILDERS", "broadcast_among", "gather_results", "reduce_to", "shard_jobs"]


def offsets(counts: Sequence[int]) -> list[int]:
    """Return where each of several blocks starts that lie one after another."""
    return [0, *accumulate(counts)][:-1]


def in_rounds(b: Builder, transfers: Sequence[tuple[Region, Region]]) -> list[list[Block]]:
    """Cut (source, target) pairs on two ranks into chunks; round c has everybody's chunk c."""
    cut = [
        [Block(s, {t.rank: t}) for s, t in zip(b.chunks(source), b.chunks(target), strict=True)]
        for source, target in transfers
    ]
    longest = max((len(chunks) for chunks in cut), default=0)
    return [[chunks[c] for chunks in cut if c < len(chunks)] for c in range(longest)]


def all_gather(b: Builder) -> None:
    """Every rank sends its input to its place in everybody's output."""
    n, count = b.call.world, b.call.count
    members = range(n)
    outputs = [b.buffer(r, "output", n * count) for r in members]
    b.outputs += outputs
    for r in members:
        own = outputs[r].part(r * count, count)
        b.inputs.append(own if b.call.in_place else b.buffer(r, "input", count))
        b.local(b.inputs[r], own)
    exchange(
        b,
        members,
        in_rounds(
            b,
            [
                (b.inputs[r], outputs[p].part(r * count, count))
                for r in members
                for p in members
                if p != r
            ],
        ),
    )


def shard_jobs(
    b: Builder,
    members: Sequence[int],
    inputs: dict[int, Region],
    outputs: dict[int, Region],
) -> list[list[Job]]:
    """Cut a tensor that every member has into a shard per member and chunks: reduction jobs.

    ``outputs`` are the regions that the results of whole tensors would take at each owner.
    """
    whole = inputs[members[0]].count
    jobs = []
    for owner, (offset, count) in zip(
        members, parts(whole, len(members), b.recipe.align), strict=True
    ):
        shard = Region(owner, "", offset, count)
        jobs.append(
            [
                Job(
                    owner,
                    {r: inputs[r].part(c.offset, c.count) for r in members},
                    outputs[owner].part(c.offset, c.count),
                )
                for c in b.chunks(shard)
            ]
        )
    return rounds(jobs)


def gather_results(
    b: Builder,
    members: Sequence[int],
    jobs: Sequence[Sequence[Job]],
    bases: dict[int, Region],
) -> None:
    """Send reduced chunks to the same place in the output of the other members."""
    exchange(
        b,
        members,
        [
            [
                Block(
                    job.output,
                    {
                        r: base.part(job.output.offset - bases[job.owner].offset, job.output.count)
                        for r, base in bases.items()
                        if r != job.owner
                    },
                    job.gates,
                )
                for job in round_
            ]
            for round_ in jobs
        ],
    )


def _tensors(b: Builder) -> tuple[dict[int, Region], dict[int, Region]]:
    """Declare input and output of an operation on whole tensors; in place they are one."""
    outputs = {r: b.buffer(r, "output", b.call.count) for r in range(b.call.world)}
    if b.call.in_place:
        return outputs, outputs
    return {r: b.buffer(r, "input", b.call.count) for r in outputs}, outputs


def all_reduce(b: Builder) -> None:
    """Reduce-scatter over shards of the tensor, then all-gather of the reduced shards."""
    members = range(b.call.world)
    inputs, outputs = _tensors(b)
    b.inputs += inputs.values()
    b.outputs += outputs.values()
    jobs = shard_jobs(b, members, inputs, outputs)
    for job in (job for round_ in jobs for job in round_):
        others = [r for r in members if r != job.owner]
        job.tell = (others if b.recipe.pull else [job.owner]) if others else []
    reduce_jobs(b, members, jobs)
    gather_results(b, members, jobs, outputs)


def reduce_scatter(b: Builder) -> None:
    """Every rank reduces its part of everybody's input."""
    n, count = b.call.world, b.call.count
    members = range(n)
    inputs = {r: b.buffer(r, "input", n * count) for r in members}
    b.inputs += inputs.values()
    jobs = []
    for owner in members:
        mine = inputs[owner].part(owner * count, count)
        output = mine if b.call.in_place else b.buffer(owner, "output", count)
        b.outputs.append(output)
        parts_of = {r: b.chunks(inputs[r].part(owner * count, count)) for r in members}
        jobs.append(
            [
                Job(owner, {r: parts_of[r][c] for r in members}, chunk)
                for c, chunk in enumerate(b.chunks(output))
            ]
        )
    reduce_jobs(b, members, rounds(jobs))


def all_to_all(b: Builder) -> None:
    """Every rank sends a block of its own to every rank; blocks may differ in size."""
    splits, members = b.call.splits, range(b.call.world)
    columns = [[row[p] for row in splits] for p in members]
    inputs = [b.buffer(r, "input", sum(splits[r])) for r in members]
    outputs = [b.buffer(r, "output", sum(columns[r])) for r in members]
    b.inputs += inputs
    b.outputs += outputs
    sent = [offsets(row) for row in splits]
    received = [offsets(column) for column in columns]
    transfers = []
    for r in members:
        for p in members:
            source = inputs[r].part(sent[r][p], splits[r][p])
            target = outputs[p].part(received[p][r], splits[r][p])
            if p == r:
                b.local(source, target)
            else:
                transfers.append((source, target))
    exchange(b, members, in_rounds(b, transfers))


def broadcast(b: Builder) -> None:
    """See :func:`broadcast_among`."""
    members = range(b.call.world)
    tensors = {r: b.buffer(r, "output", b.call.count) for r in members}
    b.inputs.append(tensors[b.call.root])
    b.outputs += tensors.values()
    broadcast_among(b, members, b.call.root, tensors)


def broadcast_among(
    b: Builder,
    members: Sequence[int],
    root: int,
    tensors: dict[int, Region],
    gate: Wait | None = None,
) -> None:
    """Scatter the root's tensor over the other members, who send their shards to each other.

    The root sends the tensor once instead of once per member. ``gate`` is waited for by the root.
    """
    others = [r for r in members if r != root]
    if not others:
        return
    shards = parts(tensors[root].count, len(others), b.recipe.align)
    cut = [b.chunks(tensors[root].part(*shard)) for shard in shards]
    arrivals: list[tuple[Region, int, Wait]] = []
    for c in range(max(len(chunks) for chunks in cut)):
        for owner, chunks in zip(others, cut, strict=True):
            if c < len(chunks):
                offset = chunks[c].offset - tensors[root].offset
                target = tensors[owner].part(offset, chunks[c].count)
                # Only the root can wait for the gate: then it pushes.
                pull = b.recipe.pull and gate is None
                wait = b.transfer(chunks[c], target, (gate,), pull=pull)
                arrivals.append((target, offset, wait))
    for source, offset, wait in arrivals:
        for rank in others:
            if rank != source.rank:
                b.transfer(source, tensors[rank].part(offset, source.count), (wait,))


def gather(b: Builder) -> None:
    """Every rank sends its input to its place in the root's output."""
    n, count, root = b.call.world, b.call.count, b.call.root
    inputs = [b.buffer(r, "input", count) for r in range(n)]
    output = b.buffer(root, "output", n * count)
    b.inputs += inputs
    b.outputs.append(output)
    b.local(inputs[root], output.part(root * count, count))
    pairs = [(inputs[r], output.part(r * count, count)) for r in range(n) if r != root]
    exchange(b, range(n), in_rounds(b, pairs))


def scatter(b: Builder) -> None:
    """Send every rank its part of the root's input."""
    n, count, root = b.call.world, b.call.count, b.call.root
    source = b.buffer(root, "input", n * count)
    outputs = [b.buffer(r, "output", count) for r in range(n)]
    b.inputs.append(source)
    b.outputs += outputs
    b.local(source.part(root * count, count), outputs[root])
    pairs = [(source.part(r * count, count), outputs[r]) for r in range(n) if r != root]
    exchange(b, range(n), in_rounds(b, pairs))


def reduce(b: Builder) -> None:
    """Reduce-scatter over shards of the tensor, then every rank sends its shard to the root."""
    members, root, count = range(b.call.world), b.call.root, b.call.count
    output = b.buffer(root, "output", count)
    inputs = {
        r: output if r == root and b.call.in_place else b.buffer(r, "input", count) for r in members
    }
    b.inputs += inputs.values()
    b.outputs.append(output)
    reduce_to(b, members, root, inputs, output)


def reduce_to(
    b: Builder,
    members: Sequence[int],
    root: int,
    inputs: dict[int, Region],
    output: Region,
) -> None:
    """Reduce the members' inputs to ``output`` at ``root``, leaving the end on its sync stream."""
    partial = b.dtype(output)
    whole = {
        r: output if r == root else b.buffer(r, "partials", output.count, partial) for r in members
    }
    jobs = shard_jobs(b, members, inputs, whole)
    for job in (job for round_ in jobs for job in round_):
        job.tell = [job.owner]
    reduce_jobs(b, members, jobs)
    for job in (job for round_ in jobs for job in round_):
        if job.owner == root:
            b.wait("sync", job.gates[root])
        else:
            offset = job.output.offset - whole[job.owner].offset
            arrival = b.transfer(
                job.output, output.part(offset, job.output.count), (job.gates[job.owner],)
            )
            b.wait("sync", arrival)


def send_recv(b: Builder) -> None:
    """Send the root's input to the peer's output."""
    source = b.buffer(b.call.root, "input", b.call.count)
    target = b.buffer(b.call.peer, "output", b.call.count)
    b.inputs.append(source)
    b.outputs.append(target)
    exchange(b, range(b.call.world), in_rounds(b, [(source, target)]))


BUILDERS: dict[str, Callable[[Builder], None]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "gather": gather,
    "scatter": scatter,
    "reduce": reduce,
    "send_recv": send_recv,
}
