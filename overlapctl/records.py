"""The frozen records that cross from one stage to the next.

``device -> DeviceFacts -> plan -> Policy -> launch -> Applied -> measure -> Trial -> profiles``

Every record is a plain frozen dataclass: it prints itself, compares by value and round-trips
through JSON with :func:`to_json` and :func:`from_json`, which validate types and reject unknown
fields. Sizes are bytes, times milliseconds, rates GB/s (1e9 bytes) or TFLOP/s unless a field name
says otherwise.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import pydantic

__all__ = [
    "Applied",
    "Arm",
    "Candidate",
    "Case",
    "Clocks",
    "CommSpec",
    "ComputeSpec",
    "DeviceFacts",
    "DeviceRates",
    "KernelFootprint",
    "KernelRule",
    "Link",
    "Plan",
    "Policy",
    "PolicyChange",
    "Profile",
    "ProfileKey",
    "Role",
    "Rule",
    "Sample",
    "Topology",
    "Trial",
    "Verdict",
    "from_json",
    "to_json",
]

_T = TypeVar("_T")
_STRICT = pydantic.ConfigDict(extra="forbid")


class Role(str, enum.Enum):
    """What a kernel is to overlapctl; unknown kernels are compute."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    IGNORED = "ignored"


class Rule(str, enum.Enum):
    """Why a launch's shared memory was, or was not, padded (same order as ``rules.def``)."""

    NOTHING_ASKED = "nothing-asked"
    PADDED_BYTES = "padded-bytes"
    PADDED_TO_TARGET = "padded-to-target"
    ALREADY_AT_TARGET = "already-at-target"
    NO_EFFECT = "no-effect"
    COMMUNICATION = "communication"
    IGNORED = "ignored"
    EXCLUDED = "excluded"
    NOT_INCLUDED = "not-included"
    COOPERATIVE = "cooperative"
    KEEPS_GRID_RESIDENT = "keeps-grid-resident"
    CLUSTER = "cluster"
    OPT_IN_LIMIT = "opt-in-limit"
    CAPTURE_LEFT_ALONE = "capture-left-alone"
    FAILED_BEFORE = "failed-before"
    FACTS_UNKNOWN = "facts-unknown"


# --- device ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """What the block-level simulation needs to know of a GPU's speed.

    Parameters
    ----------
    hbm_gbps
        Memory bandwidth, bytes read plus written, GB/s.
    link_gbps
        Payload one GPU can send to a peer in one direction while receiving as much, GB/s.
    tensor_tflops
        Dense bf16 matrix rate, TFLOP/s.
    fp32_tflops
        Plain fp32 rate, TFLOP/s.
    copy_engines
        Copy engines usable for peer traffic at once.
    """

    hbm_gbps: float
    link_gbps: float
    tensor_tflops: float
    fp32_tflops: float
    copy_engines: int = 2


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """Limits of one GPU that decide which blocks are resident together.

    Parameters
    ----------
    name
        Marketing name as the driver gives it.
    vendor
        ``"nvidia"`` or ``"amd"``.
    arch
        ``"sm_90"``, ``"gfx90a"`` ...
    sm_count
        SMs (CUs on AMD).
    registers_per_sm, register_granule, subpartitions
        32-bit registers of an SM; allocation unit in registers per warp; how many
        sub-partitions warps are dealt to.
    smem_per_sm, smem_per_block_optin, smem_reserved_per_block, smem_granule
        Shared memory in bytes: of an SM, the opt-in limit of one block, what the driver reserves
        for each block, and the allocation unit.
    carveout_steps
        Shared-memory sizes in bytes an SM can be configured to, ascending.
    priority_least, priority_greatest
        Stream priority range; the greatest is numerically the lowest.
    source
        Where the numbers come from: ``"driver"`` or ``"catalogue"``.
    """

    name: str
    vendor: Literal["nvidia", "amd"]
    arch: str
    sm_count: int
    warp_size: int
    max_threads_per_sm: int
    max_threads_per_block: int
    max_blocks_per_sm: int
    registers_per_sm: int
    registers_per_block: int
    register_granule: int
    subpartitions: int
    smem_per_sm: int
    smem_per_block: int
    smem_per_block_optin: int
    smem_reserved_per_block: int
    smem_granule: int
    carveout_steps: tuple[int, ...]
    l2_bytes: int
    memory_bytes: int
    priority_least: int
    priority_greatest: int
    rates: DeviceRates
    source: Literal["driver", "catalogue"] = "driver"


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """One reading of clocks, power and temperature; ``None`` where the GPU does not tell."""

    sm_mhz: int | None
    memory_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    throttle_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Link:
    """How GPU ``source`` reaches GPU ``target`` (indices visible to the process)."""

    source: int
    target: int
    kind: Literal["nvlink", "pcie", "xgmi", "system", "none"]
    links: int
    peer_access: bool


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The GPUs a process sees and the links between them."""

    devices: tuple[str, ...]
    links: tuple[Link, ...]

    @property
    def signature(self) -> str:
        """A short stable text for profile keys, for example ``"2x NVIDIA H200, nvlink x18"``."""
        kinds = sorted({f"{e.kind} x{e.links}" if e.links else e.kind for e in self.links})
        names = sorted(set(self.devices))
        head = f"{len(self.devices)}x {' + '.join(names)}" if names else "no GPU"
        return head + (", " + " + ".join(kinds) if kinds else "")


