import dataclasses
import json
from pathlib import Path

import pytest

from overlapctl.profiles import Entry
from overlapctl.records import Applied, KernelRule, Policy, Role, Rule
from overlapctl.reports.as_json import (
    checks_document,
    document,
    profiles_document,
    tune_document,
)
from overlapctl.reports.checks import Check, Status
from overlapctl.reports.names import case_name, policy_text, verdict_text
from overlapctl.reports.text import (
    as_text,
    checks_table,
    entries_table,
    explanation_table,
    profile_report,
    verdicts_report,
)
from overlapctl.specs import parse_comm, parse_compute

THREE = KernelRule(pattern="gemm_kernel", max_blocks_per_sm=3)


@pytest.fixture
def verdicts(samples):
    adopted = samples.verdict("priority+3/SM", rule=THREE, p=8.0, p3=6.0)
    left = samples.verdict("default", of=samples.case(64), kernel="nvjet", p=9.99)
    return adopted, left


def test_a_case_is_named_as_tune_takes_it(samples):
    compute, comm = case_name(samples.case()).split("+")
    assert parse_compute(compute) == samples.case().compute
    assert parse_comm(comm) == samples.case().comm


def test_verdicts(verdicts):
    text = as_text(verdicts_report(verdicts), width=150)
    rows = [line for line in text.splitlines() if line.startswith(("1. ", "2. "))]
    assert rows[0].split()[-6:] == ["priority+3/SM", "10.00", "6.00", "-40.0%", "1.0%", "8.00"]
    assert "leave it alone" in rows[1]
    assert "  0%  " in rows[1]
    assert "2. leave it alone: because" in text
    assert [verdict_text(v) for v in verdicts] == ["priority+3/SM", "leave it alone"]


def test_policy_text():
    assert policy_text(Policy()) == ["no launch is changed"]
    assert policy_text(Policy(comm_priority=True, rules=(THREE, KernelRule(pattern="nv*")))) == [
        "communication launches at the greatest priority",
        "kernel gemm_kernel: at most 3 blocks per SM",
        "kernel nv*: left alone",
        "other compute kernels: left alone",
    ]
    assert policy_text(
        Policy(pad_bytes=1024, carveout=100, include=("a*",), exclude=("b",), shape_captures=False)
    ) == [
        "all compute kernels: 1024 B more shared memory per block, shared-memory carve-out 100%",
        "only kernels matching a*",
        "no kernels matching b",
        "launches being captured into a graph are left alone",
    ]


def applied(**changes) -> Applied:
    row = Applied(
        kernel="gemm_kernel", role=Role.COMPUTE, threads=128, registers=90, static_smem=0,
        launches=8, shaped=8, prioritised=0, carved=0, failed=0, captured=0, before=49152,
        after=57345, blocks_before=4, blocks_after=3, rule=Rule.PADDED_TO_TARGET,
    )  # fmt: skip
    return dataclasses.replace(row, **changes)


def test_explanation_names_size_residency_and_rule():
    text = explanation_table(
        Policy(max_blocks_per_sm=3),
        "as the arguments say",
        "detour",
        [applied(), applied(kernel="void f<int[3]>", failed=2, blocks_before=0, blocks_after=0)],
    )
    assert "because: as the arguments say" in text
    row = next(line for line in text.splitlines() if line.startswith("gemm_kernel"))
    assert row.split() == [
        "gemm_kernel", "compute", "8", "8", "0", "49152", "57345", "4", "->", "3",
        "padded-to-target",
    ]  # fmt: skip
    assert "void f<int[3]>" in text
    assert "2 failed and repeated as asked" in text
    assert "no kernel was launched" in explanation_table(Policy(), "x", "not attached", [])


def test_profile_and_entries(samples, verdicts):
    profile = samples.profile(*verdicts)
    text = as_text(profile_report(profile), width=150)
    assert "2x NVIDIA H200, nvlink x18" in text
    assert "kernel gemm_kernel: at most 3 blocks per SM" in text
    entries = [
        Entry(Path("/c/good.json"), profile),
        Entry(Path("/c/bad.json"), None, "/c/bad.json is no [complete] JSON"),
    ]
    listed = as_text(entries_table(entries), width=200)
    assert "is no [complete] JSON" in listed
    files = json.loads(profiles_document(Path("/c"), entries))["files"]
    assert [(f["name"], f["problem"] is None) for f in files] == [
        ("good.json", True),
        ("bad.json", False),
    ]


def test_checks():
    checks = [
        Check("torch", Status.PASS, "2.11"),
        Check("cache folder", Status.FAIL, "not [writable]", "chmod it"),
    ]
    text = as_text(checks_table(checks))
    assert "not [writable]" in text
    assert "-> chmod it" in text
    assert text.endswith("1 PASS, 0 WARN, 1 FAIL")
    document = json.loads(checks_document(checks))
    assert document["ok"] is False
    assert document["checks"][0] == {
        "name": "torch",
        "status": "PASS",
        "value": "2.11",
        "remedy": None,
    }


def test_documents_are_versioned_and_finite(samples, verdicts):
    text = tune_document(
        device="sim:h200", simulated=True, profile=samples.profile(*verdicts), path=None,
        evidence=[(verdict, [], 15) for verdict in verdicts], left_out=[(samples.case(1), "late")],
        seconds=1.5,
    )  # fmt: skip
    found = json.loads(text)
    assert (found["schema"], found["version"], found["profile_path"]) == (
        "overlapctl-tune",
        1,
        None,
    )
    assert [case["verdict"] for case in found["cases"]] == ["priority+3/SM", "leave it alone"]
    assert found["left_out"][0]["reason"] == "late"
    with pytest.raises(ValueError, match="JSON"):
        document("tune", {"gain": float("nan")})
