"""``overlapctl run``: start a program with the shim preloaded and a policy in force."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from overlapctl import env
from overlapctl.errors import OverlapctlError, ProfileError, UsageError
from overlapctl.launch.policy_text import policy_to_text
from overlapctl.launch.shim import check_trusted, library_path
from overlapctl.records import Policy
from overlapctl.specs import parse_size

__all__ = ["CONTEXT_SETTINGS", "run"]

CONTEXT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": False}
"""For registering the command: what follows the first word of CMD belongs to CMD."""

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as shells do


def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- CMD...", help="Program and arguments.")
    ] = None,
    max_blocks: Annotated[
        int | None,
        typer.Option(
            "--max-blocks", min=1, max=64, help="Most resident blocks per SM of compute kernels."
        ),
    ] = None,
    pad: Annotated[
        str | None,
        typer.Option("--pad", metavar="SIZE", help="Shared memory added per block, like 48KiB."),
    ] = None,
    carveout: Annotated[
        int | None,
        typer.Option("--carveout", min=0, max=100, help="Shared-memory carve-out, percent."),
    ] = None,
    comm_priority: Annotated[
        bool | None,
        typer.Option(
            "--comm-priority/--no-comm-priority",
            help="Launch communication kernels at the greatest priority.  [default: yes]",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile", metavar="FILE|auto", help="Start from a profile that tune wrote."
        ),
    ] = None,
) -> None:
    """Run CMD with launches shaped from its start; options override the profile's policy."""
    if not command:
        raise UsageError(
            "CMD is missing", remedy="give the program to run: overlapctl run -- python train.py"
        )
    base = Policy(comm_priority=True) if profile is None else _profile_policy(profile)
    policy = _override(base, max_blocks, pad, carveout, comm_priority)
    shim = library_path()
    check_trusted(shim)
    _execute(command, child_environment(os.environ, shim, policy))


def child_environment(environ: Mapping[str, str], shim: Path, policy: Policy) -> dict[str, str]:
    """Give the environment for the program: the shim preloaded before what already is.

    Raises
    ------
    UsageError
        If the shim's path cannot be written in ``LD_PRELOAD``, or the policy is too large.
    """
    path = str(shim.resolve())
    if any(c in path for c in " :\t\n"):
        raise UsageError(
            f"the shim's path {path!r} has a space or colon, a separator in LD_PRELOAD",
            remedy="install overlapctl into an environment whose path has none",
        )
    try:
        text = policy_to_text(policy)
    except ValueError as error:
        raise UsageError(str(error), remedy="use fewer or shorter patterns") from None
    loaded = [p for p in environ.get("LD_PRELOAD", "").replace(":", " ").split() if p != path]
    return {
        **environ,
        "LD_PRELOAD": " ".join([path, *loaded]),
        env.SHIM: path,
        env.POLICY: text,
    }


def _override(
    base: Policy,
    max_blocks: int | None,
    pad: str | None,
    carveout: int | None,
    comm_priority: bool | None,
) -> Policy:
    return Policy(
        pad_bytes=base.pad_bytes if pad is None else _pad_bytes(pad),
        max_blocks_per_sm=base.max_blocks_per_sm if max_blocks is None else max_blocks,
        carveout=base.carveout if carveout is None else carveout,
        comm_priority=base.comm_priority if comm_priority is None else comm_priority,
        include=base.include,
        exclude=base.exclude,
        rules=base.rules,
        shape_captures=base.shape_captures,
    )


def _pad_bytes(text: str) -> int:
    try:
        size = parse_size(text)
    except UsageError as error:
        raise UsageError(f"--pad: {error.what}", remedy=error.remedy) from None
    if size > 1 << 20:  # more than any GPU has per block, by far: a slip of units
        raise UsageError(f"--pad {text} is out of range", remedy="use at most 1MiB")
    return size


def _profile_policy(source: str) -> Policy:
    if source != "auto":
        from overlapctl.profiles.schema import parse_profile

        path = Path(source)
        try:
            _check_trusted_profile(path)
            return parse_profile(path.read_bytes(), source=source).policy
        except OSError as error:
            raise ProfileError(
                f"--profile {source} cannot be read: {error.strerror}",
                remedy="give a file that `overlapctl tune` wrote, or `auto`",
            ) from None
    from overlapctl.device import open_device
    from overlapctl.profiles import ProfileStore, profile_key
    from overlapctl.records import Profile

    found = ProfileStore().load(profile_key(open_device("cuda")))
    if isinstance(found, Profile):
        return found.policy
    raise ProfileError(
        f"--profile auto: {found}",
        remedy="run `overlapctl tune` first, or give --max-blocks, --pad or --carveout",
    )


def _check_trusted_profile(path: Path) -> None:
    info = path.stat()
    if info.st_uid not in (0, os.geteuid()) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ProfileError(
            f"--profile {path} belongs to, or can be written by, somebody else",
            remedy=f"check what it says, then make it yours: chown $USER {path}; chmod go-w {path}",
        )


def _execute(command: list[str], environ: dict[str, str]) -> None:
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        failure = OverlapctlError(
            f"{command[0]} cannot be run: {error.strerror}",
            remedy="check the name and PATH" if missing else "check that it may be executed",
        )
        failure.exit_code = _NOT_FOUND if missing else _NOT_EXECUTABLE
        raise failure from None
