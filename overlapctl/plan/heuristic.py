"""What ``smem_reserve="auto"`` does on a machine that has no profile.

The heuristic is deliberately small, because nothing was measured here: it raises the priority of
communication launches and pads nothing. Priority changes neither the compute kernels nor their
residency; beside a persistent kernel it has no effect, beside a kernel of many waves it turns
serial execution into overlapped (``docs/measuring.md``). Padding pays only when the residency it
leaves is known to be enough, which is what ``overlapctl tune`` finds out.
"""

from __future__ import annotations

from overlapctl.records import DeviceFacts, Policy

__all__ = ["heuristic_policy"]


def heuristic_policy(facts: DeviceFacts) -> tuple[Policy, str]:
    """Policy for an untuned GPU, and the reason in words.

    Parameters
    ----------
    facts
        The GPU at hand; one without stream priorities gets the default policy.

    Returns
    -------
    policy
        Communication at the greatest priority, nothing padded.
    reason
        For reports.
    """
    if facts.priority_greatest >= facts.priority_least:
        return Policy(), f"{facts.name} has no stream priorities: nothing is changed untuned"
    return (
        Policy(comm_priority=True),
        "no profile: communication launches at the greatest priority, nothing padded "
        "(run `overlapctl tune` to find what padding gains here)",
    )
