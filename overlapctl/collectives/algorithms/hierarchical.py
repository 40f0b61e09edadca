"""Across hosts: direct within each host, the inner (NCCL, gloo) group between hosts.

Ranks at the same place on their hosts form a *column*; steps between hosts are collectives of a
column. Also here: the call handed over to the inner group as a whole.
"""

from __future__ import annotations

from collections.abc import Callable

from overlapctl.collectives.algorithms import direct
from overlapctl.collectives.algorithms.builder import Builder
from overlapctl.collectives.algorithms.phases import Block, Job, exchange, reduce_jobs, rounds
from overlapctl.collectives.schedule import Inner, Region
from overlapctl.errors import UsageError

__all__ = ["BUILDERS", "HANDED_OVER"]


def _layout(b: Builder) -> tuple[dict[int, list[int]], dict[int, tuple[int, ...]]]:
    """Return each rank's host mates and each rank's column, both ascending."""
    hosts = b.recipe.hosts
    if len(hosts) != b.call.world:
        raise UsageError(f"hosts {hosts} of {b.call.world} ranks", remedy="name every rank's host")
    by_host: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    if len({len(mates) for mates in by_host.values()}) != 1:
        raise UsageError(
            f"hosts {hosts} have different numbers of ranks", remedy='use algorithm "inner"'
        )
    mates = {rank: by_host[host] for rank, host in enumerate(hosts)}
    columns = {}
    for place in range(len(mates[0])):
        column = tuple(sorted(ranks[place] for ranks in by_host.values()))
        columns.update(dict.fromkeys(column, column))
    return mates, columns


def _hosts(mates: dict[int, list[int]]) -> list[list[int]]:
    return [m for rank, m in mates.items() if m[0] == rank]


def all_gather(b: Builder) -> None:
    """Gather along columns into staging, then send what the column gave to the host mates."""
    n, count = b.call.world, b.call.count
    mates, columns = _layout(b)
    outputs = [b.buffer(r, "output", n * count) for r in range(n)]
    b.outputs += outputs
    blocks: list[list[Block]] = []
    for r in range(n):
        own = outputs[r].part(r * count, count)
        source = own if b.call.in_place else b.buffer(r, "input", count)
        b.inputs.append(source)
        column = columns[r]
        staged = b.buffer(r, "staging", len(column) * count)
        wait = b.inner(r, Inner("all_gather", column, source, staged))
        gates = {r: wait}
        if b.recipe.pull:
            gates = {m: b.signal(r, "inner", m, "data") for m in mates[r] if m != r}
        for i, owner in enumerate(column):
            if not (b.call.in_place and owner == r):  # in place, the own part is there already
                b.local(staged.part(i * count, count), outputs[r].part(owner * count, count), wait)
            for c, chunk in enumerate(b.chunks(staged.part(i * count, count))):
                at = owner * count + chunk.offset - i * count
                targets = {m: outputs[m].part(at, chunk.count) for m in mates[r] if m != r}
                while len(blocks) <= c:
                    blocks.append([])
                blocks[c].append(Block(chunk, targets, gates))
    for host in _hosts(mates):
        exchange(b, host, [[x for x in round_ if x.source.rank in host] for round_ in blocks])


def _convert(b: Builder, source: Region, output: Region) -> None:
    """Bring partial sums to the output's type on the reduce stream."""
    b.reduce((source,), output)


def reduce_scatter(b: Builder) -> None:
    """Reduce within hosts for the whole column, then reduce-scatter along columns."""
    n, count = b.call.world, b.call.count
    mates, columns = _layout(b)
    inputs = [b.buffer(r, "input", n * count) for r in range(n)]
    b.inputs += inputs
    size = len(columns[0]) * count
    partials = [b.buffer(r, "partials", size + count, b.partial_dtype) for r in range(n)]
    for r in range(n):
        mine = inputs[r].part(r * count, count)
        b.outputs.append(mine if b.call.in_place else b.buffer(r, "output", count))
    for host in _hosts(mates):
        jobs = []
        for owner in host:
            own: list[Job] = []
            for i, q in enumerate(columns[owner]):
                for chunk in b.chunks(partials[owner].part(i * count, count)):
                    at = q * count + chunk.offset - i * count
                    own.append(
                        Job(
                            owner,
                            {m: inputs[m].part(at, chunk.count) for m in host},
                            chunk,
                            [owner],
                        )
                    )
            jobs.append(own)
        todo = rounds(jobs)
        reduce_jobs(b, host, todo)
        for owner in host:
            gates = [j.gates[owner] for round_ in todo for j in round_ if j.owner == owner]
            source, result = partials[owner].part(0, size), partials[owner].part(size, count)
            step = Inner("reduce_scatter", columns[owner], source, result)
            b.wait("reduce", b.inner(owner, step, *gates))
            _convert(b, result, b.outputs[owner])


