"""The shim as Python sees it: a typed ctypes face of ``_shim/include/overlapctl_shim.h``.

The structures mirror the header field by field; the library's ABI version is checked on loading.
Nothing here attaches: see :mod:`overlapctl.launch.attach`.
"""

from __future__ import annotations

import ctypes
import enum
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from overlapctl import env
from overlapctl.errors import AttachError, OverlapctlError, UsageError
from overlapctl.launch.ring import ROLES, RULES, LaunchRecord, NativeRecord, RecordReader
from overlapctl.records import Applied, Policy, Role

__all__ = [
    "ABI_VERSION",
    "AttachReport",
    "Counters",
    "LaunchRecord",
    "RecordReader",
    "Shim",
    "Snapshot",
    "Status",
    "library_path",
    "load",
]

ABI_VERSION = 2
LIBRARY_NAME = "liboverlapctl_shim.so"

_BY_NAME = 3
_ATTACHMENTS: tuple[Literal["none", "detour", "preload"], ...] = ("none", "detour", "preload")


class Status(enum.IntEnum):
    """``ovl_status``."""

    OK = 0
    NO_DRIVER = 1
    MISSING_ENTRY = 2
    PROLOGUE = 3
    FOREIGN_DETOUR = 4
    ALREADY_ATTACHED = 5
    MEMORY = 6
    PROTECT = 7
    THREADS = 8
    ARCHITECTURE = 9
    ARGUMENT = 10
    FULL = 11
    NOT_FOUND = 12
    DISABLED = 13


# --- structures, as in the header --------------------------------------------------------------


class _Report(ctypes.Structure):
    _fields_ = (
        ("attachment", ctypes.c_int32),
        ("entries", ctypes.c_int32),
        ("driver_version", ctypes.c_int32),
        ("attempts", ctypes.c_int32),
        ("entry", ctypes.c_char * 64),
        ("detail", ctypes.c_char * 192),
    )


class _KernelRule(ctypes.Structure):
    _fields_ = (
        ("pattern", ctypes.c_char_p),
        ("pad_bytes", ctypes.c_uint32),
        ("max_blocks_per_sm", ctypes.c_int32),
        ("carveout", ctypes.c_int32),
    )


class _Policy(ctypes.Structure):
    _fields_ = (
        ("pad_bytes", ctypes.c_uint32),
        ("max_blocks_per_sm", ctypes.c_int32),
        ("carveout", ctypes.c_int32),
        ("comm_priority", ctypes.c_int32),
        ("shape_captures", ctypes.c_int32),
        ("include_count", ctypes.c_uint32),
        ("exclude_count", ctypes.c_uint32),
        ("rule_count", ctypes.c_uint32),
        ("include", ctypes.POINTER(ctypes.c_char_p)),
        ("exclude", ctypes.POINTER(ctypes.c_char_p)),
        ("rules", ctypes.POINTER(_KernelRule)),
    )


_COUNTERS = (
    "launches",
    "shaped",
    "prioritised",
    "carved",
    "failed",
    "cooperative",
    "captured",
    "graph_launches",
    "unknown",
    "dropped_records",
)


class _Counters(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in _COUNTERS)


_ROW_COUNTS = ("launches", "shaped", "prioritised", "carved", "failed", "captured")


class _KernelRow(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 256),
        ("function", ctypes.c_uint64),
        *((name, ctypes.c_uint64) for name in _ROW_COUNTS),
        ("role", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("registers", ctypes.c_int32),
        ("static_smem", ctypes.c_int32),
        ("before", ctypes.c_int32),
        ("after", ctypes.c_int32),
        ("blocks_before", ctypes.c_int32),
        ("blocks_after", ctypes.c_int32),
        ("rule", ctypes.c_int32),
    )


# --- what callers get ---------------------------------------------------------------------------


@dataclass(frozen=True)
class AttachReport:
    """What attaching found: entries redirected, or the entry that was refused and its bytes."""

    status: Status
    attachment: Literal["none", "detour", "preload"]
    entries: int
    driver_version: int
    attempts: int
    entry: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Counters:
    """``ovl_counters``: launches seen while a policy was in force, and what became of them."""

    launches: int
    shaped: int
    prioritised: int
    carved: int
    failed: int
    cooperative: int
    captured: int
    graph_launches: int
    unknown: int
    dropped_records: int


class Snapshot:
    """The table of kernels at one moment."""

    def __init__(self, rows: Any, count: int) -> None:
        self._native = rows
        self._count = count

    def rows(self) -> list[Applied]:
        """Read it."""
        return [_applied(self._native[i]) for i in range(self._count)]

    def functions(self) -> dict[int, Applied]:
        """One row for each function handle: what launch records leave out of a kernel.

        Only name, registers and static shared memory are the function's; the rest is that of one of
        its configurations.
        """
        native = (self._native[i] for i in range(self._count))
        return {int(row.function): _applied(row) for row in native}


# --- the library --------------------------------------------------------------------------------


