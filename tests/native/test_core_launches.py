"""What the shim does to single launches, seen by the fake driver that receives them."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import core_harness
import shim_build
from core_harness import COMMUNICATION, COMPUTE, IGNORED, Core, attribute

pytestmark = [pytest.mark.native, shim_build.needs_compiler]

INVALID_VALUE, STICKY = 1, 700
ENTRIES = re.findall(
    r'^OVL_ENTRY\(\w+, "(\w+)", (?:"(\w+)"|NULL), (\w+), [01]\)',
    (shim_build.SHIM / "include" / "entries.def").read_text(),
    re.M,
)
SYMBOLS = [(s, kind) for legacy, twin, kind in ENTRIES for s in (legacy, twin) if s]
LAUNCHES = [s for s, kind in SYMBOLS if kind in ("LAUNCH", "LAUNCH_EX")]


@pytest.fixture
def core() -> Iterator[Core]:
    it = core_harness.core()
    it.reset()
    yield it
    assert it.abi.ovl_policy_depth() == 0, "a policy was left behind"


def test_every_entry_has_one_hook(core: Core) -> None:
    hooks = [core.abi.harness_hook(symbol.encode()) for symbol, _ in SYMBOLS]
    assert all(hooks)
    assert len(set(hooks)) == len(SYMBOLS)
    assert core.abi.harness_symbol(len(SYMBOLS)) is None


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize(("symbol", "kind"), SYMBOLS)
def test_each_call_arrives_once_with_its_arguments(
    core: Core, symbol: str, kind: str, on: bool
) -> None:
    token = core.push() if on else 0
    function = core.function()
    if kind in ("LAUNCH", "COOP"):
        result = core.launch(
            function, grid=7, threads=96, smem=512, stream=24, parameters=48, symbol=symbol
        )
    elif kind == "LAUNCH_EX":
        result = core.launch_ex(
            function, attribute(6, 1), grid=7, threads=96, smem=512, stream=24, symbol=symbol
        )
    else:
        argument = ctypes.c_void_p(24)
        scratch = ctypes.create_string_buffer(64)
        arguments = {
            "UNLOAD": (argument,),
            "CAPTURE_BEGIN": (argument, 0),
            "CAPTURE_TO_GRAPH": (argument, None, None, None, ctypes.c_size_t(0), 0),
            "CAPTURE_END": (argument, scratch),
            "GRAPH": (None, argument),
            "PARTITION": (scratch, None, 0, 0),
        }[kind]
        result = core.hook(symbol)(*arguments)
    if on:
        core.pop(token)
    assert result == 0
    (call,) = core.calls(symbol)
    assert call.symbol.decode() == symbol
    if kind in ("LAUNCH", "COOP", "LAUNCH_EX"):
        assert (call.function, list(call.grid), list(call.block)) == (
            function,
            [7, 1, 1],
            [96, 1, 1],
        )
        assert (call.smem, call.stream) == (512, 24)
    if kind == "LAUNCH_EX":
        assert call.attributes == [(6, 1)]


@pytest.mark.parametrize("symbol", LAUNCHES)
def test_a_compute_launch_is_padded_to_its_target(core: Core, symbol: str) -> None:
    function, token = core.function(), core.push(max_blocks_per_sm=2)
    launch = core.launch_ex if "Ex" in symbol else core.launch
    assert launch(function, symbol=symbol) == 0
    core.pop(token)
    (call,) = core.calls()
    # 228 KiB: three blocks of 77,824 B would fit, so one byte above that granule less the reserve.
    assert call.symbol.decode() == symbol
    assert call.smem == 77824 - 1024 + 1
    row = core.row(function)
    assert (row.before, row.after, row.blocks_before, row.blocks_after) == (16384, 76801, 4, 2)
    assert core.rule(function) == "padded-to-target"
    assert core.fake.fake_max_dynamic(ctypes.c_void_p(function)) == 76801


def test_the_larger_legal_pad_wins(core: Core) -> None:
    function = core.function()
    for pad, expected in ((100000, 116384), (1024, 76801), (300000, 76801)):
        token = core.push(max_blocks_per_sm=2, pad_bytes=pad)
        core.launch(function)
        core.pop(token)
        assert core.calls()[-1].smem == expected


@pytest.mark.parametrize("symbol", LAUNCHES)
def test_a_communication_launch_gets_the_greatest_priority(core: Core, symbol: str) -> None:
    function = core.function("_Z27ncclDevKernel_AllReduce_Sum")
    token = core.push(comm_priority=1, max_blocks_per_sm=1, pad_bytes=4096, carveout=100)
    launch = core.launch_ex if "Ex" in symbol else core.launch
    assert launch(function, symbol=symbol, stream=40) == 0
    core.pop(token)
    (call,) = core.calls()
    flavour = "_ptsz" if symbol.endswith("_ptsz") else ""
    assert call.symbol.decode() == "cuLaunchKernelEx" + flavour
    assert call.attributes == [(core_harness.ATTR_PRIORITY, -5)]
    assert (call.smem, call.stream) == (16384, 40)
    assert core.rule(function) == "communication"


def test_attributes_are_overwritten_where_given_and_others_kept(core: Core) -> None:
    comm, gemm = core.function("ncclKernel"), core.function()
    token = core.push(comm_priority=1, carveout=100)
    core.launch_ex(comm, attribute(6, 1), attribute(8, -1), attribute(10, 3))
    core.launch_ex(gemm, attribute(14, 25), attribute(6, 1))
    core.launch(gemm, parameters=64, extra=72)
    core.pop(token)
    first, second, third = core.calls()
    assert first.attributes == [(6, 1), (8, -5), (10, 3)]
    assert second.attributes == [(14, 100), (6, 1)]
    assert third.attributes == [(14, 100)]
    assert (third.parameters, third.extra) == (64, 72)
    assert core.row(gemm).carved == 2


def test_sixty_attributes_are_kept_and_more_are_left_alone(core: Core) -> None:
    function = core.function()
    token = core.push(carveout=100, pad_bytes=1024)
    core.launch_ex(function, *[attribute(6, 1)] * 60)
    core.launch_ex(function, *[attribute(6, 1)] * 61)
    core.pop(token)
    first, second = core.calls()
    assert (first.attribute_count, second.attribute_count) == (61, 61)
    assert (first.smem, second.smem) == (17408, 16384)
    assert core.counters().unknown == 1


def test_a_small_carveout_is_kept_from_grids_that_are_resident(core: Core) -> None:
    function, token = core.function(), core.push(carveout=50)
    core.launch(function, grid=4 * 132)
    core.launch(function, grid=4 * 132 + 1)
    core.pop(token)
    first, second = core.calls()
    assert (first.attributes, second.attributes) == ([], [(14, 50)])


def test_a_resident_grid_stays_resident(core: Core) -> None:
    function, token = core.function(), core.push(max_blocks_per_sm=2)
    sizes = []
    for grid in (2 * 132, 2 * 132 + 1, 4 * 132, 4 * 132 + 1):
        core.launch(function, grid=grid)
        sizes.append(core.calls()[-1].smem)
        if grid == 4 * 132:
            assert core.rule(function) == "keeps-grid-resident"
    core.pop(token)
    assert sizes == [76801, 16384, 16384, 76801]


def test_a_smaller_pad_is_taken_where_the_larger_would_end_residency(core: Core) -> None:
    function, token = core.function(), core.push(max_blocks_per_sm=2, pad_bytes=1024)
    core.launch(function, grid=4 * 132)
    core.pop(token)
    assert core.calls()[-1].smem == 17408
    assert core.rule(function) == "padded-bytes"


def test_on_a_partition_fewer_sms_count(core: Core) -> None:
    function, token = core.function(), core.push(max_blocks_per_sm=2)
    core.fake.fake_sms(16)
    core.launch(function, grid=2 * 16 + 1)
    assert core.calls()[-1].smem == 76801
    context = ctypes.c_void_p()
    core.hook("cuGreenCtxCreate")(ctypes.byref(context), None, 0, 0)
    core.launch(function, grid=2 * 16 + 1)  # resident on 16 SMs with 4 blocks each, not with 2
    core.launch(function, grid=2 * 16)
    core.pop(token)
    sizes = [call.smem for call in core.calls()]
    assert sizes == [76801, 16384, 76801]


@pytest.mark.parametrize(
    ("limit", "smem", "rule"),
    [(-1, 17408, "padded-bytes"), (0, 16384, "cluster"), (3, 16384, "keeps-grid-resident")],
)
def test_clusters_stay_schedulable(core: Core, limit: int, smem: int, rule: str) -> None:
    function = core.function("nvjet")
    core.fake.fake_cluster_limit(-1)
    token = core.push(pad_bytes=40000 if limit >= 0 else 1024)
    core.fake.fake_cluster_limit(limit)
    core.launch_ex(function, attribute(4, 2, 1, 1), grid=8)
    core.pop(token)
    assert core.calls()[-1].smem == smem
    assert core.rule(function) == rule


def test_without_the_cluster_query_residency_must_not_change(core: Core) -> None:
    core.fake.fake_hide(2)
    function = core.function("nvjet")
    token = core.push(max_blocks_per_sm=2)
    core.launch_ex(function, attribute(4, 2, 1, 1))
    core.pop(token)
    assert core.calls()[-1].smem == 16384
    assert core.rule(function) == "cluster"


def test_a_cluster_fixed_at_compile_time_counts(core: Core) -> None:
    function = core.function("fixed")
    core.fake.fake_require_cluster(ctypes.c_void_p(function), 4)
    token = core.push(max_blocks_per_sm=2)
    core.launch(function)
    core.pop(token)
    assert core.rule(function) == "cluster"


def test_cooperative_launches_are_counted_only(core: Core) -> None:
    function, token = core.function(), core.push(pad_bytes=1024, carveout=100)
    core.launch(function, symbol="cuLaunchCooperativeKernel")
    core.launch_ex(function, attribute(2, 1))
    core.launch_ex(function, attribute(2, 0))
    core.pop(token)
    assert [call.smem for call in core.calls()] == [16384, 16384, 17408]
    counters = core.counters()
    assert (counters.cooperative, counters.launches, counters.shaped) == (2, 3, 1)


def test_the_opt_in_limit_is_reached_and_not_passed(core: Core) -> None:
    function = core.function(static=1024)
    most = 232448 - 1024 - 16384
    for pad, smem in ((most, 16384 + most), (most + 1, 16384)):
        token = core.push(pad_bytes=pad)
        core.launch(function, grid=100000)
        core.pop(token)
        assert core.calls()[-1].smem == smem
    assert core.rule(function) == "opt-in-limit"


def test_the_functions_limit_is_never_lowered(core: Core) -> None:
    function = core.function()
    core.fake.fake_set_max_dynamic(ctypes.c_void_p(function), 200000)
    token = core.push(pad_bytes=1024)
    core.launch(function)
    core.pop(token)
    assert core.calls("cuFuncSet") == []
    assert core.fake.fake_max_dynamic(ctypes.c_void_p(function)) == 200000


def test_a_refused_shaped_launch_goes_out_as_asked_and_is_remembered(core: Core) -> None:
    function, token = core.function(), core.push(pad_bytes=1024)
    core.fake.fake_fail(b"cuLaunchKernel", 1, INVALID_VALUE)
    assert core.launch(function) == 0
    assert core.launch(function) == 0
    core.pop(token)
    assert [call.smem for call in core.calls()] == [17408, 16384, 16384]
    row = core.row(function)
    assert (row.launches, row.failed, row.shaped) == (2, 1, 0)
    assert core.rule(function) == "failed-before"
    assert core.counters().failed == 1


def test_an_error_that_is_not_the_pads_fault_is_returned(core: Core) -> None:
    function, token = core.function(), core.push(pad_bytes=1024)
    core.fake.fake_fail(b"cuLaunchKernel", 2, STICKY)
    assert core.launch(function) == STICKY
    assert core.launch(function) == 0
    core.pop(token)
    assert core.calls()[-1].smem == 17408
    assert core.row(function).failed == 0


def test_a_limit_lowered_by_the_caller_is_raised_again(core: Core) -> None:
    function, token = core.function(), core.push(pad_bytes=60000)
    core.launch(function)
    core.fake.fake_set_max_dynamic(ctypes.c_void_p(function), 16384)
    assert core.launch(function) == 0
    core.pop(token)
    assert core.calls()[-1].smem == 76384
    assert core.row(function).shaped == 2
    assert core.row(function).failed == 0


def test_a_kernel_handle_is_looked_through(core: Core) -> None:
    function = core.function("kernel_behind", 64)
    kernel = core.fake.fake_kernel(ctypes.c_void_p(function))
    token = core.push(max_blocks_per_sm=2)
    assert core.launch(kernel) == 0
    core.pop(token)
    row = core.row(kernel)
    assert (row.name, row.registers) == (b"kernel_behind", 64)
    assert core.calls()[-1].smem == 76801


@pytest.mark.parametrize("hidden", [8, 16])
def test_unknown_facts_leave_the_launch_alone(core: Core, hidden: int) -> None:
    core.fake.fake_hide(hidden)
    function, token = core.function(), core.push(pad_bytes=1024)
    core.launch(function)
    core.pop(token)
    assert core.calls()[-1].smem == 16384
    assert core.rule(function) == "facts-unknown"
    assert core.counters().unknown == 1


def test_the_model_serves_where_the_driver_has_no_occupancy_query(core: Core) -> None:
    core.fake.fake_hide(1)
    function, token = core.function(), core.push(max_blocks_per_sm=2)
    core.launch(function)
    core.pop(token)
    assert core.calls()[-1].smem == 76801


def test_malformed_launches_pass_through(core: Core) -> None:
    token = core.push(pad_bytes=1024)
    assert core.launch(None) != 0
    assert core.launch(core.function(), threads=2048) == INVALID_VALUE
    assert core.launch(core.function(), grid=0) == INVALID_VALUE
    assert core.hook("cuLaunchKernelEx")(None, None, None, None) == INVALID_VALUE
    core.pop(token)
    assert core.counters().unknown == 3


def test_roles_thread_over_stream_over_pattern_over_name(core: Core) -> None:
    function = core.function("my_exchange")
    token = core.push(comm_priority=1)

    def role() -> int:
        core.launch(function, stream=80)
        return int(core.row(function).role)

    assert role() == COMPUTE
    core.abi.ovl_role_add_pattern(b"my_ex*", COMMUNICATION)
    assert role() == COMMUNICATION
    assert core.calls()[-1].attributes == [(8, -5)]
    core.abi.ovl_role_set_stream(80, IGNORED)
    assert role() == IGNORED
    assert core.abi.ovl_role_set_thread(COMPUTE) == core_harness.BY_NAME
    assert role() == COMPUTE
    assert core.abi.ovl_role_set_thread(core_harness.BY_NAME) == COMPUTE
    core.abi.ovl_role_set_stream(80, core_harness.BY_NAME)
    assert role() == COMMUNICATION
    core.abi.ovl_role_add_pattern(b"my_ex*", core_harness.BY_NAME)
    assert role() == COMPUTE
    core.pop(token)


def test_include_exclude_and_rules_choose_kernels(core: Core) -> None:
    token = core.push(
        pad_bytes=1024,
        include=("gemm*", "norm*"),
        exclude=("gemm_small*",),
        rules=(("norm*", 2048, 0, -1),),
    )
    seen = {}
    for name in ("gemm_a", "gemm_small_b", "norm", "other"):
        function = core.function(name)
        core.launch(function)
        seen[name] = (core.calls()[-1].smem - 16384, core.rule(function))
    core.pop(token)
    assert seen == {
        "gemm_a": (1024, "padded-bytes"),
        "gemm_small_b": (0, "excluded"),
        "norm": (2048, "padded-bytes"),
        "other": (0, "not-included"),
    }


@pytest.mark.parametrize("begin", ["cuStreamBeginCapture_v2", "cuStreamBeginCaptureToGraph"])
@pytest.mark.parametrize("shape", [0, 1])
def test_captured_launches_are_shaped_or_left_alone(core: Core, begin: str, shape: int) -> None:
    gemm, comm = core.function(), core.function("ncclDevKernel")
    token = core.push(pad_bytes=1024, carveout=100, comm_priority=1, shape_captures=shape)
    stream = ctypes.c_void_p(32)
    core.hook(begin)(stream, None, None, None, ctypes.c_size_t(0), 0)
    for function, where in ((gemm, 32), (comm, 32), (gemm, 33)):
        core.launch(function, stream=where)
    core.hook("cuStreamEndCapture")(stream, None)
    core.launch(gemm, stream=32)
    core.pop(token)
    first, second, third, fourth = core.calls()
    assert first.smem == 16384 + 1024 * shape
    assert bool(first.attributes) == bool(second.attributes) == bool(shape)
    assert third.smem == fourth.smem == 17408
    assert core.counters().captured == 2
    assert core.counters().launches == 4


def test_a_reused_handle_is_looked_at_again_after_an_unload(core: Core) -> None:
    function, token = core.function("first", 128), core.push(pad_bytes=1024, comm_priority=1)
    core.launch(function)
    core.fake.fake_rename(ctypes.c_void_p(function), b"ncclDevKernel", 96, 0)
    core.hook("cuModuleUnload")(None)
    core.launch(function)
    core.pop(token)
    row = core.row(function)
    assert (row.name, row.registers, row.role, row.launches) == (
        b"ncclDevKernel",
        96,
        COMMUNICATION,
        1,
    )
    assert core.calls()[-1].smem == 16384
    assert core.counters().launches == 2


def test_a_launch_from_inside_a_launch_passes_through(core: Core) -> None:
    function, token = core.function(), core.push(pad_bytes=1024)
    depth = []

    @ctypes.CFUNCTYPE(None)
    def again() -> None:
        if not depth:
            depth.append(1)
            core.launch(function)

    core.fake.fake_nest(again)
    core.launch(function)
    core.fake.fake_nest(None)
    core.pop(token)
    assert [call.smem for call in core.calls()] == [16384, 17408]
    assert core.counters().unknown == 1