def all_reduce(b: Builder) -> None:
    """Reduce-scatter within hosts, all-reduce along columns, all-gather within hosts."""
    n, count = b.call.world, b.call.count
    mates, columns = _layout(b)
    outputs = {r: b.buffer(r, "output", count) for r in range(n)}
    inputs = outputs if b.call.in_place else {r: b.buffer(r, "input", count) for r in range(n)}
    b.inputs += inputs.values()
    b.outputs += outputs.values()
    for host in _hosts(mates):
        # Sums of a host are kept in the type of partial sums until the column has been added.
        sums = {r: b.buffer(r, "partials", count, b.partial_dtype) for r in host}
        jobs = direct.shard_jobs(b, host, {r: inputs[r] for r in host}, sums)
        for job in (job for round_ in jobs for job in round_):
            job.tell = [job.owner]
        reduce_jobs(b, host, jobs)
        for job in (job for round_ in jobs for job in round_):
            owner = job.owner
            step = Inner("all_reduce", columns[owner], job.output, job.output)
            b.wait("reduce", b.inner(owner, step, job.gates[owner]))
            result = Region(owner, "output", job.output.offset, job.output.count)
            _convert(b, job.output, result)
            job.output = result
            job.gates = {
                r: b.signal(owner, "reduce", r, "data")
                for r in (host if b.recipe.pull else [owner])
                if len(host) > 1
            }
        direct.gather_results(b, host, jobs, {r: outputs[r] for r in host})


def broadcast(b: Builder) -> None:
    """Broadcast along the root's column, then within hosts."""
    mates, columns = _layout(b)
    root = b.call.root
    tensors = {r: b.buffer(r, "output", b.call.count) for r in range(b.call.world)}
    b.inputs.append(tensors[root])
    b.outputs += tensors.values()
    for leader in columns[root]:
        step = Inner(
            "broadcast",
            columns[root],
            tensors[leader] if leader == root else None,
            tensors[leader] if leader != root else None,
            root=root,
        )
        wait = b.inner(leader, step)
        host = mates[leader]
        direct.broadcast_among(b, host, leader, {r: tensors[r] for r in host}, wait)


def reduce(b: Builder) -> None:
    """Reduce to one rank per host, then along the root's column."""
    mates, columns = _layout(b)
    root, count = b.call.root, b.call.count
    output = b.buffer(root, "output", count)
    inputs = {
        r: output if r == root and b.call.in_place else b.buffer(r, "input", count)
        for r in range(b.call.world)
    }
    b.inputs += inputs.values()
    b.outputs.append(output)
    for leader in columns[root]:
        host = mates[leader]
        total = b.buffer(leader, "sums", count * (2 if leader == root else 1), b.partial_dtype)
        mine, result = total.part(0, count), total.part(count, count)
        direct.reduce_to(b, host, leader, {r: inputs[r] for r in host}, mine)
        gate = b.signal(leader, "sync", leader, "data")
        target = result if leader == root else None
        step = Inner("reduce", columns[root], mine, target, root=root)
        wait = b.inner(leader, step, gate)
        if leader == root:
            b.wait("reduce", wait)
            _convert(b, result, output)


def _handed_over(declare: Callable[[Builder], None]) -> Callable[[Builder], None]:
    """Make a builder that lets ``declare`` name the buffers and hands the call over."""

    def handed_over(b: Builder) -> None:
        # The direct builder names buffers, inputs and outputs; its steps are not taken over.
        plan = Builder(b.call, type(b.recipe)())
        declare(plan)
        call, n = b.call, b.call.world
        schedule = plan.finish("")
        for buffer in schedule.buffers:
            if buffer.name in {"input", "output"}:
                b.buffer(buffer.rank, buffer.name, buffer.count, buffer.dtype)
        b.inputs, b.outputs = list(schedule.inputs), list(schedule.outputs)
        sources = {r.rank: r for r in b.inputs}
        targets = {r.rank: r for r in b.outputs}
        ranks = tuple(range(n)) if call.op != "send_recv" else tuple(sorted((call.root, call.peer)))
        for r in ranks:
            splits = None
            if call.op == "all_to_all":
                splits = (call.splits[r], tuple(row[r] for row in call.splits))
            b.inner(
                r,
                Inner(
                    call.op,
                    ranks,
                    sources.get(r),
                    targets.get(r),
                    root=call.root,
                    peer=call.peer,
                    splits=splits,
                    reduction=call.reduction,
                    factor=call.factor,
                ),
            )

    return handed_over


HANDED_OVER = {op: _handed_over(builder) for op, builder in direct.BUILDERS.items()}


def send_recv(b: Builder) -> None:
    """Send directly within a host, by the inner group between hosts."""
    hosts = b.recipe.hosts
    _layout(b)
    same = hosts[b.call.root] == hosts[b.call.peer]
    (direct.send_recv if same else HANDED_OVER["send_recv"])(b)


BUILDERS: dict[str, Callable[[Builder], None]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "reduce": reduce,
    "send_recv": send_recv,
}
