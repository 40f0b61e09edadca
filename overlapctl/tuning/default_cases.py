"""The cases `tune` measures if it is given none: the kernels of a training step.

Shapes are those of large-model training; the collective's size is worked out with the planner's
estimates so that it takes about as long as the compute kernel, because there overlap has the most
to gain. An error of a third in the estimates moves the size by as much, which changes no verdict's
meaning.
"""

from __future__ import annotations

from overlapctl.plan.workload_model import comm_work, compute_work
from overlapctl.records import Case, CommSpec, ComputeSpec, DeviceFacts

__all__ = ["default_cases"]

_MIB = 1 << 20
_STEP = 16 * _MIB
_MOST = 2048 * _MIB  # buffers must fit beside a job

_KERNELS = (
    ComputeSpec(op="gemm", shape=(8192,) * 3, tile=(64, 64, 64, 4, 3)),
    ComputeSpec(op="gemm", shape=(8192,) * 3, tile=(128, 128, 32, 4, 3)),
    ComputeSpec(op="gemm", shape=(8192,) * 3),
    ComputeSpec(op="gemm", shape=(4096,) * 3, dtype="fp32"),
    ComputeSpec(op="elementwise", shape=(512 * _MIB,)),
    ComputeSpec(op="layernorm", shape=(65536, 8192)),
    ComputeSpec(op="attention", shape=(4, 32, 4096, 128)),
)


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
    return tuple(Case(compute=spec, comm=_as_long(facts, spec, gpus)) for spec in _KERNELS)


def _as_long(facts: DeviceFacts, compute: ComputeSpec, gpus: int) -> CommSpec:
    """Return the communication whose estimated time comes nearest to the compute kernel's."""

    def comm(size: int) -> CommSpec:
        if gpus < 2:
            return CommSpec(op="local_copy", size_bytes=size, path="standin")
        return CommSpec(op="all_reduce", size_bytes=size)

    def alone(size: int) -> float:
        return comm_work(facts, comm(size), world=max(gpus, 2)).alone_ms

    wanted = compute_work(facts, compute).alone_ms
    # Times are linear in the size: a start-up and a rate, read off two sizes.
    rate = (alone(_MOST) - alone(_STEP)) / (_MOST - _STEP)
    size = _STEP + (wanted - alone(_STEP)) / rate
    return comm(int(min(max(round(size / _STEP), 1), _MOST // _STEP)) * _STEP)
