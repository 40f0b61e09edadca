"""Attach the shim to the driver, once per process, and say clearly why not if not.

::

    OVERLAPCTL_DISABLE? -> profiler or debugger? -> GPU? -> load shim -> detour (or preloaded)
                                                               -> verify with a probe kernel
"""

from __future__ import annotations

import platform
import threading
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from overlapctl import env
from overlapctl.errors import AttachError, DeviceError, OverlapctlError, OverlapctlWarning
from overlapctl.launch.conflicts import find_conflicts
from overlapctl.launch.shim import AttachReport, Shim, Status, load
from overlapctl.launch.verify import Verification, verify

__all__ = ["Attachment", "current_attachment", "ensure_attached"]

DRIVER = "libcuda.so.1"


@dataclass(frozen=True)
class Attachment:
    """The attached shim.

    Parameters
    ----------
    kind
        ``"detour"`` or ``"preload"``.
    shim
        Push and pop policies here.
    entries
        Driver entries redirected (0 with the preload: they are redirected when looked up).
    driver_version
        As the driver says, for example 13000; 0: unknown.
    note
        Optional entries that were left as they are, and why; empty: none.
    verification
        What the probe kernel saw; pending until a CUDA context is current.
    """

    kind: Literal["detour", "preload"]
    shim: Shim
    entries: int
    driver_version: int
    note: str
    verification: Verification


_lock = threading.RLock()
_attachment: Attachment | None = None


def ensure_attached(driver: str | None = None) -> Attachment:
    """Attach the shim unless it is; verify it as soon as a CUDA context is current.

    Idempotent and process-wide. With the shim preloaded (``overlapctl run``) nothing needs to be
    patched. Call it again later to verify an attachment that was made before CUDA had started.

    Parameters
    ----------
    driver
        Path or name of the driver library; ``None``: ``libcuda.so.1``.

    Raises
    ------
    AttachError
        If the shim cannot be attached, must not be, or does not take effect.
    DeviceError
        If there is no driver or no GPU.
    """
    global _attachment
    with _lock:
        if _attachment is None:
            _attachment = _attach(driver)
        if _attachment.verification.pending:
            proof = verify(_attachment.shim, driver or DRIVER)
            _attachment = replace(_attachment, verification=proof)
        return _attachment


def current_attachment() -> Attachment | None:
    """Tell how the shim is attached, if :func:`ensure_attached` has done so in this process."""
    return _attachment


def _attach(driver: str | None) -> Attachment:
    if env.is_disabled():
        raise AttachError(f"{env.DISABLE} is set", remedy=f"unset {env.DISABLE} to shape launches")
    conflicts = find_conflicts()
    if conflicts:
        tools = "; ".join(f"{c.tool} ({c.evidence})" for c in conflicts)
        raise AttachError(
            f"a tool that owns the driver's entries is active: {tools}",
            remedy="run without it; the PyTorch profiler works together with overlapctl",
        )
    if driver is None and not _has_gpu():
        raise DeviceError(
            "no NVIDIA GPU is visible (no /dev/nvidia<n>)",
            remedy="run on a machine with a GPU, or try `overlapctl tune --device sim:h200`",
        )
    shim = load()
    if shim.attachment != "none":
        return _preloaded_or_attached(shim)
    report = shim.attach_detour(driver)
    if report.status not in (Status.OK, Status.ALREADY_ATTACHED) or (
        report.attachment == "none"  # another copy of the shim has the entries
    ):
        raise _error(report)
    return Attachment(
        kind="preload" if report.attachment == "preload" else "detour",
        shim=shim,
        entries=report.entries,
        driver_version=report.driver_version,
        note=report.detail if report.status == Status.OK else "",
        verification=Verification(0),
    )


def _preloaded_or_attached(shim: Shim) -> Attachment:
    ignored = shim.ignored_policy_parts()
    if ignored:
        warnings.warn(
            f"{ignored} parts of {env.POLICY} were not understood and are not in force",
            OverlapctlWarning,
            stacklevel=4,
        )
    return Attachment(
        kind="preload" if shim.attachment == "preload" else "detour",
        shim=shim,
        entries=0,
        driver_version=0,
        note="",
        verification=Verification(0),
    )


def _has_gpu() -> bool:
    return Path("/dev/dxg").exists() or any(
        node.name[len("nvidia") :].isdigit() for node in Path("/dev").glob("nvidia*")
    )


_PRELOAD = "start the program with `overlapctl run -- CMD` instead"


def _error(report: AttachReport) -> OverlapctlError:
    entry, detail = report.entry or "the driver", report.detail or "no detail"
    attach: dict[Status, tuple[str, str]] = {
        Status.MISSING_ENTRY: (
            f"the driver does not export {entry}",
            "update the NVIDIA driver (CUDA 11.8 or newer)",
        ),
        Status.PROLOGUE: (
            f"the first instructions of {entry} are not known to be safe to move: {detail}",
            f"{_PRELOAD}, and report the bytes",
        ),
        Status.FOREIGN_DETOUR: (
            f"{entry} has already been redirected by another tool: {detail}",
            f"run without that tool, or {_PRELOAD}",
        ),
        Status.ALREADY_ATTACHED: (
            f"another copy of the shim has {entry}: {detail}",
            "use one installation of overlapctl per process",
        ),
        Status.MEMORY: (
            f"no memory could be had within reach of {entry}",
            _PRELOAD,
        ),
        Status.PROTECT: (
            f"the code of {entry} may not be changed on this system",
            f"a security policy forbids it: {_PRELOAD}",
        ),
        Status.THREADS: (
            f"the program's threads could not be stopped safely: {detail}",
            f"attach earlier in the program, or {_PRELOAD}",
        ),
        Status.ARCHITECTURE: (
            f"there is no in-process attachment for {platform.machine()}",
            _PRELOAD,
        ),
        Status.DISABLED: (f"{env.DISABLE} is set", f"unset {env.DISABLE} to shape launches"),
    }
    if report.status == Status.NO_DRIVER:
        return DeviceError(
            f"the NVIDIA driver library cannot be opened: {detail}",
            remedy="install the NVIDIA driver, or try `overlapctl tune --device sim:h200`",
        )
    what, remedy = attach.get(
        report.status, (f"attaching failed with status {report.status.name}: {detail}", _PRELOAD)
    )
    return AttachError(what, remedy=remedy)
