"""What the shim keeps: policies, counters, records, over threads, forks and full tables."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import core_harness
import shim_build
from core_harness import Core

pytestmark = [pytest.mark.native, shim_build.needs_compiler]

ARGUMENT, FULL, NOT_FOUND = 10, 11, 12


@pytest.fixture
def core() -> Iterator[Core]:
    it = core_harness.core()
    it.reset()
    yield it
    assert it.abi.ovl_policy_depth() == 0, "a policy was left behind"
    it.reset()


def in_own_process(body: str) -> str:
    """Run `body` with a fresh `core` and return what it printed."""
    fake, _ = core_harness.libraries()
    program = f"import sys; sys.path.insert(0, {str(Path(core_harness.__file__).parent)!r})\n"
    program += "import core_harness, ctypes, os\ncore = core_harness.core()\n" + body
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "OVERLAPCTL_TEST_LIBRARIES": str(fake.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def smem_now(core: Core, function: int) -> int:
    core.launch(function)
    return int(core.calls()[-1].smem) - 16384


def test_the_newest_policy_left_is_in_force(core: Core) -> None:
    function = core.function()
    tokens = [core.push(pad_bytes=pad) for pad in (1024, 2048, 3072)]
    assert smem_now(core, function) == 3072
    assert core.pop(tokens[1]) == 0
    assert smem_now(core, function) == 3072
    assert core.pop(tokens[2]) == 0
    assert smem_now(core, function) == 1024
    assert core.pop(tokens[2]) == NOT_FOUND
    assert core.pop(tokens[0]) == 0
    assert smem_now(core, function) == 0
    assert core.counters().launches == 3


def test_a_region_left_by_an_exception_can_be_entered_again(core: Core) -> None:
    function = core.function()
    for _ in range(3):
        token = core.push(pad_bytes=1024)
        try:
            assert smem_now(core, function) == 1024
            raise KeyError
        except KeyError:
            assert core.pop(token) == 0
    assert smem_now(core, function) == 0


def test_equal_policies_need_no_room_and_different_ones_are_bounded() -> None:
    out = in_own_process(
        "t = ctypes.c_uint64()\n"
        "for _ in range(3000): core.pop(core.push(pad_bytes=7, include=('a*',)))\n"
        "made = 0\n"
        "while core.push_status(t, pad_bytes=8 + made) == 0: core.pop(t.value); made += 1\n"
        "print(made, core.push_status(t, pad_bytes=9999999), core.push_status(t, pad_bytes=8))\n"
    )
    assert out == f"1023 {FULL} 0"


@pytest.mark.parametrize(
    "fields",
    [
        {"carveout": 101},
        {"carveout": -2},
        {"max_blocks_per_sm": -1},
        {"pad_bytes": 2**31},
        {"rules": (("*", 0, -1, -1),)},
    ],
)
def test_a_policy_out_of_range_is_refused(core: Core, fields: dict[str, object]) -> None:
    assert core.push_status(ctypes.c_uint64(), **fields) == ARGUMENT


def test_re_entering_a_region_asks_the_driver_nothing(core: Core) -> None:
    function = core.function()
    for pads in range(2):
        for _ in range(50):
            token = core.push(pad_bytes=60000)
            core.launch(function)
            core.pop(token)
        assert len(core.calls("cuFuncSetAttribute")) == 1, pads


def test_counters_are_exact_over_threads(core: Core) -> None:
    gemm, comm = core.function("gemm_t"), core.function("ncclDevKernel_t")
    token = core.push(pad_bytes=1024, comm_priority=1)
    core.fake.fake_quiet(1)

    def work() -> None:
        for _ in range(500):
            core.launch(gemm)
            core.launch(comm)

    threads = [threading.Thread(target=work) for _ in range(24)]  # more than there are lanes
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    core.pop(token)
    counters = core.counters()
    assert (counters.launches, counters.shaped, counters.prioritised) == (24000, 12000, 12000)
    assert (core.row(gemm).launches, core.row(comm).launches) == (12000, 12000)
    _, records = core.records()
    assert len({record.thread_id for record in records}) >= 2
    assert counters.dropped_records == 24000 - len(records) == 24000 - 8192


def test_policies_pushed_by_many_threads_leave_nothing_behind(core: Core) -> None:
    function = core.function()
    core.fake.fake_quiet(1)

    def work(pad: int) -> None:
        for _ in range(200):
            token = core.push(pad_bytes=pad)
            core.launch(function)
            assert core.pop(token) == 0

    threads = [threading.Thread(target=work, args=(64 * (i + 1),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert core.abi.ovl_policy_depth() == 0
    assert core.counters().launches == core.row(function).shaped == 1600


def test_nothing_is_recorded_unless_somebody_listens(core: Core) -> None:
    function = core.function()
    core.abi.ovl_records_listen(-1)
    assert core.abi.ovl_records_listen(0) == 0
    start, _ = core.records()
    token = core.push(pad_bytes=1024)
    core.launch(function)
    assert core.records(start) == (start, [])
    assert core.abi.ovl_records_listen(1) == 1
    assert core.abi.ovl_records_listen(1) == 2
    core.abi.ovl_records_listen(-1)
    core.launch(function)
    core.pop(token)
    assert len(core.records(start)[1]) == 1
    assert core.row(function).launches == 2


def test_records_tell_each_launch(core: Core) -> None:
    function = core.function()
    start, _ = core.records()
    token = core.push(pad_bytes=1024)
    before = time.monotonic_ns()
    for grid in (5000, 6000):
        core.launch(function, grid=grid, stream=40)
    after = time.monotonic_ns()
    core.pop(token)
    time.sleep(0.02)  # the clock's rate settles
    end, records = core.records(start)
    assert end == start + 2
    assert [(r.blocks, r.before, r.after, r.actions) for r in records] == [
        (5000, 16384, 17408, 1),
        (6000, 16384, 17408, 1),
    ]
    assert [r.sequence for r in records] == [start, start + 1]
    assert all(r.stream == 40 and r.function == function for r in records)
    assert all(r.thread_id == threading.get_native_id() for r in records)
    assert before - 10**6 <= records[0].ticks <= records[1].ticks <= after + 10**6
    assert core.records(end) == (end, [])


def test_reading_in_pieces_and_after_a_lap(core: Core) -> None:
    function = core.function()
    start, _ = core.records()
    token = core.push()
    core.fake.fake_quiet(1)
    for _ in range(9000):
        core.launch(function)
    core.pop(token)
    cursor, got = core.records(start, capacity=100)
    assert (len(got), got[0].sequence) == (100, start + 9000 - 8192)
    cursor, got = core.records(cursor)
    assert (len(got), cursor) == (8092, start + 9000)
    assert core.counters().dropped_records == 9000 - 8192
    core.abi.ovl_reset()
    assert core.counters().launches == core.counters().dropped_records == 0
    assert core.rows() == []
    assert core.records(0)[1] == []


def test_a_full_table_lets_launches_through() -> None:
    out = in_own_process(
        "token = core.push(pad_bytes=1024)\n"
        "f = core.function()\n"
        "for smem in range(20000): core.launch(f, smem=smem)\n"
        "n = core.counters()\n"
        "core.launch(f, smem=0)\n"
        "print(n.launches, n.shaped + n.unknown, n.shaped == len(core.rows()))\n"
        "print(core.calls()[-1].smem)\n"
        "print(16000 < n.shaped <= 16384)\n"
    )
    assert out.split() == ["20000", "20000", "True", "1024", "True"]


def test_a_forked_child_starts_untouched() -> None:
    out = in_own_process(
        "f = core.function()\n"
        "core.push(pad_bytes=1024); core.launch(f)\n"
        "r, w = os.pipe()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    n = core.counters(); core.launch(f)\n"
        "    text = [core.abi.ovl_policy_depth(), n.launches, core.calls()[-1].smem]\n"
        "    core.push(pad_bytes=2048); core.launch(f)\n"
        "    text += [core.calls()[-1].smem, core.counters().launches]\n"
        "    os.write(w, repr(text).encode()); os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "core.launch(f)\n"
        "print(os.read(r, 999).decode(), core.calls()[-1].smem, core.counters().launches)\n"
    )
    assert out == "[0, 0, 16384, 18432, 1] 17408 2"


def test_graph_launches_are_counted_while_on(core: Core) -> None:
    core.hook("cuGraphLaunch")(None, None)
    token = core.push()
    core.hook("cuGraphLaunch")(None, None)
    core.hook("cuGraphLaunch_ptsz")(None, None)
    core.pop(token)
    assert core.counters().graph_launches == 2


def test_bad_roles_are_refused(core: Core) -> None:
    assert core.abi.ovl_role_add_pattern(b"x", 7) == ARGUMENT
    assert core.abi.ovl_role_add_pattern(b"", 0) == ARGUMENT
    assert core.abi.ovl_role_set_stream(None, -1) == ARGUMENT


@pytest.mark.skipif(
    not Path("/usr/local/cuda/include/cuda.h").exists(), reason="no CUDA headers here"
)
def test_declarations_match_the_drivers_header(tmp_path: Path) -> None:
    fields = {
        "CUlaunchConfig": (
            "gridDimX",
            "blockDimX",
            "sharedMemBytes",
            "hStream",
            "attrs",
            "numAttrs",
        ),
        "CUlaunchAttribute": ("id", "value"),
    }
    names = {
        "CU_LAUNCH_ATTRIBUTE_COOPERATIVE": 2,
        "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION": 4,
        "CU_LAUNCH_ATTRIBUTE_PRIORITY": 8,
        "CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION": 11,
        "CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT": 14,
    }
    lines = [f'_Static_assert({name} == {value}, "");' for name, value in names.items()]
    layout = [f"offsetof({t}, {f})" for t, fs in fields.items() for f in fs]
    layout += [f"sizeof({t})" for t in fields]
    printed = []
    for header, extra in (("cuda.h", lines), ("driver_api.h", [])):
        source = tmp_path / f"{header}.c"
        prints = "".join(f'printf("%d ", (int){x});' for x in layout)
        text = [f'#include "{header}"', "#include <stddef.h>", "#include <stdio.h>", *extra]
        source.write_text("\n".join([*text, f"int main(void) {{ {prints} return 0; }}"]))
        program = shim_build.compile_c(
            tmp_path / f"{header}.out", [source], "-I/usr/local/cuda/include"
        )
        printed.append(subprocess.run([program], capture_output=True, check=True).stdout)
    assert printed[0] == printed[1] != b""
