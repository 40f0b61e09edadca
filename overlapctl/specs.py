"""Workloads and sizes as text: what the command line, configuration files and reports share.

::

    gemm:MxNxK[:dtype[:BMxBNxBK[:4w3s]]][*N]     gemm:8192x8192x8192:bf16:64x64x64*4
    elementwise:ELEMENTS[:dtype][*N]             elementwise:2^31:bf16
    layernorm:ROWSxCOLUMNS[:dtype][*N]           layernorm:16384x8192:bf16
    attention:BxHxSxD[:dtype][*N]                attention:4x32x4096x128:bf16
    COLLECTIVE:SIZE[:path]                       all_reduce:896MB:nccl

A size is a number of bytes or a number with a unit. ``MB`` and ``MiB`` both mean 2**20 bytes (and
so on for K and G), because that is what published communication workloads mean by "896 MB".
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any, get_args, get_type_hints

from overlapctl.errors import UsageError
from overlapctl.records import CommSpec, ComputeSpec

__all__ = [
    "format_comm",
    "format_compute",
    "format_size",
    "parse_comm",
    "parse_compute",
    "parse_size",
]

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(?:([kmg])i?)?b?", re.IGNORECASE | re.ASCII)
_WARPS_STAGES = re.compile(r"([1-9]\d*)w([1-9]\d*)s", re.ASCII)
_COUNT = re.compile(r"(\d+)(?:(?:\^|\*\*)(\d+))?", re.ASCII)
_REPEATS = re.compile(r"(.*?[^*])\*(\d+)", re.ASCII)

_DEFAULT_WARPS, _DEFAULT_STAGES = 4, 3
_LARGEST = (1 << 63) - 1
"""Sizes and counts are 64-bit integers in CUDA and in torch."""

_DIMENSIONS = {
    "gemm": ("M", "N", "K"),
    "elementwise": ("elements",),
    "layernorm": ("rows", "columns"),
    "attention": ("batch", "heads", "sequence", "head dimension"),
}
_EXAMPLES = {
    "gemm": "gemm:8192x8192x8192:bf16:64x64x64:4w3s",
    "elementwise": "elementwise:2^31:bf16",
    "layernorm": "layernorm:16384x8192:bf16",
    "attention": "attention:4x32x4096x128:bf16",
}
_COMM_EXAMPLE = "all_reduce:896MB:nccl"
_DTYPES: tuple[str, ...] = get_args(get_type_hints(ComputeSpec)["dtype"])
_COLLECTIVES: tuple[str, ...] = get_args(get_type_hints(CommSpec)["op"])
_PATHS: tuple[str, ...] = get_args(get_type_hints(CommSpec)["path"])


def parse_size(size: str | int) -> int:
    """Read a size in bytes.

    Parameters
    ----------
    size
        Bytes as an integer, or text such as ``"49152"``, ``"48KiB"``, ``"48K"``, ``"1.5MB"``.
        Units are powers of 1024, with or without the ``i`` and the ``B``, in either case.

    Returns
    -------
    int
        Bytes, 0 or more.

    Raises
    ------
    UsageError
        If it is negative, not a whole number of bytes, too large for 64 bits, or no size at all.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        bytes_ = Fraction(size)
    elif isinstance(size, str) and (match := _SIZE.fullmatch(size.strip())):
        bytes_ = Fraction(match[1]) * _UNITS[(match[2] or "").lower()]
    else:
        negative = isinstance(size, str) and size.strip().startswith("-")
        raise UsageError(
            f"size {size!r} is {'negative' if negative else 'no size'}",
            remedy='give bytes or a number with a unit, for example 49152, "48KiB" or "1.5MB"',
        )
    if bytes_ < 0:
        raise UsageError(f"size {size!r} is negative", remedy="give 0 bytes or more")
    if bytes_.denominator != 1:
        raise UsageError(
            f"size {size!r} is {float(bytes_):g} bytes, not a whole number",
            remedy=f"use {math.ceil(bytes_)} bytes",
        )
    if bytes_ > _LARGEST:
        raise UsageError(f"size {size!r} does not fit 64 bits", remedy="give a smaller size")
    return int(bytes_)


def format_size(size: int) -> str:
    """Write a size so that :func:`parse_size` reads it back exactly, for example ``"896MiB"``.

    Raises
    ------
    UsageError
        If ``size`` is negative.
    """
    size = parse_size(size)
    for unit in ("g", "m", "k"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit.upper()}iB"
    return f"{size}B"


def parse_compute(text: str) -> ComputeSpec:
    """Read a compute workload.

    Parameters
    ----------
    text
        As in the module's description. ``dtype`` defaults to bf16. A GEMM with a tile is the
        Triton kernel, by default with 4 warps and 3 stages; without one, the vendor library's.
        Counts may be powers (``2^31``); ``*N`` at the end launches the kernel N times in a row.

    Raises
    ------
    UsageError
        Naming the part that is wrong, with an example.
    """
    whole = text.strip()
    repeats = 1
    body = whole
    # "2**31" is a power, "...*4" the repeats: one asterisk, with no other before it.
    if match := _REPEATS.fullmatch(whole):
        body = match[1].rstrip()
        repeats = _count(match[2], "repeats", whole, _EXAMPLES["gemm"] + "*4")
    op, *parts = (part.strip() for part in body.split(":"))
    if op not in _DIMENSIONS:
        raise _unknown("operation", op, tuple(_DIMENSIONS), whole, _EXAMPLES["gemm"])
    example = _EXAMPLES[op]
    if not parts:
        raise UsageError(f"compute {whole!r} has no shape", remedy=f"write it like {example}")
    shape = _dimensions(parts[0], "shape", _DIMENSIONS[op], whole, example)
    dtype = parts[1] if len(parts) > 1 else "bf16"
    if dtype not in _DTYPES:
        raise _unknown("dtype", dtype, _DTYPES, whole, example)
    tile: tuple[int, ...] = ()
    most = 4 if op == "gemm" else 2
    if len(parts) > most:
        raise UsageError(
            f"{parts[most]!r} in compute {whole!r} is one part too many",
            remedy=f"write it like {example}",
        )
    if len(parts) > 2:
        tile = _tile(parts[2], parts[3] if len(parts) > 3 else None, whole)
    values: dict[str, Any] = {"op": op, "dtype": dtype}
    return ComputeSpec(shape=shape, tile=tile, repeats=repeats, **values)


