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
    # GCC's thread sanitizer refuses fences, which it does not model; what it checks stays sound.
    options = [f"-fsanitize={checks}", "-g", "-Wno-tsan"] if checks else []
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }")
    if checks:
        built = subprocess.run(
            [str(shim_build.COMPILER), *options, str(probe), "-o", str(tmp_path / "probe")],
            capture_output=True,
        )
        if built.returncode or subprocess.run([tmp_path / "probe"]).returncode:
            pytest.skip(f"the compiler has no {checks} sanitizer that runs here")
    fake, _ = core_harness.libraries()
    program = shim_build.compile_c(
        tmp_path / "stress",
        [
            *core_harness.CORE_SOURCES,
            core_harness.FAKE / "harness.c",
            shim_build.NATIVE / "core_stress.c",
        ],
        *options,
        "-I",
        str(core_harness.FAKE),
        str(fake),
        f"-Wl,-rpath,{fake.parent}",
    )
    done = subprocess.run([program, fake], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
