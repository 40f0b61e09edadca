"""The shim as LD_PRELOAD: each way to the driver ends at a hook, and nothing else changes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import shim_build

pytestmark = [
    pytest.mark.native,
    shim_build.needs_compiler,
    pytest.mark.skipif(
        platform.machine() != "x86_64" or sys.platform != "linux", reason="x86-64 Linux only"
    ),
]

SHIM, DRIVER = "liboverlapctl_shim.so", "libcuda.so.1"
PER_THREAD = "2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preload")
    shim_build.driver(folder, DRIVER)
    source = shim_build.NATIVE / "preload_cases.c"
    shim_build.compile_c(folder / "cases", [source])
    linked = (f"-L{folder}", f"-l:{DRIVER}", "-DLINKED")
    shim_build.compile_c(folder / "linked", [source], *linked)
    plugin = shim_build.NATIVE / "preload_plugin.c"
    shim_build.compile_c(folder / "first.so", [plugin], "-shared", "-fPIC")
    shim_build.compile_c(
        folder / "second.so",
        [plugin],
        "-shared",
        "-fPIC",
        "-Wl,--no-as-needed",
        f"-L{folder}",
        "-l:first.so",
    )
    return folder


def run(folder: Path, *case: str, program: str = "cases", **environ: str) -> str:
    shim = str(shim_build.shim())
    base = {"LD_PRELOAD": shim, "OVERLAPCTL_SHIM": shim, "LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run(
        [str(folder / program), *case],
        capture_output=True,
        text=True,
        timeout=30,
        env={"PATH": os.environ["PATH"], **base, **environ},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


ENTRIES = (
    "cuLaunchKernel",
    "cuLaunchKernel_ptsz",
    "cuLaunchKernelEx",
    "cuLaunchKernelEx_ptsz",
    "cuLaunchCooperativeKernel",
)


@pytest.mark.parametrize("name", [*ENTRIES, "cuGetProcAddress", "cuGetProcAddress_v2"])
def test_dlsym_gives_the_hook(folder: Path, name: str) -> None:
    assert run(folder, "dlsym", name) == SHIM


@pytest.mark.parametrize("name", ["cuOther", "detour_driver_calls"])
def test_dlsym_gives_other_symbols_untouched(folder: Path, name: str) -> None:
    assert run(folder, "dlsym", name) == DRIVER


def test_an_entry_the_driver_lacks_stays_missing(folder: Path) -> None:
    assert run(folder, "dlsym", "cuGraphLaunch") == "nothing"


def test_a_failed_lookup_is_told_by_dlerror(folder: Path) -> None:
    assert run(folder, "missing") == "told"


@pytest.mark.parametrize("way", ["v1", "v2"])
@pytest.mark.parametrize("flags", ["0", "1", PER_THREAD])
def test_get_proc_address_gives_the_hook(folder: Path, way: str, flags: str) -> None:
    assert run(folder, way, "cuLaunchKernel", flags) == SHIM


@pytest.mark.parametrize("way", ["v1", "v2"])
def test_get_proc_address_gives_itself_hooked(folder: Path, way: str) -> None:
    assert run(folder, way, "cuGetProcAddress") == SHIM
    assert run(folder, "through-itself", "cuLaunchKernel") == SHIM


@pytest.mark.parametrize(("name", "number"), [("cuLaunchKernel", 0), ("cuLaunchKernel_ptsz", 1)])
def test_hooks_call_the_driver_with_all_arguments(folder: Path, name: str, number: int) -> None:
    assert run(folder, "call", name) == str(28 + number)


def test_a_directly_linked_program_passes_through_the_shim(folder: Path) -> None:
    assert run(folder, "linked", program="linked") == f"{SHIM} 28"


def test_a_directly_linked_program_works_with_an_inactive_preload(folder: Path) -> None:
    assert run(folder, "linked", program="linked", OVERLAPCTL_SHIM="").endswith(" 28")


def test_next_keeps_its_meaning_for_the_program(folder: Path) -> None:
    assert run(folder, "next", "malloc").startswith("libc.so")


def test_next_keeps_its_meaning_for_a_library(folder: Path) -> None:
    # The next definition after second.so is the one in first.so, which it is linked against. Seen
    # from the shim, nothing comes next.
    assert run(folder, "next-of-plugin", str(folder / "second.so")) == "first.so"


def test_default_finds_no_entry_without_a_driver(folder: Path) -> None:
    assert run(folder, "default", "cuLaunchKernel") == "nothing"


def test_default_finds_the_hook_once_the_driver_is_loaded(folder: Path) -> None:
    assert run(folder, "default-after-load", "cuLaunchKernel") == SHIM


@pytest.mark.parametrize(
    "environ",
    [
        {"OVERLAPCTL_SHIM": ""},
        {"OVERLAPCTL_SHIM": "/bin/sh"},
        {"OVERLAPCTL_DISABLE": "1"},
        {"LD_PRELOAD": ""},
    ],
    ids=["unset", "another file", "disabled", "not preloaded"],
)
def test_inert_unless_preloaded_on_purpose(folder: Path, environ: dict[str, str]) -> None:
    assert run(folder, "dlsym", "cuLaunchKernel", **environ) == DRIVER
    assert run(folder, "v2", "cuLaunchKernel", **environ) == DRIVER
    assert run(folder, "state", str(shim_build.shim()), **environ) == "0 0 0"


def test_never_both_attachments(folder: Path) -> None:
    assert run(folder, "attach", str(shim_build.shim())) == "5"


def test_a_second_copy_sees_that_the_first_is_preloaded(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.so"
    copy.write_bytes(shim_build.shim().read_bytes())
    assert run(folder, "attach", str(copy)) == "5"


@pytest.mark.parametrize(
    ("text", "depth", "ignored"),
    [
        ("", 0, 0),
        ("pad=4096;blocks=3;carveout=100;priority=1;captures=0", 1, 0),
        ("include=nvjet*;exclude=a%3Bb%2Cc;rule=ampere_%2A,0,2,-1", 1, 0),
        ("pad=4096;future=1;blocks=x;pad;pad=-1;carveout=101;priority=2", 1, 6),
        ("rule=a,1,2;rule=,1,2,3;include=;include=%zz;exclude=%0;rule=%00,0,0,0", 1, 6),
        (";;;", 1, 0),
        ("pad=99999999999999999999", 1, 1),
        ("x" * 70000, 0, 0),
    ],
)
def test_the_policy_text_is_read_strictly_and_never_fatal(
    folder: Path, text: str, depth: int, ignored: int
) -> None:
    found = run(folder, "state", str(shim_build.shim()), OVERLAPCTL_POLICY=text)
    assert found == f"2 {depth} {ignored}"


def test_children_without_a_gpu_are_left_alone(folder: Path) -> None:
    shim = str(shim_build.shim())
    done = subprocess.run(
        ["/bin/sh", "-c", "echo a | cat; /bin/ls / > /dev/null; echo $?"],
        env={"LD_PRELOAD": shim, "OVERLAPCTL_SHIM": shim, "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("a\n0\n", "")
