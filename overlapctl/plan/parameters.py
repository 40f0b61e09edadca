"""The simulation's few fitted parameters, each with its meaning, per GPU model."""

from __future__ import annotations

from dataclasses import dataclass

from overlapctl.records import DeviceFacts

__all__ = ["SimulationParameters", "parameters_for"]


@dataclass(frozen=True, kw_only=True)
class SimulationParameters:
    """What the simulation cannot take from data sheets.

    Parameters
    ----------
    load_latency_us, memory_latency_us
        Time from a block's request for a stage of a GEMM's operands (mostly from the L2), and from
        its load out of memory, to the data's use, us. A block that waits for nothing else takes
        this for each load that follows another.
    gemm_sharpness, memory_sharpness
        How sharply an SM's throughput bends from "proportional to resident blocks" to
        "saturated", for GEMMs and for memory-bound kernels (exponent p of x / (1 + x^p)^(1/p)).
    thrash_onset, thrash_slope
        Cache effect of residency: beyond ``thrash_onset`` times the blocks that saturate an SM,
        each further multiple costs ``thrash_slope`` of the throughput, because more operand tiles
        are in flight than stay in the caches.
    comm_latency_memory, comm_latency_gemm
        Fraction by which a communication kernel's traffic lengthens the loads of memory-bound
        kernels and of GEMMs; it costs throughput only where too few blocks hide it.
    light_traffic, light_sensitivity
        The light kernel relative to NCCL's: its memory traffic for the same payload, and its
        slow-down by a GEMM's queueing (it waits for every load; NCCL's has more under way).
    compute_on_comm_memory, compute_on_comm_gemm
        Slow-down of a communication kernel (fraction) beside a saturating memory-bound kernel,
        and beside a GEMM per unit of queueing.
    queueing_onset
        Queueing of a GEMM is its blocks over the knee, less this.
    crowded_comm
        Factor by which a communication kernel is slowed that has two of its blocks on one SM.
    kept_beside_comm
        Share of its throughput an SM keeps for compute blocks while a block of a light
        communication kernel is resident on it.
    scheduler_blocks_per_us
        Blocks per us that keep the GPU's block scheduler busy: a kernel that turns over more does
        not let communication in before it ends.
    launch_gap_us
        Time from the end of a kernel to the readiness of one that waits for it on another
        stream, us.
    noise
        Relative standard deviation of one measured time (used by the simulated runner only).
    """

    load_latency_us: float = 0.74
    memory_latency_us: float = 0.67
    gemm_sharpness: float = 2.96
    memory_sharpness: float = 1.48
    thrash_onset: float = 1.6
    thrash_slope: float = 0.4
    comm_latency_memory: float = 0.09
    comm_latency_gemm: float = 0.22
    light_traffic: float = 0.23
    light_sensitivity: float = 2.26
    compute_on_comm_memory: float = 0.44
    compute_on_comm_gemm: float = 0.49
    queueing_onset: float = 0.74
    crowded_comm: float = 1.62
    kept_beside_comm: float = 0.45
    scheduler_blocks_per_us: float = 850.0
    launch_gap_us: float = 4.0
    noise: float = 0.007


_H200 = SimulationParameters()


def parameters_for(facts: DeviceFacts) -> SimulationParameters:
    """Parameters of a GPU model: those fitted on H200, and the same as defaults for the rest."""
    del facts  # Only one GPU model has been calibrated.
    return _H200
