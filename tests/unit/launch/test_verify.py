import ctypes
import sys
from pathlib import Path

import pytest

from overlapctl.errors import AttachError
from overlapctl.launch.verify import PROBE_KERNEL, PROBE_PAD, verify

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "helpers"))

import shim_build

pytestmark = [pytest.mark.native, shim_build.needs_compiler]


class PaddingShim:
    """Pads as the real shim would: only while a policy with a rule for the probe is pushed."""

    def __init__(self, driver, entries=(0, 1)):
        self._extra = (ctypes.c_int * 2).in_dll(driver, "verify_extra")
        self._entries = entries
        self.tokens = []

    def push(self, policy):
        assert [rule.pattern for rule in policy.rules] == [PROBE_KERNEL]
        assert policy.include == (PROBE_KERNEL,)  # no other kernel is touched
        for entry in self._entries:
            self._extra[entry] = policy.rules[0].pad_bytes
        self.tokens.append(7)
        return 7

    def pop(self, token):
        self.tokens.remove(token)
        self._extra[:] = [0, 0]


@pytest.fixture(scope="module")
def driver_path(tmp_path_factory):
    source = shim_build.ROOT / "tests" / "helpers" / "verify_driver.c"
    output = tmp_path_factory.mktemp("verify") / "libverify.so"
    return shim_build.compile_c(output, [source], "-shared", "-fPIC")


@pytest.fixture
def driver(driver_path):
    library = ctypes.CDLL(str(driver_path))
    yield library
    ctypes.c_int.in_dll(library, "verify_context").value = 1
    (ctypes.c_char * 64).in_dll(library, "verify_fail").value = b""


def live(driver):
    return ctypes.c_int.in_dll(driver, "verify_live").value


def test_a_padded_probe_proves_both_entries_and_leaves_nothing(driver, driver_path):
    shim = PaddingShim(driver)
    proof = verify(shim, str(driver_path))
    assert not proof.pending
    assert proof.asked == PROBE_PAD
    assert proof.seen == (("cuLaunchKernel", PROBE_PAD), ("cuLaunchKernelEx", PROBE_PAD))
    assert (live(driver), shim.tokens) == (0, [])
    assert ctypes.c_int.in_dll(driver, "verify_capture_mode").value == 0


@pytest.mark.parametrize(
    ("entries", "told"),
    [((), "0 by cuLaunchKernel, 0 by cuLaunchKernelEx"), ((0,), "got 0 by cuLaunchKernelEx")],
)
def test_an_entry_that_is_not_reached_is_named(driver, driver_path, entries, told):
    shim = PaddingShim(driver, entries)
    with pytest.raises(AttachError, match=told):
        verify(shim, str(driver_path))
    assert (live(driver), shim.tokens) == (0, [])


def test_without_a_context_the_proof_is_pending_and_nothing_is_pushed(driver, driver_path):
    ctypes.c_int.in_dll(driver, "verify_context").value = 0
    shim = PaddingShim(driver)
    assert verify(shim, str(driver_path)).pending
    assert shim.tokens == []


@pytest.mark.parametrize(
    "call",
    [
        "cuStreamCreate",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuMemAlloc_v2",
        "cuMemsetD32Async",
        "cuLaunchKernel",
        "cuLaunchKernelEx",
        "cuMemcpyDtoHAsync_v2",
        "cuStreamSynchronize",
    ],
)
def test_a_failing_call_is_named_and_everything_is_undone(driver, driver_path, call):
    (ctypes.c_char * 64).in_dll(driver, "verify_fail").value = call.encode()
    shim = PaddingShim(driver)
    with pytest.raises(AttachError, match=rf"{call} returned 719"):
        verify(shim, str(driver_path))
    assert (live(driver), shim.tokens) == (0, [])


def test_a_driver_that_cannot_be_opened(driver, tmp_path):
    with pytest.raises(AttachError, match="cannot be opened"):
        verify(PaddingShim(driver), str(tmp_path / "none.so"))
