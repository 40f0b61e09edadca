"""``overlapctl tune``: find, prove and store the best setting of this machine."""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overlapctl.errors import UsageError

if TYPE_CHECKING:
    from overlapctl.device.protocol import Device
    from overlapctl.measure.trial import TrialRunner
    from overlapctl.profiles import ProfileStore
    from overlapctl.records import Case, ProfileKey
    from overlapctl.tuning import TuningPlan, TuningResult

__all__ = ["tune"]


class Form(str, enum.Enum):
    """Forms of a case."""

    PAIR = "pair"
    PIPELINE = "pipeline"


def tune(
    device: Annotated[
        str | None,
        typer.Option(
            help="cuda (all GPUs), cuda:1 (that one alone), sim:h200 ... "
            "Default: the GPUs, else sim:h200."
        ),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="COMPUTE+COMM, for example "
            "gemm:8192x8192x8192:bf16:64x64x64+all_reduce:896MB (MB is 2^20 bytes). Repeatable. "
            "Default: seven kernels of a training step."
        ),
    ] = None,
    form: Annotated[Form, typer.Option(help="Form of the cases given with --case.")] = Form.PAIR,
    budget: Annotated[float, typer.Option(help="Seconds that measuring may take.")] = 60.0,
    repeats: Annotated[
        int, typer.Option(help="Repetitions of the arms that stay to the end.")
    ] = 15,
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip cases that the stored profile has already.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document, and nothing else, on stdout.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Also write the JSON document to this file.")
    ] = None,
) -> None:
    """Find, prove and store the best setting; "leave it alone" is one.

    Works under torchrun (one process for each GPU) and alone.
    """
    from overlapctl.device import open_device
    from overlapctl.profiles import ProfileStore, profile_key
    from overlapctl.tuning import check_budget, plan_tuning
    from overlapctl.tuning import tune as run_tuning

    check_budget(budget, repeats)
    if out is not None and not out.resolve().parent.is_dir():
        raise UsageError(
            f"the folder of --out {out} does not exist", remedy="make it, or name another file"
        )
    is_first = int(os.environ.get("RANK", "0")) == 0
    opened = open_device(device)
    say = _Speaker(is_first, to_stderr=as_json)
    store, key = ProfileStore(), profile_key(opened)
    with contextlib.closing(_runner(opened, asked=device)) as runner:
        gpus = getattr(runner, "ranks", len(opened.topology().devices))
        say.device(opened, gpus, asked=device)
        cases = _cases(case or [], form, opened, gpus)
        if resume:
            given = len(cases)
            cases = _without_known(cases, store, key, getattr(runner, "agree", bool))
            say.line(
                f"{given - len(cases)} of {given} cases are in the stored profile already: skipped"
            )
            if not cases:
                say.line("nothing is left to tune")
                return
        plan = plan_tuning(opened, cases, runner, budget_s=budget, repeats=repeats)
        path = store.path(key)
        say.plan(plan, path)
        if dry_run:
            if as_json and is_first:
                typer.echo(_plan_json(opened, plan, path))
            return
        with say.progress(plan) as progress:
            result = run_tuning(
                opened,
                cases,
                runner,
                budget_s=budget,
                repeats=repeats,
                progress=progress,
                store=store if is_first else None,
                plan=plan,
            )
    if not is_first:
        return
    if as_json or out is not None:
        text = _result_json(opened, result)
        if out is not None:
            out.write_text(text + "\n", encoding="utf-8")
        if as_json:
            typer.echo(text)
    if not as_json:
        say.result(result, simulated=opened.is_simulated)


