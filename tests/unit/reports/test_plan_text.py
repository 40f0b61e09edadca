"""Plans as text and as JSON."""

import json

import pytest

from overlapctl.device import open_device
from overlapctl.plan.choose import plan_case
from overlapctl.records import Case, Plan
from overlapctl.reports.plan_text import predicted_document, predicted_report
from overlapctl.reports.text import as_text
from overlapctl.specs import parse_comm, parse_compute


def plan(compute: str, comm: str = "all_reduce:896MB") -> Plan:
    case = Case(compute=parse_compute(compute), comm=parse_comm(comm))
    return plan_case(open_device("sim:h200").facts(), case).plan


@pytest.fixture(scope="module")
def helped() -> Plan:
    return plan("gemm:8192x8192x8192:bf16:64x64x64")


def test_report_says_verdict_rule_and_reason_before_the_table(helped):
    text = as_text(predicted_report(helped), width=160)
    parts = ["case", "plan", "rule", "reason", "policy", "candidate"]
    places = [text.index(f"\n{part} ") if part != "case" else text.index(part) for part in parts]
    assert places == sorted(places)
    assert "many waves: " in text
    assert "priority+3/SM" in text
    assert "(estimated)" in text
    assert "(estimated)" not in as_text(predicted_report(helped, estimated=False), width=160)


def test_table_marks_the_choice_and_what_is_legal(helped):
    lines = as_text(predicted_report(helped), width=200).splitlines()
    row = {line[2:].split("  ")[0]: line for line in lines if line[:2] in ("> ", "  ")}
    assert row["priority+3/SM"].startswith("> ")
    assert " yes " in row["priority+3/SM"]
    assert row["default"].split()[-1] == "1.000"
    assert " job " in row["at most 8 blocks"]
    assert "NCCL_MAX_CTAS=8" in row["at most 8 blocks"]
    assert " no " in row["green context"]


def test_leaving_alone_is_said_first():
    text = as_text(predicted_report(plan("gemm:8192x8192x8192:bf16")), width=160)
    assert "\nplan       leave it alone" in text
    assert "no launch is changed" in text
    assert "advice     collective first: predicted" in text


def test_document_holds_the_whole_plan(helped):
    document = json.loads(predicted_document(helped, device="sim:h200", simulated=True))
    assert (document["schema"], document["version"]) == ("overlapctl-plan", 1)
    assert (document["device"], document["simulated"]) == ("sim:h200", True)
    assert document["name"] == "gemm:8192x8192x8192:bf16:64x64x64+all_reduce:896MiB"
    assert document["chosen"] == "priority+3/SM"
    totals = {row["name"]: row["total"] for row in document["candidates"]}
    assert totals["priority+3/SM"] < totals["priority"] < totals["default"]
    assert totals["green context"] is None