# --- launches ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KernelFootprint:
    """What one launch asks of an SM.

    Parameters
    ----------
    threads
        Threads per block.
    registers
        Registers per thread as the compiler reports them.
    static_smem, dynamic_smem
        Shared memory per block in bytes, without the driver's reserve.
    blocks
        Blocks in the grid.
    cluster
        Blocks per cluster (1: no cluster).
    cooperative
        Launched so that all blocks must be resident at once.
    """

    name: str
    threads: int
    registers: int
    static_smem: int = 0
    dynamic_smem: int = 0
    blocks: int = 1
    cluster: int = 1
    cooperative: bool = False

    @property
    def smem(self) -> int:
        """Shared memory per block, static and dynamic, in bytes."""
        return self.static_smem + self.dynamic_smem


@dataclass(frozen=True, kw_only=True)
class KernelRule:
    """What one kernel-name pattern gets; the first rule that matches a kernel wins.

    Parameters
    ----------
    pattern
        Shell-style pattern (``*`` and ``?``) matched against the whole kernel name.
    pad_bytes
        Bytes added to each block's dynamic shared memory.
    max_blocks_per_sm
        Pad until at most this many blocks stay resident per SM (0: no target).
    carveout
        Preferred shared-memory carve-out in percent, or -1 to leave it.
    """

    pattern: str
    pad_bytes: int = 0
    max_blocks_per_sm: int = 0
    carveout: int = -1


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the shim does to launches while the policy is in force.

    Parameters
    ----------
    pad_bytes, max_blocks_per_sm, carveout
        As in :class:`KernelRule`, for compute kernels that no rule matches.
    comm_priority
        Launch communication kernels at the greatest priority.
    include, exclude
        Patterns: compute kernels outside ``include`` (empty: all) or inside ``exclude`` are left
        alone.
    rules
        Per-kernel overrides, first match wins.
    shape_captures
        Also shape launches while a stream is being captured into a graph.
    """

    pad_bytes: int = 0
    max_blocks_per_sm: int = 0
    carveout: int = -1
    comm_priority: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rules: tuple[KernelRule, ...] = ()
    shape_captures: bool = True

    @property
    def is_default(self) -> bool:
        """True if the policy changes no launch at all."""
        return (
            self.pad_bytes == 0
            and self.max_blocks_per_sm == 0
            and self.carveout < 0
            and not self.comm_priority
            and all(
                r.pad_bytes == 0 and r.max_blocks_per_sm == 0 and r.carveout < 0 for r in self.rules
            )
        )


@dataclass(frozen=True, kw_only=True)
class Applied:
    """One kernel (name, block size, dynamic shared memory) and what happened to its launches.

    Parameters
    ----------
    launches, shaped, prioritised, carved, failed, captured
        Counts: all launches; with a changed dynamic size; with the priority attribute set; with
        the carve-out attribute set; shaped launches the driver refused and that were repeated as
        asked; launches seen during graph capture.
    before, after
        Dynamic shared memory per block in bytes: as asked, as launched last.
    blocks_before, blocks_after
        Resident blocks per SM (0: unknown).
    rule
        Why the size was changed or left.
    """

    kernel: str
    role: Role
    threads: int
    registers: int
    static_smem: int
    launches: int
    shaped: int
    prioritised: int
    carved: int
    failed: int
    captured: int
    before: int
    after: int
    blocks_before: int
    blocks_after: int
    rule: Rule


@dataclass(frozen=True, kw_only=True)
class PolicyChange:
    """One entry of a region's history.

    Parameters
    ----------
    when
        Local time, ISO 8601 with seconds.
    policy, reason
        What the region's policy is from then on, and why.
    """

    when: str
    policy: Policy
    reason: str


# --- measuring ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ComputeSpec:
    """A compute workload.

    Parameters
    ----------
    op
        ``"gemm"``, ``"elementwise"``, ``"layernorm"``, ``"attention"``.
    shape
        ``gemm``: (M, N, K); ``elementwise``: (elements,); ``layernorm``: (rows, columns);
        ``attention``: (batch, heads, sequence, head dimension).
    dtype
        ``"bf16"``, ``"fp16"`` or ``"fp32"``.
    tile
        Triton GEMM: (block M, block N, block K, warps, stages); empty: the vendor library.
    repeats
        How often the kernel is launched in a row.
    """

    op: Literal["gemm", "elementwise", "layernorm", "attention"]
    shape: tuple[int, ...]
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    tile: tuple[int, ...] = ()
    repeats: int = 1


@dataclass(frozen=True, kw_only=True)
class CommSpec:
    """A collective: operation, payload in bytes (the tensor each rank passes in) and path.

    ``path`` is ``"nccl"``, ``"light"`` (symmetric-memory kernel), ``"copy"`` (copy engine within
    one GPU) or ``"standin"`` (a kernel with NCCL's footprint that copies within one GPU).
    """

    op: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "local_copy"]
    size_bytes: int
    path: Literal["nccl", "light", "copy", "standin"] = "nccl"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One compute and one communication workload that run at the same time.

    ``form`` is ``"pair"`` (the collective is issued while the compute kernel runs, without a
    dependency) or ``"pipeline"`` (``depth`` times compute, then the collective on its result).
    """

    compute: ComputeSpec
    comm: CommSpec
    form: Literal["pair", "pipeline"] = "pair"
    depth: int = 8


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One configuration in a trial; the arm named ``"default"`` is the job untouched."""

    name: str
    policy: Policy = field(default_factory=Policy)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of a case: ends in ms after the compute kernel's start; ``None``: not part of it."""

    compute_end: float | None
    comm_issue: float | None
    comm_end: float | None
    clocks: Clocks | None = None

    @property
    def total(self) -> float:
        """End of whatever ended last, in ms."""
        return max(x for x in (self.compute_end, self.comm_end) if x is not None)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """All samples of one arm of one case, with the isolated times of the same run.

    ``compute_alone`` and ``comm_alone`` are the untouched kernel and the untouched collective;
    ``arm_compute_alone`` is the compute kernel alone under this arm. All in ms, one value per
    repetition, arms interleaved.
    """

    case: Case
    arm: Arm
    samples: tuple[Sample, ...]
    compute_alone: tuple[float, ...]
    comm_alone: tuple[float, ...]
    arm_compute_alone: tuple[float, ...] = ()
    applied: tuple[Applied, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the tuner decided for one case, and why.

    ``chosen`` is an arm's name. ``gain`` is the share of the default's time that the chosen arm
    saves (0.25: a quarter less), ``spread`` the larger relative spread of the two arms.
    ``totals`` gives each arm's median total in ms.
    """

    case: Case
    chosen: str
    policy: Policy
    reason: str
    gain: float
    spread: float
    totals: dict[str, float]
    serial: float
    ideal: float


@dataclass(frozen=True, kw_only=True)
class ProfileKey:
    """What a profile is valid for; every field must match."""

    gpu: str
    driver: str
    torch: str
    nccl: str
    triton: str
    topology: str


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The tuner's memory: verdicts for one machine, and the policy ``"auto"`` applies there."""

    key: ProfileKey
    created: str
    overlapctl: str
    policy: Policy
    reason: str
    verdicts: tuple[Verdict, ...] = ()


# --- planning ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run a case: whether it can be had, and when it is predicted to end.

    Parameters
    ----------
    name
        An arm's name, or that of a lever outside the policy (``"at most 8 blocks"``).
    lever
        What is changed: ``"none"``, ``"priority"``, ``"residency"``, ``"carve-out"``,
        ``"communication kernel"``, ``"block limit"``, ``"SM target"``, ``"green context"``,
        ``"order"``.
    policy
        What overlapctl applies to launches.
    settings
        What the job itself must do; empty if overlapctl can apply the candidate alone.
    legal
        Whether it can be had here and now.
    reason
        Why it is not legal; for a legal one what is to be known, or empty.
    compute_end, comm_end
        Predicted ends in ms after the compute kernel's start; ``None``: not predicted.
    """

    name: str
    lever: str
    policy: Policy = field(default_factory=Policy)
    settings: tuple[str, ...] = ()
    legal: bool = True
    reason: str = ""
    compute_end: float | None = None
    comm_end: float | None = None

    @property
    def total(self) -> float | None:
        """Predicted end of whatever ends last, ms."""
        if self.compute_end is None or self.comm_end is None:
            return None
        return max(self.compute_end, self.comm_end)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the planner would do in one case without measuring it, and why.

    Parameters
    ----------
    case, gpu
        What was planned, and the GPU's name.
    rule, rule_text
        The first matching rule (see ``plan/rules.py``).
    chosen, policy
        The chosen candidate's name and what overlapctl applies.
    reason
        Why this one, with the predicted times.
    gain, margin
        Share of the default's predicted time that is saved, and what it had to exceed: the
        model's own error.
    compute_alone, comm_alone
        Times of either side alone in ms (all stages of a pipeline), observed or estimated.
    serial, ideal
        Both sides one after the other, and the longer of the two, ms.
    runners_up
        Names of the next best candidates overlapctl could apply, best first.
    advice
        What the job itself could change for a further gain.
    candidates
        All that were looked at, legal or not.
    """

    case: Case
    gpu: str
    rule: str
    rule_text: str
    chosen: str
    policy: Policy
    reason: str
    gain: float
    margin: float
    compute_alone: float
    comm_alone: float
    serial: float
    ideal: float
    runners_up: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()


# --- JSON --------------------------------------------------------------------------------------


@functools.cache
def _adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(kind)


def _hashable(kind: Any) -> Any:
    """Hide from the type checker that it holds ``type`` objects for unhashable."""
    return kind


def to_json(record: object, *, indent: int | None = 2) -> str:
    """Write a record as JSON text.

    Parameters
    ----------
    record
        An instance of one of this module's dataclasses.
    indent
        Spaces per level, or ``None`` for one line.
    """
    return _adapter(_hashable(type(record))).dump_json(record, indent=indent).decode()


def from_json(kind: type[_T], text: str | bytes) -> _T:
    """Read a record of type ``kind`` from JSON text.

    Raises
    ------
    ValueError
        If the text is no JSON, a field is missing, unknown or of the wrong type. (pydantic's
        ``ValidationError`` is a ``ValueError`` and lists each field with the value it had.)
    """
    record: _T = _adapter(_hashable(kind)).validate_json(text)
    return record


for _record in list(globals().values()):
    # pydantic reads this attribute from standard dataclasses: unknown fields are errors.
    if isinstance(_record, type) and hasattr(_record, "__dataclass_fields__"):
        _record.__pydantic_config__ = _STRICT  # type: ignore[attr-defined]
del _record
