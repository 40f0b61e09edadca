"""``Group``: collectives with torch.distributed's signatures, on the copy engines.

A call that the copy engines would not make faster, or cannot carry out, goes to the process group
that the ``Group`` was made from. Which path ran, and why, is counted in :attr:`Group.counts`.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from overlapctl.collectives import driver as gpu
from overlapctl.collectives.algorithms import Recipe
from overlapctl.collectives.bootstrap import Meeting, meet
from overlapctl.collectives.check import checked
from overlapctl.collectives.control import BROKEN, MISSING, Abort, Record
from overlapctl.collectives.memory import Block, PeerMemory, Place, Pool, Registry
from overlapctl.collectives.reduce import one_warp_adder
from overlapctl.collectives.schedule import (
    Call,
    Copy,
    Dtype,
    Flag,
    Reduce,
    Schedule,
    Wait,
    word_value,
)
from overlapctl.collectives.streams import Flags, Lanes
from overlapctl.collectives.transfer import Binding, Executor
from overlapctl.collectives.watchdog import InFlight, Watchdog
from overlapctl.errors import CollectiveError, DeviceError, OverlapctlError, UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["THRESHOLD_BYTES", "Group", "Options", "PathCount", "Work"]

THRESHOLD_BYTES = 8 << 20
"""Bytes between a pair of ranks from which on copy engines carry a call.

Peer copies on H200 reach 300 of 390 GB/s at 8 MiB and 60-100 at 1 MiB; NCCL wins below.
"""

_CHUNK_BYTES = 8 << 20
_MOST_CHUNKS = 8
_OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
_PULLS = frozenset({"all_gather", "all_to_all", "broadcast"})
_DTYPES: dict[str, Dtype] = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float32": "fp32",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a group may be told.

    Parameters
    ----------
    threshold_bytes
        See :data:`THRESHOLD_BYTES`. The same on all ranks.
    limit_s
        Longest time in seconds a call may make no headway before the group is given up.
    accumulate
        ``"fp32"``: sums are rounded once. ``"dtype"``: every partial sum is rounded.
    reduce_with
        ``"one_warp"``: additions that find room beside a persistent kernel, on GPUs that have
        them (sm_90 and newer); ``"ordinary"``: torch's, faster where nothing persistent runs.
    """

    threshold_bytes: int = THRESHOLD_BYTES
    limit_s: float = 600.0
    accumulate: Literal["fp32", "dtype"] = "fp32"
    reduce_with: Literal["one_warp", "ordinary"] = "one_warp"

    def __post_init__(self) -> None:
        if self.threshold_bytes < 0:
            raise UsageError(f"threshold_bytes is {self.threshold_bytes}", remedy="pass 0 or more")
        if not self.limit_s > 0:
            raise UsageError(f"limit_s is {self.limit_s}", remedy="pass seconds above 0")


class PathCount(NamedTuple):
    """How often an operation took a path: ``"copy_engine"`` or ``"inner"``, and why."""

    op: str
    path: str
    reason: str
    times: int


class Work:
    """A call on its way, as ``torch.distributed``'s: ``wait`` orders streams, not the host."""

    def __init__(self, group: Group, call: InFlight) -> None:
        self._group, self._call = group, call

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002 - torch's signature
        """Let the current stream wait for the result; ``timeout`` is the group's own limit.

        Raises
        ------
        CollectiveError
            The group has been given up; the result is NaN.
        """
        self._group._wait(self._call)
        return True

    def is_completed(self) -> bool:
        """Tell whether the result is there."""
        return self._group._is_complete(self._call)

    def exception(self) -> CollectiveError | None:
        """Why the group was given up, if it was."""
        return self._group.failure


