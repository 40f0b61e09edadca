"""Footprints and times alone of the workloads a case names, on a GPU that never ran them.

Used by the simulated device and by plans without measurement; wherever a kernel can be observed,
its real footprint and time alone replace these. Efficiencies are those seen on H200; they are
ratios to the GPU's own rates and so carry over in the first order.
"""

from __future__ import annotations

import math
from dataclasses import replace

from overlapctl.device.footprints import communication_footprint, standin_gbps
from overlapctl.plan.parameters import SimulationParameters, parameters_for
from overlapctl.plan.residency import blocks_per_sm
from overlapctl.plan.simulate import CommWork, ComputeWork
from overlapctl.plan.throughput import OccupancyCurve
from overlapctl.records import CommSpec, ComputeSpec, DeviceFacts, KernelFootprint

__all__ = [
    "comm_work",
    "compute_footprint",
    "compute_work",
]

_COPY_ENGINE = KernelFootprint(name="copy-engine", threads=1, registers=0, blocks=0)

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

# Registers per thread as compiled for sm_90 (Triton 3.x) for tiles that are used often.
_TILE_REGISTERS: dict[tuple[int, ...], int] = {
    (32, 32, 64, 4, 2): 56,
    (64, 64, 64, 4, 2): 72,
    (64, 64, 64, 4, 3): 64,
    (128, 128, 32, 8, 2): 96,
    (128, 256, 64, 8, 3): 196,
}

# Shares of the rates in DeviceFacts (which are rates *reached* by good kernels) that the workloads
# reach on H200.
_VENDOR_GEMM = {"bf16": 0.97, "fp16": 0.97, "fp32": 0.95}
_ATTENTION = 0.75
_ELEMENTWISE = 0.97
_LAYERNORM = 0.57
# Operand bytes an SM draws from the L2 per us at saturation; a tiled GEMM with little reuse in
# shared memory is bound by this (11.2 TB/s over 132 SMs: tiles of 32 and of 64).
_L2_BYTES_PER_SM_US = 84_500.0
_TILED_GEMM = 0.85

# Collectives on H200 (two ranks): share of the link rate, and start-up time in ms, per path.
_LINK_SHARE = {"nccl": 0.91, "light": 0.95, "copy": 1.0}
_START_MS = {"nccl": 0.16, "light": 0.10, "copy": 0.05, "standin": 0.02}
# What one block of NCCL moves, and how it bends towards the link's rate: 4, 8, 16 and 24 blocks on
# H200 reach 83, 163, 275 and 313 GB/s.
_BLOCK_GBPS = 20.9
_BLOCK_BEND = 3.5


