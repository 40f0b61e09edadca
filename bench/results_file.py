"""Writes result files in the one format that README and docs quote from.

``bench/results/<suite>-<device>-<yyyymmdd>.json``:
``{suite, command, commit, device, versions, when, rows: [...]}``, and a rendered ``.md`` beside it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def write(
    folder: Path, suite: str, rows: Sequence[dict[str, Any]], *, spec: str | None = None
) -> Path:
    """Write the rows of one suite and say where.

    Parameters
    ----------
    folder
        Where to; ``bench/results`` for results that are quoted.
    suite
        Name of the suite.
    rows
        One flat mapping per row; keys become the columns of the rendered table.
    spec
        Device to describe (``open_device``); ``None``: the first GPU, else the simulated one.
    """
    from overlapctl.device import open_device

    device = open_device(spec)
    name = device.facts().name
    document = {
        "suite": suite,
        "command": " ".join(sys.argv),
        "commit": _commit(),
        "device": {"name": name, "topology": device.topology().signature},
        "versions": device.versions(),
        "when": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "rows": list(rows),
    }
    slug = name.lower().replace("nvidia ", "").replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{suite}-{slug}-{time.strftime('%Y%m%d')}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    path.with_suffix(".md").write_text(render(document))
    print(f"{suite}: {len(rows)} rows in {path}", flush=True)
    return path


def render(document: dict[str, Any]) -> str:
    """Render a result document as Markdown."""
    rows: list[dict[str, Any]] = document["rows"]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    versions = ", ".join(f"{k} {v}" for k, v in document["versions"].items())
    lines = [
        f"# {document['suite']} on {document['device']['name']}",
        "",
        f"`{document['command']}` at {document['commit']}, {document['when']}; "
        f"{document['device']['topology']}; {versions}.",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
    ]
    lines += ["| " + " | ".join(_cell(row.get(c)) for c in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _commit() -> str:
    marker = ROOT / ".commit"  # written where the tree is copied to a machine without its history
    if marker.exists():
        return marker.read_text().strip()
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
