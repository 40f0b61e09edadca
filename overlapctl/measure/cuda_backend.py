"""Steps of a trial on a CUDA device: the backend of :mod:`overlapctl.measure.rank`.

How times are taken. Ranks meet in a one-element all-reduce, so they start within some 10 us of
each other. Ends are CUDA events on the compute stream and on the stream the collective was issued
from. The payload is refilled and the meeting is over before the clock starts, and a policy is in
force from then on only: helper kernels are neither shaped nor counted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from overlapctl.errors import MeasurementError
from overlapctl.measure.collectives import Collective, build_collective
from overlapctl.measure.rank import Timing
from overlapctl.measure.shaping import Shaping
from overlapctl.measure.trial import ISSUE_DELAY_MS
from overlapctl.measure.workloads import Workload, build_workload
from overlapctl.records import Applied, Case, Clocks, KernelFootprint, Policy

if TYPE_CHECKING:
    import torch

__all__ = ["CudaBackend"]

_GATE_MS_PER_CALL = 0.25
"""GPU time a pipeline trial waits for each pair of calls to be enqueued (host: about 0.1 ms)."""

_ASSUMED_MHZ = 1_800
"""To turn the gate's time into clock cycles; only how long the gate is depends on it."""


class CudaBackend:
    """Runs steps on one GPU of a job, or on the only one.

    Parameters
    ----------
    device
        CUDA device index.
    shaping
        Puts policies into force and tells what they did.
    read_clocks
        Reads this GPU's clocks.
    group, rank, ranks
        NCCL process group of the job and this rank; ``None``, 0, 1: one GPU.
    timeout_s
        Longest time a single step may take before it counts as hung.
    on_close
        Called last in :meth:`close`.
    """

    def __init__(
        self,
        device: int,
        shaping: Shaping,
        *,
        read_clocks: Callable[[], Clocks | None] = lambda: None,
        group: Any = None,
        rank: int = 0,
        ranks: int = 1,
        timeout_s: float = 60.0,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        import torch

        self._device = torch.device("cuda", device)
        torch.cuda.set_device(self._device)
        self._shaping = shaping
        self._read_clocks = read_clocks
        self._group, self._rank, self._ranks = group, rank, ranks
        self._timeout_s = timeout_s
        self._on_close = on_close
        self._side = torch.cuda.Stream(self._device)
        self._token = torch.zeros(1, device=self._device) if ranks > 1 else None
        self._case: Case | None = None
        self._work: Workload | None = None
        self._comm: Collective | None = None
        self._reference: torch.Tensor | None = None
        self._is_repeatable = True

    # --- Backend -----------------------------------------------------------------------------

    def prepare(self, case: Case) -> None:
        """Allocate a case, run it once and keep the untouched result as reference."""
        if case == self._case:
            return
        self._free()
        self._comm = build_collective(
            case.comm, self._device, group=self._group, rank=self._rank, ranks=self._ranks
        )
        self._work = build_workload(case.compute, self._device)
        self._case = case
        # Compiles, connects and sizes the allocator's pools; the second run tells whether the
        # kernel gives the same bits every time at all.
        first = self._compute_bits()
        self._reference = self._compute_bits()
        self._is_repeatable = bool((first == self._reference).all())
        del first
        self.measure("comm", None)

    def measure(self, kind: Literal["compute", "comm", "overlap"], policy: Policy | None) -> Timing:
        """Run one step; see :class:`overlapctl.measure.rank.Backend`."""
        case, _, comm = self._prepared()
        comm.reset()
        self._meet()
        if case.form == "pipeline":
            return self._pipeline(kind, policy, case.depth)
        return self._pair(kind, policy)

    def check(self, policy: Policy) -> tuple[Applied, ...]:
        """Run the pair once and compare results; see the protocol."""
        case, work, comm = self._prepared()
        work.spoil()
        comm.reset()
        self._meet()
        before = self._shaping.rows()
        self._pair("overlap", policy)
        applied = self._shaping.since(before)
        wrong = comm.wrong_elements()
        if wrong:
            raise MeasurementError(
                f"{case.comm.op} over path {case.comm.path} gave {wrong} wrong elements "
                f"on rank {self._rank}",
                remedy="do not use this path here; check the link with NCCL's own tests",
            )
        self._compare(work.bits(), policy)
        return applied

    def footprint(self) -> KernelFootprint | None:
        """Launch the compute workload once under a policy that changes nothing, and look."""
        _, work, _ = self._prepared()
        with self._shaping.observed() as observation:
            work.launch()
            self._wait_idle()
        return observation.dominant()

    def clocks(self) -> Clocks | None:
        """Read this GPU's clocks."""
        return self._read_clocks()

    def close(self) -> None:
        """Free tensors and communicators of the prepared case."""
        self._free()
        self._on_close()

    # --- steps -------------------------------------------------------------------------------

    def _pair(self, kind: str, policy: Policy | None) -> Timing:
        import torch

        _, work, comm = self._prepared()
        start, compute_end, issue, comm_end = _events(4)
        with self._in_force(policy):
            start.record()
            if kind != "comm":
                work.launch()
            compute_end.record()
            if kind != "compute":
                _spin(ISSUE_DELAY_MS)
                with torch.cuda.stream(self._side):
                    issue.record()
                    _join(comm.issue())
                    comm_end.record()
            self._wait(compute_end)
            if kind != "compute":
                self._wait(comm_end)
        return _timing(kind, start, compute_end, issue, comm_end)

    def _pipeline(self, kind: str, policy: Policy | None, depth: int) -> Timing:
        import torch

        _, work, comm = self._prepared()
        start, compute_end, issue, comm_end = _events(4)
        ready = [torch.cuda.Event() for _ in range(depth)]
        # Holds the GPU until the host is far ahead. It runs before the first compute kernel, on
        # an idle GPU, so it delays nothing but the start.
        torch.cuda._sleep(int(_GATE_MS_PER_CALL * depth * _ASSUMED_MHZ * 1_000))
        with self._in_force(policy):
            start.record()
            self._side.wait_event(start)
            for i in range(depth):
                if kind != "comm":
                    work.launch()
                    ready[i].record()
                if kind != "compute":
                    with torch.cuda.stream(self._side):
                        if kind == "overlap":
                            self._side.wait_event(ready[i])
                        if i == 0:
                            issue.record()
                        handle = comm.issue()
                        if i == depth - 1:
                            _join(handle)
                            comm_end.record()
            compute_end.record()
            self._wait(compute_end)
            if kind != "compute":
                self._wait(comm_end)
        return _timing(kind, start, compute_end, issue, comm_end)

    @contextlib.contextmanager
    def _in_force(self, policy: Policy | None) -> Iterator[None]:
        if policy is None:
            yield
            return
        with self._shaping.in_force(policy):
            yield

    # --- helpers -----------------------------------------------------------------------------

    def _prepared(self) -> tuple[Case, Workload, Collective]:
        if self._case is None or self._work is None or self._comm is None:
            raise MeasurementError("no case is prepared", remedy="call prepare() first")
        return self._case, self._work, self._comm

    def _compute_bits(self) -> torch.Tensor:
        assert self._work is not None
        self._work.launch()
        self._wait_idle()
        return self._work.bits()

    def _compare(self, bits: torch.Tensor, policy: Policy) -> None:
        assert self._reference is not None
        different = int((bits != self._reference).sum())
        if different and self._is_repeatable:
            raise MeasurementError(
                f"{different} of {bits.numel()} elements of the compute result differ under "
                f"{policy} on rank {self._rank}",
                remedy="exclude this kernel from shaping, and report it",
            )

    def _meet(self) -> None:
        """Wait until all ranks are here and all GPUs idle."""
        import torch.distributed as dist

        self._wait_idle()
        if self._ranks > 1:
            work = dist.all_reduce(self._token, group=self._group, async_op=True)
            work.wait()
            self._wait_idle()

    def _wait_idle(self) -> None:
        import torch

        for stream in (torch.cuda.current_stream(), self._side):
            event = torch.cuda.Event()
            event.record(stream)
            self._wait(event)

    def _wait(self, event: torch.cuda.Event) -> None:
        """Wait for an event, polling: a plain synchronise could never be given up."""
        deadline = time.monotonic() + self._timeout_s
        while not event.query():
            if time.monotonic() > deadline:
                raise MeasurementError(
                    f"rank {self._rank} hung: its GPU did not finish a step "
                    f"within {self._timeout_s:.0f} s",
                    remedy="look for a rank that failed first, or for GPUs used by others",
                )

    def _free(self) -> None:
        import torch

        if self._comm is not None:
            self._comm.close()
        self._case = self._work = self._comm = self._reference = None
        torch.cuda.empty_cache()


def _events(count: int) -> list[torch.cuda.Event]:
    import torch

    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]


def _spin(milliseconds: float) -> None:
    """Wait on the host; sleeping would be late by a scheduler tick."""
    end = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < end:
        pass


def _join(handle: Any) -> None:
    """Make the current stream wait for a collective that runs on a stream of its own."""
    if handle is not None:
        handle.wait()


def _timing(
    kind: str,
    start: torch.cuda.Event,
    compute_end: torch.cuda.Event,
    issue: torch.cuda.Event,
    comm_end: torch.cuda.Event,
) -> Timing:
    has_compute, has_comm = kind != "comm", kind != "compute"
    return Timing(
        compute_end=start.elapsed_time(compute_end) if has_compute else None,
        comm_issue=start.elapsed_time(issue) if has_comm else None,
        comm_end=start.elapsed_time(comm_end) if has_comm else None,
    )
