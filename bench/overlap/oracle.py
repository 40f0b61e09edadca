"""Is the tuner's choice the best arm? `oracle.py OUT_DIR [--cases FILE] [--repeats 9]`.

Every case of the committed list is tuned; afterwards a separate pass runs *all* its arms,
exhaustively and interleaved. A row compares the chosen arm's time in that pass with the best arm's
and with the default's. The pass has one arm more, "auto": what `overlap("auto")` plans for this
kernel on a machine without a profile. On one GPU the list with stand-ins is used.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import results_file
from overlapctl.device import open_device
from overlapctl.device.footprints import communication_footprint
from overlapctl.measure.gpu import GpuRunner
from overlapctl.measure.metrics import evaluate
from overlapctl.measure.stats import compare
from overlapctl.measure.trial import DEFAULT_ARM
from overlapctl.plan.heuristic import plan_kernels
from overlapctl.records import Arm, Case, DeviceFacts
from overlapctl.specs import format_comm, format_compute, parse_comm, parse_compute
from overlapctl.tuning import plan_tuning, tune
from overlapctl.tuning.race import paired_totals


def read_cases(path: Path) -> list[Case]:
    """Read the committed list."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    pairs = [line.split("+", 1) for line in lines if line and not line.startswith("#")]
    return [Case(compute=parse_compute(a), comm=parse_comm(b)) for a, b in pairs]


def auto_arm(facts: DeviceFacts, runner: GpuRunner, case: Case, nccl: str) -> Arm:
    """Return the arm that `overlap("auto")` would settle on after observing the case."""
    compute = runner.footprint(case)
    comm = communication_footprint(facts, case.comm.path, case.comm.op, nccl)
    policy, _ = plan_kernels(facts, [compute] if compute else [], [comm] if comm else [])
    return Arm(name="auto", policy=policy)


def main() -> None:
    """Tune, then check against the exhaustive pass."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--budget", type=float, default=180)
    options = parser.parse_args()
    device = open_device("cuda")
    gpus = len(device.topology().devices)
    name = "cases-multi-gpu.txt" if gpus > 1 else "cases-one-gpu.txt"
    cases = read_cases(options.cases or Path(__file__).with_name(name))
    rows: list[dict[str, Any]] = []
    with GpuRunner() as runner:
        plan = plan_tuning(device, cases, runner, budget_s=options.budget)
        start = time.monotonic()
        result = tune(device, cases, runner, budget_s=options.budget, plan=plan)
        tuned_s = time.monotonic() - start
        verdicts = {e.verdict.case: e for e in result.evidence}
        for planned in plan.cases:
            if planned.case not in verdicts:
                continue
            evidence = verdicts[planned.case]
            auto = auto_arm(device.facts(), runner, planned.case, device.versions()["nccl"])
            trials = runner.run(planned.case, [*planned.arms, auto], repeats=options.repeats)
            default = next(t for t in trials if t.arm.name == DEFAULT_ARM)
            rated = {t.arm.name: compare(*paired_totals(t, default)) for t in trials}
            best = min((arm.name for arm in planned.arms), key=lambda arm: rated[arm].ratio)
            chosen = evidence.verdict.chosen
            metrics = evaluate(next(t for t in trials if t.arm.name == chosen), default)
            rows.append(
                {
                    "compute": format_compute(planned.case.compute),
                    "comm": format_comm(planned.case.comm),
                    "chosen": chosen,
                    "best": best,
                    "chosen_over_best": rated[chosen].ratio / rated[best].ratio,
                    "chosen_over_default": rated[chosen].ratio,
                    "best_over_default": rated[best].ratio,
                    "auto_over_default": rated["auto"].ratio,
                    "auto": f"priority {auto.policy.comm_priority}, {auto.policy.rules}",
                    "spread": max(rated[chosen].spread, rated[best].spread),
                    "compute_alone": metrics.compute_alone,
                    "comm_alone": metrics.comm_alone,
                    "default_total": metrics.default_total,
                    "gain_share": metrics.gain_share,
                    "arms": len(planned.arms),
                    "tuner_trials": sum(len(t.samples) for t in evidence.trials),
                    "oracle_trials": len(trials) * options.repeats,
                    "sm_mhz": metrics.sm_mhz,
                    "reason": evidence.verdict.reason,
                }
            )
            row = rows[-1]
            print(
                f"{row['compute'][:42]:42s} {row['comm'][:26]:26s} {chosen:22s} best {best:22s} "
                f"{row['chosen_over_best']:.3f} of best, {row['chosen_over_default']:.3f} of def.",
                flush=True,
            )
    within = sum(row["chosen_over_best"] <= 1.03 for row in rows)
    print(f"within 3% of the best arm: {within} of {len(rows)}; tuning took {tuned_s:.1f} s")
    gains = [(1 - r["auto_over_default"], 1 - r["chosen_over_default"]) for r in rows]
    share = sum(a for a, _ in gains) / max(sum(c for _, c in gains), 1e-9)
    worst = max(r["auto_over_default"] for r in rows)
    print(f"auto without a profile: {share:.0%} of the tuned gain, worst {worst:.3f} of default")
    for case, why in result.left_out:
        print("left out:", case, why)
    results_file.write(options.out, "tuner-against-oracle", rows, spec="cuda")


if __name__ == "__main__":
    main()
