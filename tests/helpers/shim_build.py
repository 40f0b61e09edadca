"""Builds the shim and small C programs for the native tests with the machine's C compiler."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "overlapctl" / "launch" / "_shim"
NATIVE = ROOT / "tests" / "native"

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


def compile_c(output: Path, sources: list[Path], *options: str) -> Path:
    """Compile `sources` into `output`; libraries are named in `options`."""
    assert COMPILER is not None
    command = [COMPILER, "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"]
    command += ["-I", str(SHIM / "include"), "-I", str(SHIM / "src"), "-o", str(output)]
    command += [*map(str, sources), *options, "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return output


@functools.cache
def shim() -> Path:
    """Build the shim as the package builds it, once per test process."""
    folder = Path(tempfile.mkdtemp(prefix="overlapctl-shim-"))
    sources = sorted((SHIM / "src").glob("*.c"))
    options = ("-shared", "-fPIC", "-fvisibility=hidden", "-ftls-model=initial-exec")
    return compile_c(
        folder / "liboverlapctl_shim.so", sources, *options, "-Wl,-z,defs", "-Wl,-z,now"
    )


def driver(folder: Path, name: str = "libdriver.so", **macros: str | int) -> Path:
    """Build the assembly driver of `tests/native/detour_driver.c` with `macros` defined."""
    defines = [f"-D{key}={value}" for key, value in macros.items()]
    source = NATIVE / "detour_driver.c"
    return compile_c(
        folder / name,
        [source],
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        "-Wl,-Bsymbolic",
        *defines,
    )