class Shim:
    """The loaded library.

    All methods are safe from any thread; the state behind them is the process's.

    Parameters
    ----------
    path
        The library file.

    Raises
    ------
    AttachError
        If it cannot be loaded, is no shim, or was built for another version of overlapctl.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._capacity = 256
        try:
            self._library = ctypes.CDLL(str(path))
            version = int(self._library.ovl_abi_version())
        except (OSError, AttributeError) as error:
            raise AttachError(
                f"the shim {path} cannot be loaded: {error}", remedy="reinstall overlapctl"
            ) from None
        if version != ABI_VERSION:
            raise AttachError(
                f"the shim {path} has ABI version {version}, this overlapctl needs {ABI_VERSION}",
                remedy="reinstall overlapctl, and remove older copies of the library",
            )
        _declare(self._library)
        self._ring = RecordReader(self._library)

    @property
    def attachment(self) -> Literal["none", "detour", "preload"]:
        """How the shim is attached to the driver."""
        return _attachment(self._library.ovl_attachment_state())

    def attach_detour(self, driver: str | None = None) -> AttachReport:
        """Redirect the driver's entries; see :func:`overlapctl.launch.attach.ensure_attached`."""
        report = _Report()
        name = None if driver is None else os.fsencode(driver)
        status = self._library.ovl_attach_detour(name, ctypes.byref(report))
        return AttachReport(
            status=Status(status),
            attachment=_attachment(report.attachment),
            entries=report.entries,
            driver_version=report.driver_version,
            attempts=report.attempts,
            entry=_text(report.entry),
            detail=_text(report.detail),
        )

    def push(self, policy: Policy) -> int:
        """Put ``policy`` in force, process-wide.

        Returns
        -------
        int
            The token to give to :meth:`pop`.

        Raises
        ------
        UsageError
            If the policy has more patterns than the shim takes, or a value out of range.
        """
        token = ctypes.c_uint64()
        native = _native_policy(policy)
        status = self._library.ovl_policy_push(ctypes.byref(native), ctypes.byref(token))
        _check(status, f"policy={policy!r}")
        return token.value

    def pop(self, token: int) -> None:
        """Take a policy back; the newest one left is in force.

        Raises
        ------
        UsageError
            If ``token`` is not, or no longer, in force.
        """
        _check(self._library.ovl_policy_pop(token), f"token={token}")

    def depth(self) -> int:
        """How many policies are pushed."""
        return int(self._library.ovl_policy_depth())

    def ignored_policy_parts(self) -> int:
        """How many parts of ``OVERLAPCTL_POLICY`` the preloaded shim did not understand."""
        return int(self._library.ovl_policy_text_ignored())

    def counters(self) -> Counters:
        """Read the counters."""
        native = _Counters()
        self._library.ovl_counters_read(ctypes.byref(native))
        return Counters(**{name: getattr(native, name) for name in _COUNTERS})

    def kernels(self) -> list[Applied]:
        """Tell for each kernel seen what happened to its launches."""
        return self.snapshot().rows()

    def snapshot(self) -> Snapshot:
        """Copy the table of kernels as it is now; cheap, it is read only when asked for."""
        while True:
            rows = (_KernelRow * self._capacity)()
            exist = int(self._library.ovl_kernel_rows(rows, len(rows)))
            if exist <= len(rows):
                return Snapshot(rows, exist)
            self._capacity = exist + 128

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Have launches of the region recorded in the ring; nests, from any thread."""
        self._library.ovl_records_listen(1)
        try:
            yield
        finally:
            self._library.ovl_records_listen(-1)

    def reader(self) -> RecordReader:
        """Read the ring from here on, undisturbed by other readers."""
        reader = RecordReader(self._library)
        reader.skip()
        return reader

    def records(self) -> list[LaunchRecord]:
        """Read launches recorded since the last call, oldest first, as far as the ring has them.

        Only launches made while somebody was :meth:`listening` are recorded. All callers share one
        place in the ring; see :meth:`reader`.
        """
        return self._ring.read()

    def reset(self) -> None:
        """Forget counters, rows' counts and records."""
        self._library.ovl_reset()

    def add_role_pattern(self, pattern: str, role: Role) -> None:
        """Give kernels whose name matches ``pattern`` a role, before the built-in patterns.

        Raises
        ------
        UsageError
            If the pattern is empty or there are too many.
        """
        status = self._library.ovl_role_add_pattern(pattern.encode(), ROLES.index(role))
        _check(status, f"pattern={pattern!r}")

    def set_stream_role(self, stream: int, role: Role | None) -> None:
        """Give all launches on a stream (handle) a role; ``None``: by kernel name again.

        Raises
        ------
        UsageError
            If there are too many such streams.
        """
        _check(self._library.ovl_role_set_stream(stream, _role_number(role)), f"stream={stream:#x}")

    def set_thread_role(self, role: Role | None) -> Role | None:
        """Give all launches of the calling thread a role; returns the previous one."""
        before = int(self._library.ovl_role_set_thread(_role_number(role)))
        return None if before == _BY_NAME else ROLES[before]

    def role_of_name(self, kernel: str) -> Role:
        """Tell the role a kernel of this name has."""
        return ROLES[int(self._library.ovl_role_of_name(kernel.encode()))]


