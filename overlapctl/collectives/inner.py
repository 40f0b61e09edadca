"""The process group that carries out what the copy engines do not."""

from __future__ import annotations

from typing import Any

__all__ = ["InnerGroup"]


class InnerGroup:
    """``torch.distributed``'s collectives on one process group, as methods.

    Parameters
    ----------
    process_group
        The group; ``None``: the default group.
    """

    def __init__(self, process_group: Any = None) -> None:
        import torch.distributed as dist

        self._dist, self._group = dist, process_group

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return int(self._dist.get_rank(self._group))

    def size(self) -> int:
        """Return the number of ranks."""
        return int(self._dist.get_world_size(self._group))

    def meeting(self, thing: Any) -> list[Any]:
        """Give every rank an object of every rank."""
        things: list[Any] = [None] * self.size()
        self._dist.all_gather_object(things, thing, group=self._group)
        return things

    def all_gather_into_tensor(self, output: Any, tensor: Any, async_op: bool) -> Any:
        """See ``torch.distributed``."""
        return self._dist.all_gather_into_tensor(output, tensor, self._group, async_op)

    def reduce_scatter_tensor(self, output: Any, tensor: Any, op: Any, async_op: bool) -> Any:
        """See ``torch.distributed``."""
        op = self._dist.ReduceOp.SUM if op is None else op
        return self._dist.reduce_scatter_tensor(output, tensor, op, self._group, async_op)

    def all_reduce(self, tensor: Any, op: Any, async_op: bool) -> Any:
        """See ``torch.distributed``."""
        op = self._dist.ReduceOp.SUM if op is None else op
        return self._dist.all_reduce(tensor, op, self._group, async_op)

    def all_to_all_single(
        self, output: Any, tensor: Any, received: Any, sent: Any, async_op: bool
    ) -> Any:
        """See ``torch.distributed``."""
        return self._dist.all_to_all_single(output, tensor, received, sent, self._group, async_op)

    def broadcast(self, tensor: Any, src: int, async_op: bool) -> Any:
        """See ``torch.distributed``; ``src`` is a rank of this group."""
        if self._group is not None:
            src = self._dist.get_global_rank(self._group, src)
        return self._dist.broadcast(tensor, src, self._group, async_op)

    def barrier(self) -> Any:
        """See ``torch.distributed``."""
        return self._dist.barrier(self._group)
