"""Predict when computation and communication end on one GPU that runs both.

::

    ComputeWork, CommWork (footprints, times alone) + shape (pad, carve-out, priority)
        -> launches -> blocksim -> SimulationResult (ends, total, timeline)

Inputs are footprints and the times of the untouched kernels alone; what padding does to the
compute kernel, and when either ends, is output.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from overlapctl.errors import UsageError
from overlapctl.plan.blocksim import BlockSimulation, Kernel, Span
from overlapctl.plan.parameters import SimulationParameters, parameters_for
from overlapctl.plan.residency import blocks_per_sm, padded
from overlapctl.plan.throughput import OccupancyCurve
from overlapctl.records import DeviceFacts, KernelFootprint

__all__ = ["CommWork", "ComputeWork", "Shape", "SimulationResult", "compute_alone_ms", "simulate"]

# Kernels of blocks shorter than this, in many waves, are simulated as fluid.
_FLUID_BLOCK_MS, _FLUID_WAVES = 0.04, 6


@dataclass(frozen=True, kw_only=True)
class ComputeWork:
    """The compute side of a case.

    Parameters
    ----------
    footprint
        Of the dominant kernel, untouched.
    alone_ms
        Time of all ``launches`` in a row, untouched and alone.
    curve
        How an SM's throughput depends on resident blocks.
    bound
        What the kernel contends for: ``"memory"``, or the caches as a tiled ``"gemm"`` or as a
        ``"library"`` kernel, which is taken to have no more loads under way than it needs.
    launches
        Launches in a row (of one pipeline stage).
    """

    footprint: KernelFootprint
    alone_ms: float
    curve: OccupancyCurve
    bound: Literal["memory", "gemm", "library"] = "gemm"
    launches: int = 1


@dataclass(frozen=True, kw_only=True)
class CommWork:
    """The communication side: ``alone_ms`` is for all ``launches`` in a row.

    ``uses_sms`` is False for copy-engine transfers; ``traffic`` is the memory traffic relative to
    NCCL's for the same payload, ``sensitivity`` the slow-down by a GEMM's queueing likewise.
    """

    footprint: KernelFootprint
    alone_ms: float
    launches: int = 1
    uses_sms: bool = True
    traffic: float = 1.0
    sensitivity: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is done to the launches: pad in bytes, carve-out in percent (-1: none), priority."""

    pad: int = 0
    carveout: int = -1
    comm_priority: bool = False


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """Ends in ms after the first compute kernel's start; ``spans`` is the timeline."""

    compute_end: float
    comm_end: float
    comm_issue: float
    spans: tuple[Span, ...] = field(repr=False)

    @property
    def total(self) -> float:
        """End of whatever ended last, ms."""
        return max(self.compute_end, self.comm_end)


def simulate(
    facts: DeviceFacts,
    compute: ComputeWork,
    comm: CommWork,
    shape: Shape | None = None,
    *,
    depth: int | None = None,
    issue_ms: float = 0.15,
    parameters: SimulationParameters | None = None,
) -> SimulationResult:
    """Simulate a pair, or a pipeline of ``depth`` stages.

    Parameters
    ----------
    facts
        The GPU.
    compute, comm
        What runs; for a pipeline the times alone are of one stage.
    shape
        Pad, carve-out, priority; ``None``: untouched.
    depth
        ``None``: a pair, the collective issued ``issue_ms`` after the compute kernel's start.
        Else a pipeline: each collective waits for the compute of its stage, computes do not wait.
    parameters
        Fitted parameters; those of the GPU model if ``None``.

    Raises
    ------
    UsageError
        If a block of the compute kernel fits no SM, or the GPU cannot hold all blocks of the
        communication kernel at once.
    """
    shape = shape or Shape()
    _check(facts, padded(compute.footprint, shape.pad), comm)
    parameters = parameters or parameters_for(facts)
    launches = _launches(facts, compute, comm, shape, depth, issue_ms, parameters)
    simulation = BlockSimulation(
        facts,
        launches,
        _Contention(facts, compute, comm, shape, launches, parameters),
        crowded_gang=parameters.crowded_comm,
        kept_beside_gang=parameters.kept_beside_comm,
    )
    spans = simulation.run()
    mine = [s for s, k in zip(spans, launches, strict=True) if not k.gang]
    theirs = [s for s, k in zip(spans, launches, strict=True) if k.gang]
    return SimulationResult(
        compute_end=max(s.end for s in mine),
        comm_end=max((s.end for s in theirs), default=0.0),
        comm_issue=min((s.ready for s in theirs), default=0.0),
        spans=tuple(spans),
    )


def compute_alone_ms(
    facts: DeviceFacts,
    compute: ComputeWork,
    pad: int = 0,
    carveout: int = -1,
) -> float:
    """Time of the compute work alone under a pad or carve-out, ms."""
    natural = blocks_per_sm(facts, compute.footprint)
    shaped = blocks_per_sm(facts, padded(compute.footprint, pad), carveout=carveout)
    before = _grid_time(facts, compute, natural)
    return compute.alone_ms * _grid_time(facts, compute, max(1, shaped)) / before


