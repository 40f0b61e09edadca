"""The shim's decisions in Python: the oracle its tests compare the C code with.

Written from the rules, not from the C code: residency comes from :mod:`overlapctl.plan.residency`,
the pad for a target from its inverse, and every reason for leaving a launch alone stands in the
order in which it is asked. It also serves where no shim can be loaded, to say what one would do.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass

from overlapctl.plan import residency as model
from overlapctl.records import DeviceFacts, KernelFootprint, Policy, Role, Rule

__all__ = ["Decision", "TwinLaunch", "Wish", "decide", "match", "residency", "role_of_name", "wish"]

# Mangled names carry a prefix (_Z27ncclDevKernel_...), hence the leading stars.
_COMMUNICATION = (
    *("nccl*", "*ncclDev*", "*ncclKernel*", "*ncclSym*", "*nccl*symk*"),
    *("rccl*", "*rcclGenericKernel*", "*mscclKernel*", "*mscclpp*"),
    *("nvshmem*", "*nvshmemi_*", "*nvshmemx_*"),
    *("*one_shot_all_reduce*", "*two_shot_all_reduce*", "*multimem_*"),
    *("*symm_mem*", "*symmetric_memory*", "*deep_ep*", "*DeepEP*", "*cross_device_reduce*"),
    *("overlapctl_comm_*", "*overlapctl_comm_*"),
)


@dataclass(frozen=True, kw_only=True)
class TwinLaunch:
    """One launch as the job asked for it.

    Parameters
    ----------
    footprint
        The kernel and its grid.
    role
        What the kernel is.
    capturing
        Its stream is being captured into a graph.
    failed_before
        A changed launch of this kernel was refused by the driver before.
    natural_blocks
        Blocks per SM as the driver says, or ``None`` to use the model.
    """

    footprint: KernelFootprint
    role: Role = Role.COMPUTE
    capturing: bool = False
    failed_before: bool = False
    natural_blocks: int | None = None


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a policy asks for one kernel; ``refusal`` says why it is left alone, if it is."""

    pad_bytes: int = 0
    max_blocks_per_sm: int = 0
    carveout: int = -1
    comm_priority: bool = False
    shape_captures: bool = True
    refusal: Rule | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """How a launch goes out.

    ``priority`` and ``carveout`` are ``None`` where the launch's own value stays.
    """

    dynamic_smem: int
    blocks_before: int
    blocks_after: int
    rule: Rule
    priority: int | None = None
    carveout: int | None = None


def match(pattern: str, text: str) -> bool:
    """Whether a shell-style pattern (only ``*`` and ``?``) covers the whole text."""
    literal = re.sub(r"\[", "[[]", pattern)
    return fnmatch.fnmatchcase(text, literal)


def role_of_name(name: str) -> Role:
    """Role of a kernel by the built-in patterns; an unknown name is compute."""
    known = any(match(pattern, name) for pattern in _COMMUNICATION)
    return Role.COMMUNICATION if known else Role.COMPUTE


def residency(facts: DeviceFacts, footprint: KernelFootprint) -> int:
    """Blocks per SM by the model."""
    return model.blocks_per_sm(facts, footprint)


def wish(policy: Policy, kernel: str) -> Wish:
    """Return what ``policy`` asks for the kernel of that name."""
    refusal = None
    if any(match(pattern, kernel) for pattern in policy.exclude):
        refusal = Rule.EXCLUDED
    elif policy.include and not any(match(pattern, kernel) for pattern in policy.include):
        refusal = Rule.NOT_INCLUDED
    source = next((rule for rule in policy.rules if match(rule.pattern, kernel)), policy)
    return Wish(
        pad_bytes=source.pad_bytes,
        max_blocks_per_sm=source.max_blocks_per_sm,
        carveout=source.carveout,
        comm_priority=policy.comm_priority,
        shape_captures=policy.shape_captures,
        refusal=refusal,
    )


