import dataclasses
import importlib.util
from pathlib import Path

import pytest

from overlapctl.errors import MeasurementError, ProfileError, UsageError
from overlapctl.profiles import ProfileStore, profile_key
from overlapctl.records import Case, CommSpec, ComputeSpec, KernelRule, Policy, Profile
from overlapctl.tuning import decide, default_cases, plan_tuning, tune
from overlapctl.tuning.planning import FIRST_ROUND

_PATH = Path(__file__).resolve().parents[1] / "helpers" / "fake_tuning.py"
_SPEC = importlib.util.spec_from_file_location("fake_tuning", _PATH)
fakes = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(fakes)

CASE = Case(
    compute=ComputeSpec(op="gemm", shape=(8192, 8192, 8192), tile=(64, 64, 64, 4, 3)),
    comm=CommSpec(op="all_reduce", size_bytes=896 << 20),
)
OTHER = dataclasses.replace(CASE, comm=CommSpec(op="all_gather", size_bytes=64 << 20))
# (end of compute, end of communication), ms: the first pair of findings-h200.
GEMM_TIMES = {
    "default": (3.93, 6.85),
    "priority": (4.86, 3.93),
    "3/SM": (3.9, 6.0),
    "priority+3/SM": (3.96, 3.63),
    "2/SM": (5.5, 7.5),
    "priority+2/SM": (5.3, 3.6),
    "1/SM": (9.0, 11.0),
    "priority+1/SM": (9.0, 3.5),
}
SAME = {"default": (3.93, 6.85)}


def run(runner, cases=(CASE,), *, budget_s=100.0, **options):
    return tune(fakes.FakeDevice(), cases, runner, budget_s=budget_s, clock=runner.clock, **options)


def only_verdict(runner, **options):
    (evidence,) = run(runner, **options).evidence
    return evidence.verdict


def test_the_best_arm_is_adopted_as_a_rule_for_its_kernel():
    verdict = only_verdict(fakes.FakeRunner(GEMM_TIMES))
    assert verdict.chosen == "priority+3/SM"
    rule = KernelRule(pattern="gemm_kernel", max_blocks_per_sm=3)
    assert verdict.policy == Policy(comm_priority=True, rules=(rule,))
    assert verdict.gain == pytest.approx(1 - 3.96 / 6.85, abs=0.01)
    assert verdict.totals["priority"] == pytest.approx(4.86, rel=0.01)
    assert verdict.totals.keys() == GEMM_TIMES.keys()
    assert (verdict.serial, verdict.ideal) == (7.0, 4.0)
    assert "3.96 ms against 6.8" in verdict.reason
    assert "of the ideal gain" in verdict.reason
    assert "starts while the kernel runs" in verdict.reason


def test_a_gain_inside_the_spread_is_left_alone():
    times = {"default": (3.93, 6.85), "priority": (3.9, 6.7)}
    verdict = only_verdict(fakes.FakeRunner(times, noise=0.06))
    assert verdict.chosen == "default"
    assert verdict.policy == Policy(rules=(KernelRule(pattern="gemm_kernel"),))
    assert verdict.policy.is_default
    assert verdict.gain == 0
    assert "within the spread" in verdict.reason


def test_a_tiny_gain_is_left_alone_even_if_it_is_certain():
    times = {"default": (3.93, 6.85), "priority": (3.93, 6.80)}
    verdict = only_verdict(fakes.FakeRunner(times, noise=0.0))
    assert verdict.chosen == "default"
    assert "too little" in verdict.reason


def test_slower_arms_are_left_alone():
    times = dict.fromkeys(GEMM_TIMES, (5.0, 8.0)) | SAME
    verdict = only_verdict(fakes.FakeRunner(times))
    assert verdict.chosen == "default"
    assert "every other arm is slower" in verdict.reason


def test_a_persistent_kernel_is_left_alone_with_the_mechanism():
    verdict = only_verdict(fakes.FakeRunner(SAME, footprint=fakes.PERSISTENT))
    assert verdict.chosen == "default"
    assert set(verdict.totals) == {"default", "priority"}
    assert "persistent kernel" in verdict.reason


def test_default_at_the_ideal_says_so():
    verdict = only_verdict(fakes.FakeRunner({"default": (4.0, 4.02)}))
    assert verdict.reason.startswith("default already reaches 99%")


