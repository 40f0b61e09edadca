"""`@shaped`: decisions from plain facts, and the launcher's arguments through a fake Triton."""

import sys
import types
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapctl.device import open_device
from overlapctl.errors import UsageError
from overlapctl.launch import attach, triton_hook
from overlapctl.plan.residency import blocks_per_sm, grid_is_coresident, padded
from overlapctl.records import KernelFootprint, Role, Rule

H200 = open_device("sim:h200").facts()


def gemm(dynamic=49152, blocks=16384, **changes):
    values = {"name": "mm", "threads": 128, "registers": 72, "dynamic_smem": dynamic}
    return KernelFootprint(**{**values, "blocks": blocks, **changes})


def test_target_of_three_blocks_pads_the_64x64_tile():
    pad, rule = triton_hook.choose_pad(H200, gemm(), pad_bytes=0, max_blocks=3)
    assert rule is Rule.PADDED_TO_TARGET
    assert blocks_per_sm(H200, padded(gemm(), pad)) == 3
    assert blocks_per_sm(H200, padded(gemm(), pad - 1)) == 4


@pytest.mark.parametrize(
    ("footprint", "wish", "rule"),
    [
        (gemm(), {"pad_bytes": 0, "max_blocks": 0}, Rule.NOTHING_ASKED),
        (gemm(), {"pad_bytes": 0, "max_blocks": 4}, Rule.ALREADY_AT_TARGET),
        (gemm(cooperative=True), {"pad_bytes": 512, "max_blocks": 0}, Rule.COOPERATIVE),
        (gemm(blocks=4 * 132), {"pad_bytes": 0, "max_blocks": 3}, Rule.KEEPS_GRID_RESIDENT),
        (gemm(cluster=2), {"pad_bytes": 0, "max_blocks": 3}, Rule.CLUSTER),
        (gemm(), {"pad_bytes": 232448 - 49152 + 1, "max_blocks": 0}, Rule.OPT_IN_LIMIT),
        (gemm(), {"pad_bytes": 232448 - 49152, "max_blocks": 0}, Rule.PADDED_BYTES),
    ],
)
def test_rules(footprint, wish, rule):
    pad, got = triton_hook.choose_pad(H200, footprint, **wish)
    assert got is rule
    assert (pad > 0) == (rule in (Rule.PADDED_BYTES, Rule.PADDED_TO_TARGET))


@given(
    dynamic=st.integers(0, 232448),
    registers=st.integers(1, 255),
    warps=st.integers(1, 8),
    blocks=st.integers(1, 100000),
    pad_bytes=st.integers(0, 240000),
    max_blocks=st.integers(0, 32),
)
def test_a_chosen_pad_never_breaks_a_launch(
    dynamic, registers, warps, blocks, pad_bytes, max_blocks
):
    asked = gemm(dynamic, blocks, threads=32 * warps, registers=registers)
    pad, _ = triton_hook.choose_pad(H200, asked, pad_bytes=pad_bytes, max_blocks=max_blocks)
    after = padded(asked, pad)
    assert after.smem <= max(asked.smem, H200.smem_per_block_optin)
    if grid_is_coresident(H200, asked):
        assert grid_is_coresident(H200, after)
    if blocks_per_sm(H200, asked) > 0:
        assert blocks_per_sm(H200, after) > 0


class FakeLauncher:
    launched: ClassVar[list] = []

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *args):
        FakeLauncher.launched.append((function, packed, args))


class FakeKernel:
    """What `@triton.jit` leaves: `run` calls the launcher of a compiled kernel."""

    def __init__(self):
        self.launcher = FakeLauncher()
        self.fn = test_rules

    def run(self, *args, grid, warmup, **_):
        x, y, z = (*grid, 1, 1)[:3]
        if not warmup:
            self.launcher(x, y, z, 7, 99, (4, 1, 49152), None, None, None, *args)
        return "compiled"


