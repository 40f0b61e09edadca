"""`overlapctl plan`: printed, as JSON, as a picture; wrong usage named."""

import json
import sys

import pytest

from overlapctl.cli import main

GEMM = "gemm:8192x8192x8192:bf16:64x64x64"


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("OVERLAPCTL_CACHE_DIR", str(tmp_path / "cache"))

    def call(*more: str, compute=GEMM, comm="all_reduce:896MB") -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["plan", "--compute", compute, "--comm", comm, *more])
        printed = capsys.readouterr()
        return caught.value.code or 0, printed.out, printed.err

    return call


@pytest.mark.parametrize("device", ["a40", "sim:a40", "A40", "a40,world=2"])
def test_prints_table_and_reasons(call, device, tmp_path):
    code, out, err = call("--device", device)
    assert (code, err) == (0, "")
    assert "on NVIDIA A40" in out
    assert "protect communication: the collective is the longer side" in out
    assert "> priority+2/SM" in out
    assert not (tmp_path / "cache").exists()  # nothing is stored


def test_json_is_all_there_is_on_stdout(call):
    code, out, _ = call("--device", "h200", "--json")
    document = json.loads(out)
    assert (code, document["schema"], document["chosen"]) == (0, "overlapctl-plan", "priority+3/SM")


def test_world_changes_the_collective(call):
    def comm_alone(device: str) -> float:
        return json.loads(call("--device", device, "--json")[1])["comm_alone"]

    # Ring all-reduce of n ranks sends 2 (n - 1) / n of the payload: 1 and 1.75 times it.
    assert comm_alone("h200,world=8") == pytest.approx(1.75 * comm_alone("h200"), rel=0.08)


def test_pipeline(call):
    _, out, _ = call("--device", "h200", "--form", "pipeline", compute="gemm:8192x8192x8192")
    assert "(pipeline)" in out
    assert "persistent compute" in out


def test_plot_is_written_and_named(call, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    code, out, err = call("--device", "h200", "--plot", str(path))
    assert code == 0
    assert path.stat().st_size > 5000
    assert f"timeline: {path}" in err.replace("\n", "")
    assert "many waves" in out


def test_plot_without_matplotlib_names_the_extra(call, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = call("--device", "h200", "--plot", str(tmp_path / "plan.png"))
    assert (code, out) == (2, "")
    assert "overlapctl[plot]" in err


def test_wrong_usage_is_named(call):
    code, _, err = call("--device", "h300")
    assert code == 3
    assert "'h300' is no GPU model" in err
    assert "h200" in err
    code, _, err = call("--device", "h200", compute="gemm:12")
    assert code == 2
    assert "has 1 dimensions" in err


def test_kernel_that_cannot_run_is_refused(call):
    code, _, err = call("--device", "h200", compute="gemm:8192x8192x8192:bf16:256x256x64:4w4s")
    assert code == 2
    assert "fits no SM of NVIDIA H200" in err