class _Speaker:
    """Prints on the first rank only."""

    def __init__(self, is_first: bool, *, to_stderr: bool) -> None:
        from overlapctl.cli.console import console

        self._is_first = is_first
        self._console = console(to_stderr=to_stderr)

    def line(self, text: str) -> None:
        if self._is_first:
            self._console.print(text, markup=False)

    def device(self, device: Device, gpus: int, *, asked: str | None) -> None:
        facts, topology = device.facts(), device.topology()
        self.line(
            f"device: {device.spec} ({facts.name}, {facts.sm_count} SMs; {topology.signature})"
        )
        if device.is_simulated and asked is None:
            self.line(
                "no GPU here: a simulated one is tuned. The verdicts show what to expect; tune "
                "again on the machine that runs the job."
            )
        if gpus < 2:
            self.line(
                "one GPU: a kernel with NCCL's footprint, copying within the GPU, stands in for "
                "collectives. Residency and priority can be tuned; verdicts that depend on links "
                "and real collectives (all-reduce, all-gather, copy engines between GPUs) need two."
            )

    def plan(self, plan: TuningPlan, path: Path) -> None:
        from overlapctl.reports.names import case_name

        self.line("plan:")
        for number, planned in enumerate(plan.cases, 1):
            arms = ", ".join(arm.name for arm in planned.arms)
            self.line(f"  {number}. {case_name(planned.case)}")
            self.line(f"     {len(planned.arms)} arms: {arms}")
            for name, reason in planned.pruned:
                self.line(f"     without {name}: {reason}")
        for case, reason in plan.left_out:
            self.line(f"  not possible here: {case_name(case)}: {reason}")
        self.line(
            f"time: about {plan.estimate:.0f} s at most (one round {plan.first_rounds:.1f} s, "
            f"budget {plan.budget_s:g} s); arms are interleaved, up to {plan.repeats} repetitions"
        )
        self.line(f"profile: {path}")

    @contextlib.contextmanager
    def progress(self, plan: TuningPlan) -> Iterator[Any]:
        """Progress bar on stderr; stdout stays clean for the report."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from overlapctl.cli.console import console
        from overlapctl.reports.names import case_name

        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=console(to_stderr=True),
            disable=not self._is_first,
        )
        with bar:
            task = bar.add_task("tuning", total=len(plan.cases))

            def advance(case: Case, number: int, share: float) -> None:
                label = f"{number + 1}/{len(plan.cases)} {case_name(case)}"
                bar.update(task, description=label, completed=number + share)

            yield advance
            bar.update(task, description="tuning", completed=len(plan.cases))

    def result(self, result: TuningResult, *, simulated: bool) -> None:
        from overlapctl.reports.names import case_name
        from overlapctl.reports.text import verdicts_report

        self.line(f"\nverdict: {result.profile.reason}\n")
        self._console.print(verdicts_report([item.verdict for item in result.evidence]))
        for case, reason in result.left_out:
            self.line(f"not measured: {case_name(case)}: {reason}")
        user = "real GPUs never use it (simulated)" if simulated else 'overlap("auto") uses it'
        self.line(f"\n{result.seconds:.1f} s; stored in {result.path}; {user}")


def _cases(texts: Sequence[str], form: Form, device: Device, gpus: int) -> list[Case]:
    from overlapctl.records import Case
    from overlapctl.specs import parse_comm, parse_compute
    from overlapctl.tuning import default_cases

    if not texts:
        return list(default_cases(device.facts(), gpus))
    cases = []
    for text in texts:
        compute, plus, comm = text.partition("+")
        if not plus:
            raise UsageError(
                f"--case {text!r} names no communication",
                remedy="write COMPUTE+COMM, for example gemm:8192x8192x8192:bf16+all_reduce:64MB",
            )
        cases.append(Case(compute=parse_compute(compute), comm=parse_comm(comm), form=form.value))
    return cases


def _without_known(
    cases: list[Case], store: ProfileStore, key: ProfileKey, agree: Callable[[bool], bool]
) -> list[Case]:
    from overlapctl.records import Profile

    found = store.load(key)
    known = {v.case for v in found.verdicts} if isinstance(found, Profile) else set()
    # Ranks on other hosts have other folders: what the first rank knows counts for all.
    return [case for case in cases if not agree(case in known)]


def _runner(device: Device, *, asked: str | None) -> TrialRunner:
    if device.is_simulated:
        from overlapctl.measure.simulated import SimulatedRunner

        return SimulatedRunner(
            device.facts(),
            world=len(device.topology().devices),
            nccl_version=device.versions()["nccl"],
        )
    from overlapctl.measure.gpu import GpuRunner

    # An index asks for that GPU alone; in a job each rank has its own anyway.
    index = (asked or "").partition(":")[2]
    in_job = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return GpuRunner([int(index)] if index.isdigit() and not in_job else None)


def _plan_json(device: Device, plan: TuningPlan, path: Path) -> str:
    from overlapctl.reports.as_json import plan_document

    return plan_document(
        device=device.spec,
        simulated=device.is_simulated,
        profile_path=path,
        estimate_s=plan.estimate,
        budget_s=plan.budget_s,
        cases=[(p.case, p.footprint, p.arms, p.pruned, p.most) for p in plan.cases],
    )


def _result_json(device: Device, result: TuningResult) -> str:
    from overlapctl.reports.as_json import tune_document
    from overlapctl.tuning.verdict import arm_metrics

    return tune_document(
        device=device.spec,
        simulated=device.is_simulated,
        profile=result.profile,
        path=result.path,
        evidence=[
            (
                item.verdict,
                arm_metrics(item.trials),
                max(len(trial.samples) for trial in item.trials),
            )
            for item in result.evidence
        ],
        left_out=result.left_out,
        seconds=result.seconds,
    )
