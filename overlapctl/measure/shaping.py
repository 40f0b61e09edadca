"""What a trial needs of the shim: put a policy into force, and see what became of launches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from overlapctl.records import Applied, KernelFootprint, Policy, Role

__all__ = ["Observation", "Shaping", "ShimShaping", "rows_since"]

_COUNTS = ("launches", "shaped", "prioritised", "carved", "failed", "captured")


@dataclasses.dataclass
class Observation:
    """Kernels launched in a region, and the grids they were launched with."""

    kernels: tuple[Applied, ...] = ()
    blocks: dict[str, int] = dataclasses.field(default_factory=dict)
    clusters: dict[str, int] = dataclasses.field(default_factory=dict)

    def dominant(self) -> KernelFootprint | None:
        """Footprint of the compute kernel with the most threads over all its launches."""
        compute = [row for row in self.kernels if row.role is Role.COMPUTE]
        if not compute:
            return None
        row = max(compute, key=lambda r: r.launches * r.threads * self.blocks.get(r.kernel, 1))
        return KernelFootprint(
            name=row.kernel,
            threads=row.threads,
            registers=row.registers,
            static_smem=row.static_smem,
            dynamic_smem=row.before,
            blocks=self.blocks.get(row.kernel, 1),
            cluster=self.clusters.get(row.kernel, 1),
        )


class Shaping(Protocol):
    """Policies and their effects in this process."""

    def in_force(self, policy: Policy) -> AbstractContextManager[None]:
        """Put a policy into force for the region."""
        ...

    def rows(self) -> tuple[Applied, ...]:
        """Return all kernels seen so far."""
        ...

    def since(self, before: Sequence[Applied]) -> tuple[Applied, ...]:
        """Return what was launched after :meth:`rows` returned ``before``."""
        ...

    def observed(self) -> AbstractContextManager[Observation]:
        """Observe the region's launches; the observation is filled when it ends."""
        ...


def rows_since(now: Sequence[Applied], before: Sequence[Applied]) -> tuple[Applied, ...]:
    """Rows whose launches grew from ``before`` to ``now``, with the growth as counts."""
    old = {_key(row): row for row in before}
    grown = []
    for row in now:
        first = old.get(_key(row))
        counts = {c: getattr(row, c) - (getattr(first, c) if first else 0) for c in _COUNTS}
        if counts["launches"] > 0:
            grown.append(dataclasses.replace(row, **counts))
    return tuple(grown)


def _key(row: Applied) -> tuple[str, int, int, int, int]:
    return row.kernel, row.threads, row.registers, row.static_smem, row.before


class ShimShaping:
    """:class:`Shaping` by the shim, attached when it is first needed.

    Raises
    ------
    AttachError
        From any method, if the shim cannot be attached.
    """

    @contextlib.contextmanager
    def in_force(self, policy: Policy) -> Iterator[None]:
        """Push the policy, and pop it whatever happens."""
        shim = _shim()
        token = shim.push(policy)
        try:
            yield
        finally:
            shim.pop(token)

    def rows(self) -> tuple[Applied, ...]:
        """Return the shim's rows."""
        return tuple(_shim().kernels())

    def since(self, before: Sequence[Applied]) -> tuple[Applied, ...]:
        """Return the growth of the shim's rows."""
        return rows_since(self.rows(), before)
