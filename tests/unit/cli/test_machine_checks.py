import dataclasses
import importlib.util
from pathlib import Path

import pytest

import overlapctl.device
from overlapctl.cli import machine_checks
from overlapctl.errors import AttachError, DeviceError
from overlapctl.launch import attach, shim
from overlapctl.records import Clocks, Link, Topology
from overlapctl.reports.checks import Check, Status

_PATH = Path(__file__).resolve().parents[2] / "helpers" / "fake_tuning.py"
_SPEC = importlib.util.spec_from_file_location("fake_tuning", _PATH)
fakes = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(fakes)


class RealDevice(fakes.FakeDevice):
    """As a machine with GPUs would answer."""

    is_simulated = False
    spec = "cuda:0"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    monkeypatch.setenv("OVERLAPCTL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(shim, "load", lambda path=None: None)
    monkeypatch.setattr(shim, "library_path", lambda: Path("/lib/liboverlapctl.so"))
    monkeypatch.setattr(
        machine_checks, "_attach", lambda: Check("attach", Status.PASS, "works here")
    )


@pytest.fixture
def look(monkeypatch):
    def look(device) -> dict[str, Check]:
        monkeypatch.setattr(overlapctl.device, "open_device", lambda spec=None: device)
        return {check.name: check for check in machine_checks.check_machine(None)}

    return look


def test_a_good_machine_passes(look):
    checks = look(RealDevice())
    assert checks.pop("profile").status is Status.WARN  # not tuned yet
    assert {name: c.status for name, c in checks.items() if c.status is not Status.PASS} == {}
    assert checks["driver"].value == "580"
    assert checks["topology"].value == "2x NVIDIA H200, nvlink x18"
    assert "132 SMs" in checks["GPU"].value


def test_one_gpu_is_told_what_needs_two(look):
    check = look(RealDevice(gpus=1))["topology"]
    assert check.status is Status.WARN
    assert "need two GPUs" in check.remedy


def test_links_without_peer_access(look):
    device = RealDevice()
    blind = Link(source=0, target=1, kind="pcie", links=0, peer_access=False)
    device.topology = lambda: Topology(devices=("a", "b"), links=(blind,))
    assert "1 of 1 links have no peer access" in look(device)["topology"].value


def test_throttling_and_missing_priorities(look):
    device = RealDevice()
    facts = dataclasses.replace(fakes.H200, priority_greatest=0)
    device.facts = lambda: facts
    device.clocks = lambda: Clocks(
        sm_mhz=1200, memory_mhz=None, power_w=None, temperature_c=None,
        throttle_reasons=("power cap",),
    )  # fmt: skip
    checks = look(device)
    assert "1200 MHz, held down by power cap" in checks["clocks"].value
    assert checks["stream priorities"].status is Status.WARN


def test_no_device_still_reports_the_rest(monkeypatch):
    def refuse(spec):
        raise DeviceError("no driver", remedy="install one")

    monkeypatch.setattr(overlapctl.device, "open_device", refuse)
    checks = {check.name: check for check in machine_checks.check_machine("cuda")}
    assert checks["GPU"] == Check("GPU", Status.FAIL, "no driver", "install one")
    assert {"torch", "cache folder"} <= checks.keys()


@pytest.mark.parametrize(
    ("version", "status"),
    [
        (None, Status.FAIL),
        ("2.8.1", Status.FAIL),
        ("2.9.0+cu130", Status.PASS),
        ("3.0", Status.PASS),
    ],
)
def test_torch_versions(monkeypatch, look, version, status):
    monkeypatch.setattr(machine_checks, "_installed", lambda package: version)
    check = look(RealDevice())["torch"]
    assert check.status is status
    assert bool(check.remedy) == (status is Status.FAIL)


@pytest.mark.parametrize(
    ("device", "status"), [(RealDevice, Status.FAIL), (fakes.FakeDevice, Status.WARN)]
)
def test_a_missing_shim_fails_only_where_it_could_work(monkeypatch, look, device, status):
    def missing(path=None):
        raise AttachError("the shim x.so does not exist", remedy="build it")

    monkeypatch.setattr(shim, "load", missing)
    assert look(device())["shim"] == Check(
        "shim", status, "the shim x.so does not exist", "build it"
    )


def test_conflicts_are_named(monkeypatch, look):
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    assert "Nsight Systems" in look(fakes.FakeDevice())["profiler"].value


def test_a_refused_attachment_is_reported(monkeypatch):
    monkeypatch.undo()

    def refuse():
        raise AttachError("first instructions not known", remedy="overlapctl run")

    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: None)
    monkeypatch.setattr(attach, "ensure_attached", refuse)
    assert machine_checks._attach() == Check(
        "attach", Status.FAIL, "first instructions not known", "overlapctl run"
    )


def test_cuda_that_does_not_start_is_reported(monkeypatch):
    monkeypatch.undo()
    torch = pytest.importorskip("torch")

    def fail(*args, **kwargs):
        raise RuntimeError("CUDA driver is insufficient\nmore")

    monkeypatch.setattr(torch, "zeros", fail)
    check = machine_checks._attach()
    assert check.status is Status.FAIL
    assert check.value == "CUDA does not start in torch: CUDA driver is insufficient"


def test_a_broken_profile_fails(look):
    from overlapctl.profiles import ProfileStore, profile_key

    store = ProfileStore()
    store.check_writable()
    path = store.path(profile_key(RealDevice()))
    path.write_text("{")
    path.chmod(0o600)
    assert look(RealDevice())["profile"].status is Status.FAIL
