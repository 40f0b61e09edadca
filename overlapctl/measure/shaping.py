"""What a trial needs of the shim: put a policy into force, and see what became of launches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from overlapctl.launch.rows import rows_since
from overlapctl.records import Applied, KernelFootprint, Policy, Role, Rule

if TYPE_CHECKING:
    from overlapctl.launch.shim import Shim

__all__ = ["Grid", "Observation", "Shaping", "ShimShaping"]


@dataclasses.dataclass(frozen=True)
class Grid:
    """Blocks a kernel was launched with, and blocks per cluster."""

    blocks: int
    cluster: int = 1


@dataclasses.dataclass
class Observation:
    """Kernels launched in a region, and their grids.

    Grids are known by block size and dynamic shared memory in bytes: the shim's launch records
    hold those, and no names.
    """

    kernels: tuple[Applied, ...] = ()
    grids: dict[tuple[int, int], Grid] = dataclasses.field(default_factory=dict)

    def dominant(self) -> KernelFootprint | None:
        """Footprint of the compute kernel with the most threads over all its launches."""
        compute = [row for row in self.kernels if row.role is Role.COMPUTE]
        if not compute:
            return None
        row = max(compute, key=lambda r: r.launches * r.threads * self._grid(r).blocks)
        return KernelFootprint(
            name=row.kernel,
            threads=row.threads,
            registers=row.registers,
            static_smem=row.static_smem,
            dynamic_smem=row.before,
            blocks=self._grid(row).blocks,
            cluster=self._grid(row).cluster,
            cooperative=row.rule is Rule.COOPERATIVE,
        )

    def _grid(self, row: Applied) -> Grid:
        return self.grids.get((row.threads, row.before), Grid(1))


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


class ShimShaping:
    """:class:`Shaping` by the shim, attached when it is first needed.

    Any method raises ``AttachError`` if the shim cannot be attached.
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

    @contextlib.contextmanager
    def observed(self) -> Iterator[Observation]:
        """Observe under a policy that changes nothing: without one the shim does not look."""
        shim = _shim()
        observation = Observation()
        shim.records()  # those of before
        before = self.rows()
        with shim.listening(), self.in_force(Policy()):
            yield observation
        observation.kernels = self.since(before)
        for record in shim.records():
            key = record.threads, record.before
            if record.blocks > observation.grids.get(key, Grid(0)).blocks:
                observation.grids[key] = Grid(record.blocks, record.cluster)


def _shim() -> Shim:
    from overlapctl.launch.attach import ensure_attached

    return ensure_attached().shim
