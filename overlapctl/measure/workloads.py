"""Compute workloads of trials: a :class:`~overlapctl.records.ComputeSpec` made callable on a GPU.

Inputs are random and of the magnitude of trained networks: normal activations, weights scaled by
``1/sqrt(K)``. Zeros or uninitialised memory draw less power, keep the clock higher and make every
bound taken on them lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlapctl.errors import MeasurementError, UsageError
from overlapctl.records import ComputeSpec

if TYPE_CHECKING:
    import torch

__all__ = ["Workload", "build_workload", "tensor_shapes"]

_RANKS = {"gemm": 3, "elementwise": 1, "layernorm": 2, "attention": 4}
_SEED = 20240229


@dataclass(frozen=True)
class Workload:
    """A compute workload on a GPU.

    Parameters
    ----------
    spec
        What it computes.
    launch
        Enqueues it (``spec.repeats`` launches) on the current stream and returns at once.
    result
        The tensor it writes; the same memory every time.
    """

    spec: ComputeSpec
    launch: Callable[[], None]
    result: Callable[[], torch.Tensor]

    def bits(self) -> torch.Tensor:
        """Return a copy of the result as integers, for bit-for-bit comparison."""
        import torch

        result = self.result()
        integer = {2: torch.int16, 4: torch.int32}[result.element_size()]
        return result.detach().contiguous().view(integer).clone()

    def spoil(self) -> None:
        """Overwrite the result, so that a launch that did not run cannot go unnoticed."""
        self.result().fill_(math.nan)


def tensor_shapes(spec: ComputeSpec) -> tuple[tuple[int, ...], ...]:
    """Shapes of inputs, then of the result.

    Raises
    ------
    UsageError
        If the shape has the wrong number of entries for the operation or one below 1, ``repeats``
        is below 1, or a tile is given for another operation than a GEMM.
    """
    if len(spec.shape) != _RANKS[spec.op] or min(spec.shape) < 1:
        raise UsageError(
            f"shape of {spec.op} is {spec.shape}",
            remedy=f"give {_RANKS[spec.op]} sizes of at least 1",
        )
    if spec.repeats < 1:
        raise UsageError(f"repeats is {spec.repeats}", remedy="launch at least once")
    if spec.tile and spec.op != "gemm":
        raise UsageError(f"tile {spec.tile} is given for {spec.op}", remedy="tiles are for gemm")
    if spec.op == "gemm":
        m, n, k = spec.shape
        return (m, k), (k, n), (m, n)
    if spec.op == "layernorm":
        return spec.shape, (spec.shape[1],), (spec.shape[1],), spec.shape
    if spec.op == "attention":
        return (spec.shape,) * 4
    return spec.shape, spec.shape


def build_workload(spec: ComputeSpec, device: torch.device) -> Workload:
    """Allocate inputs and result and return the callable workload.

    Parameters
    ----------
    spec
        What to compute.
    device
        A CUDA device. (A CPU device works for everything but tiles; the tests use that.)

    Raises
    ------
    UsageError
        If the shape does not fit the operation.
    MeasurementError
        If the memory does not suffice.
    """
    import torch

    shapes = tensor_shapes(spec)
    try:
        return _BUILDERS[spec.op](spec, shapes, device)
    except torch.OutOfMemoryError as error:
        sizes = ", ".join("x".join(map(str, shape)) for shape in shapes)
        raise MeasurementError(
            f"{spec.op} with tensors of {sizes} ({spec.dtype}) does not fit into {device}",
            remedy="use a smaller shape, or free memory on the GPU",
        ) from error


def _gemm(spec: ComputeSpec, shapes: tuple[tuple[int, ...], ...], device: torch.device) -> Workload:
    import torch

    a = _normal(shapes[0], spec, device)
    b = _normal(shapes[1], spec, device).mul_(1 / math.sqrt(spec.shape[2]))
    out = torch.empty(shapes[2], device=device, dtype=_dtype(spec))
    if spec.tile:
        from overlapctl.kernels.triton_gemm import check_tile, gemm

        tile = check_tile(spec.tile)
        return _in_place(spec, lambda: gemm(a, b, out, tile), out)
    return _in_place(spec, lambda: torch.mm(a, b, out=out), out)


def _elementwise(
    spec: ComputeSpec, shapes: tuple[tuple[int, ...], ...], device: torch.device
) -> Workload:
    import torch

    x = _normal(shapes[0], spec, device)
    out = torch.empty_like(x)
    return _in_place(spec, lambda: torch.add(x, 1, out=out), out)


def _layernorm(
    spec: ComputeSpec, shapes: tuple[tuple[int, ...], ...], device: torch.device
) -> Workload:
    import torch

    x = _normal(shapes[0], spec, device)
    weight = _normal(shapes[1], spec, device).mul_(0.1).add_(1)
    bias = _normal(shapes[2], spec, device).mul_(0.1)
    return _returning(
        spec, lambda: torch.nn.functional.layer_norm(x, (spec.shape[1],), weight, bias)
    )


def _attention(
    spec: ComputeSpec, shapes: tuple[tuple[int, ...], ...], device: torch.device
) -> Workload:
    import torch

    query, key, value = (_normal(shape, spec, device) for shape in shapes[:3])
    return _returning(
        spec,
        lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True),
    )


_BUILDERS: dict[
    str, Callable[[ComputeSpec, tuple[tuple[int, ...], ...], torch.device], Workload]
] = {
    "gemm": _gemm,
    "elementwise": _elementwise,
    "layernorm": _layernorm,
    "attention": _attention,
}


def _in_place(spec: ComputeSpec, once: Callable[[], object], out: torch.Tensor) -> Workload:
    def launch() -> None:
        for _ in range(spec.repeats):
            once()

    return Workload(spec, launch, lambda: out)


def _returning(spec: ComputeSpec, once: Callable[[], torch.Tensor]) -> Workload:
    """Wrap an operation without ``out=``: it allocates, and the last result is kept.

    After the warm-up the caching allocator hands out the same blocks without calling the driver.
    """
    import torch

    kept: list[torch.Tensor] = []

    def launch() -> None:
        with torch.no_grad():
            for _ in range(spec.repeats):
                kept[:] = [once()]

    def result() -> torch.Tensor:
        if not kept:
            launch()
        return kept[0]

    return Workload(spec, launch, result)


def _dtype(spec: ComputeSpec) -> torch.dtype:
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[spec.dtype]


def _normal(shape: tuple[int, ...], spec: ComputeSpec, device: torch.device) -> torch.Tensor:
    """Draw standard normal values; the same for the same shape on every rank."""
    import torch

    generator = torch.Generator(device=device).manual_seed(_SEED + math.prod(shape))
    return torch.empty(shape, device=device, dtype=_dtype(spec)).normal_(generator=generator)
