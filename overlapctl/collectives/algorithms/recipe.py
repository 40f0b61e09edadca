"""How a collective is to be carried out: the knobs of the builders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from overlapctl.errors import UsageError

__all__ = ["Recipe", "parts"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The choices that leave a collective's result alone.

    Parameters
    ----------
    algorithm
        ``"direct"``: every pair of ranks at once. ``"ring"``: neighbours of ``order`` only.
        ``"hierarchical"``: direct within each host, the inner group between hosts. ``"inner"``:
        the whole call goes to the inner group.
    chunks
        Parts a transfer is cut into, so that reductions and forwarding start early.
    depth
        Chunks that a staging buffer holds per peer (0: all). Fewer need less memory and more
        hand-shakes.
    lanes
        Copy streams per rank (0: one per peer).
    pull
        The receiving rank executes the copies (``"direct"`` only; second phases of broadcast and
        reduce push nevertheless).
    push_reduce
        Ranks add straight into the owner's memory, one after another, instead of staging: needs
        accumulation in the data type and no pre-scaling.
    order
        Ring only: the ranks in ring order (empty: ascending).
    hosts
        Hierarchical only: the host of each rank.
    align
        Elements that chunk and shard boundaries are multiples of.

    Raises
    ------
    UsageError
        If a number is out of range.
    """

    algorithm: Literal["direct", "ring", "hierarchical", "inner"] = "direct"
    chunks: int = 1
    depth: int = 0
    lanes: int = 0
    pull: bool = False
    push_reduce: bool = False
    order: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()
    align: int = 64

    def __post_init__(self) -> None:
        for name, least in (("chunks", 1), ("depth", 0), ("lanes", 0), ("align", 1)):
            if getattr(self, name) < least:
                raise UsageError(
                    f"{name} is {getattr(self, name)}", remedy=f"pass at least {least}"
                )


def parts(count: int, pieces: int, align: int = 1) -> list[tuple[int, int]]:
    """Cut ``count`` elements into ``pieces`` (offset, count), all but the last alike.

    Boundaries are multiples of ``align``; trailing parts may be empty.
    """
    size = -(-count // pieces)
    size = -(-size // align) * align
    return [(min(i * size, count), max(0, min(size, count - i * size))) for i in range(pieces)]
