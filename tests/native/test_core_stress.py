"""The core on many threads, built with the compiler's thread, address and undefined checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import core_harness
import shim_build

pytestmark = [pytest.mark.native, shim_build.needs_compiler]


@pytest.mark.parametrize("checks", ["thread", "address,undefined", ""])
def test_everything_at_once(tmp_path: Path, checks: str) -> None:
    program = core_harness.sanitized(
        tmp_path / "stress", shim_build.NATIVE / "core_stress.c", checks
    )
    fake, _ = core_harness.libraries()
    done = subprocess.run([program, fake], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
