"""The folder of profiles: found by key, replaced atomically, never guessed, never lost.

- One file per key; its name is readable and ends in a hash of the whole key.
- Writers hold a lock and write ``.tmp-*`` in the same folder, fsync it and rename it: a reader or a
  killed writer sees the old or the new file, never half of one.
- A file that cannot be read is moved aside (``*.broken-<n>``) by the next writer, not deleted. One
  that a newer overlapctl wrote is left where it is.
- Files decide how a job launches kernels: they are honoured only if they, and their folder,
  belong to the user or root and nobody else can write them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock
import platformdirs

from overlapctl import env
from overlapctl.errors import ProfileError
from overlapctl.profiles.combine import combine_verdicts
from overlapctl.profiles.key import FieldDifference, differences
from overlapctl.profiles.schema import NewerProfileError, dump_profile, parse_profile
from overlapctl.records import Profile, ProfileKey, to_json

__all__ = ["Entry", "Miss", "ProfileStore", "default_folder"]

LOCK_TIMEOUT_S = 20.0
"""How long a writer waits for another one; writing takes milliseconds."""

_MAX_BYTES = 32 << 20
_TEMP_PREFIX = ".tmp-"


def default_folder() -> Path:
    """``profiles`` in ``OVERLAPCTL_CACHE_DIR``, else in the user's cache folder."""
    return (env.cache_dir() or platformdirs.user_cache_path("overlapctl")) / "profiles"


@dataclass(frozen=True)
class Entry:
    """One file of the folder: a profile, or the reason why it is none."""

    path: Path
    profile: Profile | None
    problem: str = ""


@dataclass(frozen=True)
class Miss:
    """No profile has this key. Prints which fields differ from each stored one, nearest first."""

    key: ProfileKey
    nearest: tuple[tuple[Path, tuple[FieldDifference, ...]], ...] = ()

    def __str__(self) -> str:
        """Render as one sentence."""
        if not self.nearest:
            return "no profile is stored"
        path, fields = self.nearest[0]
        more = f" ({len(self.nearest) - 1} further stored)" if len(self.nearest) > 1 else ""
        return f"no profile matches; nearest {path.name}: {'; '.join(map(str, fields))}{more}"


