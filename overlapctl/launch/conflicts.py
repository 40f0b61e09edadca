"""Debuggers and profilers that own the driver's entries: with one active the shim stays away.

Nsight Systems, Nsight Compute, compute-sanitizer and cuda-gdb redirect or replay driver calls
themselves. Two parties at the same entries may lose launches or replay altered ones. The PyTorch
profiler is no conflict: it listens through CUPTI and changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["Conflict", "find_conflicts"]

_MAPPED = (
    # (start of a mapped library's file name, tool)
    ("libToolsInjection", "Nsight Systems"),
    ("libnsys", "Nsight Systems"),
    ("libcuda-injection", "Nsight Compute"),
    ("libnv-cuda-injection", "Nsight Compute"),
    ("libcuinj64", "nvprof"),
    ("libsanitizer-collection", "compute-sanitizer"),
    ("libcudadebugger", "cuda-gdb"),
)
_INJECTION_VARIABLES = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")
_LAUNCHER_VARIABLES = (
    # (start of a variable set for the program under test, tool)
    ("NSYS_PROFILING_SESSION_ID", "Nsight Systems"),
    ("NV_COMPUTE_PROFILER_", "Nsight Compute"),
    ("NV_TPS_LAUNCH_TOKEN", "Nsight Compute"),
    ("NV_SANITIZER_", "compute-sanitizer"),
)
_LISTENERS = ("libkineto", "libcupti")
"""Injected libraries that only listen."""


@dataclass(frozen=True)
class Conflict:
    """A tool that owns the driver's entries, and how it was noticed."""

    tool: str
    evidence: str


def find_conflicts(
    environ: Mapping[str, str] | None = None, maps: str | None = None
) -> tuple[Conflict, ...]:
    """Look for tools the shim must not share the driver's entries with.

    Parameters
    ----------
    environ
        Environment variables; ``None``: this process's.
    maps
        Text of ``/proc/self/maps``; ``None``: this process's (empty where there is none).

    Returns
    -------
    tuple of Conflict
        One per tool, in the order noticed.
    """
    found: dict[str, Conflict] = {}
    environ = os.environ if environ is None else environ
    for conflict in (*_in_environment(environ), *_in_maps(_own_maps() if maps is None else maps)):
        found.setdefault(conflict.tool, conflict)
    return tuple(found.values())


def _own_maps() -> str:
    try:
        return Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return ""


def _tool_of(library: str) -> str | None:
    return next((tool for start, tool in _MAPPED if library.startswith(start)), None)


def _in_environment(environ: Mapping[str, str]) -> Iterator[Conflict]:
    for variable in _INJECTION_VARIABLES:
        value = environ.get(variable, "")
        library = PurePosixPath(value).name
        if library in ("", "none") or library.startswith(_LISTENERS):
            continue
        tool = _tool_of(library)
        # NVTX injection alone only receives annotations.
        if tool is None and variable == "CUDA_INJECTION64_PATH":
            tool = f"the CUDA injection library {library}"
        if tool is not None:
            yield Conflict(tool, f"{variable}={value}")
    for variable in environ:
        for start, tool in _LAUNCHER_VARIABLES:
            if variable.startswith(start):
                yield Conflict(tool, f"{variable} is set")


def _in_maps(maps: str) -> Iterator[Conflict]:
    # address, permissions, offset, device, inode, path
    lines = (line.split(None, 5) for line in maps.splitlines())
    paths = {fields[5] for fields in lines if len(fields) == 6}
    for path in sorted(paths):
        tool = _tool_of(PurePosixPath(path).name)
        if tool is not None:
            yield Conflict(tool, f"{path} is loaded")
