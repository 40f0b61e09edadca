import dataclasses
import random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from overlapctl.collectives.algorithms import Recipe, build
from overlapctl.collectives.check import check, checked
from overlapctl.collectives.host import Interpreter, torch_dtype
from overlapctl.collectives.schedule import REDUCIBLE, Call, Schedule, Wait
from overlapctl.errors import CollectiveError, UsageError

OPS = [
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "gather", "scatter",
    "reduce", "send_recv",
]  # fmt: skip
ROOTED = {"broadcast", "gather", "scatter", "reduce", "send_recv"}
STEP = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}


def make_call(rng, op, world):
    count = rng.choice([1, 2, 7, 33, 129])
    fields = {"count": count}
    if op == "all_to_all":
        fields = {
            "splits": tuple(
                tuple(rng.choice([0, 1, 5, 16]) for _ in range(world)) for _ in range(world)
            )
        }
    if op in ROOTED:
        fields["root"] = rng.randrange(world)
    if op == "send_recv":
        fields["peer"] = (fields["root"] + rng.randrange(1, world)) % world
    fields["dtype"] = rng.choice(["bf16", "fp16", "fp32"])
    if op in REDUCIBLE:
        fields["reduction"] = rng.choice(["sum", "avg", "premul"])
        fields["factor"] = 0.3 if fields["reduction"] == "premul" else 1.0
        fields["accumulate"] = rng.choice(["fp32", "dtype"])
    elif rng.random() < 0.3:
        fields["dtype"] = "u8"
    if op in {"all_gather", "reduce_scatter", "all_reduce", "reduce"}:
        fields["in_place"] = rng.random() < 0.5
    if op == "broadcast":
        fields["in_place"] = True
    return Call(op=op, world=world, **fields)


