"""Which rule explains which situation; the first that matches is named."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapctl.plan.rules import RULES, Situation, fewest_blocks, first_rule, may_pad

# A GEMM of many waves beside an all-reduce a little shorter than it, where priority helps.
PLAIN = Situation(
    persistent=False,
    resident=False,
    memory_bound=False,
    light=False,
    waits=True,
    compute_ms=3.9,
    comm_ms=2.9,
    headroom=0.4,
    gain=0.3,
    padded=False,
    margin=0.04,
)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "many waves"),
        ({"padded": True}, "many waves"),
        ({"compute_ms": 9.0}, "compute the longer side"),
        ({"padded": True, "comm_ms": 5.0}, "protect communication"),
        ({"padded": True, "light": True}, "protect communication"),
        ({"padded": True, "memory_bound": True}, "protect communication"),
        ({"light": True}, "many waves"),
        ({"persistent": True, "resident": True}, "room beside a persistent kernel"),
        ({"persistent": True, "resident": True, "gain": 0.0}, "persistent compute"),
        ({"resident": True, "gain": 0.0}, "resident grid"),
        ({"waits": False, "gain": 0.0, "persistent": True}, "bandwidth"),
        ({"waits": False}, "many waves"),
        ({"headroom": 0.03, "gain": 0.0, "persistent": True}, "nothing to gain"),
        ({"gain": 0.0, "memory_bound": True}, "memory bandwidth"),
        ({"gain": 0.0}, "below the model's error"),
        ({"gain": 0.04}, "below the model's error"),
    ],
)
def test_first_matching_rule(changes: dict[str, object], name: str) -> None:
    assert first_rule(dataclasses.replace(PLAIN, **changes)).name == name  # type: ignore[arg-type]


def test_every_rule_is_the_first_somewhere_and_says_what_follows() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        follows_from_no_gain = rule.text.endswith("leave it alone")
        assert follows_from_no_gain == (rule not in RULES[4:8])


@given(
    st.builds(
        Situation,
        persistent=st.booleans(),
        resident=st.booleans(),
        memory_bound=st.booleans(),
        light=st.booleans(),
        waits=st.booleans(),
        compute_ms=st.floats(0.01, 100),
        comm_ms=st.floats(0.01, 100),
        headroom=st.floats(-1, 1),
        gain=st.floats(-1, 1),
        padded=st.booleans(),
        margin=st.floats(0, 0.2),
    )
)
def test_leaving_alone_is_said_exactly_where_nothing_is_gained(situation: Situation) -> None:
    left_alone = first_rule(situation).text.endswith("leave it alone")
    # Every rule of a gain needs the gain; a memory-bound kernel that gains is named by its gain.
    assert left_alone == (situation.gain <= situation.margin)


def test_no_pad_where_compute_is_much_longer() -> None:
    assert may_pad(3.9, 2.9)
    assert not may_pad(5.9, 2.9)


@pytest.mark.parametrize(("natural", "fewest"), [(1, 1), (2, 1), (3, 2), (4, 2), (16, 8)])
def test_fewest_blocks_is_half_rounded_up(natural: int, fewest: int) -> None:
    assert fewest_blocks(natural) == fewest
