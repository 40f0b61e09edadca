"""What a trial needs of the shim: put a policy into force, and see what became of launches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from overlapctl.launch.observe import ObservedKernel, observe_kernels
from overlapctl.launch.rows import rows_since
from overlapctl.records import Applied, KernelFootprint, Policy, Role

if TYPE_CHECKING:
    from overlapctl.launch.shim import Shim

__all__ = ["Observation", "Shaping", "ShimShaping"]


@dataclasses.dataclass
class Observation:
    """Kernels launched in a region, largest share of the work first."""

    kernels: tuple[ObservedKernel, ...] = ()

    def dominant(self) -> KernelFootprint | None:
        """Footprint of the compute kernel with the most threads over all its launches."""
        compute = (kernel for kernel in self.kernels if kernel.role is Role.COMPUTE)
        first = next(compute, None)
        return None if first is None else first.footprint


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
        reader = shim.reader()
        with shim.listening(), self.in_force(Policy()):
            yield observation
        observation.kernels = observe_kernels(reader.read(), shim.snapshot().functions())


def _shim() -> Shim:
    from overlapctl.launch.attach import ensure_attached

    return ensure_attached().shim
