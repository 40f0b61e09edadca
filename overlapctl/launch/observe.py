"""From launch records to kernels: what ran, how much of the work it was, and beside what. Pure.

::

    LaunchRecord ... + function table -> ObservedKernel (footprint, role, streams, share, beside)

Records tell when the *CPU* issued a launch, not when the GPU ran it, and nothing about events
between streams. So concurrency is what streams permit: a compute launch and a communication launch
can run at the same time if they are on different streams and no other communication launch of that
stream was issued between them. Launches of one stream never overlap.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from overlapctl.launch.ring import LaunchRecord
from overlapctl.records import Applied, KernelFootprint, Role, Rule

__all__ = ["ObservedKernel", "observe_kernels"]


@dataclass(frozen=True, kw_only=True)
class ObservedKernel:
    """One kernel in one configuration (block size, dynamic shared memory, cluster).

    Parameters
    ----------
    footprint
        As the job asked for it; ``blocks`` is the grid that most of its blocks were launched in.
    launches
        Launches seen.
    share
        Its share of the threads of all launches of its role, 0 to 1: a stand-in for time.
    streams
        Handles of the streams it was launched on, ascending.
    beside
        Names of the kernels of the other role (compute or communication) that can run at the same
        time, in alphabetical order; always empty for ignored kernels.
    """

    footprint: KernelFootprint
    role: Role
    launches: int
    share: float
    streams: tuple[int, ...]
    beside: tuple[str, ...] = ()


class _Key(NamedTuple):
    name: str
    role: Role
    threads: int
    registers: int
    static_smem: int
    dynamic_smem: int
    cluster: int
    cooperative: bool


@dataclass
class _Sum:
    grids: collections.Counter[int] = field(default_factory=collections.Counter)
    streams: set[int] = field(default_factory=set)
    beside: set[str] = field(default_factory=set)


def observe_kernels(
    records: Iterable[LaunchRecord], functions: Mapping[int, Applied]
) -> tuple[ObservedKernel, ...]:
    """Summarise launches by kernel, in order of their share, largest first.

    Parameters
    ----------
    records
        Launches, of any threads. Those the driver refused are left out.
    functions
        Name, registers and static shared memory by function handle
        (:meth:`overlapctl.launch.shim.Snapshot.functions`). Records of other functions (their
        module is unloaded) are left out.

    Returns
    -------
    tuple of ObservedKernel
        The same for the same launches, whatever the handles are.
    """
    launched = [
        (record, _key(record, functions[record.function]))
        for record in sorted(records, key=lambda record: record.ticks)
        if record.result == 0 and record.function in functions
    ]
    sums: dict[_Key, _Sum] = collections.defaultdict(_Sum)
    for record, key in launched:
        sums[key].grids[record.blocks] += 1
        sums[key].streams.add(record.stream)
    _pair(launched, sums)
    _pair(launched[::-1], sums)
    work: collections.Counter[Role] = collections.Counter()
    for key, total in sums.items():
        work[key.role] += _work(key, total)
    kernels = [_kernel(key, total, work[key.role]) for key, total in sums.items()]
    return tuple(sorted(kernels, key=lambda k: (-k.share, repr(k.footprint), k.role.value)))


def _key(record: LaunchRecord, function: Applied) -> _Key:
    return _Key(
        name=function.kernel,
        role=record.role,
        threads=record.threads,
        registers=function.registers,
        static_smem=function.static_smem,
        dynamic_smem=record.before,
        cluster=max(1, record.cluster),
        cooperative=record.rule is Rule.COOPERATIVE,
    )


def _pair(launched: Sequence[tuple[LaunchRecord, _Key]], sums: Mapping[_Key, _Sum]) -> None:
    """Pair each compute launch with the last communication launch of every other stream."""
    last: dict[int, _Key] = {}
    for record, key in launched:
        if key.role is Role.COMMUNICATION:
            last[record.stream] = key
        elif key.role is Role.COMPUTE:
            for stream, other in last.items():
                if stream != record.stream:
                    sums[key].beside.add(other.name)
                    sums[other].beside.add(key.name)


def _work(key: _Key, total: _Sum) -> int:
    return key.threads * sum(blocks * count for blocks, count in total.grids.items())


def _kernel(key: _Key, total: _Sum, work: int) -> ObservedKernel:
    blocks = max(total.grids, key=lambda n: (n * total.grids[n], n))
    return ObservedKernel(
        footprint=KernelFootprint(
            name=key.name,
            threads=key.threads,
            registers=key.registers,
            static_smem=key.static_smem,
            dynamic_smem=key.dynamic_smem,
            blocks=blocks,
            cluster=key.cluster,
            cooperative=key.cooperative,
        ),
        role=key.role,
        launches=sum(total.grids.values()),
        share=_work(key, total) / work if work else 0.0,
        streams=tuple(sorted(total.streams)),
        beside=tuple(sorted(total.beside)),
    )
