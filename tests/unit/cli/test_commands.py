import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from overlapctl.cli import app, main
from overlapctl.profiles import ProfileStore

OPTIONS = Path(__file__).resolve().parents[2] / "data" / "cli_options.txt"
GEMM = "gemm:8192x8192x8192:bf16:64x64x64+all_reduce:896MB"
NORM = "layernorm:65536x8192:bf16+all_gather:64MB"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    for name in list(os.environ):
        if name.startswith(("NCCL_", "TORCH_NCCL_", "CUDA_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OVERLAPCTL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "profiles"


@pytest.fixture
def call(capsys):
    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        printed = capsys.readouterr()
        return caught.value.code or 0, printed.out, printed.err

    return call


def tune(call, *more, case=GEMM):
    return call("tune", "--device", "sim:h200", "--case", case, "--budget", "30", *more)


def test_options_are_the_frozen_ones():
    """Options are promises: a new one is added here on purpose, never by accident."""
    found = []

    def collect(command, path):
        for child in getattr(command, "commands", {}).values():
            collect(child, f"{path} {child.name}")
        for parameter in command.params:
            names = "/".join([*parameter.opts, *parameter.secondary_opts])
            found.append(f"{path}: {names}")

    collect(typer.main.get_command(app), "overlapctl")
    assert sorted(found) == OPTIONS.read_text().splitlines()


def test_version(call):
    code, out, _ = call("--version")
    assert (code, out) == (0, "overlapctl 0.1.0\n")


def test_tune_says_plan_time_and_path_first_then_the_verdict(call, cache):
    code, out, _ = tune(call)
    assert code == 0
    (stored,) = cache.glob("*.json")
    texts = ["device:", "plan:", "8 arms: default, priority", "time: about", str(stored), "why:"]
    places = [out.index(text) for text in texts]
    assert places == sorted(places)
    assert "priority+" in out[out.index("verdict:") :]


def test_tune_json_is_all_there_is_on_stdout(call, cache, tmp_path):
    code, out, err = tune(call, "--json", "--out", str(tmp_path / "result.json"))
    assert code == 0
    document = json.loads(out)
    assert json.loads((tmp_path / "result.json").read_text()) == document
    assert (document["schema"], document["version"]) == ("overlapctl-tune", 1)
    assert document["simulated"] is True
    assert Path(document["profile_path"]).parent == cache
    (case,) = document["cases"]
    assert case["case"] == "gemm:8192x8192x8192:bf16:64x64x64+all_reduce:896MiB"
    assert case["chosen"].startswith("priority+")
    assert case["arms"][0]["arm"] == "default"
    assert case["gain"] > 0.3
    assert document["profile"]["policy"]["comm_priority"] is True
    assert "plan:" in err


def test_tune_without_gpu_says_that_it_simulates(call, monkeypatch):
    import overlapctl.device

    simulated = overlapctl.device.open_device("sim:h200")
    monkeypatch.setattr(overlapctl.device, "open_device", lambda spec=None: simulated)
    _, out, _ = call("tune", "--case", GEMM, "--dry-run")
    assert "no GPU here: a simulated one is tuned" in out


def test_dry_run_stores_and_measures_nothing(call, cache):
    code, out, _ = tune(call, "--dry-run", "--json")
    document = json.loads(out)
    assert (code, document["schema"]) == (0, "overlapctl-tuning-plan")
    assert document["cases"][0]["footprint"]["threads"] == 128
    assert [arm["name"] for arm in document["cases"][0]["arms"]][:2] == ["default", "priority"]
    assert not cache.exists()


def test_default_cases_are_seven(call):
    code, out, _ = call("tune", "--device", "sim:h200", "--dry-run", "--json")
    cases = [case["case"] for case in json.loads(out)["cases"]]
    assert code == 0
    assert len(cases) == 7
    assert all("+all_reduce:" in case for case in cases)


def test_runs_add_up_and_resume_skips_what_is_known(call, cache):
    tune(call)
    tune(call, case=NORM)
    (entry,) = ProfileStore(cache).entries()
    assert len(entry.profile.verdicts) == 2
    code, out, _ = tune(call, "--resume")
    assert code == 0
    assert "1 of 1 cases are in the stored profile already" in out
    assert "nothing is left to tune" in out


def test_pipeline_form(call):
    code, out, _ = tune(call, "--form", "pipeline", "--json")
    assert code == 0
    assert json.loads(out)["cases"][0]["form"] == "pipeline"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--budget", "0"], 2, ["budget is 0 s", "above 0"]),
        (["--budget", "-3"], 2, ["budget is -3 s"]),
        (["--budget", "1e-9"], 2, ["one round of 1 cases", "allow at least"]),
        (["--budget", "soon"], 2, ["--budget", "number"]),
        (["--repeats", "1"], 2, ["repeats is 1", "at least 3"]),
        (["--case", "gemm:8x8x8:bf16"], 2, ["names no communication"]),
        (["--case", "gemm:what+all_reduce:1MB"], 2, ["what"]),
        (["--case", GEMM], 2, ["given twice"]),
        (["--device", "sim:abacus"], 3, ["abacus"]),
        (["--out", "/nonexistent/x.json"], 2, ["--out"]),
        (["--bogus"], 2, ["--bogus"]),
    ],
)
def test_wrong_usage_is_refused_with_a_remedy(call, cache, arguments, code, words):
    found, _, err = tune(call, *arguments)
    assert found == code
    assert all(word in err for word in words)
    assert "Traceback" not in err
    if "--bogus" not in arguments and "soon" not in arguments:
        assert "Error: " in err
        assert "Remedy: " in err
    assert not list(cache.glob("*.json"))