class ProfileStore:
    """Reads and writes the profiles of one folder.

    Parameters
    ----------
    folder
        Where the files are; ``None``: :func:`default_folder`. Made when first written to.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else default_folder()

    def path(self, key: ProfileKey) -> Path:
        """Where the profile of ``key`` is, or would be."""
        digest = hashlib.sha256(to_json(key, indent=None).encode()).hexdigest()[:12]
        words = f"{key.gpu} driver-{key.driver} torch-{key.torch}"
        slug = re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-.")[:80]
        return self.folder / f"{slug}-{digest}.json"

    def load(self, key: ProfileKey) -> Profile | Miss:
        """Find the profile whose key equals ``key`` in every field.

        Raises
        ------
        ProfileError
            If the file of this key is broken, newer, or could be written by somebody else.
        """
        path = self.path(key)
        if path.exists():
            profile = self._read(path)
            if profile.key == key:
                return profile
        stored = [(e.path, differences(e.profile.key, key)) for e in self.entries() if e.profile]
        return Miss(key, tuple(sorted(stored, key=lambda item: (len(item[1]), item[0].name))))

    def entries(self) -> list[Entry]:
        """All files: profiles, unreadable ones with the problem, and those moved aside.

        Raises
        ------
        ProfileError
            If the folder cannot be listed.
        """
        try:
            names = sorted(p for p in self.folder.iterdir() if not p.name.startswith("."))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._folder_error("read", error) from error
        return [self._entry(path) for path in names if ".json" in path.name]

    def check_writable(self) -> None:
        """Make the folder if needed and prove that a profile could be written.

        Raises
        ------
        ProfileError
            If not, with the remedy. Called before measuring, so that no result is lost.
        """
        with self._locked():
            self._write_atomically(self.folder / ".writable", "")
            (self.folder / ".writable").unlink()

    def save(self, profile: Profile) -> Path:
        """Store ``profile`` under its key; a broken or foreign file in its place moves aside.

        Raises
        ------
        ProfileError
            If the folder cannot be written, or holds a newer version of this profile.
        """
        with self._locked():
            self._existing(self.path(profile.key))
            return self._write(profile)

    def merge(self, profile: Profile) -> Profile:
        """Store ``profile`` and keep the verdicts an earlier run gave for other cases.

        Parameters
        ----------
        profile
            The new verdicts; ``policy`` and ``reason`` are worked out anew from all verdicts.

        Returns
        -------
        Profile
            What was stored: earlier verdicts first, a case tuned again replaced in its place.

        Raises
        ------
        ProfileError
            As :meth:`save`.
        """
        with self._locked():
            earlier = self._existing(self.path(profile.key))
            new = {verdict.case: verdict for verdict in profile.verdicts}
            kept = earlier.verdicts if earlier is not None else ()
            verdicts = [new.pop(old.case, old) for old in kept] + list(new.values())
            policy, reason = combine_verdicts(verdicts)
            merged = Profile(
                key=profile.key,
                created=profile.created,
                overlapctl=profile.overlapctl,
                policy=policy,
                reason=reason,
                verdicts=tuple(verdicts),
            )
            self._write(merged)
            return merged

    def remove(self, name: str) -> Path:
        """Delete one file of the folder.

        Parameters
        ----------
        name
            A file name as :meth:`entries` lists it, or the part before ``.json``.

        Raises
        ------
        ProfileError
            If there is no such file, or it cannot be deleted.
        """
        path = self._named(name).path
        with self._locked():
            path.unlink(missing_ok=True)
        return path

    def named(self, name: str) -> Profile:
        """Read one file of the folder, whatever its key.

        Parameters
        ----------
        name
            As for :meth:`remove`.

        Raises
        ------
        ProfileError
            If there is no such file, or it cannot be used.
        """
        return self._read(self._named(name).path)

    # --- reading ------------------------------------------------------------------------------

    def _named(self, name: str) -> Entry:
        for entry in self.entries():
            if name in (entry.path.name, entry.path.stem):
                return entry
        raise ProfileError(
            f"no profile is called {name!r} in {self.folder}",
            remedy="`overlapctl profiles list` shows the names",
        )

    def _entry(self, path: Path) -> Entry:
        if ".broken-" in path.name:
            return Entry(path, None, "moved aside because it could not be used")
        try:
            return Entry(path, self._read(path))
        except ProfileError as error:
            return Entry(path, None, str(error))

    def _read(self, path: Path) -> Profile:
        _check_owner(self.folder.stat(), self.folder)
        try:
            # Non-blocking: a pipe in the folder must not hang the training job.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                _check_owner(status, path)
                if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
                    raise ProfileError(
                        f"{path} is no ordinary file of at most {_MAX_BYTES >> 20} MiB",
                        remedy="remove it and run `overlapctl tune`",
                    )
                return parse_profile(file.read(), source=str(path))
        except OSError as error:
            raise ProfileError(
                f"{path} cannot be read: {error.strerror}",
                remedy="give yourself read permission, or remove it and run `overlapctl tune`",
            ) from error

    # --- writing ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = filelock.FileLock(self.folder / ".lock", mode=0o600)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(self.folder.stat(), self.folder)
            lock.acquire(timeout=LOCK_TIMEOUT_S)
        except filelock.Timeout as error:
            raise ProfileError(
                f"another process has held {self.folder / '.lock'} for {LOCK_TIMEOUT_S:.0f} s",
                remedy="wait for the other `overlapctl tune` to end, or end it",
            ) from error
        except (OSError, NotImplementedError) as error:
            raise self._folder_error("write to", error) from error
        try:
            # Writers hold the lock, so any temporary file found here was left by a killed one.
            for stale in self.folder.glob(f"{_TEMP_PREFIX}*"):
                stale.unlink(missing_ok=True)
            yield
        except OSError as error:
            raise self._folder_error("write to", error) from error
        finally:
            lock.release()

    def _existing(self, path: Path) -> Profile | None:
        """Read the profile to be replaced; move it aside if it is broken or another key's."""
        if not os.path.lexists(path):
            return None
        try:
            found = self._read(path)
        except NewerProfileError:
            raise
        except ProfileError:
            found = None
        # Another machine's verdicts (a copied file) count here as little as a broken file's.
        if found is not None and self.path(found.key) == path:
            return found
        number = 1
        while os.path.lexists(aside := path.with_name(f"{path.name}.broken-{number}")):
            number += 1
        path.rename(aside)
        return None

    def _write(self, profile: Profile) -> Path:
        path = self.path(profile.key)
        self._write_atomically(path, dump_profile(profile))
        return path

    def _write_atomically(self, path: Path, text: str) -> None:
        descriptor, temporary = tempfile.mkstemp(prefix=_TEMP_PREFIX, dir=self.folder)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(descriptor)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _folder_error(self, verb: str, error: Exception) -> ProfileError:
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return ProfileError(
            f"cannot {verb} the profile folder {self.folder}: {text}",
            remedy=f"make it writable, or set {env.CACHE_DIR} to a folder that is",
        )


def _check_owner(status: os.stat_result, path: Path) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise ProfileError(
            f"{path} belongs to user {status.st_uid}, not to you or root",
            remedy=f"set {env.CACHE_DIR} to a folder of your own",
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ProfileError(
            f"{path} can be written by other users (mode {stat.S_IMODE(status.st_mode):o})",
            remedy=f"chmod go-w '{path}'",
        )