def library_path() -> Path:
    """Where the shim belonging to this package is: beside this module.

    Raises
    ------
    AttachError
        If it has not been built.
    """
    path = Path(__file__).with_name(LIBRARY_NAME)
    if not path.is_file():
        raise AttachError(
            f"the shim {path} does not exist",
            remedy="build it: `pip install .` in the source folder, or `make setup`",
        )
    return path


def load(path: Path | None = None) -> Shim:
    """Load the shim; in a process it was preloaded into, the copy that is already there.

    Parameters
    ----------
    path
        Another copy of the library instead of the package's own.

    Raises
    ------
    AttachError
        If there is none, it cannot be loaded, or others than the user and root could change it.
    """
    if path is None:
        preloaded = os.environ.get(env.SHIM, "")
        path = Path(preloaded) if preloaded and _is_mapped(preloaded) else library_path()
    check_trusted(path)
    return Shim(path)


def check_trusted(path: Path) -> None:
    """Refuse a library that somebody else could have written.

    Raises
    ------
    AttachError
        If the file is missing, belongs to another user than this one or root, or is writable by
        group or others.
    """
    try:
        info = path.stat()
    except OSError as error:
        raise AttachError(
            f"the shim {path} cannot be read: {error.strerror}", remedy="reinstall overlapctl"
        ) from None
    if info.st_uid not in (0, os.geteuid()):
        raise AttachError(
            f"the shim {path} belongs to user {info.st_uid}",
            remedy="it must belong to you or root: install overlapctl into an environment of yours",
        )
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise AttachError(
            f"the shim {path} can be written by group or others", remedy=f"chmod go-w {path}"
        )


def _is_mapped(path: str) -> bool:
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return False
    return any(line.endswith(" " + str(Path(path).resolve())) for line in maps.splitlines())


# --- conversions --------------------------------------------------------------------------------


def _declare(library: Any) -> None:
    size, u64, i32, text = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p
    pointer = ctypes.POINTER
    for name, result, arguments in (
        ("ovl_attachment_state", i32, []),
        ("ovl_attach_detour", i32, [text, pointer(_Report)]),
        ("ovl_policy_push", i32, [pointer(_Policy), pointer(u64)]),
        ("ovl_policy_pop", i32, [u64]),
        ("ovl_policy_depth", i32, []),
        ("ovl_policy_text_ignored", i32, []),
        ("ovl_role_add_pattern", i32, [text, i32]),
        ("ovl_role_set_stream", i32, [ctypes.c_void_p, i32]),
        ("ovl_role_set_thread", i32, [i32]),
        ("ovl_role_of_name", i32, [text]),
        ("ovl_counters_read", None, [pointer(_Counters)]),
        ("ovl_kernel_rows", size, [pointer(_KernelRow), size]),
        ("ovl_records_listen", i32, [i32]),
        ("ovl_records_read", size, [pointer(u64), pointer(NativeRecord), size]),
        ("ovl_reset", None, []),
    ):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments


def _native_policy(policy: Policy) -> _Policy:
    def texts(values: Iterable[str]) -> Any:
        encoded = [value.encode() for value in values]
        return (ctypes.c_char_p * len(encoded))(*encoded)

    rules = (_KernelRule * len(policy.rules))(
        *(
            _KernelRule(r.pattern.encode(), r.pad_bytes, r.max_blocks_per_sm, r.carveout)
            for r in policy.rules
        )
    )
    # ctypes keeps the arrays alive as long as the structure.
    return _Policy(
        policy.pad_bytes,
        policy.max_blocks_per_sm,
        policy.carveout,
        policy.comm_priority,
        policy.shape_captures,
        len(policy.include),
        len(policy.exclude),
        len(policy.rules),
        texts(policy.include),
        texts(policy.exclude),
        rules,
    )


def _check(status: int, field: str) -> None:
    if status == Status.OK:
        return
    what, remedy = {
        Status.FULL: ("the shim's table is full", "use fewer policies, patterns or streams"),
        Status.NOT_FOUND: ("not in force", "pop each token once"),
        Status.ARGUMENT: ("out of range", "see Policy for the ranges"),
        Status.MEMORY: ("no memory", "free some memory"),
    }.get(Status(status), (f"status {status}", "report this"))
    error: type[OverlapctlError] = AttachError if status == Status.MEMORY else UsageError
    raise error(f"{field}: {what}", remedy=remedy)


def _attachment(number: int) -> Literal["none", "detour", "preload"]:
    return _ATTACHMENTS[number]


def _role_number(role: Role | None) -> int:
    return _BY_NAME if role is None else ROLES.index(role)


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _applied(row: Any) -> Applied:
    counts = {name: getattr(row, name) for name in _ROW_COUNTS}
    return Applied(
        kernel=_text(row.name),
        role=ROLES[row.role],
        threads=row.threads,
        registers=row.registers,
        static_smem=row.static_smem,
        before=row.before,
        after=row.after,
        blocks_before=row.blocks_before,
        blocks_after=row.blocks_after,
        rule=RULES[row.rule],
        **counts,
    )
