"""Ranks that measure together: in this process, or one of a job started by torchrun.

A team takes the same request to every rank and brings all answers back. Ranks started by overlapctl
itself are in :mod:`overlapctl.measure.worker`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from overlapctl.errors import MeasurementError, OverlapctlError
from overlapctl.measure.rank import Backend, RankResult, RankRunner
from overlapctl.records import Arm, Case, KernelFootprint

__all__ = ["Alone", "JobTeam", "LocalTeam", "Team", "describe_error"]

_T = TypeVar("_T")

Alone = tuple["KernelFootprint | None", float, float]
"""A rank's observation: footprint of the compute kernel, compute and collective alone in ms."""


class Team(Protocol):
    """All ranks of a measurement."""

    @property
    def ranks(self) -> int:
        """How many there are."""
        ...

    def footprint(self, case: Case) -> list[Alone]:
        """Observe the case's compute kernel; one answer for each rank.

        Raises
        ------
        MeasurementError
            If a rank failed; the message names it.
        """
        ...

    def run(self, case: Case, arms: Sequence[Arm], repeats: int) -> list[RankResult]:
        """Run all arms; one answer for each rank. Raises as :meth:`footprint`."""
        ...

    def agree(self, value: bool) -> bool:
        """Return rank 0's value on every process that called."""
        ...

    def close(self) -> None:
        """Free everything; may be called twice."""
        ...


class LocalTeam:
    """One rank, in this process."""

    def __init__(self, make_backend: Callable[[], Backend]) -> None:
        self._make_backend = make_backend
        self._backend: Backend | None = None
        self._runner: RankRunner | None = None

    @property
    def ranks(self) -> int:
        """One."""
        return 1

    def footprint(self, case: Case) -> list[Alone]:
        """Observe; see :class:`Team`."""
        return [self._started().footprint(case)]

    def run(self, case: Case, arms: Sequence[Arm], repeats: int) -> list[RankResult]:
        """Run; see :class:`Team`."""
        return [self._started().run(case, arms, repeats)]

    def agree(self, value: bool) -> bool:
        """Return ``value``: there is nobody else."""
        return value

    def close(self) -> None:
        """Free the device."""
        backend, self._backend, self._runner = self._backend, None, None
        if backend is not None:
            backend.close()

    def _started(self) -> RankRunner:
        if self._runner is None:
            self._backend = self._make_backend()
            self._runner = RankRunner(self._backend)
        return self._runner


class JobTeam:
    """The ranks of a running ``torch.distributed`` job; every rank makes the same calls.

    Parameters
    ----------
    make_backend
        Makes this rank's backend.
    control
        A process group of all ranks on CPU (gloo): answers and failures go over it, because a
        failed rank would leave the others waiting on their GPUs.
    """

    def __init__(self, make_backend: Callable[[], Backend], control: Any) -> None:
        self._local = LocalTeam(make_backend)
        self._control = control

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return int(self._control.size())

    def footprint(self, case: Case) -> list[Alone]:
        """Observe on every rank; see :class:`Team`."""
        return self._everywhere(lambda: self._local.footprint(case)[0])

    def run(self, case: Case, arms: Sequence[Arm], repeats: int) -> list[RankResult]:
        """Run on every rank; see :class:`Team`."""
        return self._everywhere(lambda: self._local.run(case, arms, repeats)[0])

    def agree(self, value: bool) -> bool:
        """Return rank 0's value."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self._control)
        return bool(values[0])

    def close(self) -> None:
        """Free this rank's device; the job's process groups are the job's."""
        self._local.close()

    def _everywhere(self, mine: Callable[[], _T]) -> list[_T]:
        import torch.distributed as dist

        try:
            answer: tuple[bool, Any] = (True, mine())
        except Exception as error:  # any failure must reach the other ranks
            answer = (False, describe_error(error))
        answers: list[Any] = [None] * self.ranks
        dist.all_gather_object(answers, answer, group=self._control)
        failures = [(rank, what) for rank, (ok, what) in enumerate(answers) if not ok]
        if failures:
            # Ranks that hung did so because of one that failed otherwise: name that one.
            rank, what = min(failures, key=lambda f: " hung" in f[1])
            raise MeasurementError(
                f"rank {rank} of {self.ranks} failed: {what}", remedy="fix this rank first"
            )
        return [value for _, value in answers]


def describe_error(error: BaseException) -> str:
    """One line that tells an error to another process."""
    text = str(error).strip() or "no message"
    return text if isinstance(error, OverlapctlError) else f"{type(error).__name__}: {text}"
