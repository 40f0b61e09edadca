"""Check the simulator against the recorded trials on 2x H200: ``validate.py [OUT_DIR [FITS]]``.

Every compute kernel is left out once (with its variants in size and number): the parameters are
fitted to the others and predict it. Inputs are footprints, the untouched compute time alone and the
communication time alone; padded compute time, both ends and the total are outputs. Needs no GPU.

Fitting takes some minutes; ``FITS``, an earlier result file of this suite, gives its fits again.
"""

from __future__ import annotations

import concurrent.futures
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from recorded import Row, observation, pairs, pipelines

import results_file
from overlapctl.device import open_device
from overlapctl.plan.calibration import Prediction, calibrate, predict
from overlapctl.plan.parameters import SimulationParameters, parameters_for
from overlapctl.records import DeviceFacts

DEVICE = "sim:h200"
NOTHING = "nothing"
# A choice leaves the default only for a predicted gain above MARGIN; among arms that are predicted
# the same (TIE) it takes the one that changes least.
MARGIN = 0.02
TIE = 0.001


def main() -> None:
    """Fit, leave out, compare, write."""
    facts = open_device(DEVICE).facts()
    rows = pairs() + pipelines()
    fits = _read(Path(sys.argv[2])) if len(sys.argv) > 2 else _leave_one_out(facts, rows)
    seen = [observation(facts, row) for row in rows]
    predictions = [
        (row, predict(facts, o, fits[row.family])) for row, o in zip(rows, seen, strict=True)
    ]
    shipped = parameters_for(facts)
    ours = [(row, predict(facts, o, shipped)) for row, o in zip(rows, seen, strict=True)]
    out: list[dict[str, Any]] = []
    for name, chosen in (("left out", predictions), ("shipped parameters", ours)):
        for table in ("pair", "pipeline", "all"):
            some = [(r, p) for r, p in chosen if table in (r.table, "all")]
            out.append({"what": "errors", "parameters": name, "table": table, **_errors(some)})
            out.append({"what": "choice", "parameters": name, "table": table, **_choices(some)})
    out.append(
        {"what": "errors", "parameters": "one-line formula", "table": "pair", **_formula(rows)}
    )
    for family in sorted(fits.keys() - {NOTHING}):
        some = [(r, p) for r, p in predictions if r.family == family]
        out.append({"what": "errors", "parameters": "left out", "table": family, **_errors(some)})
    out += _worst(predictions)
    out += [
        {"what": "fit", "table": name, "parameters": json.dumps(asdict(fit))}
        for name, fit in fits.items()
    ]
    for row in out:
        print(row, flush=True)
    if len(sys.argv) > 1:
        results_file.write(Path(sys.argv[1]), "model", out, spec=DEVICE)


def _leave_one_out(facts: DeviceFacts, rows: Sequence[Row]) -> dict[str, SimulationParameters]:
    fits: dict[str, SimulationParameters] = {}
    with concurrent.futures.ProcessPoolExecutor(max_workers=2) as pool:
        waiting = {}
        for name in [NOTHING, *sorted({row.family for row in rows})]:
            kept = [observation(facts, row) for row in rows if row.family != name]
            waiting[pool.submit(calibrate, facts, kept)] = name
        for done in concurrent.futures.as_completed(waiting):
            fits[waiting[done]] = done.result()
            print(f"left out: {waiting[done]}: {done.result()}", flush=True)
    return fits


def _read(path: Path) -> dict[str, SimulationParameters]:
    rows = json.loads(path.read_text())["rows"]
    return {
        row["table"]: SimulationParameters(**json.loads(row["parameters"]))
        for row in rows
        if row["what"] == "fit"
    }


def _errors(some: Iterable[tuple[Row, Prediction]]) -> dict[str, Any]:
    columns: dict[str, list[float]] = defaultdict(list)
    for row, p in some:
        columns["total"].append(abs(p.total / row.total - 1))
        for name, said, seen in (
            ("compute_alone", p.compute_alone, row.padded_alone),
            ("compute_end", p.compute_end, row.compute_end),
            ("comm_end", p.comm_end, row.comm_end),
        ):
            if seen is not None:
                columns[name].append(abs(said / seen - 1))
    result: dict[str, Any] = {"rows": len(columns["total"])}
    for name, values in columns.items():
        result[f"{name}_median"] = round(statistics.median(values), 4)
        result[f"{name}_p90"] = round(quantile(values, 0.9), 4)
    return result


