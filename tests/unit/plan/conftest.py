"""GPUs for the planner's tests, written out by hand so that a wrong catalogue cannot hide."""

from __future__ import annotations

import dataclasses

import pytest

from overlapctl.records import DeviceFacts, DeviceRates

KIB = 1024
H200 = DeviceFacts(
    name="NVIDIA H200",
    vendor="nvidia",
    arch="sm_90",
    sm_count=132,
    warp_size=32,
    max_threads_per_sm=2048,
    max_threads_per_block=1024,
    max_blocks_per_sm=32,
    registers_per_sm=65536,
    registers_per_block=65536,
    register_granule=256,
    subpartitions=4,
    smem_per_sm=228 * KIB,
    smem_per_block=48 * KIB,
    smem_per_block_optin=227 * KIB,
    smem_reserved_per_block=1024,
    smem_granule=128,
    carveout_steps=tuple(k * KIB for k in (0, 8, 16, 32, 64, 100, 132, 164, 196, 228)),
    l2_bytes=50 * KIB * KIB,
    memory_bytes=141 * 10**9,
    priority_least=0,
    priority_greatest=-5,
    rates=DeviceRates(hbm_gbps=4300, link_gbps=370, tensor_tflops=800, fp32_tflops=60),
    source="catalogue",
)
MI250X = dataclasses.replace(
    H200,
    name="AMD Instinct MI250X (one GCD)",
    vendor="amd",
    arch="gfx90a",
    sm_count=110,
    warp_size=64,
    max_threads_per_sm=2048,
    max_blocks_per_sm=32,
    registers_per_sm=512 * 64 * 4,
    registers_per_block=512 * 64 * 4,
    register_granule=8 * 64,
    smem_per_sm=64 * KIB,
    smem_per_block=64 * KIB,
    smem_per_block_optin=64 * KIB,
    smem_reserved_per_block=0,
    smem_granule=512,
    carveout_steps=(64 * KIB,),
    priority_least=0,
    priority_greatest=-1,
)
MI355X = dataclasses.replace(
    MI250X,
    arch="gfx950",
    sm_count=256,
    smem_per_sm=160 * KIB,
    smem_per_block_optin=160 * KIB,
    smem_granule=1280,
    carveout_steps=(160 * KIB,),
)


@pytest.fixture(scope="session")
def gpus() -> dict[str, DeviceFacts]:
    return {"h200": H200, "mi250x": MI250X, "mi355x": MI355X}


@pytest.fixture(scope="session")
def h200() -> DeviceFacts:
    return H200
