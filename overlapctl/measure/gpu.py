"""Run trials on GPUs.

Three ways, chosen by what is there:

* the process is a rank of a job (``RANK`` and ``WORLD_SIZE`` are set, as torchrun does, or
  ``torch.distributed`` is initialised): the job's ranks measure together, one GPU each;
* one GPU: measured in this process;
* several GPUs: one worker process for each is started here, and ended with the runner.
"""

from __future__ import annotations

import datetime
import functools
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from overlapctl.errors import DeviceError, UsageError
from overlapctl.measure.collectives import check_comm
from overlapctl.measure.rank import Backend, merge_ranks
from overlapctl.measure.team import JobTeam, LocalTeam, Team
from overlapctl.measure.trial import check_request
from overlapctl.measure.worker import SpawnedTeam
from overlapctl.measure.workloads import tensor_shapes
from overlapctl.records import Arm, Case, Clocks, KernelFootprint, Trial

__all__ = ["GpuRunner", "open_team"]

_SETUP_S = 3.0
"""Allocating, compiling and checking the results of a case, roughly."""

_STEP_OVERHEAD_S = 0.004
"""Refilling the payload, meeting of the ranks and reading clocks, for each step."""

# NVLink multicast (NVLS) takes a resource that all users of a machine share, and changes which
# kernel NCCL picks; trials are without it unless the user sets it.
_ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


class GpuRunner:
    """Runs trials on real GPUs; a :class:`~overlapctl.measure.trial.TrialRunner`.

    Parameters
    ----------
    devices
        CUDA device indices; ``None``: the rank's own GPU in a job, else all visible ones. Not
        to be given in a job.
    timeout_s
        Longest time a single step may take on a GPU before it counts as hung.
    team
        The ranks; made by :func:`open_team` if ``None``.

    Raises
    ------
    DeviceError
        If there is no CUDA GPU, or fewer than ``devices`` names.
    UsageError
        If ``devices`` is empty, names a GPU twice, or is given in a job.
    """

    def __init__(
        self,
        devices: Sequence[int] | None = None,
        *,
        timeout_s: float = 60.0,
        team: Team | None = None,
    ) -> None:
        self._team = open_team(devices, timeout_s) if team is None else team
        self._alone: dict[Case, tuple[KernelFootprint | None, float, float]] = {}

    @property
    def ranks(self) -> int:
        """GPUs that measure together."""
        return self._team.ranks

    def footprint(self, case: Case) -> KernelFootprint | None:
        """Observe the dominant kernel of the case's compute workload."""
        return self._observe(case)[0]

    def estimate_seconds(self, case: Case, arms: Sequence[Arm], repeats: int) -> float:
        """Estimate from one run of each side alone (which this does on first need)."""
        check_request(arms, repeats)
        _, compute, comm = self._observe(case)
        changing = sum(not arm.policy.is_default for arm in arms)
        steps = 2 + len(arms) + changing
        # An overlapped step takes at most what both take in a row.
        per_round_ms = compute * (1 + changing) + comm + len(arms) * (compute + comm)
        rounds = repeats + 2
        return _SETUP_S + rounds * (per_round_ms / 1e3 + steps * _STEP_OVERHEAD_S)

    def run(self, case: Case, arms: Sequence[Arm], *, repeats: int) -> list[Trial]:
        """Run every arm of the case, interleaved; see the protocol for errors."""
        check_request(arms, repeats)
        self._check_case(case)
        return merge_ranks(case, arms, self._team.run(case, arms, repeats))

    def agree(self, value: bool) -> bool:
        """Return rank 0's value on all ranks: for decisions that hang on a rank's own clock."""
        return self._team.agree(value)

    def close(self) -> None:
        """End workers and free the GPUs; may be called twice."""
        self._team.close()

    def __enter__(self) -> GpuRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _observe(self, case: Case) -> tuple[KernelFootprint | None, float, float]:
        if case not in self._alone:
            self._check_case(case)
            answers = self._team.footprint(case)
            self._alone[case] = (
                answers[0][0],
                max(compute for _, compute, _ in answers),
                max(comm for _, _, comm in answers),
            )
        return self._alone[case]

    def _check_case(self, case: Case) -> None:
        """Refuse what cannot work before any worker sees it."""
        tensor_shapes(case.compute)
        check_comm(case.comm, self.ranks)
        if case.form == "pipeline" and case.depth < 1:
            raise UsageError(f"depth is {case.depth}", remedy="use a pipeline of at least 1")


