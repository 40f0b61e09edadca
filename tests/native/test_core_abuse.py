"""The core under abuse, one case per process, plain and with the compiler's checks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import core_harness
import shim_build

pytestmark = [pytest.mark.native, shim_build.needs_compiler]

CASES = (
    *("malformed", "first-sight", "full-table", "signals", "forks", "captures", "limits"),
    "policies",
)
# A forked child of a threaded program is beyond what the thread sanitizer follows.
BEYOND = {("thread", "forks"), ("thread", "signals")}


@pytest.fixture(scope="module", params=["", "address,undefined", "thread"])
def abuse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    checks: str = request.param
    folder = tmp_path_factory.mktemp("abuse") / (checks or "plain")
    folder.mkdir()
    return core_harness.sanitized(folder / "abuse", shim_build.NATIVE / "core_abuse.c", checks)


@pytest.mark.parametrize("case", CASES)
def test_every_count_and_launch_is_right(abuse: Path, case: str) -> None:
    if (abuse.parent.name, case) in BEYOND:
        pytest.skip("the thread sanitizer does not follow this")
    fake, _ = core_harness.libraries()
    # The fake driver's functions live as long as their process.
    environ = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(
        [abuse, fake, case], capture_output=True, text=True, timeout=120, env=environ
    )
    assert done.returncode == 0, done.stderr[-4000:]
