"""What the collectives need from a GPU: memory, streams, events, flags, copies, additions.

The real one is :class:`overlapctl.collectives.cuda_driver.CudaDriver`. Memory is an address, a
stream and an event are opaque handles, and everything that takes a stream returns at once and
takes effect in stream order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

__all__ = ["FLAG_MODULUS", "Copy", "Driver"]

FLAG_MODULUS = 1 << 32
"""Flags are 32 bits wide; values are compared on the circle, as the driver's GEQ wait does."""


class Copy(NamedTuple):
    """One copy: ``size`` bytes from ``src`` to ``dst``.

    ``is_local`` tells that both ends are on this GPU, where the driver may choose to copy with a
    kernel unless it is asked to leave the SMs alone.
    """

    dst: int
    src: int
    size: int
    is_local: bool = False


class Driver(Protocol):
    """A GPU as one rank sees it. All methods may be called from any thread."""

    is_cuda: bool

    # --- memory ------------------------------------------------------------------------------

    def allocate(self, size: int) -> int:
        """Allocate ``size`` bytes that peers can be let into, and return their address."""

    def free(self, address: int) -> None:
        """Free what :meth:`allocate` returned."""

    def export(self, address: int) -> bytes:
        """Return a handle that lets another process open an allocation, given its address."""

    def open(self, handle: bytes) -> int:
        """Map a peer's allocation into this process and return its address here."""

    def close(self, address: int) -> None:
        """Unmap what :meth:`open` returned."""

    def map_host(self, address: int, size: int) -> int:
        """Let the GPU use host memory, page-aligned, and return the GPU's address of it."""

    def unmap_host(self, address: int) -> None:
        """Undo :meth:`map_host`, given the host's address."""

    # --- streams and events ------------------------------------------------------------------

    def create_stream(self) -> Any:
        """Create a stream of the greatest priority that waits for no other stream implicitly."""

    def destroy_stream(self, stream: Any) -> None:
        """Destroy a stream of :meth:`create_stream`; what is enqueued still completes."""

    def current_stream(self) -> Any:
        """Return the stream the calling thread enqueues its work on."""

    def is_capturing(self) -> bool:
        """Tell whether the current stream is being captured into a graph."""

    def record(self, stream: Any) -> Any:
        """Record a new event: it is complete once all that the stream holds now is."""

    def wait_event(self, stream: Any, event: Any) -> None:
        """Let what is enqueued on the stream from now on wait for an event."""

    def is_complete(self, event: Any) -> bool:
        """Tell whether an event has completed, without waiting."""

    # --- work --------------------------------------------------------------------------------

    def copy(self, copies: Sequence[Copy], stream: Any) -> None:
        """Enqueue copies, to be made in any order among each other."""

    def fill(self, address: int, value: int, size: int, stream: Any) -> None:
        """Enqueue setting ``size`` bytes to ``value`` (0-255)."""

    def write_flag(self, address: int, value: int, stream: Any) -> None:
        """Enqueue writing a 32-bit flag, visible to all after what was enqueued before it."""

    def wait_flag(self, address: int, value: int, stream: Any) -> None:
        """Make the stream wait until ``(flag - value) mod 2**32 < 2**31``."""

    def allocation(self, address: int) -> tuple[int, int]:
        """Return (base address, size) of the allocation that an address lies in."""

    def view(self, address: int, numel: int, dtype: Any) -> Any:
        """Return memory on this GPU as a one-dimensional tensor that does not own it."""

    def compute(self, work: Callable[[], None], stream: Any) -> None:
        """Call ``work``, so that the torch operations in it are enqueued on the stream."""