def test_little_to_gain_says_so():
    verdict = only_verdict(fakes.FakeRunner({"default": (4.0, 4.1)}, alone=(4.0, 0.2)))
    assert verdict.reason.startswith("even perfect overlap would save only 4.8%")


def test_of_equal_arms_the_simplest_is_taken():
    times = dict.fromkeys(GEMM_TIMES, (4.0, 4.0)) | SAME
    times |= {"3/SM": (3.9, 6.85), "2/SM": (4.0, 6.85), "1/SM": (4.0, 6.85)}
    assert only_verdict(fakes.FakeRunner(times)).chosen == "priority"


def test_losing_arms_drop_out_early_and_the_default_never():
    runner = fakes.FakeRunner(GEMM_TIMES)
    run(runner, repeats=24)
    rounds = [names for _, names, _ in runner.calls]
    assert len(rounds[0]) == 8
    assert all(names[0] == "default" for names in rounds)
    assert "1/SM" not in rounds[1]
    assert sum(repeats for _, _, repeats in runner.calls) < 24  # settled before


def test_equal_arms_are_halved_not_measured_to_the_end():
    runner = fakes.FakeRunner(SAME)
    run(runner, repeats=48)
    assert len(runner.calls[-1][1]) <= 3
    assert sum(repeats for _, _, repeats in runner.calls) == 48


def test_drift_of_the_clock_does_not_favour_arms_that_dropped_out():
    verdict = only_verdict(fakes.FakeRunner(GEMM_TIMES, drift=0.1), repeats=24)
    ratio = verdict.totals["priority+2/SM"] / verdict.totals["default"]
    assert ratio == pytest.approx(5.3 / 6.85, rel=0.02)


def test_the_budget_is_kept_and_late_cases_are_left_out():
    slow = fakes.FakeRunner(SAME, noise=0.02)
    result = run(slow, (CASE, OTHER), budget_s=1.0, repeats=60)
    assert result.seconds <= 1.0
    assert [len(result.evidence), len(result.left_out)] == [2, 0]

    class Slower(fakes.FakeRunner):
        def run(self, case, arms, *, repeats):
            self.now += 2.0
            return super().run(case, arms, repeats=repeats)

    result = run(Slower(SAME), (CASE, OTHER), budget_s=1.0)
    assert [case for case, _ in result.left_out] == [OTHER]
    assert "budget of 1 s" in result.left_out[0][1]


@pytest.mark.parametrize("budget", [0.0, -5.0, float("nan"), float("inf")])
def test_a_budget_that_is_no_time_is_refused(budget):
    with pytest.raises(UsageError, match="budget is"):
        run(fakes.FakeRunner(SAME), budget_s=budget)


def test_a_budget_below_one_round_names_the_minimum():
    runner = fakes.FakeRunner(SAME)
    with pytest.raises(UsageError, match=r"one round of 1 cases takes about 0.2 s") as caught:
        run(runner, budget_s=0.1)
    assert "allow at least 1 s" in caught.value.remedy
    assert runner.calls == []


def test_other_bad_requests_are_refused():
    device, runner = fakes.FakeDevice(), fakes.FakeRunner(SAME)
    with pytest.raises(UsageError, match="cases is empty"):
        plan_tuning(device, [], runner, budget_s=1)
    with pytest.raises(UsageError, match="given twice"):
        plan_tuning(device, [CASE, CASE], runner, budget_s=1)
    with pytest.raises(UsageError, match="repeats is 2"):
        plan_tuning(device, [CASE], runner, budget_s=1, repeats=FIRST_ROUND - 1)


def test_the_plan_says_arms_reasons_and_time():
    plan = plan_tuning(
        fakes.FakeDevice(), [CASE], fakes.FakeRunner(SAME, footprint=fakes.PERSISTENT),
        budget_s=100, repeats=10,
    )  # fmt: skip
    (planned,) = plan.cases
    assert [arm.name for arm in planned.arms] == ["default", "priority"]
    assert "carveout100" in dict(planned.pruned)
    assert (plan.first_rounds, plan.estimate) == pytest.approx((0.06, 0.2))