def decide(facts: DeviceFacts, launch: TwinLaunch, wish: Wish) -> Decision:
    """Decide one launch.

    Parameters
    ----------
    facts
        The GPU.
    launch
        The launch as asked.
    wish
        What the policy asks for its kernel (:func:`wish`).
    """
    footprint = launch.footprint
    before = launch.natural_blocks
    if before is None:
        before = residency(facts, footprint)

    def unpadded(
        rule: Rule, *, priority: int | None = None, carveout: int | None = None
    ) -> Decision:
        return Decision(
            dynamic_smem=footprint.dynamic_smem,
            blocks_before=before,
            blocks_after=before,
            rule=rule,
            priority=priority,
            carveout=carveout,
        )

    if launch.capturing and not wish.shape_captures:
        return unpadded(Rule.CAPTURE_LEFT_ALONE)
    if launch.role is Role.IGNORED:
        return unpadded(Rule.IGNORED)
    if launch.role is Role.COMMUNICATION:
        raised = wish.comm_priority and not launch.failed_before
        return unpadded(Rule.COMMUNICATION, priority=facts.priority_greatest if raised else None)
    if footprint.cooperative:
        return unpadded(Rule.COOPERATIVE)
    if launch.failed_before:
        return unpadded(Rule.FAILED_BEFORE)
    if wish.refusal is not None:
        return unpadded(wish.refusal)

    is_resident = footprint.blocks <= before * facts.sm_count
    carveout: int | None = min(wish.carveout, 100)
    # Less shared memory could mean fewer blocks: not for a grid that is resident as a whole.
    if wish.carveout < 0 or (wish.carveout < 100 and is_resident):
        carveout = None

    if wish.pad_bytes == 0 and wish.max_blocks_per_sm == 0:
        return unpadded(Rule.NOTHING_ASKED, carveout=carveout)
    if before < 1:
        return unpadded(Rule.NO_EFFECT, carveout=carveout)

    reason, pads = _pads(facts, footprint, wish, before)
    legal: list[tuple[int, int, Rule]] = []
    for pad, rule in pads:
        after = min(before, residency(facts, model.padded(footprint, pad)))
        refusal = _refusal(facts, footprint, pad, before, after)
        if refusal is None:
            legal.append((pad, after, rule))
        else:
            reason = refusal
    if not legal:
        return unpadded(reason, carveout=carveout)
    for pad, after, rule in legal:
        if is_resident and footprint.blocks > after * facts.sm_count:
            continue
        return Decision(
            dynamic_smem=footprint.dynamic_smem + pad,
            blocks_before=before,
            blocks_after=after,
            rule=rule,
            carveout=carveout,
        )
    return unpadded(Rule.KEEPS_GRID_RESIDENT, carveout=carveout)


def _pads(
    facts: DeviceFacts, footprint: KernelFootprint, wish: Wish, before: int
) -> tuple[Rule, list[tuple[int, Rule]]]:
    """List the pads to try, largest first, and the reason if there is none."""
    pads = [(wish.pad_bytes, Rule.PADDED_BYTES)] if wish.pad_bytes else []
    reason = Rule.NOTHING_ASKED
    if wish.max_blocks_per_sm:
        if before <= wish.max_blocks_per_sm:
            reason = Rule.ALREADY_AT_TARGET
        else:
            pad = model.pad_for_blocks(facts, footprint, wish.max_blocks_per_sm)
            if pad is None and model.blocks_per_sm(facts, footprint) == 0:
                pad = 0  # the driver launches what the model takes for too large
            if pad is None:
                reason = Rule.OPT_IN_LIMIT
            else:
                # Where driver and model differ the model may say 0: at least one byte is a pad.
                pads.insert(0, (max(1, pad), Rule.PADDED_TO_TARGET))
    return reason, sorted(pads, key=lambda entry: -entry[0])


def _refusal(
    facts: DeviceFacts, footprint: KernelFootprint, pad: int, before: int, after: int
) -> Rule | None:
    if footprint.smem + pad > facts.smem_per_block_optin:
        return Rule.OPT_IN_LIMIT
    if after < 1:
        return Rule.NO_EFFECT
    if footprint.cluster > 1 and after != before:
        return Rule.CLUSTER
    return None