def open_team(devices: Sequence[int] | None, timeout_s: float) -> Team:
    """Make the team that fits this process; see :class:`GpuRunner` for arguments and errors."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        raise DeviceError(
            "torch sees no CUDA GPU",
            remedy="check the driver with nvidia-smi, or use a simulated device such as sim:h200",
        )
    in_job = (dist.is_available() and dist.is_initialized()) or int(
        os.environ.get("WORLD_SIZE", "1")
    ) > 1
    if in_job:
        if devices is not None:
            raise UsageError(
                f"devices is {list(devices)} in a job", remedy="leave it out: each rank has its GPU"
            )
        return _join_job(timeout_s)
    visible = torch.cuda.device_count()
    if devices is None and "LOCAL_RANK" in os.environ:
        devices = [int(os.environ["LOCAL_RANK"])]  # a job of one rank: its GPU, not all of them
    chosen = tuple(range(visible)) if devices is None else tuple(devices)
    if not chosen or len(set(chosen)) != len(chosen):
        raise UsageError(f"devices is {list(chosen)}", remedy="name each GPU once, at least one")
    if max(chosen) >= visible or min(chosen) < 0:
        raise DeviceError(
            f"devices is {list(chosen)}, but torch sees {visible} GPUs",
            remedy=f"use indices from 0 to {visible - 1}",
        )
    if len(chosen) == 1:
        return LocalTeam(functools.partial(_single_backend, chosen[0], timeout_s))
    return _spawn_team(chosen, timeout_s)


# --- one GPU, in this process --------------------------------------------------------------------


def _single_backend(device: int, timeout_s: float) -> Backend:
    from overlapctl.measure.cuda_backend import CudaBackend
    from overlapctl.measure.shaping import ShimShaping

    return CudaBackend(
        device, ShimShaping(), read_clocks=_clock_reader(device), timeout_s=timeout_s
    )


# --- a job started by somebody else --------------------------------------------------------------


def _join_job(timeout_s: float) -> Team:
    import torch
    import torch.distributed as dist

    _set_environment()
    device = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(device)
    is_ours = not dist.is_initialized()
    if is_ours:
        dist.init_process_group("nccl", device_id=torch.device("cuda", device))
    # A rank that fails answers at once; one that hangs does after its own watchdog.
    control = dist.new_group(
        backend="gloo", timeout=datetime.timedelta(seconds=300 + 10 * timeout_s)
    )
    # What the job did not make, the job will not end.
    on_close = dist.destroy_process_group if is_ours else _nothing
    return JobTeam(functools.partial(_job_backend, device, timeout_s, on_close), control)


def _job_backend(device: int, timeout_s: float, on_close: Callable[[], None]) -> Backend:
    import torch.distributed as dist

    from overlapctl.measure.cuda_backend import CudaBackend
    from overlapctl.measure.shaping import ShimShaping

    return CudaBackend(
        device,
        ShimShaping(),
        read_clocks=_clock_reader(device),
        group=dist.group.WORLD,
        rank=dist.get_rank(),
        ranks=dist.get_world_size(),
        timeout_s=timeout_s,
        on_close=on_close,
    )


# --- workers of our own --------------------------------------------------------------------------


def _spawn_team(devices: tuple[int, ...], timeout_s: float) -> SpawnedTeam:
    folder = Path(tempfile.gettempdir()) / f"overlapctl-{os.getpid()}-{secrets.token_hex(8)}"
    rendezvous = folder / "rendezvous"
    return SpawnedTeam(
        functools.partial(_worker_backend, devices, str(rendezvous), timeout_s),
        len(devices),
        silence_s=300 + 5 * timeout_s,
        # A rendezvous file serves one team; a team that replaces a failed one needs a fresh one.
        on_start=functools.partial(folder.mkdir, mode=0o700),
        on_end=functools.partial(shutil.rmtree, folder, ignore_errors=True),
    )


def _worker_backend(
    devices: tuple[int, ...], rendezvous: str, timeout_s: float, rank: int, ranks: int
) -> Backend:
    """Make the backend inside of a worker: its own job on this host."""
    import torch
    import torch.distributed as dist

    _set_environment()
    device = devices[rank]
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        device_id=torch.device("cuda", device),
        # Longer than a step may take: our own watchdog tells more than NCCL's abort.
        timeout=datetime.timedelta(seconds=120 + 2 * timeout_s),
    )
    return _job_backend(device, timeout_s, on_close=dist.destroy_process_group)


def _nothing() -> None:
    pass


def _set_environment() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _clock_reader(device: int) -> Callable[[], Clocks]:
    from overlapctl.device import open_device

    return open_device(f"cuda:{device}").clocks