def test_each_case_is_stored_when_it_is_decided(tmp_path):
    store = ProfileStore(tmp_path / "p")
    seen = []

    def progress(case, number, share):
        stored = store.load(profile_key(fakes.FakeDevice()))
        seen.append((number, len(stored.verdicts) if isinstance(stored, Profile) else 0))

    result = run(fakes.FakeRunner(GEMM_TIMES), (CASE, OTHER), store=store, progress=progress)
    assert {(0, 0), (1, 1)} == set(seen)
    assert store.load(profile_key(fakes.FakeDevice())) == result.profile
    assert result.path.is_file()
    assert result.profile.policy.comm_priority


def test_a_later_run_keeps_other_cases(tmp_path):
    store = ProfileStore(tmp_path / "p")
    run(fakes.FakeRunner(GEMM_TIMES), (CASE,), store=store)
    result = run(fakes.FakeRunner(SAME, footprint=fakes.PERSISTENT), (OTHER,), store=store)
    assert [v.case for v in result.profile.verdicts] == [CASE, OTHER]
    assert [e.verdict.case for e in result.evidence] == [OTHER]
    assert [r.pattern for r in result.profile.policy.rules] == ["gemm_kernel", "nvjet"]


def test_an_unwritable_store_is_found_before_measuring(tmp_path):
    (tmp_path / "file").write_text("")
    runner = fakes.FakeRunner(SAME)
    with pytest.raises(ProfileError, match="cannot write"):
        run(runner, store=ProfileStore(tmp_path / "file" / "p"))
    assert runner.calls == []


def test_a_failing_case_does_not_lose_the_others():
    result = run(fakes.FakeRunner(GEMM_TIMES, fail=(CASE,)), (CASE, OTHER))
    assert [e.verdict.case for e in result.evidence] == [OTHER]
    assert [(case, "rank 1 died" in reason) for case, reason in result.left_out] == [(CASE, True)]
    with pytest.raises(MeasurementError, match=r"none of 1 cases.*rank 1 died"):
        run(fakes.FakeRunner(GEMM_TIMES, fail=(CASE,)), (CASE,))


def test_a_case_this_machine_cannot_run_is_left_out_of_the_plan():
    class Small(fakes.FakeRunner):
        def footprint(self, case):
            if case == CASE:
                raise MeasurementError("does not fit into memory", remedy="use a smaller shape")
            return super().footprint(case)

    result = run(Small(GEMM_TIMES), (CASE, OTHER))
    assert [e.verdict.case for e in result.evidence] == [OTHER]
    assert [case for case, _ in result.left_out] == [CASE]
    with pytest.raises(MeasurementError, match="does not fit"):
        run(Small(GEMM_TIMES), (CASE,))


def test_decisions_on_time_are_agreed_between_ranks():
    asked = []

    class Ranked(fakes.FakeRunner):
        def agree(self, value):
            asked.append(value)
            return True  # another rank is late

    runner = Ranked(SAME)
    run(runner, repeats=48)
    assert asked == [False]
    assert len(runner.calls) == 1


def test_without_a_default_arm_there_is_no_verdict():
    runner = fakes.FakeRunner(GEMM_TIMES)
    (evidence,) = run(runner).evidence
    with pytest.raises(UsageError, match="default"):
        decide(evidence.trials[1:], fakes.H200, None)


def test_default_cases_balance_compute_and_communication():
    cases = default_cases(fakes.H200, 2)
    assert len(set(cases)) == len(cases) == 7
    assert {c.comm.op for c in cases} == {"all_reduce"}
    assert {c.compute.op for c in cases} == {"gemm", "elementwise", "layernorm", "attention"}
    first = cases[0]  # 3.9 ms of GEMM: about 1.2 GB at 390 GB/s
    assert 1000 < first.comm.size_bytes >> 20 < 1400
    assert all(c.comm.size_bytes % (16 << 20) == 0 for c in cases)
    slow = dataclasses.replace(
        fakes.H200, rates=dataclasses.replace(fakes.H200.rates, link_gbps=25)
    )
    assert default_cases(slow, 2)[0].comm.size_bytes < first.comm.size_bytes / 10


def test_one_gpu_gets_stand_ins():
    assert {(c.comm.op, c.comm.path) for c in default_cases(fakes.H200, 1)} == {
        ("local_copy", "standin")
    }