def format_compute(spec: ComputeSpec) -> str:
    """Write a compute workload so that :func:`parse_compute` reads it back."""
    shape = _power(spec.shape[0]) if spec.op == "elementwise" else "x".join(map(str, spec.shape))
    text = f"{spec.op}:{shape}:{spec.dtype}"
    if spec.tile:
        *tile, warps, stages = spec.tile
        text += ":" + "x".join(map(str, tile))
        if (warps, stages) != (_DEFAULT_WARPS, _DEFAULT_STAGES):
            text += f":{warps}w{stages}s"
    return text + (f"*{spec.repeats}" if spec.repeats > 1 else "")


def parse_comm(text: str) -> CommSpec:
    """Read a collective, for example ``"all_reduce:896MB"`` (path ``nccl``).

    Raises
    ------
    UsageError
        Naming the part that is wrong, with an example.
    """
    whole = text.strip()
    op, *parts = (part.strip() for part in whole.split(":"))
    if op not in _COLLECTIVES:
        raise _unknown("collective", op, _COLLECTIVES, whole, _COMM_EXAMPLE)
    if not parts or len(parts) > 2:
        wrong = "has no size" if not parts else f"has a part too many, {parts[2]!r}"
        raise UsageError(f"comm {whole!r} {wrong}", remedy=f"write it like {_COMM_EXAMPLE}")
    try:
        size = parse_size(parts[0])
    except UsageError as error:
        raise UsageError(f"comm {whole!r}: {error.what}", remedy=error.remedy) from None
    if size == 0:
        raise UsageError(f"comm {whole!r}: size is 0", remedy=f"write it like {_COMM_EXAMPLE}")
    path = parts[1] if len(parts) > 1 else "nccl"
    if path not in _PATHS:
        raise _unknown("path", path, _PATHS, whole, _COMM_EXAMPLE)
    values: dict[str, Any] = {"op": op, "path": path}
    return CommSpec(size_bytes=size, **values)


def format_comm(spec: CommSpec) -> str:
    """Write a collective so that :func:`parse_comm` reads it back."""
    path = "" if spec.path == "nccl" else f":{spec.path}"
    return f"{spec.op}:{format_size(spec.size_bytes)}{path}"


def _tile(tile: str, launch: str | None, whole: str) -> tuple[int, ...]:
    example = _EXAMPLES["gemm"]
    blocks = _dimensions(tile, "tile", ("block M", "block N", "block K"), whole, example)
    for value in blocks:
        # Triton's tl.arange takes powers of two, and tl.dot at least 16 of them.
        if value < 16 or value & (value - 1):
            raise UsageError(
                f"tile {tile!r} in {whole!r}: {value} is no power of two of at least 16",
                remedy=f"write it like {example}",
            )
    if launch is None:
        return (*blocks, _DEFAULT_WARPS, _DEFAULT_STAGES)
    match = _WARPS_STAGES.fullmatch(launch)
    if match is None:
        raise UsageError(
            f"{launch!r} in {whole!r} is no number of warps and stages",
            remedy=f"4w3s is 4 warps and 3 stages: write it like {example}",
        )
    warps, stages = int(match[1]), int(match[2])
    if warps not in (1, 2, 4, 8, 16, 32):
        raise UsageError(
            f"{launch!r} in {whole!r}: {warps} warps cannot be launched",
            remedy="use 1, 2, 4, 8, 16 or 32 warps",
        )
    return (*blocks, warps, stages)


def _dimensions(
    text: str, field: str, names: tuple[str, ...], whole: str, example: str
) -> tuple[int, ...]:
    parts = text.split("x")
    if len(parts) != len(names):
        raise UsageError(
            f"{field} {text!r} in {whole!r} has {len(parts)} dimensions, "
            f"not {len(names)} ({' x '.join(names)})",
            remedy=f"write it like {example}",
        )
    return tuple(
        _count(part.strip(), name, whole, example) for part, name in zip(parts, names, strict=True)
    )


def _count(text: str, field: str, whole: str, example: str) -> int:
    match = _COUNT.fullmatch(text)
    # Check the size of a power before computing it: 9^999999999 would take the process with it.
    if match and match[2] and int(match[1]) > 1 and len(match[2]) > 2:
        value = _LARGEST + 1
    elif match:
        value = int(match[1]) ** int(match[2] or 1)
    else:
        value = 0
    if not 1 <= value <= _LARGEST:
        raise UsageError(
            f"{field} {text!r} in {whole!r} is no whole number from 1 to 2^63-1",
            remedy=f"write it like {example}",
        )
    return value


def _power(value: int) -> str:
    return (
        f"2^{value.bit_length() - 1}" if value >= 1024 and not value & (value - 1) else f"{value}"
    )


def _unknown(
    field: str, value: str, known: tuple[str, ...], whole: str, example: str
) -> UsageError:
    return UsageError(
        f"{field} {value!r} in {whole!r} is unknown",
        remedy=f"use one of {', '.join(known)}, for example {example}",
    )
