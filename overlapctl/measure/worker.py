"""A team of worker processes, one for each GPU, started and ended by this process.

Parent and worker talk over a pipe: a request goes down; ``("alive", None)`` comes up from time to
time and at last ``("done", answer)`` or ``("failed", text)``. A worker that dies, fails or falls
silent ends the whole team - its peers would wait for it on their GPUs - and the next request
starts a new one. Workers are daemons and end when the pipe breaks: none outlives its parent.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from overlapctl.errors import MeasurementError
from overlapctl.measure.rank import Backend, RankResult, RankRunner
from overlapctl.measure.team import Alone, describe_error
from overlapctl.records import Arm, Case

__all__ = ["MakeBackend", "SpawnedTeam"]

MakeBackend = Callable[[int, int], Backend]
"""Makes the backend of (rank, ranks) inside its worker; must be importable there (picklable)."""

_END_S = 5.0
"""How long a worker may take to end by itself before it is killed."""


class SpawnedTeam:
    """Worker processes that measure together.

    Parameters
    ----------
    make_backend
        Called in each worker with its rank and the number of ranks.
    ranks
        How many workers.
    silence_s
        How long no worker may say anything while a request runs. Workers have their own, shorter
        watchdog for single steps; this one also covers compiling and connecting.
    on_start, on_end
        Called here before workers start and after they ended.
    """

    def __init__(
        self,
        make_backend: MakeBackend,
        ranks: int,
        *,
        silence_s: float = 300.0,
        on_start: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._make_backend = make_backend
        self._ranks = ranks
        self._silence_s = silence_s
        self._on_start, self._on_end = on_start, on_end
        self._workers: list[tuple[BaseProcess, Connection]] = []

    @property
    def ranks(self) -> int:
        """How many workers."""
        return self._ranks

    def footprint(self, case: Case) -> list[Alone]:
        """Observe on every rank; see :class:`overlapctl.measure.team.Team`."""
        return self._ask(("footprint", case))

    def run(self, case: Case, arms: Sequence[Arm], repeats: int) -> list[RankResult]:
        """Run on every rank; see :class:`overlapctl.measure.team.Team`."""
        return self._ask(("run", case, tuple(arms), repeats))

    def agree(self, value: bool) -> bool:
        """Return ``value``: only this process decides."""
        return value

    def close(self) -> None:
        """End the workers: by closing their pipe, then by signal."""
        workers, self._workers = self._workers, []
        if not workers:
            return
        for _, pipe in workers:
            pipe.close()
        for process, _ in workers:
            process.join(_END_S)
        for process, _ in workers:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        self._on_end()

    def _ask(self, request: tuple[Any, ...]) -> list[Any]:
        try:
            if not self._workers:
                self._start()
            for rank, (_, pipe) in enumerate(self._workers):
                try:
                    pipe.send(request)
                except OSError as error:
                    raise self._died(rank) from error
            return self._answers()
        except BaseException:
            # Also on Ctrl-C: an unread answer would be taken for the next request's.
            self._kill()
            raise

    def _start(self) -> None:
        self._on_start()
        context = multiprocessing.get_context("spawn")
        for rank in range(self._ranks):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_worker_main,
                args=(theirs, self._make_backend, rank, self._ranks),
                name=f"overlapctl-rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()  # so that the pipe breaks when the worker dies
            self._workers.append((process, mine))

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        rank_of = {pipe: rank for rank, (_, pipe) in enumerate(self._workers)}
        while len(answers) < self._ranks:
            waiting = [pipe for pipe, rank in rank_of.items() if rank not in answers]
            ready = multiprocessing.connection.wait(waiting, timeout=self._silence_s)
            if not ready:
                silent = sorted(rank_of[pipe] for pipe in waiting)
                raise MeasurementError(
                    f"ranks {silent} said nothing for {self._silence_s:.0f} s",
                    remedy="look for GPUs used by others; the workers have been ended",
                )
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = rank_of[pipe]
                try:
                    kind, value = pipe.recv()
                except (EOFError, OSError) as error:
                    raise self._died(rank) from error
                if kind == "failed":
                    raise MeasurementError(
                        f"rank {rank} of {self._ranks} failed: {value}",
                        remedy="fix this rank first; all workers have been ended",
                    )
                if kind == "done":
                    answers[rank] = value
        return [answers[rank] for rank in range(self._ranks)]

    def _died(self, rank: int) -> MeasurementError:
        process = self._workers[rank][0]
        process.join(_END_S)
        code = process.exitcode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return MeasurementError(
            f"the worker of rank {rank} ended {how}",
            remedy="see what it wrote to standard error; all workers have been ended",
        )

    def _kill(self) -> None:
        for process, _ in self._workers:
            process.kill()
        self.close()


def _worker_main(pipe: Connection, make_backend: MakeBackend, rank: int, ranks: int) -> None:
    """Serve requests until the parent closes the pipe."""
    backend: Backend | None = None
    try:
        backend = make_backend(rank, ranks)
        runner = RankRunner(backend)
        while True:
            name, *arguments = pipe.recv()
            if name == "run":
                case, arms, repeats = arguments
                answer: object = runner.run(
                    case, arms, repeats, on_repetition=lambda: pipe.send(("alive", None))
                )
            else:
                answer = runner.footprint(*arguments)
            pipe.send(("done", answer))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the parent has ended or does not want any more
    except Exception as error:  # the parent decides what to do about it
        with contextlib.suppress(OSError):
            pipe.send(("failed", describe_error(error)))
    finally:
        if backend is not None:
            backend.close()