def _check(facts: DeviceFacts, kernel: KernelFootprint, comm: CommWork) -> None:
    if blocks_per_sm(facts, kernel) < 1:
        raise UsageError(
            f"a block of {kernel.name!r} with {kernel.threads} threads, {kernel.registers} "
            f"registers and {kernel.smem} bytes of shared memory fits no SM of {facts.name}",
            remedy="use a smaller tile or pad",
        )
    held = blocks_per_sm(facts, comm.footprint) * facts.sm_count
    if comm.uses_sms and comm.footprint.blocks > held:
        raise UsageError(
            f"{comm.footprint.name!r} needs {comm.footprint.blocks} blocks resident at once, "
            f"{facts.name} with {facts.sm_count} SMs holds {held}",
            remedy="use fewer blocks or more SMs",
        )


def _grid_time(facts: DeviceFacts, compute: ComputeWork, residency: int) -> float:
    """Time of one launch in units of a block's work: full waves, then the rest levelled out."""
    waves, rest = divmod(compute.footprint.blocks, residency * facts.sm_count)
    time = waves * residency / compute.curve.throughput(residency)
    if rest:
        last = -(-rest // facts.sm_count)
        time += last / compute.curve.throughput(last)
    return time


def _launches(
    facts: DeviceFacts,
    compute: ComputeWork,
    comm: CommWork,
    shape: Shape,
    depth: int | None,
    issue_ms: float,
    parameters: SimulationParameters,
) -> list[Kernel]:
    footprint = padded(compute.footprint, shape.pad)
    natural = max(1, blocks_per_sm(facts, compute.footprint))
    launch_ms = compute.alone_ms / compute.launches
    waves = footprint.blocks / (natural * facts.sm_count)
    fluid = waves >= _FLUID_WAVES and launch_ms / waves < _FLUID_BLOCK_MS
    shaped = max(1, blocks_per_sm(facts, footprint, carveout=shape.carveout))
    slower = compute.curve.throughput(natural) / compute.curve.throughput(shaped)
    turnover = footprint.blocks / (launch_ms * slower * 1000)  # blocks per us
    if fluid:
        unit = launch_ms * compute.curve.throughput(natural) * facts.sm_count / footprint.blocks
    else:
        unit = launch_ms / _grid_time(facts, compute, natural)
    curve = tuple(compute.curve.throughput(n) for n in range(natural + 1))
    gap = parameters.launch_gap_us / 1000
    kernels: list[Kernel] = []
    for stage in range(depth or 1):
        kernels += [
            Kernel(
                name=f"compute {stage}.{i}" if depth else f"compute {i}",
                footprint=footprint,
                stream="compute",
                work=unit,
                curve=curve,
                carveout=shape.carveout,
                fluid=fluid,
                yields=turnover < parameters.scheduler_blocks_per_us,
            )
            for i in range(compute.launches)
        ]
        last = len(kernels) - 1
        kernels += [
            Kernel(
                name=f"comm {stage}.{i}" if depth else f"comm {i}",
                footprint=comm.footprint,
                stream="comm",
                work=comm.alone_ms / comm.launches,
                gang=True,
                priority=1 if shape.comm_priority else 0,
                issued=0.0 if depth else issue_ms,
                after=(last,) if depth and i == 0 else (),
                latency=gap if depth else 0.0,
                uses_sms=comm.uses_sms,
            )
            for i in range(comm.launches)
        ]
    return kernels


class _Contention:
    """How the two sides slow each other through memory while both move data."""

    def __init__(
        self,
        facts: DeviceFacts,
        compute: ComputeWork,
        comm: CommWork,
        shape: Shape,
        launches: list[Kernel],
        parameters: SimulationParameters,
    ) -> None:
        self._is_comm = [k.gang for k in launches]
        curve = compute.curve
        residency = max(1, blocks_per_sm(facts, padded(compute.footprint, shape.pad)))
        at_rest = curve.throughput(residency)
        memory = compute.bound == "memory"
        # Traffic of the collective lengthens every load: the same as fewer blocks that wait less.
        latency = 1.0 + comm.traffic * (
            parameters.comm_latency_memory if memory else parameters.comm_latency_gemm
        )
        self._on_compute = at_rest / curve.throughput(residency / latency)
        if memory:
            self._on_comm = parameters.compute_on_comm_memory * at_rest / curve.saturated
        elif compute.bound == "library":
            self._on_comm = 0.0
        else:
            queueing = max(0.0, residency / curve.knee - parameters.queueing_onset)
            self._on_comm = comm.sensitivity * parameters.compute_on_comm_gemm * queueing
        self._full = facts.sm_count * max(at_rest, 1e-9)

    def __call__(self, throughput: dict[int, float]) -> dict[int, float]:
        """Factors for the launches that run now (see :class:`BlockSimulation`)."""
        busy = sum(t for i, t in throughput.items() if not self._is_comm[i]) / self._full
        comm = any(self._is_comm[i] for i in throughput)
        on_comm = 1.0 + self._on_comm * min(1.0, busy)
        on_compute = self._on_compute if comm else 1.0
        return {i: on_comm if self._is_comm[i] else on_compute for i in throughput}
