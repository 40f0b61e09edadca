"""`@overlapctl.shaped(...)` above `@triton.jit`: shape one kernel, with or without the shim.

Triton's launcher takes the dynamic shared-memory size from the ``packed_metadata`` tuple it is
called with (third entry, both vendors, Triton 3.4 to 3.9). While a shaped kernel is being launched,
that entry is replaced. No hook of Triton lets a caller change the size, hence the wrapper around
the launcher's ``__call__``: remove it when there is one.

With the shim attached, the launch is marked so that the shim leaves it alone: nothing is padded
twice, and the decorator's setting wins over the policy in force.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from overlapctl.errors import DeviceError, OverlapctlWarning, UsageError
from overlapctl.plan.residency import (
    blocks_per_sm,
    grid_is_coresident,
    pad_for_blocks,
    padded,
)
from overlapctl.records import Applied, DeviceFacts, KernelFootprint, Role, Rule
from overlapctl.specs import parse_size

__all__ = ["Shaped", "choose_pad", "shaped"]

_F = TypeVar("_F")
_active = threading.local()
_install_lock = threading.Lock()


def shaped(
    *,
    smem_reserve: int | str | None = None,
    max_blocks_per_sm: int | None = None,
    role: Role | str = Role.COMPUTE,
    strict: bool = True,
) -> Callable[[_F], Shaped]:
    """Shape every launch of one Triton kernel; put it above ``@triton.jit`` or ``@autotune``.

    Parameters
    ----------
    smem_reserve
        Bytes (or like ``"16KiB"``) added to each block's dynamic shared memory.
    max_blocks_per_sm
        Pad until at most this many blocks stay resident per SM.
    role
        ``"communication"``: never padded, launched at the greatest priority wherever a region with
        communication priority is in force.
    strict
        Raise if static + dynamic + pad passes the opt-in limit of a block; otherwise warn once and
        launch as it was.

    Returns
    -------
    callable
        Turns the kernel into a :class:`Shaped` one, launched in the same way.

    Raises
    ------
    UsageError
        An argument is out of range, or padding is asked for a communication kernel.
    """
    pad = 0 if smem_reserve is None else parse_size(smem_reserve)
    role = Role(role)
    if pad < 0 or (max_blocks_per_sm is not None and max_blocks_per_sm < 1):
        raise UsageError(
            f"smem_reserve={smem_reserve!r}, max_blocks_per_sm={max_blocks_per_sm!r}",
            remedy="use a pad of at least 0 bytes and at least 1 block per SM",
        )
    if role is not Role.COMPUTE and (pad or max_blocks_per_sm):
        raise UsageError(f"role={role.value!r} with a pad", remedy="pad compute kernels only")
    wish = _Wish(pad_bytes=pad, max_blocks=max_blocks_per_sm or 0, role=role, strict=strict)
    return lambda kernel: Shaped(kernel, wish)


def choose_pad(
    facts: DeviceFacts, footprint: KernelFootprint, *, pad_bytes: int, max_blocks: int
) -> tuple[int, Rule]:
    """Bytes to add to a launch, and the rule that decided (the shim's rules, for one kernel).

    Parameters
    ----------
    facts, footprint
        The GPU and the launch as asked, with its grid.
    pad_bytes, max_blocks
        As in :class:`overlapctl.records.KernelRule`; of both, the larger pad.
    """
    if not pad_bytes and not max_blocks:
        return 0, Rule.NOTHING_ASKED
    if footprint.cooperative:
        return 0, Rule.COOPERATIVE
    target = pad_for_blocks(facts, footprint, max_blocks) if max_blocks else 0
    if target is None:
        return 0, Rule.OPT_IN_LIMIT
    if not target and not pad_bytes:
        return 0, Rule.ALREADY_AT_TARGET
    pad, rule = max((target, Rule.PADDED_TO_TARGET), (pad_bytes, Rule.PADDED_BYTES))
    after = padded(footprint, pad)
    if after.smem > facts.smem_per_block_optin:
        return 0, Rule.OPT_IN_LIMIT
    if footprint.cluster > 1 and blocks_per_sm(facts, after) != blocks_per_sm(facts, footprint):
        return 0, Rule.CLUSTER
    if grid_is_coresident(facts, footprint) and not grid_is_coresident(facts, after):
        return 0, Rule.KEEPS_GRID_RESIDENT
    return pad, rule


class Shaped:
    """A Triton kernel whose launches are shaped; everything else is the kernel's own."""

    def __init__(self, kernel: Any, wish: _Wish) -> None:
        self._kernel = kernel
        self._wish = wish
        function: Any = getattr(kernel, "fn", kernel)
        for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
            if hasattr(function, attribute):
                setattr(self, attribute, getattr(function, attribute))

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """Give the launcher for a grid, like Triton's kernels do."""
        return functools.partial(self.run, grid=grid, warmup=False)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch (or warm up) as Triton's ``run`` does, shaped."""
        _install()
        with _launching(self._wish):
            return self._kernel.run(*args, **kwargs)

    def explain(self) -> tuple[Applied, ...]:
        """Say what happened to the launches so far: before, after, rule and counts."""
        return tuple(
            dataclasses.replace(row, launches=count, shaped=count if row.after > row.before else 0)
            for row, count in self._wish.seen()
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


class _Wish:
    """What a decorator asks for, and what became of it per compiled kernel."""

    def __init__(self, *, pad_bytes: int, max_blocks: int, role: Role, strict: bool) -> None:
        self.pad_bytes = pad_bytes
        self.max_blocks = max_blocks
        self.role = role
        self.strict = strict
        self._rows: dict[tuple[int, int, int], list[Any]] = {}
        self._lock = threading.Lock()

    def size(self, function: int, warps: int, cluster: int, dynamic: int, blocks: int) -> int:
        """Dynamic size to launch a compiled kernel with."""
        # Co-residency depends on the grid; everything else on the compiled kernel alone.
        key = (function, dynamic, blocks)
        with self._lock:
            entry = self._rows.get(key)
            if entry is None:
                entry = [self._decide(function, warps, cluster, dynamic, blocks), 0]
                self._rows[key] = entry
            entry[1] += 1
            row: Applied = entry[0]
        return row.after

    def seen(self) -> list[tuple[Applied, int]]:
        """Rows and their launches."""
        with self._lock:
            return [(row, count) for row, count in self._rows.values()]

    def _decide(
        self, function: int, warps: int, cluster: int, dynamic: int, blocks: int
    ) -> Applied:
        facts = _current_facts()
        footprint = _footprint(function, warps * facts.warp_size, cluster, dynamic, blocks)
        pad, rule = choose_pad(
            facts, footprint, pad_bytes=self.pad_bytes, max_blocks=self.max_blocks
        )
        if rule is Rule.OPT_IN_LIMIT:
            self._over_the_limit(facts, footprint)
        if pad:
            _allow(function, dynamic + pad)
        return Applied(
            kernel=footprint.name,
            role=self.role,
            threads=footprint.threads,
            registers=footprint.registers,
            static_smem=footprint.static_smem,
            launches=0,
            shaped=0,
            prioritised=0,
            carved=0,
            failed=0,
            captured=0,
            before=dynamic,
            after=dynamic + pad,
            blocks_before=blocks_per_sm(facts, footprint),
            blocks_after=blocks_per_sm(facts, padded(footprint, pad)),
            rule=rule,
        )

    def _over_the_limit(self, facts: DeviceFacts, footprint: KernelFootprint) -> None:
        most = facts.smem_per_block_optin - footprint.smem
        what = (
            f"smem_reserve={self.pad_bytes} and the {footprint.smem} B a block of "
            f"{footprint.name!r} has pass the opt-in limit of {facts.smem_per_block_optin} B"
        )
        remedy = f"reserve at most {most} B"
        if self.strict:
            raise UsageError(what, remedy=remedy)
        warnings.warn(f"launched unpadded: {what} ({remedy})", OverlapctlWarning, stacklevel=2)


def _install() -> None:
    """Wrap the active launcher class's ``__call__``, once."""
    from triton.runtime import driver

    launcher = driver.active.launcher_cls
    with _install_lock:
        if getattr(launcher.__call__, "is_overlapctl", False):
            return
        original = launcher.__call__

        @functools.wraps(original)
        def call(self: Any, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> Any:
            wish = getattr(_active, "wish", None)
            if wish is not None:
                packed = rest[0]
                size = wish.size(function, packed[0], packed[1], packed[2], x * y * z * packed[1])
                rest = ((*packed[:2], size, *packed[3:]), *rest[1:])
            return original(self, x, y, z, stream, function, *rest)

        call.is_overlapctl = True  # type: ignore[attr-defined]
        launcher.__call__ = call


@contextmanager
def _launching(wish: _Wish) -> Iterator[None]:
    """Mark this thread's launches as shaped by `wish`, for Triton's launcher and for the shim."""
    from overlapctl.launch.attach import current_attachment

    attachment = current_attachment()
    before = getattr(_active, "wish", None)
    pads = bool(wish.pad_bytes or wish.max_blocks)
    _active.wish = wish if pads else None
    # None: naming decides, so that a decorator that asks for nothing leaves the policy in force.
    role = Role.IGNORED if pads else None if wish.role is Role.COMPUTE else wish.role
    old_role = attachment.shim.set_thread_role(role) if attachment else None
    try:
        yield
    finally:
        _active.wish = before
        if attachment:
            attachment.shim.set_thread_role(old_role)


def _current_facts() -> DeviceFacts:
    import torch

    return _facts(torch.cuda.current_device())


@functools.cache
def _facts(index: int) -> DeviceFacts:
    from overlapctl.device import open_device

    return open_device(f"cuda:{index}").facts()


def _footprint(
    function: int, threads: int, cluster: int, dynamic: int, blocks: int
) -> KernelFootprint:
    from cuda.bindings import driver as cu

    attribute = cu.CUfunction_attribute
    name = _value(cu.cuFuncGetName(function))
    return KernelFootprint(
        name=name.decode() if isinstance(name, bytes) else str(name),
        threads=threads,
        registers=_value(cu.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, function)),
        static_smem=_value(
            cu.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
        ),
        dynamic_smem=dynamic,
        blocks=blocks,
        cluster=cluster,
    )


def _allow(function: int, dynamic: int) -> None:
    """Raise the function's limit on dynamic shared memory where the launch needs it."""
    from cuda.bindings import driver as cu

    limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    if dynamic > _value(cu.cuFuncGetAttribute(limit, function)):
        _value((*cu.cuFuncSetAttribute(function, limit, dynamic), None))


def _value(result: tuple[Any, ...]) -> Any:
    if int(result[0]) != 0:
        raise DeviceError(
            f"the driver answered {result[0]}", remedy="update the driver, or drop @shaped"
        )
    return result[1]
