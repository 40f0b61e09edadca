"""The in-process detour against drivers whose entries begin in every way that matters."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import shim_build

pytestmark = [
    pytest.mark.native,
    shim_build.needs_compiler,
    pytest.mark.skipif(
        platform.machine() != "x86_64" or sys.platform != "linux",
        reason="x86-64 Linux only",
    ),
]

OK, MISSING, PROLOGUE, FOREIGN, ALREADY, THREADS, DISABLED = 0, 2, 3, 4, 5, 8, 13
DETOUR = 1


@dataclass(frozen=True)
class Result:
    status: int
    attachment: int
    entries: int
    attempts: int
    entry: str
    detail: str


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    return shim_build.compile_c(folder / "cases", [shim_build.NATIVE / "detour_cases.c"])


@pytest.fixture(scope="module")
def real_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shim_build.driver(tmp_path_factory.mktemp("driver"))


def run_case(
    program: Path, driver: Path, *case: str, shim: Path | None = None, **environ: str
) -> list[Result]:
    done = subprocess.run(
        [str(program), str(shim or shim_build.shim()), str(driver), *case],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environ},
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    found = re.findall(r"^(\d+) (\d+) (\d+) (\d+) (.*?)\|(.*)$", done.stdout, re.MULTILINE)
    return [Result(*map(int, row[:4]), *row[4:]) for row in found]


def test_real_prologues_are_redirected_and_missing_optional_entries_are_told(
    program: Path, real_driver: Path
) -> None:
    (result,) = run_case(program, real_driver, "plain")
    assert (result.status, result.attachment, result.entries) == (OK, DETOUR, 5)
    assert "cuModuleUnload (not exported)" in result.detail


def test_attaching_again_tells_so_and_changes_nothing(program: Path, real_driver: Path) -> None:
    first, second = run_case(program, real_driver, "twice")
    assert (first.status, second.status) == (OK, ALREADY)
    assert (second.attachment, second.entries) == (DETOUR, first.entries)


@pytest.mark.parametrize("variant", ["ENDBR", "WIDE_PUSH", "BIG_FRAME", "LONG_MOVE", "NO_POINTER"])
def test_position_independent_prologues_work_after_the_move(
    program: Path, tmp_path: Path, variant: str
) -> None:
    (result,) = run_case(program, shim_build.driver(tmp_path, VARIANT=variant), "plain")
    assert (result.status, result.entries) == (OK, 5)


@pytest.mark.parametrize(
    ("variant", "status"),
    [
        ("RIP_RELATIVE", PROLOGUE),
        ("RELATIVE_CALL", PROLOGUE),
        ("BRANCH", PROLOGUE),
        ("JUMP_NEAR", FOREIGN),
        ("JUMP_SHORT", FOREIGN),
        ("JUMP_FAR", FOREIGN),
        ("JUMP_REGISTER", FOREIGN),
        ("JUMP_BEHIND_ENDBR", FOREIGN),
        ("BREAKPOINT", FOREIGN),
    ],
)
def test_other_code_is_refused_with_the_entry_and_its_bytes(
    program: Path, tmp_path: Path, variant: str, status: int
) -> None:
    # Calling through a breakpoint would end the program.
    driver = shim_build.driver(tmp_path, VARIANT=variant)
    case = "attach-only" if variant == "BREAKPOINT" else "plain"
    (result,) = run_case(program, driver, case)
    assert (result.status, result.attachment, result.entries) == (status, 0, 0)
    assert result.entry == "cuLaunchKernel"
    assert re.match(r"found( [0-9a-f]{2}){16}", result.detail)


def test_an_optional_entry_with_unknown_code_is_skipped_and_told(
    program: Path, tmp_path: Path
) -> None:
    driver = shim_build.driver(tmp_path, VARIANT_COOP="RIP_RELATIVE")
    (result,) = run_case(program, driver, "plain")
    assert (result.status, result.entries) == (OK, 4)
    assert "cuLaunchCooperativeKernel (unknown code)" in result.detail


@pytest.mark.parametrize("shift", [3, 8, 11])
def test_an_entry_whose_jump_fits_one_word_is_redirected(
    program: Path, tmp_path: Path, shift: int
) -> None:
    (result,) = run_case(program, shim_build.driver(tmp_path, SHIFT=shift), "plain")
    assert result.status == OK


@pytest.mark.parametrize("shift", [4, 7, 12])
def test_an_entry_whose_jump_would_cross_a_word_is_refused(
    program: Path, tmp_path: Path, shift: int
) -> None:
    (result,) = run_case(program, shim_build.driver(tmp_path, SHIFT=shift), "plain")
    assert (result.status, result.entry) == (PROLOGUE, "cuLaunchKernel")
    assert "not within one aligned word" in result.detail


def test_a_missing_required_entry_is_an_error(program: Path, tmp_path: Path) -> None:
    (result,) = run_case(program, shim_build.driver(tmp_path, WITHOUT_EX=1), "plain")
    assert (result.status, result.entry) == (MISSING, "cuLaunchKernelEx")


def test_a_second_copy_of_the_shim_stays_away(
    program: Path, real_driver: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.so"
    copy.write_bytes(shim_build.shim().read_bytes())
    first, second = run_case(program, real_driver, "two-shims", str(copy))
    assert (first.status, second.status) == (OK, ALREADY)
    assert second.attachment == 0


def test_disabled_by_the_environment(program: Path, real_driver: Path) -> None:
    (result,) = run_case(program, real_driver, "plain", OVERLAPCTL_DISABLE="1")
    assert (result.status, result.attachment) == (DISABLED, 0)


def test_attaching_while_eight_threads_launch_in_a_hundred_processes(
    program: Path, real_driver: Path
) -> None:
    run_case(program, real_driver, "hammer", "100")


def test_waits_for_a_thread_held_inside_the_replaced_bytes(
    program: Path, real_driver: Path
) -> None:
    (result,) = run_case(program, real_driver, "held-inside", "60000")
    assert result.status == OK
    assert result.attempts > 1


def test_gives_up_and_changes_nothing_if_a_thread_stays_inside(
    program: Path, real_driver: Path
) -> None:
    (result,) = run_case(program, real_driver, "held-inside", "1500000")
    assert (result.status, result.entries) == (THREADS, 0)
    assert "inside an entry's first instructions" in result.detail


@pytest.mark.parametrize("case", ["blocked-in-read", "sigwait"])
def test_threads_that_block_signals_in_a_system_call_are_no_obstacle(
    program: Path, real_driver: Path, case: str
) -> None:
    # The program itself checks that no signal reached them and none is left pending.
    (result,) = run_case(program, real_driver, case)
    assert result.status == OK


def test_a_running_thread_that_blocks_signals_is_an_error(program: Path, real_driver: Path) -> None:
    (result,) = run_case(program, real_driver, "blocked-spinning")
    assert (result.status, result.entries) == (THREADS, 0)
    assert "blocks signals" in result.detail


def test_pages_are_never_left_writable_and_executable(real_driver: Path) -> None:
    script = (
        "import ctypes, sys\n"
        "shim, driver = sys.argv[1:]\n"
        "ctypes.CDLL(driver)\n"
        "report = ctypes.create_string_buffer(512)\n"
        "status = ctypes.CDLL(shim).ovl_attach_detour(driver.encode(), report)\n"
        "maps = open('/proc/self/maps').read().splitlines()\n"
        "print(status, sum('rwx' in line.split()[1] for line in maps))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(shim_build.shim()), str(real_driver)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["0", "0"]


def test_a_driver_that_does_not_exist(program: Path, tmp_path: Path) -> None:
    library = ctypes.CDLL(str(shim_build.shim()))
    report = ctypes.create_string_buffer(512)
    assert library.ovl_attach_detour(str(tmp_path / "none.so").encode(), report) == 1
    assert library.ovl_attachment_state() == 0