def make_recipe(rng, call):
    world = call.world
    algorithm = rng.choice(["direct", "direct", "ring", "hierarchical", "inner"])
    if algorithm == "ring" and call.op not in {
        "all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce",
    }:  # fmt: skip
        algorithm = "direct"
    if algorithm == "hierarchical" and call.op in {"all_to_all", "gather", "scatter"}:
        algorithm = "inner"
    fields = {
        "chunks": rng.randint(1, 4), "depth": rng.randint(0, 2), "lanes": rng.randint(0, 2),
        "align": rng.choice([1, 8]),
    }  # fmt: skip
    if algorithm == "ring":
        fields["order"] = tuple(rng.sample(range(world), world))
    else:
        fields["pull"] = rng.random() < 0.5
        exact = call.accumulate == "dtype" or call.dtype == "fp32"
        fields["push_reduce"] = exact and call.reduction != "premul" and rng.random() < 0.3
    if algorithm == "hierarchical":
        per_host = rng.choice([k for k in range(1, world + 1) if world % k == 0])
        fields["hosts"] = tuple(rng.sample([r // per_host for r in range(world)], world))
    return Recipe(algorithm=algorithm, **fields)


def make_inputs(schedule, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    for region in schedule.inputs:
        if schedule.call.dtype == "u8":
            value = torch.randint(0, 256, (region.count,), dtype=torch.uint8, generator=generator)
        else:
            value = torch.randn(region.count, generator=generator)
        inputs[region.rank] = value.to(torch_dtype(schedule.call.dtype))
    return inputs


def reference(call, inputs):
    """The definition of each operation in fp64."""
    n, x = call.world, {r: t.double() for r, t in inputs.items()}
    scale = {"sum": 1.0, "avg": 1 / n, "premul": call.factor}[call.reduction]
    if call.op in {"all_gather", "gather"}:
        whole = torch.cat([x[r] for r in range(n)])
        return dict.fromkeys(range(n) if call.op == "all_gather" else [call.root], whole)
    if call.op == "broadcast":
        return dict.fromkeys(range(n), x[call.root])
    if call.op == "send_recv":
        return {call.peer: x[call.root]}
    if call.op == "scatter":
        return {r: x[call.root][r * call.count : (r + 1) * call.count] for r in range(n)}
    if call.op == "all_to_all":
        result = {}
        for p in range(n):
            blocks = [x[r][sum(call.splits[r][:p]) :][: call.splits[r][p]] for r in range(n)]
            result[p] = torch.cat(blocks)
        return result
    total = sum(x.values()) * scale
    if call.op == "reduce_scatter":
        return {r: total[r * call.count : (r + 1) * call.count] for r in range(n)}
    return dict.fromkeys(range(n) if call.op == "all_reduce" else [call.root], total)


def assert_right(call, inputs, outputs):
    wanted = reference(call, inputs)
    assert outputs.keys() == wanted.keys()
    if call.op not in REDUCIBLE:
        assert all(torch.equal(outputs[r].double(), wanted[r]) for r in wanted)
        return
    size = reference(call, {r: t.double().abs() for r, t in inputs.items()})
    # Each of the additions and scalings rounds once; so does the store of every partial sum.
    roundings = (2 * call.world + 2) if call.accumulate == "dtype" else 4
    step = STEP[call.dtype] * roundings + STEP["fp32"] * 2 * (call.world + 2)
    tiny = 2.0**-24 * (call.world + 2) if call.dtype == "fp16" else 0.0  # subnormal results
    for rank, value in wanted.items():
        error = (outputs[rank].double() - value).abs()
        assert bool((error <= size[rank].abs() * step + tiny).all()), (rank, error.max())


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(OPS), st.integers(2, 16))
def test_results_are_those_of_the_definition_under_any_interleaving(seed, op, world):
    rng = random.Random(seed)
    call = make_call(rng, op, world)
    schedule = checked(call, make_recipe(rng, call))
    inputs = make_inputs(schedule, seed)
    first = Interpreter(seed=seed).run(schedule, inputs)
    assert_right(call, inputs, first)
    again = Interpreter(seed=seed + 1, base=2**32 - 2).run(schedule, inputs)
    assert all(torch.equal(first[r], again[r]) for r in first)


@pytest.mark.parametrize("base", [0, 2**31 - 2, 2**32 - 3])
def test_sequences_of_calls_share_flag_words_that_wrap_around(base):
    rng = random.Random(base)
    world = 4
    interpreter = Interpreter(seed=1, base=base)
    for k in range(40):
        call = make_call(rng, rng.choice(OPS), world)
        schedule = checked(call, make_recipe(rng, call))
        inputs = make_inputs(schedule, k)
        assert_right(call, inputs, interpreter.run(schedule, inputs))


def test_two_hosts_of_several_ranks():
    for op in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "send_recv"):
        for local in (1, 2, 4):
            n = 2 * local
            fields = {"peer": n - 1} if op == "send_recv" else {}
            call = Call(
                op=op, world=n, dtype="fp32", count=50, in_place=op == "broadcast", **fields
            )
            for hosts in (tuple(r // local for r in range(n)), tuple(r % 2 for r in range(n))):
                recipe = Recipe(algorithm="hierarchical", hosts=hosts, align=1, chunks=2)
                schedule = checked(call, recipe)
                inputs = make_inputs(schedule)
                assert_right(call, inputs, Interpreter(seed=n).run(schedule, inputs))


def test_fp32_accumulation_rounds_once():
    # 1 + 15 * 2**-9: each single addition would round away in bf16.
    call = Call(op="all_reduce", world=16, dtype="bf16", count=3)
    inputs = {r: torch.full((3,), 1.0 if r == 0 else 2.0**-9).bfloat16() for r in range(16)}
    for algorithm in ("direct", "ring"):
        recipe = Recipe(algorithm=algorithm, align=1, order=())
        assert Interpreter().run(checked(call, recipe), inputs)[7].tolist() == [1.03125] * 3
    rough = dataclasses.replace(call, accumulate="dtype")
    assert Interpreter().run(checked(rough, Recipe(align=1)), inputs)[7].tolist() == [1.0] * 3


def test_all_ranks_agree_on_every_bit_of_an_all_reduce():
    call = Call(op="all_reduce", world=5, dtype="bf16", count=1000, reduction="avg")
    for recipe in (Recipe(chunks=3), Recipe(algorithm="ring", chunks=3)):
        schedule = checked(call, recipe)
        outputs = Interpreter(seed=3).run(schedule, make_inputs(schedule))
        assert all(torch.equal(outputs[0], outputs[r]) for r in range(5))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(OPS), st.integers(2, 5), st.data())
def test_what_the_checker_passes_runs_right_also_with_a_wait_less(seed, op, world, data):
    rng = random.Random(seed)
    call = make_call(rng, op, world)
    schedule = build(call, make_recipe(rng, call))
    waits = [
        (p, i)
        for p, program in enumerate(schedule.programs)
        for i, step in enumerate(program.steps)
        if isinstance(step, Wait)
    ]
    assume(waits)
    p, i = data.draw(st.sampled_from(waits))
    program = schedule.programs[p]
    steps = (*program.steps[:i], *program.steps[i + 1 :])
    mutant = dataclasses.replace(
        schedule,
        programs=(
            *schedule.programs[:p],
            dataclasses.replace(program, steps=steps),
            *schedule.programs[p + 1 :],
        ),
    )
    try:
        check(mutant)
    except CollectiveError:
        return
    inputs = make_inputs(schedule, seed)
    for k in range(4):
        assert_right(call, inputs, Interpreter(seed=k).run(mutant, inputs))


def test_a_schedule_prints_and_survives_json():
    call = Call(op="all_reduce", world=3, dtype="bf16", count=10, reduction="avg")
    schedule = build(call, Recipe(align=1, chunks=2))
    copy = Schedule.from_json(schedule.to_json())
    assert copy == schedule
    assert copy.advances == schedule.advances
    text = str(schedule)
    assert text.startswith("all_reduce of 10 x bf16 on 3 ranks: direct\n")
    assert "rank 0 needs staging: 8 x bf16" in text
    assert "reduce 0.input[0:2] + 0.staging[" in text
    assert "* 0.333333 -> 0.output[0:2] in fp32" in text
    with pytest.raises(ValueError, match="Unexpected keyword"):
        Schedule.from_json(schedule.to_json().replace('"algorithm"', '"algo"', 1))


def test_a_deadlock_is_an_error_that_names_the_steps():
    call = Call(op="send_recv", world=2, dtype="u8", count=4, peer=1)
    schedule = build(call, Recipe())
    stuck = dataclasses.replace(schedule, programs=schedule.programs[1:])
    with pytest.raises(CollectiveError, match="deadlock at rank 1 sync: wait   data"):
        Interpreter().run(stuck, make_inputs(schedule))


def test_calls_that_make_no_sense_are_refused():
    good = {"op": "all_reduce", "world": 2, "dtype": "bf16", "count": 4}
    for change, problem in [
        ({"world": 0}, "world is 0"),
        ({"count": -1}, "count is -1"),
        ({"dtype": "u8"}, "dtype is u8"),
        ({"root": 2}, "root is 2"),
        ({"factor": 2.0}, "factor is 2.0"),
        ({"reduction": "premul", "factor": float("nan")}, "factor is nan"),
        ({"op": "all_to_all"}, "not 2 x 2"),
        ({"op": "all_gather", "reduction": "avg"}, "only moves data"),
        ({"op": "broadcast"}, "one tensor"),
        ({"op": "send_recv"}, "sends to itself"),
    ]:
        with pytest.raises(UsageError, match=problem):
            Call(**(good | change))
