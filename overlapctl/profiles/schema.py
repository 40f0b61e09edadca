"""The profile document: a versioned JSON object that any editor can show.

``{"schema": "overlapctl-profile", "version": 1, "sha256": ..., "profile": {...}}``

``sha256`` covers the content (not the white space): a flipped digit would otherwise be a valid
document that shapes a job wrongly.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pydantic

from overlapctl.errors import ProfileError
from overlapctl.records import Profile

__all__ = ["SCHEMA", "VERSION", "NewerProfileError", "dump_profile", "parse_profile"]

SCHEMA = "overlapctl-profile"
"""Value of ``schema``: tells a profile from any other JSON file."""

VERSION = 1
"""Version this release reads and writes."""

_FIELDS = {"schema", "version", "sha256", "profile"}
_RETUNE = "run `overlapctl tune`: it moves this file aside and writes a new one"
_ADAPTER: pydantic.TypeAdapter[Profile] = pydantic.TypeAdapter(Profile)


class NewerProfileError(ProfileError):
    """The document was written by a newer overlapctl: not broken, and not to be replaced."""


def dump_profile(profile: Profile) -> str:
    """Write a profile as the text of its document.

    Raises
    ------
    ProfileError
        If the profile would not be read back equal (JSON knows no NaN and no infinity).
    """
    content = json.loads(_ADAPTER.dump_json(profile))
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "sha256": _digest(content),
        "profile": content,
    }
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    try:
        same = parse_profile(text.encode(), source="the new profile") == profile
    except (ProfileError, UnicodeEncodeError) as error:
        raise ProfileError(
            f"the profile cannot be written as JSON: {error}",
            remedy="report this as a bug: a measured value is not a finite number or not text",
        ) from error
    if not same:
        raise ProfileError(
            "the profile would be read back different from what it is",
            remedy="report this as a bug, with the output of `overlapctl tune --json`",
        )
    return text


def parse_profile(data: bytes, *, source: str) -> Profile:
    """Read a profile from the bytes of its document.

    Parameters
    ----------
    data
        The file's content.
    source
        What to call it in errors, usually its path.

    Raises
    ------
    ProfileError
        If it is no JSON (truncated), no profile, changed since it was written, or has a field of
        the wrong type; :class:`NewerProfileError` if a newer overlapctl wrote it.
    """
    document = _parse_json(data, source)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise ProfileError(
            f"{source} is not an overlapctl profile (schema is {found!r}, not {SCHEMA!r})",
            remedy=f"remove it from the profile folder, or {_RETUNE}",
        )
    version = document.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ProfileError(f"{source}: version is {version!r}, not a number from 1", remedy=_RETUNE)
    if version > VERSION:
        raise NewerProfileError(
            f"{source}: version {version} was written by a newer overlapctl "
            f"(this one reads version {VERSION})",
            remedy="upgrade overlapctl, or set OVERLAPCTL_CACHE_DIR to another folder",
        )
    return _parse_content(document, source)


def _parse_json(data: bytes, source: str) -> Any:
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProfileError(
            f"{source} is no complete JSON document: {error}", remedy=_RETUNE
        ) from error


def _parse_content(document: dict[str, Any], source: str) -> Profile:
    if set(document) != _FIELDS:
        odd = ", ".join(sorted(set(document) ^ _FIELDS))
        raise ProfileError(f"{source}: missing or unknown fields: {odd}", remedy=_RETUNE)
    content = document["profile"]
    try:
        # Through JSON text again, because pydantic is strict in another way about Python values
        # (there a tuple must be a tuple).
        profile = _ADAPTER.validate_json(json.dumps(content), strict=True)
        digest = _digest(content)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{source}: {_first_line(error)}", remedy=_RETUNE) from error
    if document["sha256"] != digest:
        raise ProfileError(
            f"{source}: its content does not match its sha256: it was changed after "
            "overlapctl wrote it",
            remedy=_RETUNE,
        )
    return profile


def _first_line(error: Exception) -> str:
    if isinstance(error, pydantic.ValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "profile"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        return f"profile.{where}: {first['msg']}, got {first['input']!r:.80}{more}"
    return str(error)


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
