"""Runs one :class:`~overlapctl.collectives.schedule.Reduce` step on the GPU it is enqueued on.

Two ways. *Ordinary* kernels are fast alone, but their blocks (128 threads and more) wait behind a
persistent GEMM until it ends. The *one-warp* kernels of :mod:`overlapctl.kernels.one_warp` find
room beside such a GEMM; they add two operands of one type, in place. Which is better depends on
what runs beside; both give the same bits wherever either may run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from overlapctl.collectives.schedule import Reduce

if TYPE_CHECKING:
    import torch

__all__ = ["Adder", "one_warp_adder", "reduce_into", "torch_dtype"]

_UNIT = 16  # bytes: what the one-warp kernels need addresses to be multiples of


class Adder(Protocol):
    """Adds in place on the current stream: ``dst += src``, rounded once per element."""

    def __call__(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue the addition."""


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's type for a schedule's name of it."""
    import torch

    return {
        "u8": torch.uint8,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
    }[name]


def reduce_into(
    step: Reduce,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    *,
    adder: Adder | None = None,
    copy: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> None:
    """Enqueue a reduction on the current stream.

    Parameters
    ----------
    step
        What to compute; its regions are given as tensors, in its order.
    output, inputs
        One-dimensional tensors of equal length. ``output`` may be one of the inputs.
    adder
        Used for additions that it does exactly as asked; ``None``: ordinary kernels only.
    copy
        Copies ``(dst, src)`` without taking an SM; used with ``adder`` only.
    """
    if adder is not None and copy is not None and _adds_only(step, output, inputs):
        _add_one_by_one(output, inputs, adder, copy)
        return
    import torch

    scales = step.scales or (1.0,) * len(inputs)
    kind = torch_dtype(step.accumulate)
    if (
        len(inputs) == 2
        and scales == (1.0, 1.0)
        and step.output_scale == 1.0
        and (inputs[0].dtype == inputs[1].dtype == output.dtype and _holds(kind, output.dtype))
    ):  # one rounding, from the exact sum: the same in either accumulation type
        torch.add(inputs[0], inputs[1], out=output)
        return
    total = _scaled(inputs[0], scales[0], kind)
    for term, scale in zip(inputs[1:], scales[1:], strict=True):
        if scale == 1.0:
            total.add_(term)
        else:
            total.add_(_scaled(term, scale, kind))
    if step.output_scale != 1.0:
        total.mul_(step.output_scale)
    output.copy_(total)


@functools.cache
def one_warp_adder(device: int) -> Adder | None:
    """Return the one-warp addition on a GPU, or ``None`` where it cannot be had."""
    import torch

    if torch.cuda.get_device_capability(device) < (9, 0):
        return None
    from overlapctl.errors import DeviceError
    from overlapctl.kernels.one_warp import OneWarpKernel

    try:
        kernel = OneWarpKernel(device)
    except DeviceError:
        return None

    def add(dst: torch.Tensor, src: torch.Tensor) -> None:
        kernel.add(dst, src)

    return add


def _scaled(x: torch.Tensor, scale: float, kind: Any) -> torch.Tensor:
    """Copy ``x`` to another type, times ``scale``, rounded to that type."""
    y = x.to(kind, copy=True)
    return y if scale == 1.0 else y.mul_(scale)


def _holds(kind: Any, dtype: Any) -> bool:
    return bool(kind.itemsize >= dtype.itemsize)


def _adds_only(step: Reduce, output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether additions in place, each rounded to the data type, are what the step asks for."""
    if step.output_scale != 1.0 or any(scale != 1.0 for scale in step.scales):
        return False
    if len(inputs) < 2 or any(x.dtype != output.dtype for x in inputs):
        return False
    if len(inputs) > 2 and torch_dtype(step.accumulate) != output.dtype:
        return False
    # In place of a later operand, the order of additions would change (only two commute).
    places = [x.data_ptr() for x in inputs]
    if len(inputs) > 2 and output.data_ptr() in places[1:]:
        return False
    return all(place % _UNIT == 0 for place in (output.data_ptr(), *places))


def _add_one_by_one(
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    adder: Adder,
    copy: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    first, *rest = inputs
    if len(rest) == 1 and rest[0].data_ptr() == output.data_ptr():
        first, rest = rest[0], [first]
    if first.data_ptr() != output.data_ptr():
        copy(output, first)
    for term in rest:
        adder(output, term)
