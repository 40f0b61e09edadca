"""The order of steps and the checks every runner makes."""

from __future__ import annotations

import pytest

from overlapctl.errors import UsageError
from overlapctl.measure.trial import Step, check_request, interleaved_order
from overlapctl.records import Arm, Policy

DEFAULT = Arm(name="default")
PRIORITY = Arm(name="priority", policy=Policy(comm_priority=True))
PADDED = Arm(name="3 blocks", policy=Policy(comm_priority=True, max_blocks_per_sm=3))


def test_every_repetition_runs_everything_once():
    for repetition in range(5):
        order = interleaved_order([DEFAULT, PRIORITY, PADDED], repetition)
        assert sorted(order, key=str) == sorted(
            [
                Step("compute", None),
                Step("comm", None),
                Step("overlap", 0),
                Step("overlap", 1),
                Step("overlap", 2),
                Step("compute", 1),
                Step("compute", 2),
            ],
            key=str,
        )


def test_order_changes_between_repetitions_and_is_the_same_on_all_ranks():
    arms = [DEFAULT, PRIORITY, PADDED]
    orders = [interleaved_order(arms, r) for r in range(8)]
    assert orders == [interleaved_order(arms, r) for r in range(8)]
    assert len({tuple(order) for order in orders}) > 4
    # No arm has a fixed place, so none is always run on a cold (or hot) card.
    assert len({order.index(Step("overlap", 0)) for order in orders}) > 2


@pytest.mark.parametrize(
    ("arms", "repeats", "message"),
    [
        ([DEFAULT], 0, "repeats is 0"),
        ([], 1, "arms is empty"),
        ([DEFAULT, PRIORITY, DEFAULT], 1, "'default' is used 2 times"),
    ],
)
def test_bad_requests_name_the_value(arms, repeats, message):
    with pytest.raises(UsageError, match=message):
        check_request(arms, repeats)
