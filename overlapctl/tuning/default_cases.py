"""The cases `tune` measures if it is given none: the kernels of a training step.

Shapes are those of large-model training; the collective's size is worked out from the device's
rates so that it takes about as long as the compute kernel, because there overlap has the most to
gain. The rates a kernel reaches (as a share of the data-sheet rate) are rough H200 figures: an
error of a third moves the collective's size by as much, which changes no verdict's meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from overlapctl.records import Case, CommSpec, ComputeSpec, DeviceFacts, DeviceRates

__all__ = ["default_cases", "estimated_ms"]

_MIB = 1 << 20
_LINK_SHARE = 0.85
# Share of the link rate that NCCL's all-reduce of hundreds of MB reaches.


@dataclass(frozen=True)
class _Kernel:
    compute: ComputeSpec
    rate: Callable[[DeviceRates], float]
    share: float
    """Share of the data-sheet rate the kernel reaches."""


def _tensor(rates: DeviceRates) -> float:
    return rates.tensor_tflops * 1e12


def _fp32(rates: DeviceRates) -> float:
    return rates.fp32_tflops * 1e12


def _memory(rates: DeviceRates) -> float:
    return rates.hbm_gbps * 1e9


_KERNELS = (
    _Kernel(ComputeSpec(op="gemm", shape=(8192,) * 3, tile=(64, 64, 64, 4, 3)), _tensor, 0.29),
    _Kernel(ComputeSpec(op="gemm", shape=(8192,) * 3, tile=(128, 128, 32, 4, 3)), _tensor, 0.5),
    _Kernel(ComputeSpec(op="gemm", shape=(8192,) * 3), _tensor, 0.78),
    _Kernel(ComputeSpec(op="gemm", shape=(4096,) * 3, dtype="fp32"), _fp32, 0.8),
    _Kernel(ComputeSpec(op="elementwise", shape=(512 * _MIB,)), _memory, 0.85),
    _Kernel(ComputeSpec(op="layernorm", shape=(65536, 8192)), _memory, 0.8),
    _Kernel(ComputeSpec(op="attention", shape=(4, 32, 4096, 128)), _tensor, 0.6),
)


def estimated_ms(compute: ComputeSpec, rates: DeviceRates) -> float:
    """Time of one of the default kernels by arithmetic, in ms.

    Raises
    ------
    KeyError
        If it is none of them.
    """
    for kernel in _KERNELS:
        if kernel.compute == compute:
            return 1e3 * _work(compute) / (kernel.rate(rates) * kernel.share)
    raise KeyError(compute)


def default_cases(facts: DeviceFacts, gpus: int) -> tuple[Case, ...]:
    """Cases for a machine.

    Parameters
    ----------
    facts
        The GPU; its rates decide how large the collectives are.
    gpus
        How many GPUs there are. With one, a kernel with NCCL's footprint that copies within the
        GPU stands in for the collective: shaping can be tuned, links cannot.
    """
    return tuple(
        Case(compute=kernel.compute, comm=_comm(kernel.compute, facts.rates, gpus))
        for kernel in _KERNELS
    )


def _work(compute: ComputeSpec) -> float:
    """FLOP, or bytes moved by memory-bound kernels."""
    if compute.op == "gemm":
        return 2.0 * math.prod(compute.shape)
    if compute.op == "attention":
        batch, heads, sequence, size = compute.shape
        return 4.0 * batch * heads * sequence**2 * size
    return 2.0 * math.prod(compute.shape) * (4 if compute.dtype == "fp32" else 2)


def _comm(compute: ComputeSpec, rates: DeviceRates, gpus: int) -> CommSpec:
    seconds = estimated_ms(compute, rates) / 1e3
    if gpus < 2:  # The stand-in is paced like a link.
        size = seconds * rates.link_gbps * 1e9 * _LINK_SHARE
        return CommSpec(op="local_copy", size_bytes=_rounded(size), path="standin")
    # A ring sends 2 (n - 1) / n of the payload over each GPU's links.
    size = seconds * rates.link_gbps * 1e9 * _LINK_SHARE / (2 * (gpus - 1) / gpus)
    return CommSpec(op="all_reduce", size_bytes=_rounded(size))


def _rounded(size: float) -> int:
    """Whole multiples of 16 MiB, at least one, at most 2 GiB (buffers must fit beside a job)."""
    return int(min(max(round(size / (16 * _MIB)), 1), 128)) * 16 * _MIB
