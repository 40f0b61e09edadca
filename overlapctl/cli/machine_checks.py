"""Doctor's look at the machine: driver, GPU, versions, shim, profile and cache folder."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import TYPE_CHECKING

from overlapctl.errors import OverlapctlError, ProfileError
from overlapctl.reports.checks import Check, Status

if TYPE_CHECKING:
    from overlapctl.device.protocol import Device

__all__ = ["check_machine"]

MIN_TORCH = (2, 9)
"""Oldest torch that is supported (``pyproject.toml``)."""


def check_machine(spec: str | None) -> list[Check]:
    """Check everything that does not come from environment variables; takes a few seconds.

    Parameters
    ----------
    spec
        Device to check, ``None``: the GPU if there is one, else the simulated one.
    """
    from overlapctl.device import open_device

    try:
        device = open_device(spec)
    except OverlapctlError as error:
        return [
            Check("GPU", Status.FAIL, error.what, error.remedy),
            _torch(),
            _cache_folder(),
        ]
    return [
        *_gpu(device),
        _torch(),
        *_libraries(device),
        *_shim(device),
        _profile(device),
        _cache_folder(),
    ]


def _gpu(device: Device) -> list[Check]:
    facts, topology = device.facts(), device.topology()
    if device.is_simulated:
        return [
            Check(
                "GPU",
                Status.WARN,
                f"simulated: {facts.name}; nothing is shaped in this process",
                "run on a machine with an NVIDIA GPU to shape real launches",
            )
        ]
    checks = [
        Check("driver", Status.PASS, device.versions().get("driver", "unknown")),
        Check("GPU", Status.PASS, f"{facts.name} ({facts.arch}, {facts.sm_count} SMs)"),
    ]
    checks.append(_peers(len(topology.devices), topology.signature, topology.links))
    if facts.priority_greatest >= facts.priority_least:
        checks.append(
            Check("stream priorities", Status.WARN, "none: communication cannot be preferred")
        )
    clocks = device.clocks()
    if clocks.throttle_reasons:
        checks.append(
            Check(
                "clocks",
                Status.WARN,
                f"{clocks.sm_mhz} MHz, held down by {', '.join(clocks.throttle_reasons)}",
                "let the GPU cool, or check its power limit, before measuring",
            )
        )
    return checks


def _peers(count: int, signature: str, links: tuple[object, ...]) -> Check:
    if count < 2:
        return Check(
            "topology",
            Status.WARN,
            f"{signature}: one GPU has no collectives to overlap",
            "tune measures stand-ins here; collectives and links need two GPUs",
        )
    blind = [link for link in links if not getattr(link, "peer_access", True)]
    if blind:
        return Check(
            "topology",
            Status.WARN,
            f"{signature}: {len(blind)} of {len(links)} links have no peer access",
            "check ACS and IOMMU settings, or expect slower collectives",
        )
    return Check("topology", Status.PASS, signature)


def _torch() -> Check:
    version = _installed("torch")
    if version is None:
        return Check("torch", Status.FAIL, "not installed", "pip install 'torch>=2.9'")
    parts = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if parts < MIN_TORCH:
        return Check("torch", Status.FAIL, f"{version} is too old", "pip install 'torch>=2.9'")
    return Check("torch", Status.PASS, version)


def _libraries(device: Device) -> list[Check]:
    triton, nccl = _installed("triton"), device.versions().get("nccl", "")
    return [
        Check("triton", Status.PASS, triton)
        if triton
        else Check(
            "triton",
            Status.WARN,
            "not installed: Triton workloads cannot be measured",
            "pip install triton",
        ),
        Check("NCCL", Status.PASS, nccl)
        if nccl and nccl != "unknown"
        else Check(
            "NCCL",
            Status.WARN,
            "none: this torch has no NCCL, or there is no GPU",
            "install a CUDA build of torch to measure collectives",
        ),
    ]


def _profile(device: Device) -> Check:
    from overlapctl.profiles import ProfileStore, profile_key
    from overlapctl.records import Profile

    try:
        found = ProfileStore().load(profile_key(device))
    except ProfileError as error:
        return Check("profile", Status.FAIL, error.what, error.remedy)
    if isinstance(found, Profile):
        return Check("profile", Status.PASS, f"of {found.created}: {found.reason}")
    return Check("profile", Status.WARN, str(found), "overlapctl tune")


def _cache_folder() -> Check:
    from overlapctl.profiles import ProfileStore

    store = ProfileStore()
    try:
        store.check_writable()
    except ProfileError as error:
        return Check("cache folder", Status.FAIL, error.what, error.remedy)
    return Check("cache folder", Status.PASS, f"{store.folder} is writable")


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _shim(device: Device) -> list[Check]:
    from overlapctl.launch.conflicts import find_conflicts
    from overlapctl.launch.shim import library_path, load

    try:
        load()
    except OverlapctlError as error:
        status = Status.WARN if device.is_simulated else Status.FAIL
        return [Check("shim", status, error.what, error.remedy)]
    checks = [Check("shim", Status.PASS, f"built: {library_path().name}")]
    tracer = _tracer()
    if tracer:
        checks.append(
            Check(
                "debugger",
                Status.WARN,
                f"process {tracer} traces this one: attaching may be refused",
                "detach the debugger, or use `overlapctl run`",
            )
        )
    if not device.is_simulated:
        return [*checks, _attach()]
    checks += [
        Check(
            "profiler",
            Status.WARN,
            f"{found.tool} owns the driver's entries ({found.evidence})",
            "run without it; the PyTorch profiler works together with overlapctl",
        )
        for found in find_conflicts()
    ]
    return checks


def _attach() -> Check:
    """Attach in this process: finds patched entries, profilers and unknown prologues."""
    from overlapctl.launch.attach import ensure_attached

    try:
        import torch

        torch.zeros(1, device="cuda")  # A context, so that a probe kernel can prove the effect.
        attachment = ensure_attached()
    except OverlapctlError as error:
        return Check("attach", Status.FAIL, error.what, error.remedy)
    except (ImportError, RuntimeError) as error:
        return Check(
            "attach",
            Status.FAIL,
            f"CUDA does not start in torch: {str(error).splitlines()[0]}",
            "check the driver with nvidia-smi and that torch is a CUDA build",
        )
    proof = "not proven yet" if attachment.verification.pending else "proven by a probe kernel"
    note = f"; {attachment.note}" if attachment.note else ""
    return Check("attach", Status.PASS, f"works here, by {attachment.kind}, {proof}{note}")


def _tracer() -> int:
    """Id of the process that traces this one (a debugger), 0 if none."""
    try:
        status = Path(f"/proc/{os.getpid()}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    lines = [line for line in status.splitlines() if line.startswith("TracerPid:")]
    return int(lines[0].split()[1]) if lines else 0
