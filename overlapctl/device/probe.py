"""Facts of a real GPU: the driver's attributes, completed from the catalogue.

What the driver tells wins. From the table of architectures come the two things it does not tell:
allocation granules and the shared-memory sizes an SM can be configured to. Rates come from the
catalogue's model of that name; for a GPU it lacks they are derived, see :func:`derived_rates`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from overlapctl.device import cuda
from overlapctl.device.architectures import ARCHITECTURES, Architecture
from overlapctl.device.catalogue import MODELS, REACHED, Model, find_model
from overlapctl.records import DeviceFacts, DeviceRates

__all__ = ["compare", "derived_rates", "differences", "read_facts"]

PCIE_GBPS = 31.5 * REACHED.link
"""Rate between GPUs without NVLink: PCIe 4.0 x16 (31.5 GB/s) times the share links reach."""

_MEMORY_TOLERANCE = 0.1
"""Data sheets round, and ECC and the driver keep some: closer than this is no difference."""


def read_facts(index: int) -> DeviceFacts:
    """Read the facts of the GPU with this index among those visible to the process.

    Raises
    ------
    DeviceError
        If there is no driver, or no such GPU.
    """
    handle = cuda.device_handle(index)
    name, memory = cuda.device_name(handle), cuda.memory_bytes(handle)
    arch = (
        f"sm_{_read(handle, 'COMPUTE_CAPABILITY_MAJOR')}{_read(handle, 'COMPUTE_CAPABILITY_MINOR')}"
    )
    smem_per_sm = _read(handle, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR")
    table = architecture(arch, smem_per_sm)
    sm_count = _read(handle, "MULTIPROCESSOR_COUNT")
    least, greatest = cuda.priority_range(handle) or (table.priority_least, table.priority_greatest)
    model = find_model(name, memory)
    if model is not None and model.arch == arch:
        rates = _rates_of(model, sm_count)
    else:
        rates = derived_rates(
            arch,
            sm_count,
            clock_khz=_read(handle, "CLOCK_RATE"),
            memory_khz=_read(handle, "MEMORY_CLOCK_RATE"),
            bus_bits=_read(handle, "GLOBAL_MEMORY_BUS_WIDTH"),
        )
    engines = _read(handle, "ASYNC_ENGINE_COUNT")
    return DeviceFacts(
        name=name,
        vendor="nvidia",
        arch=arch,
        sm_count=sm_count,
        warp_size=_read(handle, "WARP_SIZE"),
        max_threads_per_sm=_read(handle, "MAX_THREADS_PER_MULTIPROCESSOR"),
        max_threads_per_block=_read(handle, "MAX_THREADS_PER_BLOCK"),
        max_blocks_per_sm=_read(handle, "MAX_BLOCKS_PER_MULTIPROCESSOR"),
        registers_per_sm=_read(handle, "MAX_REGISTERS_PER_MULTIPROCESSOR"),
        registers_per_block=_read(handle, "MAX_REGISTERS_PER_BLOCK"),
        register_granule=table.register_granule,
        subpartitions=table.subpartitions,
        smem_per_sm=smem_per_sm,
        smem_per_block=_read(handle, "MAX_SHARED_MEMORY_PER_BLOCK"),
        smem_per_block_optin=_read(handle, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        smem_reserved_per_block=_read(handle, "RESERVED_SHARED_MEMORY_PER_BLOCK"),
        smem_granule=table.smem_granule,
        carveout_steps=table.carveout_steps,
        l2_bytes=_read(handle, "L2_CACHE_SIZE"),
        memory_bytes=memory,
        priority_least=least,
        priority_greatest=greatest,
        rates=dataclasses.replace(rates, copy_engines=engines or rates.copy_engines),
        source="driver",
    )


def architecture(arch: str, smem_per_sm: int) -> Architecture:
    """Return the table's row for ``"sm_XY"``, or a conservative one for an architecture it lacks.

    The stand-in has the granules all NVIDIA architectures since 7.0 share, and the newest older
    row's carve-out steps, cut at what the SM has.
    """
    if arch in ARCHITECTURES:
        return ARCHITECTURES[arch]
    nearest = ARCHITECTURES[_nearest(arch, tuple(ARCHITECTURES))]
    steps = {step for step in nearest.carveout_steps if step < smem_per_sm} | {smem_per_sm}
    return dataclasses.replace(
        nearest, smem_per_sm=smem_per_sm, carveout_steps=tuple(sorted(steps))
    )


def derived_rates(
    arch: str, sm_count: int, *, clock_khz: int, memory_khz: int, bus_bits: int
) -> DeviceRates:
    """Estimate the rates of a GPU that the catalogue lacks.

    Memory: two transfers per clock x bus width, times the share large copies reach. Arithmetic: the
    catalogue's nearest architecture, scaled by SMs x clock. Link: PCIe 4.0 x16.

    Parameters
    ----------
    clock_khz, memory_khz
        Highest SM and memory clock; 0 where the driver does not tell, then the near model's.
    bus_bits
        Width of the memory bus.
    """
    by_arch = {m.arch: m for m in MODELS.values() if m.arch.startswith("sm_")}
    near = by_arch[_nearest(arch, tuple(by_arch))]
    speed = sm_count / near.sm_count * ((clock_khz / 1000) / near.sm_mhz if clock_khz else 1.0)
    hbm = 2 * memory_khz * 1e3 * bus_bits / 8 / 1e9 * REACHED.hbm
    return DeviceRates(
        hbm_gbps=round(hbm or near.rates.hbm_gbps, 1),
        link_gbps=round(PCIE_GBPS, 1),
        tensor_tflops=round(near.rates.tensor_tflops * speed, 1),
        fp32_tflops=round(near.rates.fp32_tflops * speed, 1),
    )


def compare(driver: DeviceFacts, catalogue: DeviceFacts) -> list[str]:
    """List where the driver contradicts the catalogue; the driver's value is the one in use.

    Names and rates are not compared: the driver tells no rates. Memory and L2 count as different
    from 10% on.
    """
    found = []
    for field in dataclasses.fields(DeviceFacts):
        if field.name in ("name", "rates", "source"):
            continue
        real, table = getattr(driver, field.name), getattr(catalogue, field.name)
        if field.name in ("memory_bytes", "l2_bytes"):
            same = abs(real - table) <= _MEMORY_TOLERANCE * table
        else:
            same = real == table
        if not same:
            found.append(f"{field.name} is {real} by the driver, {table} in the catalogue")
    return found


def differences(facts: DeviceFacts) -> list[str]:
    """List where a real GPU differs from its catalogue entry, or say that it has none."""
    model = find_model(facts.name, facts.memory_bytes)
    if model is None:
        return [f"{facts.name} is not in the catalogue: its rates are derived, not measured"]
    return compare(facts, model.facts)


def _rates_of(model: Model, sm_count: int) -> DeviceRates:
    """Model's rates; a GPU with fewer SMs (a MIG instance, a cut-down part) has its share."""
    rates = model.rates
    share = min(1.0, sm_count / model.sm_count)
    if share == 1.0:
        return rates
    return dataclasses.replace(
        rates,
        hbm_gbps=rates.hbm_gbps * share,
        tensor_tflops=rates.tensor_tflops * share,
        fp32_tflops=rates.fp32_tflops * share,
    )


def _read(handle: Any, name: str) -> int:
    return cuda.attribute(handle, name)


def _nearest(arch: str, known: tuple[str, ...]) -> str:
    """Newest known NVIDIA architecture that is not newer than ``arch``; else the oldest."""
    numbers = {int(a.removeprefix("sm_")): a for a in known if a.startswith("sm_")}
    own = int(arch.removeprefix("sm_"))
    older = [n for n in numbers if n <= own]
    return numbers[max(older) if older else min(numbers)]
