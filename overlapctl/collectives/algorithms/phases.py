"""The two halves of most collectives: everybody gathers, everybody reduces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from overlapctl.collectives.algorithms.builder import Builder
from overlapctl.collectives.schedule import Region, Wait
from overlapctl.errors import UsageError

__all__ = ["Block", "Job", "average", "exchange", "peers", "reduce_jobs", "rounds"]


@dataclass
class Block:
    """Data at its owner, to be sent to other ranks.

    ``gates`` are waits of the owner, or in a pull of each taker, that must come first.
    """

    source: Region
    targets: dict[int, Region]
    gates: dict[int, Wait] = field(default_factory=dict)


@dataclass
class Job:
    """One chunk to be reduced at its owner from everybody's part.

    ``tell`` are the ranks that need to know of the result (the owner: its other streams); the
    phase leaves the waits for it in ``gates``.
    """

    owner: int
    inputs: dict[int, Region]
    output: Region
    tell: Sequence[int] = ()
    gates: dict[int, Wait] = field(default_factory=dict)


def peers(members: Sequence[int], rank: int) -> list[int]:
    """Return the other members, starting behind ``rank``: the rotated order of peers."""
    at = members.index(rank)
    return [*members[at + 1 :], *members[:at]]


def exchange(b: Builder, members: Sequence[int], blocks: Sequence[Sequence[Block]]) -> None:
    """Send blocks to their targets, all pairs at once.

    ``blocks[c]`` are the blocks of all owners in round ``c``; within a round every owner takes
    its targets in rotated order, so that no rank is the target of all others at once.
    """
    pull, n = b.recipe.pull, len(members)
    at = {rank: i for i, rank in enumerate(members)}
    for round_ in blocks:
        turns: list[list[tuple[Block, Region]]] = [[] for _ in range(n)]
        for block in round_:
            for rank, target in block.targets.items():
                if target.count:
                    turns[(at[rank] - at[block.source.rank]) % n].append((block, target))
        for block, target in (pair for turn in turns for pair in turn):
            gate = block.gates.get(target.rank if pull else block.source.rank)
            b.transfer(block.source, target, (gate,), pull=pull)


def reduce_jobs(b: Builder, members: Sequence[int], jobs: Sequence[Sequence[Job]]) -> None:
    """Do the jobs of all owners, as the recipe says; ``jobs[c]`` are those of round ``c``."""
    if b.recipe.push_reduce:
        _push_reduce(b, members, jobs)
    else:
        _staged_reduce(b, members, jobs)


def _staged_reduce(b: Builder, members: Sequence[int], jobs: Sequence[Sequence[Job]]) -> None:
    """Bring everybody's part of each job to its owner's staging buffer and add there.

    Parts are added in the order of ``members`` whoever the owner is. Staging holds
    ``recipe.depth`` chunks per peer; a slot is used again only after the reduction that read it.
    """
    pull, others = b.recipe.pull, len(members) - 1
    depth = min(b.recipe.depth or len(jobs), len(jobs))
    sizes: dict[int, int] = {}
    for job in (job for round_ in jobs for job in round_):
        sizes[job.owner] = max(sizes.get(job.owner, 0), job.output.count)
    staging = {
        owner: b.buffer(owner, "staging", depth * others * size)
        for owner, size in sizes.items()
        if others
    }
    granted: dict[tuple[int, int, int], Wait] = {}
    for c, round_ in enumerate(jobs):
        arrived: dict[int, dict[int, Region]] = {job.owner: {} for job in round_}
        arrivals: dict[int, list[Wait]] = {job.owner: [] for job in round_}
        for distance in range(1, len(members)):
            for job in round_:
                # Of all members, each gives to one owner per turn: the one ``distance`` ahead.
                giver = peers(members, job.owner)[-distance]
                number = (c % depth) * others + distance - 1
                slot = staging[job.owner].part(number * sizes[job.owner], job.output.count)
                gate = granted.get((c, job.owner, giver))
                arrivals[job.owner].append(b.transfer(job.inputs[giver], slot, (gate,), pull=pull))
                arrived[job.owner][giver] = slot
        for job in round_:
            owner = job.owner
            b.wait("reduce", *arrivals[owner])
            arrived[owner][owner] = job.inputs[owner]
            inputs = tuple(arrived[owner][m] for m in members)
            b.reduce(inputs, job.output, scales=_scales(b, inputs), output_scale=average(b))
            _tell(b, job)
            if c + depth < len(jobs):
                for giver in peers(members, owner):
                    executor = owner if pull else giver
                    granted[c + depth, owner, giver] = b.signal(owner, "reduce", executor, "ready")


def _push_reduce(b: Builder, members: Sequence[int], jobs: Sequence[Sequence[Job]]) -> None:
    """Let the members add into each owner's output one after another, starting with the owner.

    In turn ``k`` of a round member i adds into the output of member i - k and then signals its
    right neighbour, whose turn it is there: all links are busy and the order is fixed.
    """
    call, n = b.call, len(members)
    if call.reduction == "premul" or b.partial_dtype != call.dtype:
        raise UsageError(
            f"push_reduce of {call.dtype}, {call.reduction}, accumulated in {b.partial_dtype}",
            remedy='use staging, or sum in the data type (accumulate="dtype")',
        )
    for round_ in jobs:
        token: dict[int, Wait] = {}
        for k in range(n):
            for job in round_:
                at = (members.index(job.owner) + k) % n
                rank, after = members[at], members[(at + 1) % n]
                if k == 0:
                    b.reduce((job.inputs[rank],), job.output)
                else:
                    b.wait("reduce", token[job.owner])
                    b.reduce((job.output, job.inputs[rank]), job.output)
                if n > 1:
                    token[job.owner] = b.signal(rank, "reduce", after, "data")
        for job in round_:
            if n > 1:
                b.wait("reduce", token[job.owner])
            b.reduce((job.output,), job.output, output_scale=average(b))
            _tell(b, job)


def average(b: Builder) -> float:
    """Return the factor of a result: 1/world for an average."""
    return 1.0 / b.call.world if b.call.reduction == "avg" else 1.0


def _scales(b: Builder, inputs: Sequence[Region]) -> tuple[float, ...]:
    return (b.call.factor,) * len(inputs)


def _tell(b: Builder, job: Job) -> None:
    for rank in job.tell:
        job.gates[rank] = b.signal(job.owner, "reduce", rank, "data")


def rounds(per_owner: Sequence[Sequence[Job]]) -> list[list[Job]]:
    """Regroup each owner's jobs into rounds: the first of every owner, the second ..."""
    longest = max((len(jobs) for jobs in per_owner), default=0)
    return [[jobs[c] for jobs in per_owner if c < len(jobs)] for c in range(longest)]
