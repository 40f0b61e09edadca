"""Brings the ranks of a group together once: can they share memory, and if not, why not.

The verdict is the same on every rank, since every rank hears all answers.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from overlapctl.collectives.control import Control, create_file, open_file
from overlapctl.collectives.streams import connections_problem
from overlapctl.errors import OverlapctlError

__all__ = ["Meeting", "meet"]

Meeting = Callable[[Any], Sequence[Any]]
"""Gives every rank an object of every rank; all ranks call it together."""


def meet(
    meeting: Meeting, rank: int, world: int, *, limit_s: float, problem: str | None = None
) -> tuple[Control | None, str | None]:
    """Map one shared file on all ranks.

    Parameters
    ----------
    meeting
        How ranks talk while there is no shared file yet.
    rank, world
        This rank and the number of ranks.
    limit_s
        Longest time to wait for a peer later on.
    problem
        A reason known already why this rank cannot take part.

    Returns
    -------
    control, reason
        The file and ``None``, or ``None`` and why peers cannot be reached, naming the rank.
    """
    problem = problem or connections_problem()
    answers = meeting((_host(), problem))
    problems = [f"rank {r}: {p}" for r, (_, p) in enumerate(answers) if p]
    if world < 2:
        problems.append("the group has one rank")
    if len({host for host, _ in answers}) > 1:
        problems.append("its ranks are on several hosts")
    if problems:
        return None, "; ".join(problems)
    path: Path | None = None
    file: int | None = None
    try:
        if rank == 0:
            file, path = create_file(world)
    except OverlapctlError as error:
        problem = str(error)
    first = meeting(path)[0]
    try:
        if rank != 0 and first is not None:
            file = open_file(Path(first), world)
    except OverlapctlError as error:
        problem = str(error)
    problems = [f"rank {r}: {p}" for r, p in enumerate(meeting(problem)) if p]
    if path is not None:  # everybody has it open, or nobody will: its name can go
        with contextlib.suppress(OSError):
            path.unlink()
    if problems or file is None:
        if file is not None:
            os.close(file)
        return None, "; ".join(problems)
    return Control(file, rank, world, limit_s=limit_s), None


def _host() -> str:
    """Name the running system: ranks with one host name may be in two containers."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {boot.read_text().strip()}"
    return socket.gethostname()
