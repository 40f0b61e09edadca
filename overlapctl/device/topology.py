"""How the GPUs a process sees reach each other."""

from __future__ import annotations

from typing import Literal

from overlapctl.device import cuda, nvml
from overlapctl.records import Link, Topology

__all__ = ["read_topology"]

_ACROSS_NUMA_NODES = 40  # NVML_TOPOLOGY_NODE; NVML_TOPOLOGY_SYSTEM is above


def read_topology() -> Topology:
    """Read all visible GPUs and the link from each to each other.

    NVLinks are those NVML reports active: the direct ones between two GPUs or, where links end in
    NVSwitches, the fewer of both GPUs' links into them. Without NVLink: ``"pcie"``, or ``"system"``
    where the way crosses NUMA nodes. Without NVML every link counts as PCIe.

    Raises
    ------
    DeviceError
        If there is no driver or no GPU.
    """
    handles = [cuda.device_handle(index) for index in range(cuda.device_count())]
    addresses = [cuda.pci_address(handle) for handle in handles]
    links = [nvml.nvlinks(address) for address in addresses]

    def link(i: int, j: int) -> Link:
        kind, count = _kind(addresses[i], addresses[j], links[i], links[j])
        access = cuda.can_access_peer(handles[i], handles[j])
        return Link(source=i, target=j, kind=kind, links=count, peer_access=access)

    indices = range(len(handles))
    return Topology(
        devices=tuple(cuda.device_name(handle) for handle in handles),
        links=tuple(link(i, j) for i in indices for j in indices if i != j),
    )


def _kind(
    source: cuda.PciAddress,
    target: cuda.PciAddress,
    from_source: nvml.NvLinks | None,
    from_target: nvml.NvLinks | None,
) -> tuple[Literal["nvlink", "pcie", "system"], int]:
    if from_source and from_target:
        direct = from_source.to_gpu.get(target, 0)
        count = direct or min(from_source.to_switch, from_target.to_switch)
        if count:
            return "nvlink", count
    level = nvml.common_ancestor(source, target)
    return ("system" if level is not None and level >= _ACROSS_NUMA_NODES else "pcie"), 0
