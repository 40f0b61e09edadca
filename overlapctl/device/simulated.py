"""A GPU out of the catalogue: no driver, no hardware, the same answers every time.

``sim:MODEL[,sms=N][,link=GBPS][,world=N][,nccl=X.Y.Z]``. The variants ask "what if": fewer or more
SMs, another rate to the peer, another number of GPUs, another NCCL (its kernels' footprint).

The GPUs are linked to each other alike, as on one NVSwitch or one fully connected board.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from overlapctl.device.catalogue import Model, model
from overlapctl.errors import DeviceError
from overlapctl.records import Clocks, DeviceFacts, Link, Topology

__all__ = ["SimulatedDevice", "parse_simulated"]

_MAX_SMS = 1024
_MAX_LINK_GBPS = 10_000
_MAX_WORLD = 64
_DEFAULT_WORLD = 2
_DEFAULT_NCCL = "2.28.9"
"""NCCL of the measurements that the simulation is compared with (bundled with torch 2.11)."""

_EXAMPLE = 'write it like "sim:h200,sms=100,link=50,world=8"'


@dataclass(frozen=True)
class SimulatedDevice:
    """A simulated GPU and its peers; implements :class:`~overlapctl.device.protocol.Device`.

    Parameters
    ----------
    model
        The catalogue's entry.
    sms, link_gbps
        Replace the model's SM count and the rate to a peer (GB/s, one direction, as reached).
    world
        Number of GPUs.
    nccl
        NCCL version whose kernels are simulated.
    """

    model: Model
    sms: int | None = None
    link_gbps: float | None = None
    world: int = _DEFAULT_WORLD
    nccl: str = _DEFAULT_NCCL

    is_simulated = True

    @property
    def spec(self) -> str:
        """The shortest text that makes this device."""
        parts = [f"sim:{self.model.key}"]
        if self.sms is not None:
            parts.append(f"sms={self.sms}")
        if self.link_gbps is not None:
            parts.append(f"link={self.link_gbps:.12g}")
        if self.world != _DEFAULT_WORLD:
            parts.append(f"world={self.world}")
        if self.nccl != _DEFAULT_NCCL:
            parts.append(f"nccl={self.nccl}")
        return ",".join(parts)

    def facts(self) -> DeviceFacts:
        """Catalogue facts with the variants applied.

        With another SM count the arithmetic rates scale along; memory and links do not.
        """
        facts = self.model.facts
        rates = facts.rates
        if self.sms is not None:
            share = self.sms / facts.sm_count
            rates = dataclasses.replace(
                rates,
                tensor_tflops=rates.tensor_tflops * share,
                fp32_tflops=rates.fp32_tflops * share,
            )
            facts = dataclasses.replace(facts, sm_count=self.sms)
        if self.link_gbps is not None:
            rates = dataclasses.replace(rates, link_gbps=self.link_gbps)
        return dataclasses.replace(facts, rates=rates)

    def topology(self) -> Topology:
        """``world`` GPUs of the model, each linked to each other.

        The variants are part of the name, so that a profile of one never matches another.
        """
        name = self.model.name + ("" if self.spec == f"sim:{self.model.key}" else f" [{self.spec}]")
        links = tuple(
            Link(
                source=i,
                target=j,
                kind=self.model.link,
                links=self.model.links,
                peer_access=True,
            )
            for i in range(self.world)
            for j in range(self.world)
            if i != j
        )
        return Topology(devices=(name,) * self.world, links=links)

    def clocks(self) -> Clocks:
        """Return the model's boost clock, always: the simulated GPU does not throttle."""
        return Clocks(sm_mhz=self.model.sm_mhz, memory_mhz=None, power_w=None, temperature_c=None)

    def versions(self) -> dict[str, str]:
        """Versions of the simulated software; torch and Triton as installed here, if at all."""
        return {
            "driver": "simulated",
            "torch": installed_version("torch"),
            "nccl": self.nccl,
            "triton": installed_version("triton"),
        }


def installed_version(package: str) -> str:
    """Version of an installed package without importing it, or ``"none"``."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def parse_simulated(spec: str) -> SimulatedDevice:
    """Make the device that ``"sim:..."`` describes.

    Raises
    ------
    DeviceError
        If the model or a variant is unknown, malformed, repeated or out of range.
    """
    name, *variants = spec.removeprefix("sim:").split(",")
    device = SimulatedDevice(model(name))
    seen: set[str] = set()
    for variant in variants:
        field, _, value = (part.strip() for part in variant.partition("="))
        if field in seen:
            raise DeviceError(f"{field!r} is given twice in {spec!r}", remedy="give it once")
        seen.add(field)
        device = dataclasses.replace(device, **_variant(field, value, spec))
    return device


def _variant(field: str, value: str, spec: str) -> dict[str, Any]:
    if field == "sms":
        return {"sms": _whole(field, value, 1, _MAX_SMS, spec)}
    if field == "world":
        return {"world": _whole(field, value, 1, _MAX_WORLD, spec)}
    if field == "link":
        return {"link_gbps": _rate(value, spec)}
    if field == "nccl":
        if not re.fullmatch(r"\d+\.\d+(\.\d+)?", value, re.ASCII):
            raise DeviceError(
                f"nccl={value!r} in {spec!r} is no version", remedy='write it like "nccl=2.28.9"'
            )
        return {"nccl": value}
    raise DeviceError(
        f"{field!r} in {spec!r} is no variant of a simulated device",
        remedy=f"known are sms, link, world and nccl: {_EXAMPLE}",
    )


def _whole(field: str, value: str, low: int, high: int, spec: str) -> int:
    if not re.fullmatch(r"\d{1,9}", value, re.ASCII) or not low <= int(value) <= high:
        raise DeviceError(
            f"{field}={value!r} in {spec!r} is no whole number from {low} to {high}",
            remedy=_EXAMPLE,
        )
    return int(value)


def _rate(value: str, spec: str) -> float:
    try:
        rate = float(value)
    except ValueError:
        rate = math.nan
    if not 0 < rate <= _MAX_LINK_GBPS:
        raise DeviceError(
            f"link={value!r} in {spec!r} is no rate above 0 and up to {_MAX_LINK_GBPS} GB/s",
            remedy=_EXAMPLE,
        )
    return rate
