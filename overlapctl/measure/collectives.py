"""Communication of trials: a :class:`~overlapctl.records.CommSpec` made callable on a GPU.

===============  ============================================================================
path ``nccl``    torch's NCCL process group, asynchronous; ``local_copy``: one GPU, NCCL's
                 send-to-self kernel
path ``light``   this package's light kernel over symmetric memory (all-reduce)
path ``copy``    a copy within one GPU by ``cudaMemcpyAsync``
path ``standin`` a copy within one GPU by a kernel with NCCL's footprint, at the pace of a link
===============  ============================================================================

The payload is bf16. Its values are small integers, a different pattern on each rank, chosen so that
every sum is exact in bf16: results are checked for equality, whatever the order of summation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overlapctl.errors import MeasurementError, UsageError
from overlapctl.records import CommSpec

if TYPE_CHECKING:
    import torch

__all__ = ["BufferSizes", "Collective", "buffer_sizes", "build_collective", "check_comm"]

ELEMENT_BYTES = 2
_PERIOD = 7
"""Values are 1 to 7: sums over up to 36 ranks stay at or below 256, exact in bf16."""

_MAX_RANKS = 256 // _PERIOD


@dataclass(frozen=True)
class BufferSizes:
    """Elements a rank passes in, and elements it gets back."""

    sent: int
    received: int


@dataclass(frozen=True)
class Collective:
    """A collective on a GPU.

    Parameters
    ----------
    spec
        What it does.
    issue
        Enqueues it on torch's current stream and returns at once: either ``None`` (it runs on
        that stream) or a work handle whose ``wait()`` makes the current stream wait for it.
    reset
        Enqueues, on the current stream, the refill of the payload. In-place sums would otherwise
        grow until they overflow.
    wrong_elements
        Counts elements of the result that are not what one ``issue`` after ``reset`` must give.
    close
        Frees what torch does not.
    """

    spec: CommSpec
    issue: Callable[[], Any]
    reset: Callable[[], None]
    wrong_elements: Callable[[], int]
    close: Callable[[], None] = lambda: None


def buffer_sizes(spec: CommSpec, ranks: int) -> BufferSizes:
    """Turn the payload (bytes each rank passes in) into elements sent and received.

    Raises
    ------
    UsageError
        If the payload is no positive multiple of what the operation needs.
    """
    unit = ELEMENT_BYTES * (ranks if spec.op in ("reduce_scatter", "all_to_all") else 1)
    if spec.size_bytes < unit or spec.size_bytes % unit:
        raise UsageError(
            f"size_bytes of {spec.op} is {spec.size_bytes}",
            remedy=f"use a positive multiple of {unit} for {ranks} ranks",
        )
    sent = spec.size_bytes // ELEMENT_BYTES
    received = {"all_gather": sent * ranks, "reduce_scatter": sent // ranks}.get(spec.op, sent)
    return BufferSizes(sent, received)


def check_comm(spec: CommSpec, ranks: int) -> None:
    """Check that an operation, its path and the number of GPUs go together.

    Raises
    ------
    UsageError
        If they do not, or the size does not fit.
    """
    if spec.op == "local_copy":
        if spec.path == "light":
            raise UsageError("path of local_copy is light", remedy="use copy, standin or nccl")
    elif spec.path in ("copy", "standin"):
        raise UsageError(
            f"path of {spec.op} is {spec.path}",
            remedy="use local_copy with this path, or the nccl path",
        )
    elif spec.path == "light" and spec.op != "all_reduce":
        raise UsageError(f"path of {spec.op} is light", remedy="the light path does all_reduce")
    elif ranks < 2:
        raise UsageError(
            f"{spec.op} is asked for on {ranks} GPU",
            remedy="use two GPUs or more, or local_copy:SIZE with path copy, standin or nccl",
        )
    if ranks > _MAX_RANKS:
        raise UsageError(f"there are {ranks} ranks", remedy=f"measure on at most {_MAX_RANKS}")
    buffer_sizes(spec, ranks)


def build_collective(
    spec: CommSpec, device: torch.device, *, group: Any = None, rank: int = 0, ranks: int = 1
) -> Collective:
    """Allocate the payload and return the callable collective.

    Parameters
    ----------
    spec
        What to do.
    device
        The rank's GPU. (CPU with a gloo group works for the ``nccl`` path; the tests use that.)
    group
        Process group; ``None`` for operations within one GPU.
    rank, ranks
        This rank, and how many there are. Building is a collective call.

    Raises
    ------
    UsageError
        If operation, path, size and number of GPUs do not go together.
    MeasurementError
        If the memory does not suffice.
    """
    import torch

    check_comm(spec, ranks)
    try:
        if spec.op == "local_copy":
            return _local_copy(spec, device)
        return _between_ranks(spec, device, group, rank, ranks)
    except torch.OutOfMemoryError as error:
        raise MeasurementError(
            f"{spec.op} of {spec.size_bytes} B does not fit into {device}",
            remedy="use a smaller size, or free memory on the GPU",
        ) from error


def _between_ranks(
    spec: CommSpec, device: torch.device, group: Any, rank: int, ranks: int
) -> Collective:
    import torch
    import torch.distributed as dist

    sizes = buffer_sizes(spec, ranks)
    source = _pattern(rank, sizes.sent, device)
    if spec.op == "all_reduce":
        payload = _symmetric_like(source) if spec.path == "light" else source.clone()
        issue = (
            _light_all_reduce(payload, group)
            if spec.path == "light"
            else lambda: dist.all_reduce(payload, group=group, async_op=True)
        )
        return Collective(
            spec,
            issue,
            lambda: _void(payload.copy_(source)),
            lambda: _differences(payload, lambda at, n: _pattern_sum(at, n, ranks, device)),
        )

    result = torch.zeros(sizes.received, device=device, dtype=source.dtype)
    share = sizes.sent // ranks

    def gathered(at: int, count: int) -> torch.Tensor:
        return torch.cat([_pattern(peer, sizes.sent, device) for peer in range(ranks)])[
            at : at + count
        ]

    def exchanged(at: int, count: int) -> torch.Tensor:
        parts = [_pattern(peer, share, device, start=rank * share) for peer in range(ranks)]
        return torch.cat(parts)[at : at + count]

    operations: dict[str, tuple[Callable[[], Any], Callable[[int, int], torch.Tensor]]] = {
        "all_gather": (
            lambda: dist.all_gather_into_tensor(result, source, group=group, async_op=True),
            gathered,
        ),
        "reduce_scatter": (
            lambda: dist.reduce_scatter_tensor(result, source, group=group, async_op=True),
            lambda at, n: _pattern_sum(rank * share + at, n, ranks, device),
        ),
        "all_to_all": (
            lambda: dist.all_to_all_single(result, source, group=group, async_op=True),
            exchanged,
        ),
    }
    issue, expected = operations[spec.op]
    return Collective(
        spec,
        issue,
        lambda: _void(result.zero_()),
        lambda: _differences(result, expected, whole=spec.op != "reduce_scatter"),
    )


def _local_copy(spec: CommSpec, device: torch.device) -> Collective:
    import torch

    sizes = buffer_sizes(spec, 1)
    source = _pattern(0, sizes.sent, device)
    result = torch.zeros_like(source)
    close: Callable[[], None] = lambda: None  # noqa: E731
    if spec.path == "standin":
        from overlapctl.device import open_device
        from overlapctl.device.footprints import standin_gbps
        from overlapctl.kernels.standin import StandIn

        standin = StandIn(device.index)
        pace = standin_gbps(open_device(f"cuda:{device.index}").facts())
        issue: Callable[[], Any] = lambda: standin.copy(result, source, gbps=pace)  # noqa: E731
    elif spec.path == "nccl":
        from overlapctl.measure.nccl_self import NcclSelf

        nccl = NcclSelf()
        close = nccl.close

        def issue() -> None:
            nccl.copy(
                result.data_ptr(),
                source.data_ptr(),
                spec.size_bytes,
                int(torch.cuda.current_stream(device).cuda_stream),
            )
    else:

        def issue() -> None:
            result.copy_(source, non_blocking=True)

    return Collective(
        spec,
        issue,
        lambda: _void(result.zero_()),
        lambda: _differences(result, lambda at, n: _pattern(0, n, device, start=at)),
        close,
    )


def _symmetric_like(source: torch.Tensor) -> torch.Tensor:
    import torch.distributed._symmetric_memory as symmetric_memory

    buffer: torch.Tensor = symmetric_memory.empty(
        source.numel(), dtype=source.dtype, device=source.device
    )
    return buffer.copy_(source)


def _light_all_reduce(payload: torch.Tensor, group: Any) -> Callable[[], None]:
    from overlapctl.kernels.light_all_reduce import LightAllReduce

    return LightAllReduce(payload, group).run


# --- the payload's values ------------------------------------------------------------------------

_CHECK_ELEMENTS = 1 << 26
"""Results are checked in pieces, so that the expected values need little memory beside them."""


def _pattern(rank: int, count: int, device: torch.device, *, start: int = 0) -> torch.Tensor:
    """Return elements ``start ...`` of a rank's payload: ``(index * 3 + rank * 5) mod 7 + 1``."""
    import torch

    values = torch.empty(count, device=device, dtype=torch.bfloat16)
    for at in range(0, count, _CHECK_ELEMENTS):
        n = min(_CHECK_ELEMENTS, count - at)
        first = (3 * (start + at) + 5 * rank) % _PERIOD
        index = torch.arange(n, device=device, dtype=torch.int32).remainder_(_PERIOD)
        values[at : at + n] = index.mul_(3).add_(first).remainder_(_PERIOD).add_(1)
    return values


def _pattern_sum(at: int, count: int, ranks: int, device: torch.device) -> torch.Tensor:
    total = _pattern(0, count, device, start=at)
    for peer in range(1, ranks):
        total += _pattern(peer, count, device, start=at)
    return total


def _differences(
    result: torch.Tensor,
    expected: Callable[[int, int], torch.Tensor],
    *,
    whole: bool = False,
) -> int:
    """Count elements that differ from ``expected(start, count)``."""
    step = result.numel() if whole else _CHECK_ELEMENTS
    wrong = 0
    for at in range(0, result.numel(), step):
        piece = result[at : at + step]
        wrong += int((piece != expected(at, piece.numel())).sum())
    return wrong


def _void(_: object) -> None:
    """Drop a tensor an in-place operation returned."""
