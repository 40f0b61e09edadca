"""NCCL process-group options with elevated priority and a bounded footprint."""

from __future__ import annotations

from typing import Any

from overlapctl.errors import DeviceError, UsageError

__all__ = ["process_group_options"]

# NCCL's own cap on channels, hence on blocks per collective kernel (MAXCHANNELS in its source).
_MAX_CTAS = 64
_CTA_POLICIES = {"default": 0, "efficiency": 1, "zero": 2}


def process_group_options(
    *,
    high_priority: bool = True,
    min_ctas: int | None = None,
    max_ctas: int | None = None,
    cta_policy: str | None = None,
) -> Any:
    """Options for ``init_process_group(pg_options=...)`` and ``new_group(pg_options=...)``.

    Parameters
    ----------
    high_priority
        NCCL's internal stream gets the greatest priority. (The priority of the stream a collective
        is called from does not reach NCCL's kernels.)
    min_ctas, max_ctas
        Bounds on the blocks (NCCL: CTAs) of each collective kernel, 1 to 64; ``None``: NCCL
        decides. Fewer blocks leave compute more SMs and make the collective slower: on a fast link
        a cap usually loses, so measure first (``overlapctl tune``).
    cta_policy
        ``"default"``, ``"efficiency"`` (NCCL 2.27 and newer) or ``"zero"`` (2.28 and newer: copy
        engines where NCCL has them, for symmetric buffers).

    Returns
    -------
    torch.distributed.ProcessGroupNCCL.Options

    Raises
    ------
    UsageError
        A bound is out of range or the policy is unknown.
    DeviceError
        This torch was built without NCCL, or its binding lacks the field.
    """
    for field, value in (("min_ctas", min_ctas), ("max_ctas", max_ctas)):
        if value is not None and not 1 <= value <= _MAX_CTAS:
            raise UsageError(
                f"{field}={value!r} is out of range", remedy=f"use 1 to {_MAX_CTAS}, or None"
            )
    if min_ctas is not None and max_ctas is not None and min_ctas > max_ctas:
        raise UsageError(
            f"min_ctas={min_ctas} is above max_ctas={max_ctas}", remedy="swap or drop one of them"
        )
    if cta_policy is not None and cta_policy not in _CTA_POLICIES:
        raise UsageError(
            f"cta_policy={cta_policy!r} is unknown", remedy=f"use one of {', '.join(_CTA_POLICIES)}"
        )
    import torch.distributed as dist

    group_type = getattr(dist, "ProcessGroupNCCL", None)
    if group_type is None:
        raise DeviceError(
            "this torch has no NCCL process group",
            remedy="use a CUDA (or ROCm) build of torch for options of an NCCL group",
        )
    options = group_type.Options(is_high_priority_stream=high_priority)
    settings = {
        "min_ctas": min_ctas,
        "max_ctas": max_ctas,
        "cta_policy": None if cta_policy is None else _CTA_POLICIES[cta_policy],
    }
    for field, value in settings.items():
        if value is None:
            continue
        if not hasattr(options.config, field):
            raise DeviceError(
                f"this torch's NCCL configuration has no field {field!r}",
                remedy="update torch, or set the NCCL_* environment variable of that name",
            )
        setattr(options.config, field, value)
    return options