class Group:
    """Collectives of one process group's ranks, all on one host.

    Parameters
    ----------
    process_group
        The group that carries out everything else; ``None``: the default group.
    options
        See :class:`Options`.
    driver, meeting, inner
        For other devices than CUDA, and tests: the GPU, how ranks first talk, and what has the
        collectives of ``torch.distributed`` as methods.

    Notes
    -----
    All ranks issue the same calls in the same order. Ranks that cannot reach each other's memory
    (several hosts, no peer access, ``CUDA_DEVICE_MAX_CONNECTIONS=1``) are not an error:
    :attr:`reason` says why every call then goes to the process group.
    """

    def __init__(
        self,
        process_group: Any = None,
        *,
        options: Options | None = None,
        driver: gpu.Driver | None = None,
        meeting: Meeting | None = None,
        inner: Any = None,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        from overlapctl.collectives.inner import InnerGroup

        self._options = options or Options()
        self._inner = inner if inner is not None else InnerGroup(process_group)
        self._rank: int = self._inner.rank() if rank is None else rank
        self._world: int = self._inner.size() if world is None else world
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._lock = threading.RLock()
        self._issued = 0
        self._is_closed = False
        self._symmetric: dict[int, Block] = {}
        problem = None
        if driver is None:
            try:
                driver = _cuda_driver()
            except DeviceError as error:
                problem = str(error)
        meeting = meeting or self._inner.meeting
        self._meeting = meeting
        self._control, self._reason = meet(
            meeting, self._rank, self._world, limit_s=self._options.limit_s, problem=problem
        )
        if self._control is None or driver is None:
            return
        self._driver = driver
        self._page = driver.map_host(self._control.address, self._control.size)
        self._lanes = Lanes(driver)
        self._flags = Flags(driver, self._control, self._page)
        self._peers = PeerMemory(driver, self._rank, self._control.exchange)
        self._pool = Pool(driver, self._rank, self._peers)
        self._registry = Registry(driver, self._rank, self._peers)
        adder = None
        if driver.is_cuda and self._options.reduce_with == "one_warp":
            import torch

            adder = one_warp_adder(torch.cuda.current_device())
        self._executor = Executor(driver, self._lanes, self._flags, self._rank, adder)
        self._watchdog = Watchdog(
            driver,
            self._control,
            self._flags,
            limit_s=self._options.limit_s,
            describe=_describe,
        )

    # --- what it is --------------------------------------------------------------------------

    @property
    def reason(self) -> str | None:
        """Why no call can go to the copy engines; ``None``: they can."""
        return self._reason

    @property
    def failure(self) -> CollectiveError | None:
        """Why the group was given up, if it was."""
        return None if self._control is None else self._watchdog.failure

    @property
    def counts(self) -> list[PathCount]:
        """How often each operation took which path, and why."""
        return [PathCount(*key, n) for key, n in sorted(self._counts.items())]

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._world

    # --- memory that peers see ---------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that peers see, so that calls on it need no copy through the pool.

        All ranks ask for the same sizes in the same order. It lives until :meth:`release` or the
        group's end.

        Raises
        ------
        DeviceError
            On every rank, if one has no memory left.
        """
        self._require_peers()
        with self._lock:
            block = self._pool.take(numel * dtype.itemsize)
            tensor = self._driver.view(self._pool.address(block, self._rank), numel, dtype)
            self._symmetric[tensor.data_ptr()] = block
            return tensor

    def release(self, tensor: torch.Tensor) -> None:
        """Give a tensor of :meth:`empty` back; all ranks do so, in the same order."""
        with self._lock:
            block = self._symmetric.pop(tensor.data_ptr(), None)
            if block is None:
                raise UsageError("tensor is not of this group's empty()", remedy="pass that one")
            self._pool.give(block)

    def register(self, tensor: torch.Tensor) -> int:
        """Let peers into an ordinary tensor, as :meth:`empty` does; see :class:`Registry`."""
        self._require_peers()
        with self._lock:
            return self._registry.register(tensor)

    def unregister(self, number: int) -> None:
        """Undo :meth:`register`, on all ranks, once no call with the tensor is in flight."""
        with self._lock:
            self._registry.unregister(number)

    # --- collectives -------------------------------------------------------------------------

    def all_gather_into_tensor(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, async_op: bool = False
    ) -> Any:
        """Gather all ranks' inputs into every rank's output, in rank order."""
        size = _bytes(input_tensor)
        _expect("output_tensor", output_tensor, input_tensor.numel() * self._world)
        return self._call(
            Call(op="all_gather", world=self._world, dtype="u8", count=size),
            size,
            input_tensor,
            output_tensor,
            lambda: self._inner.all_gather_into_tensor(output_tensor, input_tensor, async_op),
            async_op,
        )

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        op: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce all ranks' inputs and leave each rank its part in ``output``."""
        _expect("input", input, output.numel() * self._world)
        reduction, dtype, problem = _reduction(op, output)
        return self._call(
            Call(
                op="reduce_scatter",
                world=self._world,
                dtype=dtype,
                count=output.numel(),
                reduction=reduction,
                accumulate=self._options.accumulate,
            ),
            _bytes(output),
            input,
            output,
            lambda: self._inner.reduce_scatter_tensor(output, input, op, async_op),
            async_op,
            problem,
        )

    def all_reduce(self, tensor: torch.Tensor, op: Any = None, async_op: bool = False) -> Any:
        """Reduce all ranks' tensors in place."""
        reduction, dtype, problem = _reduction(op, tensor)
        return self._call(
            Call(
                op="all_reduce",
                world=self._world,
                dtype=dtype,
                count=tensor.numel(),
                reduction=reduction,
                accumulate=self._options.accumulate,
            ),
            _bytes(tensor) // self._world,
            tensor,
            tensor,
            lambda: self._inner.all_reduce(tensor, op, async_op),
            async_op,
            problem,
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send part p of the input to rank p. Uneven splits go to the process group."""
        n, is_even = self._world, not output_split_sizes and not input_split_sizes
        problem = None if is_even else "uneven splits: no rank knows the others'"
        if is_even:
            _expect("output", output, input.numel())
            if input.numel() % n:
                raise UsageError(
                    f"input has {input.numel()} elements for {n} ranks",
                    remedy="pass a multiple, or split sizes",
                )
        each = _bytes(input) // n if is_even else 0
        return self._call(
            Call(op="all_to_all", world=n, dtype="u8", splits=((each,) * n,) * n),
            each,
            input,
            output,
            lambda: self._inner.all_to_all_single(
                output, input, output_split_sizes, input_split_sizes, async_op
            ),
            async_op,
            problem,
        )

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool = False) -> Any:
        """Give all ranks the tensor of rank ``src`` of this group."""
        size = _bytes(tensor)
        return self._call(
            Call(
                op="broadcast", world=self._world, dtype="u8", count=size, root=src, in_place=True
            ),
            size // max(1, self._world - 1),
            tensor,
            tensor,
            lambda: self._inner.broadcast(tensor, src, async_op),
            async_op,
        )

    def barrier(self) -> Any:
        """Wait for all ranks, in the process group."""
        self._refuse_failed()
        return self._inner.barrier()

    def close(self) -> None:
        """Wait for the calls in flight and give everything back; all ranks do so together.

        After a failure memory that a late peer may write to is kept until the process ends.
        """
        if self._control is None or self._is_closed:
            self._is_closed = True
            return
        self._is_closed = True
        if self._await_quiet():
            try:
                self._control.exchange(b"idle")
                self._peers.close()
                self._control.exchange(b"unmapped")
            except CollectiveError:
                self._control.leave()
                self._watchdog.close()
                return
            self._registry.close()
            self._pool.close()
            self._watchdog.close()
            self._lanes.close()
            self._driver.unmap_host(self._control.address)
            self._control.close()
        else:
            self._control.leave()
            self._watchdog.wait_until_over(self._options.limit_s)
            self._watchdog.close()

    # --- a call ------------------------------------------------------------------------------

    def _call(
        self,
        call: Call,
        per_pair: int,
        source: torch.Tensor,
        target: torch.Tensor,
        hand_over: Any,
        async_op: bool,
        problem: str | None = None,
    ) -> Any:
        with self._lock:
            self._refuse_failed()
            reason = problem or self._why_inner(per_pair, source, target)
            if self._control is None:
                return self._hand_over(call.op, self._reason or "closed", hand_over)
            schedule, places = None, {}
            if reason is None:
                schedule = checked(call, self._recipe(call, per_pair))
                places = self._places(schedule, source, target)
            self._issued += 1
            number = self._issued
            record = _record(number, call, source, reason, places)
            self._control.post(record)
            self._watchdog.compare(record)
            self._refuse_failed()
            if schedule is None:
                return self._hand_over(call.op, str(reason), hand_over)
            try:
                binding, blocks = self._bind(schedule, places, source, target)
            except DeviceError as error:  # agreed on by all ranks
                return self._hand_over(call.op, error.what, hand_over)
            except CollectiveError:  # the pool had to grow and a peer did not come
                self._refuse_failed()
                late = [r for r in range(self._world) if self._control.issued(r) < number]
                self._watchdog.give_up(Abort(MISSING, number, sum(1 << r for r in late)))
                self._refuse_failed()
                raise
            work = self._enqueue(schedule, binding, number, source, target)
            for block in blocks:
                self._pool.give(block)
            self._counts[call.op, "copy_engine", "at or above the threshold"] += 1
        self._refuse_failed()
        if async_op:
            return work
        work.wait()
        return None

    def _enqueue(
        self,
        schedule: Schedule,
        binding: Binding,
        number: int,
        source: torch.Tensor,
        target: torch.Tensor,
    ) -> Work:
        if self._control is None:
            raise AssertionError("a group without peers enqueues nothing")
        self._executor.load_kernels(schedule)
        self._watchdog.retire()
        self._control.open_gate_beyond(number)
        begin = self._driver.record(self._driver.current_stream())
        bases = self._flags.advance(schedule)
        flight = InFlight(
            number,
            str(schedule.call.op),
            begin,
            outputs=[(target.data_ptr(), _bytes(target))],
            waits=_waits(schedule, self._rank, bases),
            keep=[source, target],
        )
        self._watchdog.add(flight)
        try:
            ended = self._executor.run(schedule, binding, number=number, bases=bases, begin=begin)
            flight.worked, flight.end = ended.worked, ended.end
        except OverlapctlError:
            self._watchdog.give_up(Abort(BROKEN, number, 1 << self._rank))
            raise
        finally:
            flight.is_enqueued = True
        return Work(self, flight)

    def _why_inner(self, per_pair: int, source: torch.Tensor, target: torch.Tensor) -> str | None:
        if self._reason is not None:
            return self._reason
        if per_pair < max(1, self._options.threshold_bytes):
            return f"below {self._options.threshold_bytes} B per pair of ranks"
        if not (source.is_contiguous() and target.is_contiguous()):
            return "a tensor is not contiguous"
        if self._driver.is_cuda and not (source.is_cuda and target.is_cuda):
            return "a tensor is not on the GPU"
        if self._driver.is_capturing():
            return "captured into a graph: flag values would repeat"
        return None

    def _hand_over(self, op: str, reason: str, hand_over: Any) -> Any:
        self._counts[op, "inner", reason] += 1
        return hand_over()

    def _recipe(self, call: Call, per_pair: int) -> Recipe:
        if call.op in _PULLS:
            return Recipe(pull=True)
        return Recipe(chunks=max(1, min(_MOST_CHUNKS, per_pair // _CHUNK_BYTES)))

    def _places(
        self, schedule: Schedule, source: torch.Tensor, target: torch.Tensor
    ) -> dict[str, Place | None]:
        """Where peers have the buffers of the caller that steps of another rank touch."""
        tensors = {"input": source, "output": target}
        found: dict[str, Place | None] = {}
        for name in _touched(schedule):
            address, size = tensors[name].data_ptr(), _bytes(tensors[name])
            found[name] = self._pool.find(address, size) or self._registry.find(address, size)
        return found

    def _bind(
        self,
        schedule: Schedule,
        places: dict[str, Place | None],
        source: torch.Tensor,
        target: torch.Tensor,
    ) -> tuple[Binding, list[Block]]:
        tensors = {"input": source, "output": target}
        sizes: dict[str, int] = {}
        for b in schedule.buffers:
            sizes[b.name] = max(sizes.get(b.name, 0), b.size_bytes)
        addresses: dict[tuple[int, str], int] = {}
        blocks: list[Block] = []
        bounced: dict[str, int] = {}
        try:
            for name in sorted(sizes):
                place = places.get(name)
                if place is not None:
                    addresses |= {(r, name): place.address(r) for r in range(self._world)}
                elif name in tensors and name not in places:
                    addresses[self._rank, name] = tensors[name].data_ptr()
                else:
                    block = self._pool.take(sizes[name])
                    blocks.append(block)
                    for r in range(self._world):
                        addresses[r, name] = self._pool.address(block, r)
                    if name in tensors:
                        bounced[name] = addresses[self._rank, name]
        except OverlapctlError:
            for block in blocks:
                self._pool.give(block)
            raise
        own_inputs = {r.buffer for r in schedule.inputs if r.rank == self._rank}
        own_outputs = {r.buffer for r in schedule.outputs if r.rank == self._rank}
        copy_in, copy_out = [], []
        for name, address in bounced.items():
            tensor = tensors[name]
            if name in own_inputs:
                copy_in.append(gpu.Copy(address, tensor.data_ptr(), _bytes(tensor), True))
            if name in own_outputs and name not in own_inputs:
                copy_out.append(gpu.Copy(tensor.data_ptr(), address, _bytes(tensor), True))
        return Binding(addresses, copy_in, copy_out), blocks

    # --- waiting and failing -----------------------------------------------------------------

    def _wait(self, call: InFlight) -> None:
        self._driver.wait_event(self._driver.current_stream(), call.end)
        if self._driver.is_cuda:
            # Torch's allocator reuses memory in stream order, and this stream has waited now.
            call.keep.clear()
        self._refuse_failed()

    def _is_complete(self, call: InFlight) -> bool:
        return bool(self._driver.is_complete(call.end))

    def _refuse_failed(self) -> None:
        if self._is_closed:
            raise UsageError("the group is closed", remedy="make a new one")
        if self._control is None:
            return
        failure = self._watchdog.failure
        if failure is None:
            theirs = self._control.aborted()
            if theirs is None:
                return
            self._watchdog.give_up(theirs)
            failure = self._watchdog.failure
        if failure is not None:
            raise CollectiveError(failure.what, remedy=failure.remedy)

    def _require_peers(self) -> None:
        self._refuse_failed()
        if self._control is None:
            raise DeviceError(
                f"peers cannot be reached: {self._reason}", remedy="use ordinary tensors"
            )

    def _await_quiet(self) -> bool:
        """Wait until nothing is in flight; ``False``: the group has failed."""
        while self._watchdog.failure is None:
            self._watchdog.retire()
            if self._watchdog.is_idle:
                return True
            time.sleep(1e-3)
        return False


def _touched(schedule: Schedule) -> set[str]:
    """Names of the caller's buffers that a step of another rank reads or writes."""
    found = set()
    for program, _, step in schedule.steps():
        if isinstance(step, Copy):
            regions = [step.source, step.target]
        elif isinstance(step, Reduce):
            regions = [*step.inputs, step.output]
        else:
            continue
        found |= {r.buffer for r in regions if r.rank != program.rank}
    return found & {"input", "output"}


def _waits(schedule: Schedule, rank: int, bases: dict[Flag, int]) -> dict[Flag, int]:
    last: dict[Flag, int] = {}
    for program in schedule.of_rank(rank):
        for step in program.steps:
            if isinstance(step, Wait) and step.flag in bases:
                last[step.flag] = max(last.get(step.flag, 0), step.value)
    return {flag: word_value(bases[flag], value) for flag, value in last.items()}


def _record(
    number: int, call: Call, tensor: torch.Tensor, reason: str | None, places: dict[str, Any]
) -> Record:
    uneven = call.op == "all_to_all" and not call.splits[0][0]
    where = sorted((n, p and (p.area, p.offset)) for n, p in places.items())
    detail = zlib.crc32(repr((call.root, call.reduction, reason is None, where)).encode())
    size = 0 if uneven else tensor.numel()
    return Record(number, _OPS.index(call.op), _dtype_code(tensor.dtype), size, detail)


def _dtype_code(dtype: torch.dtype) -> int:
    return int.from_bytes(str(dtype).removeprefix("torch.").encode()[:7], "little")


def _describe(record: Record) -> str:
    raw = record.dtype.to_bytes(7, "little").rstrip(b"\0")
    return f"{_OPS[record.op]} of {record.numel} x {raw.decode(errors='replace')}"


def _reduction(op: Any, tensor: torch.Tensor) -> tuple[Literal["sum", "avg"], Dtype, str | None]:
    name = "SUM" if op is None else str(op).rpartition(".")[2]
    dtype = _DTYPES.get(str(tensor.dtype))
    if name not in {"SUM", "AVG"}:
        return "sum", dtype or "fp32", f"reduction {name} is the process group's"
    if dtype is None:
        return "sum", "fp32", f"{tensor.dtype} is not added on the GPU by this group"
    return ("avg" if name == "AVG" else "sum"), dtype, None


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _expect(name: str, tensor: torch.Tensor, numel: int) -> None:
    if tensor.numel() != numel:
        raise UsageError(
            f"{name} has {tensor.numel()} elements, {numel} fit the other tensor",
            remedy="pass tensors whose sizes differ by the number of ranks",
        )


def _cuda_driver() -> gpu.Driver:
    import torch

    if not torch.cuda.is_available():
        raise DeviceError("no CUDA GPU", remedy="use the process group alone")
    from overlapctl.collectives.cuda_driver import CudaDriver

    return CudaDriver(torch.cuda.current_device())
