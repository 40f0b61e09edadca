import dataclasses

from overlapctl.profiles import combine_verdicts
from overlapctl.records import KernelRule, Policy


def three(kernel="gemm_kernel") -> KernelRule:
    return KernelRule(pattern=kernel, max_blocks_per_sm=3)


def test_nothing_measured():
    assert combine_verdicts([]) == (Policy(), "nothing was measured: leave it alone")


def test_one_adopted_verdict_becomes_a_rule(samples):
    verdict = samples.verdict("priority+3/SM", rule=three(), p=8.0, n3=9.5, p3=6.0)
    policy, reason = combine_verdicts([verdict])
    assert policy == Policy(comm_priority=True, rules=(three(),))
    assert "1 of 1 kernels shaped" in reason
    assert "mean -40.0%" in reason


def test_kernels_get_rules_of_their_own_and_the_others_none(samples):
    gemm = samples.verdict("priority+3/SM", rule=three(), p=8.0, p3=6.0)
    other = samples.verdict("default", kernel="cublas", of=samples.case(m=64), p=10.0)
    policy, _ = combine_verdicts([gemm, other])
    assert policy.rules == (three(), KernelRule(pattern="cublas"))
    assert policy.comm_priority
    assert policy.max_blocks_per_sm == 0


def test_priority_that_harms_another_kernel_is_off(samples):
    gemm = samples.verdict("priority", p=8.0)
    other = samples.verdict("default", kernel="norm", of=samples.case(m=64), p=11.0)
    policy, reason = combine_verdicts([gemm, other])
    assert policy.is_default
    assert "harms another" in reason


def test_priority_within_the_spread_is_no_harm(samples):
    gemm = samples.verdict("priority", p=8.0)
    other = samples.verdict("default", kernel="norm", of=samples.case(m=64), p=10.3, spread=0.05)
    assert combine_verdicts([gemm, other])[0].comm_priority


def test_shape_stays_where_priority_must_go(samples):
    gemm = samples.verdict("priority+3/SM", rule=three(), p=8.0, n3=9.0, p3=6.0)
    other = samples.verdict("default", kernel="norm", of=samples.case(m=64), p=12.0)
    policy, reason = combine_verdicts([gemm, other])
    assert policy == Policy(rules=(three(), KernelRule(pattern="norm")))
    assert "priority off (it helps in some cases" in reason


def test_a_shape_that_harms_another_case_of_the_same_kernel_is_not_used(samples):
    long = samples.verdict("priority+3/SM", rule=three(), p=8.0, p3=6.0)
    short = samples.verdict("default", of=samples.case(16), p=10.0, p3=13.0)
    policy, _ = combine_verdicts([long, short])
    assert policy == Policy(comm_priority=True, rules=(KernelRule(pattern="gemm_kernel"),))


def test_a_gentler_target_than_any_measured_changes_nothing(samples):
    one = samples.verdict("priority+3/SM", rule=three(), p=8.0, p3=6.0)
    same_name = samples.verdict(
        "priority", of=samples.case(m=128), p=9.0, p2=15.0, p1=20.0, n2=15.0
    )
    policy, _ = combine_verdicts([one, same_name])
    assert policy.rules == (three(),)


def test_an_unmeasured_target_between_measured_ones_is_not_guessed(samples):
    one = samples.verdict("priority+3/SM", rule=three(), p=8.0, p3=6.0)
    same_name = samples.verdict("priority", of=samples.case(m=128), p=9.0, p4=9.5, p2=15.0)
    policy, _ = combine_verdicts([one, same_name])
    assert policy.rules == (KernelRule(pattern="gemm_kernel"),)


def test_order_of_verdicts_does_not_matter_to_the_decision(samples):
    gemm = samples.verdict("priority+3/SM", rule=three(), p=8.0, p3=6.0)
    norm = samples.verdict("default", kernel="norm", of=samples.case(m=64), p=10.0)
    forth, back = combine_verdicts([gemm, norm])[0], combine_verdicts([norm, gemm])[0]
    assert set(forth.rules) == set(back.rules)
    assert dataclasses.replace(forth, rules=()) == dataclasses.replace(back, rules=())