def test_an_unwritable_cache_is_found_before_measuring(call, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OVERLAPCTL_CACHE_DIR", str(tmp_path / "file"))
    code, _, err = tune(call)
    assert code == 5
    assert "cannot write to the profile folder" in err
    assert "OVERLAPCTL_CACHE_DIR" in err


def test_other_ranks_print_and_store_nothing(call, cache, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    code, out, _ = tune(call)
    assert (code, out) == (0, "")
    assert not cache.exists()


def test_profiles(call, cache):
    assert "no profile in" in call("profiles", "list")[1]
    tune(call)
    (stored,) = cache.glob("*.json")
    assert call("profiles", "path")[1].strip() == str(cache)
    assert "NVIDIA H200 (simulated)" in call("profiles", "list")[1]
    listed = json.loads(call("profiles", "list", "--json")[1])
    assert [file["name"] for file in listed["files"]] == [stored.name]
    assert "at most" in call("profiles", "show", stored.stem)[1]
    assert call("profiles", "show", stored.stem, "--json")[1] == stored.read_text()
    code, _, err = call("profiles", "show", "nothing")
    assert code == 5
    assert "no profile is called 'nothing'" in err
    assert call("profiles", "remove", stored.name)[0] == 0
    assert not stored.exists()


def test_a_broken_profile_is_listed_and_kept(call, cache):
    tune(call)
    (stored,) = cache.glob("*.json")
    stored.write_text("{")
    assert "no complete JSON" in call("profiles", "list")[1].replace("\n", " ")
    assert tune(call)[0] == 0
    assert [p.read_text() for p in cache.glob("*.broken-1")] == ["{"]


def test_doctor_without_gpu_warns(call):
    code, out, _ = call("doctor", "--device", "sim:h200", "--json")
    document = json.loads(out)
    checks = {check["name"]: check for check in document["checks"]}
    assert document["schema"] == "overlapctl-doctor"
    assert checks["GPU"]["status"] == "WARN"
    assert checks["profile"]["value"] == "no profile is stored"
    assert checks["cache folder"]["status"] == "PASS"
    assert (code, document["ok"]) == (0, True)


def test_doctor_finds_the_profile_or_the_differing_fields(call, cache):
    tune(call)
    assert "profile" in call("doctor", "--device", "sim:h200")[1]
    _, out, _ = call("doctor", "--device", "sim:h100", "--json")
    profile = next(c for c in json.loads(out)["checks"] if c["name"] == "profile")
    assert profile["status"] == "WARN"
    assert "gpu is 'NVIDIA H100" in profile["value"]


def test_doctor_fails_with_exit_code_1(call, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    code, out, _ = call("doctor", "--device", "sim:h200")
    assert code == 1
    assert "nothing can overlap" in out
    assert "1 FAIL" in out
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OVERLAPCTL_CACHE_DIR", str(tmp_path / "file"))
    assert call("doctor", "--device", "sim:h200")[0] == 1
    assert call("doctor", "--device", "sim:abacus")[0] == 1


def test_module_is_runnable():
    command = [sys.executable, "-m", "overlapctl", "--version"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "overlapctl 0.1.0\n"