@pytest.fixture
def fake_triton(monkeypatch):
    driver = types.SimpleNamespace(active=types.SimpleNamespace(launcher_cls=FakeLauncher))
    runtime = types.ModuleType("triton.runtime")
    runtime.driver = driver
    triton = types.ModuleType("triton")
    triton.runtime = runtime
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    original = FakeLauncher.__call__
    monkeypatch.setattr(FakeLauncher, "launched", [])
    monkeypatch.setattr(triton_hook, "_current_facts", lambda: H200)
    monkeypatch.setattr(triton_hook, "_footprint", lambda _, t, c, d, b: gemm(d, b, threads=t))
    raised = []
    monkeypatch.setattr(triton_hook, "_allow", lambda function, size: raised.append(size))
    monkeypatch.setattr(attach, "current_attachment", lambda: None)
    yield raised
    FakeLauncher.__call__ = original


def test_only_launches_of_the_shaped_kernel_change(fake_triton):
    kernel = FakeKernel()
    three = triton_hook.shaped(max_blocks_per_sm=3)(kernel)
    assert three[(16384,)]("a", 5) == "compiled"
    kernel.run("b", grid=(16384,), warmup=False)
    (_, packed, args), (_, plain, _) = FakeLauncher.launched
    assert packed[:2] == (4, 1)
    assert blocks_per_sm(H200, gemm(packed[2])) == 3
    assert args == ("a", 5)
    assert plain == (4, 1, 49152)
    assert fake_triton == [packed[2]]
    (row,) = three.explain()
    assert (row.before, row.after, row.blocks_before, row.blocks_after) == (49152, packed[2], 4, 3)
    assert (row.launches, row.shaped, row.rule) == (1, 1, Rule.PADDED_TO_TARGET)


def test_pad_to_the_opt_in_limit_and_one_byte_beyond(fake_triton):
    room = H200.smem_per_block_optin - 49152
    for pad in (room - 1, room):
        triton_hook.shaped(smem_reserve=pad)(FakeKernel())[(16384,)]()
        assert FakeLauncher.launched[-1][1][2] == 49152 + pad
    with pytest.raises(UsageError, match=f"at most {room} B"):
        triton_hook.shaped(smem_reserve=room + 1)(FakeKernel())[(16384,)]()
    lenient = triton_hook.shaped(smem_reserve=room + 1, strict=False)(FakeKernel())
    with pytest.warns(UserWarning, match="launched unpadded"):
        lenient[(16384,)]()
    assert FakeLauncher.launched[-1][1][2] == 49152


def test_nothing_is_left_behind_by_an_exception(fake_triton):
    class Broken(FakeKernel):
        def run(self, *args, **kwargs):
            raise RuntimeError("compile error")

    with pytest.raises(RuntimeError, match="compile error"):
        triton_hook.shaped(max_blocks_per_sm=2)(Broken())[(1,)]()
    FakeKernel().run(grid=(16384,), warmup=False)
    assert FakeLauncher.launched[-1][1] == (4, 1, 49152)


def test_the_shim_is_told_to_leave_shaped_launches_alone(fake_triton, monkeypatch):
    calls = []

    class Shim:
        def set_thread_role(self, role):
            calls.append(role)

    monkeypatch.setattr(attach, "current_attachment", lambda: types.SimpleNamespace(shim=Shim()))
    triton_hook.shaped(max_blocks_per_sm=3)(FakeKernel())[(16384,)]()
    assert calls == [Role.IGNORED, None]
    calls.clear()
    triton_hook.shaped(role="communication")(FakeKernel())[(16384,)]()
    assert calls == [Role.COMMUNICATION, None]
    assert FakeLauncher.launched[-1][1] == (4, 1, 49152)


@pytest.mark.parametrize(
    "arguments",
    [
        {"smem_reserve": -1},
        {"max_blocks_per_sm": 0},
        {"role": "communication", "smem_reserve": 512},
        {"smem_reserve": "a lot"},
    ],
)
def test_bad_arguments(arguments):
    with pytest.raises(UsageError):
        triton_hook.shaped(**arguments)