def _choices(some: Iterable[tuple[Row, Prediction]]) -> dict[str, Any]:
    cases: dict[tuple[str, str, int, int], list[tuple[Row, Prediction]]] = defaultdict(list)
    for row, p in some:
        cases[row.case].append((row, p))
    over_best, over_default, worst = [], [], ""
    for case, arms in cases.items():
        default = next((a for a in arms if a[0].is_default), None)
        if default is None:
            continue
        chosen = choose(arms, default)
        best = min(row.total for row, _ in arms)
        over_best.append(chosen.total / best - 1)
        over_default.append(chosen.total / default[0].total - 1)
        if over_best[-1] >= max(over_best):
            worst = f"{case}: {_arm(chosen)} {chosen.total} ms, best {best} ms"
    return {
        "cases": len(over_best),
        "within_3%_of_best": round(sum(x <= 0.03 for x in over_best) / len(over_best), 3),
        "most_over_best": round(max(over_best), 3),
        "most_over_default": round(max(over_default), 3),
        "worst": worst,
    }


def choose(arms: Sequence[tuple[Row, Prediction]], default: tuple[Row, Prediction]) -> Row:
    """Pick the arm by prediction alone."""
    best = min(p.total for _, p in arms)
    if best > default[1].total * (1 - MARGIN):
        return default[0]
    close = [row for row, p in arms if p.total <= best * (1 + TIE)]
    return min(close, key=_changes)


def _changes(row: Row) -> tuple[int, int]:
    changes = (row.comm != "nccl") + (row.blocks != 24) + row.priority + bool(row.target)
    return changes, -(row.target or 0)


def _formula(rows: Iterable[Row]) -> dict[str, Any]:
    """Errors of default = c + m, priority = max(c + 0.35 m, m + 0.2) with the *measured* c."""
    errors = []
    for row in rows:
        if row.table == "pair":
            c, m = row.padded_alone or row.compute_alone, row.comm_alone
            said = max(c + 0.35 * m, m + 0.2) if row.priority else c + m
            errors.append(abs(said / row.total - 1))
    return {
        "rows": len(errors),
        "total_median": round(statistics.median(errors), 4),
        "total_p90": round(quantile(errors, 0.9), 4),
    }


def _worst(predictions: Iterable[tuple[Row, Prediction]], count: int = 15) -> list[dict[str, Any]]:
    ranked = sorted(predictions, key=lambda x: -abs(x[1].total / x[0].total - 1))
    rows: list[dict[str, Any]] = []
    seen = set()
    for row, p in ranked:
        key = (row.table, row.compute, row.comm, row.target)
        if key in seen:
            continue
        seen.add(key)
        rows.append(
            {
                "what": "worst",
                "table": row.table,
                "case": f"{row.compute} {row.comm} {row.mib} MiB x{row.repeats}",
                "arm": _arm(row),
                "measured": row.total,
                "predicted": round(p.total, 2),
                "error": round(p.total / row.total - 1, 3),
                "compute_alone_measured": row.padded_alone or row.compute_alone,
                "compute_alone_predicted": round(p.compute_alone, 2),
                "why": _why(row, p),
            }
        )
        if len(rows) == count:
            break
    return rows


def _why(row: Row, p: Prediction) -> str:
    """Say which part of the prediction is off."""
    error = p.total / row.total - 1
    if row.padded_alone is not None:
        alone = p.compute_alone / row.padded_alone - 1
        if abs(alone) > 0.5 * abs(error) and alone * error > 0:
            if abs(p.compute_alone / row.compute_alone - 1) < 0.005:
                return f"a pad without effect: measured alone {-alone:+.0%} longer (clocks)"
            return f"compute time under the pad is off by {alone:+.0%}"
    if row.compute in ("gemm_bf16", "sdpa"):
        return "persistent kernels in a row: which of two waiting kernels gets the free SMs"
    if row.table == "pipeline" and abs(p.compute_alone / row.compute_alone - 1) > 0.005:
        return "compute time under the pad (not recorded apart)"
    if row.compute_end is not None and row.comm_end is not None:
        side = "collective" if row.comm_end > row.compute_end else "compute kernel"
        return f"end of the {side}"
    return "both ends unknown"


def _arm(row: Row) -> str:
    parts = [row.comm if row.comm != "nccl" else "", "priority" if row.priority else ""]
    parts += [f"{row.target}/SM" if row.target else ""]
    parts += [f"{row.blocks} blocks" if row.blocks != 24 else ""]
    return "+".join(p for p in parts if p) or "default"


def quantile(values: Sequence[float], share: float) -> float:
    """Smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


if __name__ == "__main__":
    main()
