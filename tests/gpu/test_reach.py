"""Shaping reaches every library's kernels, however and whenever the shim is attached.

Each mode runs in a process of its own (an attachment lasts as long as its process). What the GPU
launched is read from the profiler's activity records, which also shows that the profiler works
inside a region, and from a Triton kernel that reads its own dynamic shared-memory size.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA GPU"),
]

PROGRAM = Path(__file__).with_name("reach_program.py")
PAD = 1024
MODES = ("before", "after", "threads", "preload")


@pytest.fixture(scope="module", params=MODES)
def report(request):
    command = [sys.executable, str(PROGRAM), request.param]
    if request.param == "preload":
        command = [sys.executable, "-m", "overlapctl", "run", "--", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout[done.stdout.index("{") :])
    if folder := os.environ.get("OVERLAPCTL_TEST_OUT"):
        Path(folder, f"reach-{request.param}.json").write_text(json.dumps(found, indent=1))
    return found


def test_attached_the_way_it_was_asked(report):
    assert report["kind"] == ("preload" if report["mode"] == "preload" else "detour")
    if report["mode"] == "threads":
        assert report["shaped_by_threads"] > 0


@pytest.mark.parametrize(
    "name",
    [
        "cublas_bf16",
        "cublas_fp32",
        "aten_elementwise",
        "layer_norm",
        "flash_attention",
        "convolution",
        "torch_compile",
        "backward",
    ],
)
def test_kernels_run_with_the_larger_size_and_give_the_same_bits(report, name):
    seen = report["operations"][name]
    assert [k["name"] for k in seen["before"]] == [k["name"] for k in seen["after"]]
    grown = [a["smem"] - b["smem"] for b, a in zip(seen["before"], seen["after"], strict=True)]
    assert grown, "the profiler saw no kernel"
    # Rows say which kernels were shaped: those, and only those, grew by the pad.
    shaped = [row for row in seen["rows"] if row["shaped"]]
    assert shaped, seen["rows"]
    assert all(row["after"] == row["before"] + PAD for row in shaped)
    assert all(row["failed"] == 0 for row in seen["rows"])
    assert PAD in grown
    assert set(grown) <= {0, PAD}
    assert seen["equal"]


def test_a_kernel_reads_its_own_size_back(report):
    seen = report["operations"]["triton"]
    row = next(r for r in seen["rows"] if r["kernel"] == "read_dynamic_size")
    assert seen["value"] == row["after"] == row["before"] + PAD


def test_captured_launches_stay_shaped_in_every_replay(report):
    graph = report["graph"]
    assert graph["captured"] >= 2
    assert all(k["smem"] >= PAD for k in graph["kernels"])
    assert len(graph["kernels"]) >= 2


def test_the_shim_leaves_a_plain_process_alone():
    assert shutil.which("true")
    done = subprocess.run(
        [sys.executable, "-m", "overlapctl", "run", "--", "true"], capture_output=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout == b""
    assert done.stderr == b""
