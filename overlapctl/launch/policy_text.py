"""The policy as one line of text, for the program that `overlapctl run` starts.

The preloaded shim reads it before any Python runs, so the format is made for a small strict
reader in C (``_shim/src/policy_text.c``)::

    pad=4096;blocks=3;carveout=100;priority=1;captures=0;include=P;exclude=P;rule=P,pad,blocks,carveout

Only what differs from ``Policy()`` is written. ``include``, ``exclude`` and ``rule`` may repeat. In
patterns every byte but letters, digits and ``*?_-.:`` is written as ``%XX``.
"""

from __future__ import annotations

import urllib.parse

from overlapctl.records import Policy

__all__ = ["MAX_BYTES", "MAX_PATTERNS", "policy_to_text"]

MAX_BYTES = 65535
"""Longest text the shim reads (and well below what an environment variable may hold)."""

MAX_PATTERNS = 256
"""Most patterns of each kind the shim reads from text."""


def policy_to_text(policy: Policy) -> str:
    """Write ``policy`` for ``OVERLAPCTL_POLICY``.

    Raises
    ------
    ValueError
        If the text would be longer, or have more patterns, than the shim reads.
    """
    default = Policy()
    parts = [
        f"{key}={int(value)}"
        for key, value, usual in (
            ("pad", policy.pad_bytes, default.pad_bytes),
            ("blocks", policy.max_blocks_per_sm, default.max_blocks_per_sm),
            ("carveout", policy.carveout, default.carveout),
            ("priority", policy.comm_priority, default.comm_priority),
            ("captures", policy.shape_captures, default.shape_captures),
        )
        if value != usual
    ]
    parts += [f"include={_quoted(pattern)}" for pattern in policy.include]
    parts += [f"exclude={_quoted(pattern)}" for pattern in policy.exclude]
    parts += [
        f"rule={_quoted(r.pattern)},{r.pad_bytes},{r.max_blocks_per_sm},{r.carveout}"
        for r in policy.rules
    ]
    text = ";".join(parts)
    most = max(len(policy.include), len(policy.exclude), len(policy.rules))
    if len(text) > MAX_BYTES or most > MAX_PATTERNS:
        raise ValueError(
            f"the policy takes {len(text)} bytes and {most} patterns of one kind; "
            f"the shim reads at most {MAX_BYTES} and {MAX_PATTERNS}"
        )
    return text


def _quoted(pattern: str) -> str:
    return urllib.parse.quote(pattern, safe="*?_-.:")
