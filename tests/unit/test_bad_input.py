"""Bad input through the real command, as a user meets it: exit code, remedy, nothing left behind.

Each command runs in a process of its own, in an empty folder. What the commands refuse is tested
case by case in `cli/` and `profiles/`, what `overlap()` refuses in `test_session.py`; here it is
that nothing is lost or left on the way.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import overlapctl

ROOT = Path(overlapctl.__file__).parents[1]
CASE = ("--case", "gemm:8192x8192x8192:bf16:64x64x64+all_reduce:896MB")
TUNE = ("tune", "--device", "sim:h200", *CASE, "--budget", "20", "--repeats", "3")
PLAN = ("plan", "--compute", "gemm:8192x8192x8192", "--comm", "all_reduce:896MB")
START = ("--", "touch", "started")


@pytest.fixture
def here(tmp_path) -> Path:
    """Where the command runs."""
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


@pytest.fixture
def call(here, tmp_path):
    """Run `overlapctl` as a program; its cache is `cache` beside its folder, and no GPU is seen."""

    def call(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("OVERLAPCTL_", "NCCL_"))}
        return subprocess.run(
            [sys.executable, "-m", "overlapctl", *arguments],
            cwd=here,
            env={
                **kept,
                "PYTHONPATH": str(ROOT),
                "OVERLAPCTL_CACHE_DIR": str(tmp_path / "cache"),
                "CUDA_VISIBLE_DEVICES": "",
                "COLUMNS": "200",
                **environ,
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return call


@pytest.fixture
def stored(call, tmp_path) -> Path:
    """A profile that `tune` wrote for the simulated H200."""
    assert call(*TUNE).returncode == 0
    (path,) = (tmp_path / "cache" / "profiles").glob("*.json")
    return path


def refused(done, code: int, *words: str) -> None:
    """Assert an error of this code on stderr, with a remedy, and without a traceback."""
    assert done.returncode == code, done.stderr
    what, remedy = done.stderr.rpartition("Error: ")[2].split("\nRemedy: ")
    assert remedy.strip()
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in f"{what}\n{remedy}"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((*TUNE[:1], *CASE, "--device", "sim:abacus"), 3, ["'abacus' is unknown", "h200"]),
        ((*TUNE[:1], *CASE, "--device", "abacus"), 3, ["'abacus' is unknown", "sim:h200"]),
        ((*PLAN, "--device", "abacus"), 3, ["'abacus'", "h200"]),
        ((*PLAN, "--device", "sim:h200,sms=0"), 3, ["sms"]),
        ((*TUNE, "--budget", "0"), 2, ["budget is 0 s", "above 0"]),
        (("run", "--pad", "-1", *START), 2, ["--pad", "negative"]),
        (("run", "--pad", "2MiB", *START), 2, ["--pad", "1MiB"]),
        (("run", "--pad", "1e400", *START), 2, ["--pad", "1e400"]),
        (("run", "--profile", "missing.json", *START), 5, ["missing.json", "overlapctl tune"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_refused_command_leaves_nothing(call, here, tmp_path, arguments, code, words):
    done = call(*arguments)
    refused(done, code, *words)
    assert done.stdout == ""
    assert list(here.iterdir()) == []
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("arguments", [TUNE, ("profiles", "list")], ids=lambda a: a[0])
def test_a_cache_below_a_file_is_refused_and_the_file_kept(call, here, tmp_path, arguments):
    (tmp_path / "file").write_text("mine")
    done = call(*arguments, OVERLAPCTL_CACHE_DIR=str(tmp_path / "file" / "below"))
    refused(done, 5, str(tmp_path / "file" / "below"), "OVERLAPCTL_CACHE_DIR")
    assert (tmp_path / "file").read_text() == "mine"
    assert list(here.iterdir()) == []


def truncated(text: str) -> str:
    return text[: len(text) // 2]


def not_a_profile(text: str) -> str:
    return json.dumps({"somebody": "else's"})


def changed_by_hand(text: str) -> str:
    return text.replace('"comm_priority": true', '"comm_priority": false', 1)


@pytest.mark.parametrize("change", [truncated, not_a_profile, changed_by_hand])
def test_a_broken_profile_is_refused_then_moved_aside_whole(call, here, stored, change):
    intact = stored.read_text()
    broken = change(intact)
    assert broken != intact
    stored.write_text(broken)

    refused(call("run", "--profile", str(stored), *START), 5, stored.name, "overlapctl tune")
    refused(call("profiles", "show", stored.stem), 5, stored.name)
    assert not (here / "started").exists()
    assert stored.read_text() == broken

    assert call(*TUNE).returncode == 0
    assert stored.with_name(f"{stored.name}.broken-1").read_text() == broken
    assert json.loads(stored.read_text())["schema"] == "overlapctl-profile"


def test_a_newer_profile_stops_tune_and_stays(call, here, stored):
    newer = json.dumps(json.loads(stored.read_text()) | {"version": 99, "more": [1]})
    stored.write_text(newer)
    before = {path.name for path in stored.parent.iterdir()}
    for arguments in (TUNE, (*TUNE, "--resume"), ("run", "--profile", str(stored), *START)):
        refused(call(*arguments), 5, "newer overlapctl", "upgrade")
    assert stored.read_text() == newer
    assert {path.name for path in stored.parent.iterdir()} == before
    assert list(here.iterdir()) == []


def test_a_profile_of_another_machine_is_moved_aside_whole(call, stored):
    """Copied over this machine's file, it gives neither settings nor verdicts, and is kept."""
    other = [*TUNE]
    other[other.index("sim:h200")] = "sim:a40"
    assert call(*other).returncode == 0
    (foreign,) = set(stored.parent.glob("*.json")) - {stored}
    copied = foreign.read_text()
    stored.write_text(copied)

    done = call("doctor", "--device", "sim:h200", "--json")
    check = next(c for c in json.loads(done.stdout)["checks"] if c["name"] == "profile")
    assert check["status"] == "WARN"
    assert "A40" in check["value"]

    assert call(*TUNE).returncode == 0
    assert stored.with_name(f"{stored.name}.broken-1").read_text() == copied
    document = json.loads(stored.read_text())["profile"]
    assert "H200" in document["key"]["gpu"]
    assert len(document["verdicts"]) == 1
    assert foreign.read_text() == copied
