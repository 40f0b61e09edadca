"""A device and a runner whose times are chosen by the test."""

import random

from overlapctl.errors import MeasurementError
from overlapctl.measure.trial import check_request
from overlapctl.records import (
    Applied,
    Clocks,
    DeviceFacts,
    DeviceRates,
    KernelFootprint,
    Link,
    Role,
    Rule,
    Sample,
    Topology,
    Trial,
)

H200 = DeviceFacts(
    name="NVIDIA H200", vendor="nvidia", arch="sm_90", sm_count=132, warp_size=32,
    max_threads_per_sm=2048, max_threads_per_block=1024, max_blocks_per_sm=32,
    registers_per_sm=65536, registers_per_block=65536, register_granule=256,
    subpartitions=4, smem_per_sm=233472, smem_per_block=49152, smem_per_block_optin=232448,
    smem_reserved_per_block=1024, smem_granule=128,
    carveout_steps=tuple(k << 10 for k in (0, 8, 16, 32, 64, 100, 132, 164, 196, 228)),
    l2_bytes=50 << 20, memory_bytes=140 << 30, priority_least=0, priority_greatest=-5,
    rates=DeviceRates(
        hbm_gbps=4800, link_gbps=390, tensor_tflops=989, fp32_tflops=67
    ),
)  # fmt: skip
TRITON = KernelFootprint(
    name="gemm_kernel", threads=128, registers=90, dynamic_smem=49152, blocks=16384
)
PERSISTENT = KernelFootprint(
    name="nvjet", threads=384, registers=168, dynamic_smem=232_448, blocks=132
)


class FakeDevice:
    """An H200 that does nothing."""

    spec = "fake:h200"
    is_simulated = True

    def __init__(self, gpus=2):
        self._gpus = gpus

    def facts(self):
        return H200

    def topology(self):
        links = (Link(source=0, target=1, kind="nvlink", links=18, peer_access=True),)
        return Topology(devices=(H200.name,) * self._gpus, links=links if self._gpus > 1 else ())

    def clocks(self):
        return Clocks(sm_mhz=1980, memory_mhz=None, power_w=500.0, temperature_c=None)

    def versions(self):
        return {"driver": "580", "torch": "2.11", "nccl": "2.28", "triton": "3.6"}


class FakeRunner:
    """Times by arm name from ``compute_ends`` and ``comm_ends``; noise and drift as asked.

    Each repetition of an arm takes 10 ms of the fake ``clock``.
    """

    step_s = 0.01

    def __init__(
        self, times, *, footprint=TRITON, noise=0.002, drift=0.0, fail=(), alone=(4.0, 3.0)
    ):
        self.times = times
        self.kernel = footprint
        self.noise = noise
        self.drift = drift
        self.fail = fail
        self.alone = alone
        self.now = 0.0
        self.calls = []
        self.closed = False
        self._draw = random.Random(5)

    def clock(self):
        return self.now

    def footprint(self, case):
        return self.kernel

    def estimate_seconds(self, case, arms, repeats):
        return self.step_s * len(arms) * repeats

    def run(self, case, arms, *, repeats):
        check_request(arms, repeats)
        self.calls.append((case, [arm.name for arm in arms], repeats))
        if case in self.fail:
            raise MeasurementError("rank 1 died", remedy="look at its log")
        trials = []
        for arm in arms:
            times = self.times.get(arm.name, self.times["default"])
            samples = []
            for _ in range(repeats):
                factor = (1 + self.drift * (len(self.calls) - 1)) * self._jitter()
                end, comm = (t * factor for t in times)
                samples.append(Sample(compute_end=end, comm_issue=0.15, comm_end=comm))
            self.now += self.step_s * repeats
            trials.append(
                Trial(
                    case=case,
                    arm=arm,
                    samples=tuple(samples),
                    compute_alone=(self.alone[0],) * repeats,
                    comm_alone=(self.alone[1],) * repeats,
                    applied=(self._applied(repeats),),
                )
            )
        return trials

    def close(self):
        self.closed = True

    def _jitter(self):
        return 1 + self.noise * self._draw.uniform(-1, 1)

    def _applied(self, launches):
        return Applied(
            kernel=self.kernel.name, role=Role.COMPUTE, threads=128, registers=90, static_smem=0,
            launches=launches, shaped=0, prioritised=0, carved=0, failed=0, captured=0, before=0,
            after=0, blocks_before=4, blocks_after=4, rule=Rule.NOTHING_ASKED,
        )  # fmt: skip
