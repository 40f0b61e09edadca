"""Doctor's look at the environment variables that decide whether anything can overlap."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from overlapctl import env
from overlapctl.reports.checks import Check, Status

__all__ = ["check_environment"]

_PREFIXES = ("NCCL_", "TORCH_NCCL_", "OVERLAPCTL_")
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def check_environment(variables: Mapping[str, str]) -> list[Check]:
    """Judge the variables that matter, and list the others with their values.

    Parameters
    ----------
    variables
        The process's environment.
    """
    checks = [_connections(variables)]
    for name in sorted(variables):
        if name in _RULES:
            checks.append(_RULES[name](name, variables[name]))
        elif name.startswith(_PREFIXES):
            checks.append(Check(name, Status.PASS, variables[name]))
    return checks


def _connections(variables: Mapping[str, str]) -> Check:
    value = variables.get(_CONNECTIONS)
    if value is None:
        return Check(_CONNECTIONS, Status.PASS, "8 (the driver's default; not set)")
    if not value.isdigit() or not 1 <= int(value) <= 32:
        return Check(
            _CONNECTIONS,
            Status.WARN,
            f"{value!r} is no number from 1 to 32: the driver ignores it",
            f"export {_CONNECTIONS}=8",
        )
    if int(value) == 1:
        return Check(
            _CONNECTIONS,
            Status.WARN,
            "1: all streams share one queue, so a collective starts only after every kernel that "
            "was launched before it, and a waiting stream blocks all others",
            f"unset {_CONNECTIONS} (or set it to 8 or 32) before CUDA starts; keep 1 only for "
            "Megatron-style code that relies on launch order",
        )
    return Check(_CONNECTIONS, Status.PASS, value)


def _launch_blocking(name: str, value: str) -> Check:
    if value in ("", "0"):
        return Check(name, Status.PASS, value or "empty")
    return Check(
        name,
        Status.FAIL,
        f"{value}: every launch waits for its kernel, so nothing can overlap",
        f"unset {name}",
    )


def _nccl_cap(name: str, value: str) -> Check:
    return Check(
        name,
        Status.WARN,
        f"{value}: caps the blocks of NCCL's kernels, which seldom helps and often slows the "
        "collective",
        f"unset {name} and compare with `overlapctl tune`",
    )


def _nccl_protocol(name: str, value: str) -> Check:
    return Check(
        name,
        Status.WARN,
        f"{value}: NCCL does not choose for itself any more",
        f"unset {name} unless you measured it",
    )


def _disabled(name: str, value: str) -> Check:
    if value in ("", "0"):
        return Check(name, Status.PASS, f"{value or 'empty'}: overlapctl is on")
    return Check(name, Status.WARN, f"{value}: overlap() changes nothing", f"unset {name}")


_RULES: dict[str, Callable[[str, str], Check]] = {
    "CUDA_LAUNCH_BLOCKING": _launch_blocking,
    "NCCL_ALGO": _nccl_protocol,
    "NCCL_MAX_CTAS": _nccl_cap,
    "NCCL_MAX_NCHANNELS": _nccl_cap,
    "NCCL_MAX_P2P_NCHANNELS": _nccl_cap,
    "NCCL_PROTO": _nccl_protocol,
    env.DISABLE: _disabled,
}