def compute_footprint(facts: DeviceFacts, spec: ComputeSpec) -> KernelFootprint:
    """Footprint of the dominant kernel of a compute workload."""
    if spec.op == "gemm" and spec.tile:
        return _tile_footprint(facts, spec)
    if spec.op == "gemm":
        return _vendor_gemm_footprint(facts, spec)
    if spec.op == "attention":
        batch, heads, sequence, _ = spec.shape
        tiles = batch * heads * -(-sequence // 128)
        return KernelFootprint(
            name="sdpa_flash_fprop",
            threads=384,
            registers=168,
            dynamic_smem=facts.smem_per_block_optin,
            blocks=min(tiles, facts.sm_count),
        )
    elements = math.prod(spec.shape)
    if spec.op == "layernorm":
        return KernelFootprint(
            name="vectorized_layer_norm_kernel",
            threads=128,
            registers=32,
            dynamic_smem=24,
            blocks=spec.shape[0],
        )
    per_block = 128 * 16 // _BYTES[spec.dtype]
    return KernelFootprint(
        name="vectorized_elementwise_kernel",
        threads=128,
        registers=32,
        blocks=max(1, -(-elements // per_block)),
    )


def compute_work(
    facts: DeviceFacts,
    spec: ComputeSpec,
    *,
    footprint: KernelFootprint | None = None,
    alone_ms: float | None = None,
    parameters: SimulationParameters | None = None,
) -> ComputeWork:
    """Compute side of a simulation.

    Parameters
    ----------
    footprint, alone_ms
        Observed values; estimated where ``None``. ``alone_ms`` is for all repeats, untouched.
    """
    parameters = parameters or parameters_for(facts)
    footprint = footprint or compute_footprint(facts, spec)
    alone = alone_ms if alone_ms is not None else _alone_ms(facts, spec, footprint, parameters)
    is_memory = spec.op in ("elementwise", "layernorm")
    curve = _curve(facts, spec, footprint, alone / spec.repeats, parameters)
    return ComputeWork(
        footprint=footprint,
        alone_ms=alone,
        curve=curve,
        bound="memory" if is_memory else "gemm" if spec.tile else "library",
        launches=spec.repeats,
    )


def comm_work(
    facts: DeviceFacts,
    spec: CommSpec,
    *,
    footprint: KernelFootprint | None = None,
    alone_ms: float | None = None,
    world: int = 2,
    nccl_version: str = "none",
    max_blocks: int | None = None,
    parameters: SimulationParameters | None = None,
) -> CommWork:
    """Communication side of a simulation.

    Parameters
    ----------
    footprint, alone_ms
        Observed values; estimated where ``None``.
    world
        Ranks, all linked alike.
    nccl_version
        Decides NCCL's footprint; ``"none"``: the version of the recorded measurements.
    max_blocks
        Cap on the kernel's blocks (NCCL's CTA limit): it takes fewer SMs, and longer.
    """
    parameters = parameters or parameters_for(facts)
    footprint = footprint or communication_footprint(facts, spec.path, spec.op, nccl_version)
    slower = 1.0
    if footprint is not None and max_blocks is not None and max_blocks < footprint.blocks:
        slower = _block_rate(facts, footprint.blocks) / _block_rate(facts, max_blocks)
        footprint = replace(footprint, blocks=max_blocks)
    if alone_ms is None:
        alone_ms = _START_MS[spec.path] + slower * _transfer_ms(facts, spec, world)
    return CommWork(
        footprint=footprint or _COPY_ENGINE,
        alone_ms=alone_ms,
        uses_sms=footprint is not None,
        traffic=1.0 if spec.path in ("nccl", "standin") else parameters.light_traffic,
        sensitivity=parameters.light_sensitivity if spec.path == "light" else 1.0,
    )


def _transfer_ms(facts: DeviceFacts, spec: CommSpec, world: int) -> float:
    """Time for the bytes each rank sends over its link, without start-up."""
    if spec.op == "local_copy" or spec.path == "standin":
        gbps = facts.rates.hbm_gbps / 2  # read and written
        if spec.path == "standin":
            gbps = min(gbps, standin_gbps(facts))
        return spec.size_bytes / gbps / 1e6
    sent = {
        "all_reduce": 2 * (world - 1) / world,
        "all_gather": float(world - 1),
        "reduce_scatter": (world - 1) / world,
        "all_to_all": (world - 1) / world,
    }[spec.op]
    rate = facts.rates.link_gbps * _LINK_SHARE[spec.path]
    return spec.size_bytes * sent / rate / 1e6


def _block_rate(facts: DeviceFacts, blocks: int) -> float:
    """GB/s that so many blocks of a communication kernel move: by their own rate, or the link's."""
    own, link = blocks * _BLOCK_GBPS, facts.rates.link_gbps * _LINK_SHARE["nccl"]
    return float((own**-_BLOCK_BEND + link**-_BLOCK_BEND) ** (-1 / _BLOCK_BEND))


def _curve(
    facts: DeviceFacts,
    spec: ComputeSpec,
    footprint: KernelFootprint,
    launch_ms: float,
    parameters: SimulationParameters,
) -> OccupancyCurve:
    """Throughput over residency, in units of one block that waits only for its own loads.

    What such a block takes follows from the workload; where the SM saturates is solved from the
    time of one launch at the natural residency.
    """
    natural = max(1, blocks_per_sm(facts, footprint))
    waiting = _waiting_us(spec, parameters)
    if waiting is None:
        return _bent(spec, float(natural), parameters)
    reached = footprint.blocks / (launch_ms * 1e3) / facts.sm_count * waiting
    low, high = 0.01, 1.5 * natural
    for _ in range(40):
        knee = (low + high) / 2
        if _bent(spec, knee, parameters).throughput(natural) < reached:
            low = knee
        else:
            high = knee
    return _bent(spec, high, parameters)


def _bent(spec: ComputeSpec, knee: float, parameters: SimulationParameters) -> OccupancyCurve:
    if spec.op in ("elementwise", "layernorm"):
        return OccupancyCurve(knee=knee, sharpness=parameters.memory_sharpness)
    return OccupancyCurve(
        knee=knee,
        sharpness=parameters.gemm_sharpness,
        thrash_onset=parameters.thrash_onset,
        thrash_slope=parameters.thrash_slope,
    )


def _waiting_us(spec: ComputeSpec, parameters: SimulationParameters) -> float | None:
    """Time of a block alone on its SM: its loads that follow each other, times their latency.

    A tiled GEMM loads once per K step and has all stages but one under way; an elementwise block
    loads once; a layer norm's block walks its row twice and reduces twice. ``None``: unknown.
    """
    if spec.op == "gemm" and spec.tile:
        steps = -(-spec.shape[2] // spec.tile[2])
        return steps * parameters.load_latency_us / max(1, spec.tile[4] - 1)
    if spec.op == "elementwise":
        return parameters.memory_latency_us
    if spec.op == "layernorm":
        loads = -(-spec.shape[1] * _BYTES[spec.dtype] // (128 * 16))
        return (2 * loads + 2) * parameters.memory_latency_us
    return None


def _flops(spec: ComputeSpec) -> float:
    if spec.op == "gemm":
        return 2.0 * math.prod(spec.shape)
    batch, heads, sequence, dim = spec.shape
    return 4.0 * batch * heads * sequence * sequence * dim


def _alone_ms(
    facts: DeviceFacts,
    spec: ComputeSpec,
    footprint: KernelFootprint,
    parameters: SimulationParameters,
) -> float:
    rates = facts.rates
    matrix = rates.fp32_tflops if spec.dtype == "fp32" else rates.tensor_tflops
    if spec.op in ("elementwise", "layernorm"):
        share = _ELEMENTWISE if spec.op == "elementwise" else _LAYERNORM
        moved = 2.0 * math.prod(spec.shape) * _BYTES[spec.dtype]
        return spec.repeats * moved / (rates.hbm_gbps * share * 1e6)
    if spec.op == "attention":
        return spec.repeats * _flops(spec) / (matrix * _ATTENTION * 1e9)
    if not spec.tile:
        return spec.repeats * _flops(spec) / (matrix * _VENDOR_GEMM[spec.dtype] * 1e9)
    block_m, block_n = spec.tile[:2]
    reuse = 2.0 * block_m * block_n / ((block_m + block_n) * _BYTES[spec.dtype])  # flop per byte
    by_l2 = _L2_BYTES_PER_SM_US * reuse
    by_math = matrix * _TILED_GEMM * 1e6 / facts.sm_count
    block_flops = _flops(spec) / footprint.blocks
    waiting = _waiting_us(spec, parameters) or 1.0
    natural = max(1, blocks_per_sm(facts, footprint))
    curve = _bent(spec, min(by_l2, by_math) * waiting / block_flops, parameters)
    rate = curve.throughput(natural) / waiting * block_flops * facts.sm_count
    return spec.repeats * _flops(spec) / rate / 1e3


def _tile_footprint(facts: DeviceFacts, spec: ComputeSpec) -> KernelFootprint:
    block_m, block_n, block_k, warps, stages = spec.tile
    m, n, _ = spec.shape
    size = _BYTES[spec.dtype]
    # Tiles of at least 64 rows per warp group use wgmma on sm_90 and buffer every stage; the
    # others keep one stage in registers (as compiled).
    wgmma = facts.arch == "sm_90" and block_m >= 64 and warps % 4 == 0 and size == 2
    buffers = stages if wgmma else max(1, stages - 1)
    operands = buffers * (block_m + block_n) * block_k * size
    result = block_m * block_n * size  # staged in shared memory before it is stored
    # Registers: the accumulators and what addresses and operands take (as compiled, within 10 %).
    accumulators = block_m * block_n // (warps * facts.warp_size)
    estimate = min(255, max(56, (35 if wgmma else 56) + accumulators * 9 // 8))
    compiled = _TILE_REGISTERS if facts.arch == "sm_90" and size == 2 else {}
    return KernelFootprint(
        name="gemm_kernel",
        threads=warps * facts.warp_size,
        registers=compiled.get(spec.tile, estimate),
        dynamic_smem=max(operands, result),
        blocks=-(-m // block_m) * -(-n // block_n),
    )


def _vendor_gemm_footprint(facts: DeviceFacts, spec: ComputeSpec) -> KernelFootprint:
    m, n, _ = spec.shape
    if spec.dtype == "fp32":
        return KernelFootprint(
            name="sgemm_256x128",
            threads=256,
            registers=254,
            dynamic_smem=min(67584, facts.smem_per_block_optin),
            blocks=-(-m // 256) * -(-n // 128),
        )
    persistent = facts.arch in ("sm_90", "sm_100", "sm_120")
    if persistent:
        smem = 188636 if m * n >= 8192 * 8192 else 213188
        return KernelFootprint(
            name="nvjet",
            threads=384,
            registers=168,
            dynamic_smem=min(smem, facts.smem_per_block_optin),
            blocks=min(facts.sm_count, -(-m // 128) * -(-n // 256)),
        )
    return KernelFootprint(
        name="ampere_bf16_s16816gemm_256x128",
        threads=256,
        registers=234,
        dynamic_smem=min(98304, facts.smem_per_block_optin),
        blocks=-(-m // 256) * -(-n // 128),
    )
