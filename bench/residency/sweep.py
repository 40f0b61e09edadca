"""What the driver and the hardware say about residency, as JSON for the model's checks.

``python bench/residency/sweep.py OUT_DIR`` (needs one CUDA GPU and NVRTC) writes three suites:

``residency-occupancy``
    The driver's blocks per SM for kernels swept over registers, threads, static and dynamic shared
    memory. The model in ``overlapctl.plan.residency`` must equal every row.
``residency-room``
    Which blocks of small kernels (10-48 registers, 1-4 warps, up to 4 blocks per SM, no shared
    memory) start beside a persistent vendor GEMM when issued at high priority while it runs: on how
    many SMs, in which warp slots, and how many of several launches in a row.
``residency-prologues``
    First bytes of the driver entries the shim intercepts.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver as cu
from cuda.bindings import nvrtc

sys.path.insert(0, str(Path(__file__).parents[1]))
import results_file

# Keeps LIVE independent values alive across a loop the compiler cannot fold, so that the register
# count grows with LIVE; the shared-memory use is declared only where STATIC is not 0.
SOURCE = """
extern "C" __global__ void __launch_bounds__(THREADS)
live(float* out, const float* in, int n, unsigned long long* seen) {
  if (seen && threadIdx.x == 0) {
    unsigned sm, warp;
    unsigned long long now;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    asm volatile("mov.u32 %0, %%warpid;" : "=r"(warp));
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    seen[2 * blockIdx.x] = now;
    seen[2 * blockIdx.x + 1] = sm * 64 + warp;
  }
#if STATIC
  __shared__ char pool[STATIC];
  pool[threadIdx.x % STATIC] = (char)n;
  __syncthreads();
#endif
  float v[LIVE];
#pragma unroll
  for (int i = 0; i < LIVE; i++) v[i] = in[i + threadIdx.x];
  for (int k = 0; k < n; k++) {
#pragma unroll
    for (int i = 0; i < LIVE; i++) v[i] = v[i] * v[(i + 1) % LIVE] + 1.0f;
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < LIVE; i++) sum += v[i];
#if STATIC
  sum += pool[(threadIdx.x + n) % STATIC];
#endif
  if (sum == 12345.678f) out[threadIdx.x] = sum;
}
"""


def ok(result: tuple[Any, ...]) -> Any:
    """Value of a cuda-bindings call, or RuntimeError."""
    if int(result[0]) != 0:
        raise RuntimeError(str(result[0]))
    return result[1] if len(result) == 2 else result[1:]


def compile_live(live: int, threads: int, static: int) -> tuple[Any, dict[str, int]]:
    """Compile the kernel; give the function and its attributes."""
    major, minor = torch.cuda.get_device_capability()
    options = [
        f"--gpu-architecture=sm_{major}{minor}".encode(),
        f"-DLIVE={live}".encode(),
        f"-DTHREADS={threads}".encode(),
        f"-DSTATIC={static}".encode(),
    ]
    program = ok(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"live.cu", 0, [], []))
    ok((*nvrtc.nvrtcCompileProgram(program, len(options), options), None))
    image = b" " * ok(nvrtc.nvrtcGetCUBINSize(program))
    ok((*nvrtc.nvrtcGetCUBIN(program, image), None))
    function = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(image)), b"live"))
    names = {
        "registers": cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS,
        "static_smem": cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
        "max_threads": cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
    }
    return function, {k: int(ok(cu.cuFuncGetAttribute(a, function))) for k, a in names.items()}


def occupancy_rows() -> list[dict[str, int]]:
    """Driver occupancy over registers x threads x static x dynamic shared memory."""
    optin = int(
        ok(
            cu.cuDeviceGetAttribute(
                cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 0
            )
        )
    )
    maximum = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    rows = []
    for live in (4, 12, 20, 28, 40, 56, 72, 96, 120, 160, 200):
        for static in (0, 3000):
            function, facts = compile_live(live, 256, static)
            ok((*cu.cuFuncSetAttribute(function, maximum, optin - facts["static_smem"]), None))
            for threads in (32, 33, 64, 96, 128, 160, 224, 256):
                for dynamic in (0, 1, 1000, 7000, 16385, 40000, 76000, 115000, 200000):
                    if facts["static_smem"] + dynamic > optin:
                        continue
                    blocks = ok(
                        cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, dynamic)
                    )
                    rows.append(
                        {
                            "threads": threads,
                            "registers": facts["registers"],
                            "static_smem": facts["static_smem"],
                            "dynamic_smem": dynamic,
                            "blocks_per_sm": int(blocks),
                        }
                    )
    for threads in (384, 512, 640, 768, 1024):
        for live in (8, 24, 40, 56):
            function, facts = compile_live(live, threads, 0)
            for dynamic in (0, 20000, 49152):
                blocks = ok(
                    cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, dynamic)
                )
                rows.append(
                    {
                        "threads": threads,
                        "registers": facts["registers"],
                        "static_smem": facts["static_smem"],
                        "dynamic_smem": dynamic,
                        "blocks_per_sm": int(blocks),
                    }
                )
    return rows


def room_rows() -> list[dict[str, Any]]:
    """Which blocks of small kernels start while a persistent bf16 GEMM runs, and where."""
    device = "cuda"
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    a = torch.randn(8192, 32768, device=device, dtype=torch.bfloat16)
    b = torch.randn(32768, 8192, device=device, dtype=torch.bfloat16)
    c = torch.empty(8192, 8192, device=device, dtype=torch.bfloat16)
    source, sink = torch.randn(4096, device=device), torch.empty(4096, device=device)
    urgent = torch.cuda.Stream(priority=-3)
    most = 24 * sms
    seen = torch.zeros(most, 2, device=device, dtype=torch.int64)

    mark = torch.zeros(1, 2, device=device, dtype=torch.int64)
    marker, _ = compile_live(1, 32, 0)

    def launch(
        function: Any, threads: int, blocks: int, spin: int, into: torch.Tensor, stream: Any
    ) -> None:
        values = (sink.data_ptr(), source.data_ptr(), spin, into.data_ptr())
        types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        handle = stream.cuda_stream
        result = cu.cuLaunchKernel(
            function, blocks, 1, 1, threads, 1, 1, 0, handle, (values, types), 0
        )
        ok((*result, None))

    def once(
        function: Any, threads: int, blocks: int, spin: int, launches: int = 1
    ) -> dict[str, Any]:
        seen.zero_()
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        torch.mm(a, b, out=c)
        events[1].record()
        launch(marker, 32, 1, 4, mark, torch.cuda.current_stream())
        start = time.perf_counter()
        while time.perf_counter() - start < 200e-6:
            pass
        for i in range(launches):
            launch(function, threads, blocks, spin, seen[i * blocks :], urgent)
        events[2].record(urgent)
        torch.cuda.synchronize()
        gemm, end = (events[0].elapsed_time(events[i]) for i in (1, 2))
        rows = seen[: blocks * launches].cpu()
        # The GEMM's end on the same clock: a marker block behind it on its own stream.
        early = rows[rows[:, 0] < int(mark[0, 0]) - 500_000, 1]
        return {
            "gemm_end_ms": gemm,
            "kernel_end_ms": end,
            "early_blocks": len(early),
            "early_sms": len(set((early // 64).tolist())),
            "warp_slots": sorted(set((early % 64).tolist())),
        }

    rows: list[dict[str, Any]] = []
    done = set()
    for live in (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 36, 40):
        for warps in (1, 2, 3, 4):
            function, facts = compile_live(live, 32 * warps, 0)
            if facts["registers"] > 48 or (facts["registers"], warps) in done:
                continue
            done.add((facts["registers"], warps))
            for blocks in (24, sms // 2, sms, 3 * sms // 2, 2 * sms, 3 * sms, 4 * sms):
                for spin in (4, 20000):
                    once(function, 32 * warps, blocks, spin)
                    runs = [once(function, 32 * warps, blocks, spin) for _ in range(3)]
                    middle = sorted(runs, key=lambda r: r["kernel_end_ms"])[1]
                    rows.append(
                        {
                            "registers": facts["registers"],
                            "warps": warps,
                            "blocks": blocks,
                            "spin": spin,
                            **middle,
                        }
                    )
    # Several launches in a row beside one GEMM: does the room come back when a block ends?
    for live, warps, blocks, launches in (
        (4, 1, 24, 24),
        (4, 1, sms // 2, 8),
        (4, 1, sms, 6),
        (4, 1, 2 * sms, 4),
        (4, 2, 24, 12),
    ):
        function, facts = compile_live(live, 32 * warps, 0)
        for spin in (4, 2000):
            once(function, 32 * warps, blocks, spin, launches)
            rows.append(
                {
                    "registers": facts["registers"],
                    "warps": warps,
                    "blocks": blocks,
                    "launches": launches,
                    "spin": spin,
                    **once(function, 32 * warps, blocks, spin, launches),
                }
            )
    return rows


def prologues() -> list[dict[str, str]]:
    """First 24 bytes of every intercepted driver entry, as hex."""
    text = (Path(__file__).parents[2] / "overlapctl/launch/_shim/include/entries.def").read_text()
    library = ctypes.CDLL("libcuda.so.1")
    found = []
    for line in text.splitlines():
        if not line.startswith("OVL_ENTRY("):
            continue
        for symbol in [s for s in line.split('"') if s.startswith("cu")]:
            try:
                address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
            except AttributeError:
                found.append({"entry": symbol, "bytes": "missing"})
                continue
            code = ctypes.string_at(address or 0, 24).hex(" ")
            found.append({"entry": symbol, "bytes": code})
    return found


def main() -> None:
    """Run all three and write them."""
    out = Path(sys.argv[1])
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    for name, rows in (
        ("prologues", prologues()),
        ("occupancy", occupancy_rows()),
        ("room", room_rows()),
    ):
        results_file.write(out, f"residency-{name}", rows, spec="cuda")


if __name__ == "__main__":
    main()
