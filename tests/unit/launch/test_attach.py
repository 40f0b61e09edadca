import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from overlapctl import env
from overlapctl.errors import AttachError, DeviceError, OverlapctlWarning
from overlapctl.launch import attach
from overlapctl.launch.conflicts import Conflict
from overlapctl.launch.shim import AttachReport, Status
from overlapctl.launch.verify import Verification

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "helpers"))

import shim_build

PROOF = Verification(4096, (("cuLaunchKernel", 4096),))


class FakeShim:
    def __init__(self, report, attachment="none", ignored=0):
        self.report = report
        self.attachment = attachment
        self.ignored = ignored
        self.attached = 0

    def attach_detour(self, driver):
        self.attached += 1
        return self.report

    def ignored_policy_parts(self):
        return self.ignored


def report(status=Status.OK, attachment="detour", entry="", detail=""):
    return AttachReport(status, attachment, 17, 13000, 1, entry, detail)


@pytest.fixture
def use(monkeypatch):
    """Attach with a given shim instead of the built one; GPU, conflicts and proof as told."""

    def use(shim, *, gpu=True, conflicts=(), proofs=(PROOF,)):
        remaining = list(proofs)
        monkeypatch.setattr(attach, "load", lambda: shim)
        monkeypatch.setattr(attach, "_has_gpu", lambda: gpu)
        monkeypatch.setattr(attach, "find_conflicts", lambda: conflicts)
        monkeypatch.setattr(attach, "verify", lambda shim, driver: remaining.pop(0))
        return shim

    monkeypatch.setattr(attach, "_attachment", None)
    monkeypatch.delenv(env.DISABLE, raising=False)
    return use


def test_attaches_once(use):
    shim = use(FakeShim(report(detail="not redirected: cuX (not exported)")))
    first = attach.ensure_attached()
    assert attach.ensure_attached() is first is attach.current_attachment()
    assert (first.kind, first.entries, first.driver_version) == ("detour", 17, 13000)
    assert first.note == "not redirected: cuX (not exported)"
    assert first.verification == PROOF
    assert shim.attached == 1


def test_the_proof_is_made_up_for_once_a_context_is_there(use):
    use(FakeShim(report()), proofs=(Verification(4096), PROOF))
    assert attach.ensure_attached().verification.pending
    assert attach.ensure_attached().verification == PROOF
    assert attach.ensure_attached().verification == PROOF


def test_a_preloaded_shim_counts_as_attached(use):
    shim = use(FakeShim(report(), attachment="preload", ignored=2))
    with pytest.warns(OverlapctlWarning, match="2 parts of OVERLAPCTL_POLICY"):
        assert attach.ensure_attached().kind == "preload"
    assert shim.attached == 0


@pytest.mark.parametrize(
    ("status", "kind", "told"),
    [
        (Status.NO_DRIVER, DeviceError, "cannot be opened: why"),
        (Status.MISSING_ENTRY, AttachError, "does not export cuE"),
        (Status.PROLOGUE, AttachError, "instructions of cuE .* why .*overlapctl run"),
        (Status.FOREIGN_DETOUR, AttachError, "cuE has already been redirected .* why"),
        (Status.ALREADY_ATTACHED, AttachError, "another copy of the shim"),
        (Status.MEMORY, AttachError, "within reach of cuE"),
        (Status.PROTECT, AttachError, "cuE may not be changed"),
        (Status.THREADS, AttachError, "threads could not be stopped safely: why"),
        (Status.ARCHITECTURE, AttachError, "no in-process attachment"),
        (Status.DISABLED, AttachError, "OVERLAPCTL_DISABLE is set"),
        (Status.ARGUMENT, AttachError, "ARGUMENT"),
    ],
)
def test_each_failure_says_what_and_the_remedy(use, status, kind, told):
    use(FakeShim(report(status, "none", "cuE", "why")))
    with pytest.raises(kind, match=told) as caught:
        attach.ensure_attached()
    assert caught.value.remedy
    assert attach.current_attachment() is None


def test_nothing_is_touched_when_disabled(use, monkeypatch):
    shim = use(FakeShim(report()))
    monkeypatch.setenv(env.DISABLE, "1")
    with pytest.raises(AttachError, match="OVERLAPCTL_DISABLE"):
        attach.ensure_attached()
    assert shim.attached == 0


def test_nothing_is_touched_under_a_profiler(use):
    shim = use(FakeShim(report()), conflicts=(Conflict("Nsight Systems", "X is loaded"),))
    with pytest.raises(AttachError, match=r"Nsight Systems \(X is loaded\)"):
        attach.ensure_attached()
    assert shim.attached == 0


def test_no_gpu_is_told_before_anything_is_loaded(use):
    shim = use(FakeShim(report()), gpu=False)
    with pytest.raises(DeviceError, match="no NVIDIA GPU"):
        attach.ensure_attached()
    assert shim.attached == 0


@pytest.mark.native
@shim_build.needs_compiler
def test_a_real_shim_attaches_to_a_driver_by_path(tmp_path):
    driver = shim_build.driver(tmp_path)
    script = (
        "import sys\n"
        "from overlapctl.launch import attach, shim\n"
        "from pathlib import Path\n"
        "from overlapctl.launch.verify import Verification\n"
        "attach.load = lambda: shim.load(Path(sys.argv[1]))\n"
        "attach.verify = lambda *a: Verification(0)\n"
        "found = attach.ensure_attached(sys.argv[2])\n"
        "print(found.kind, found.entries, found.shim.attachment)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(shim_build.shim()), str(driver)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("detour 5 detour\n", "")
    assert ctypes.CDLL(str(shim_build.shim())).ovl_attachment_state() == 0  # not in this process
