import time

import pytest

from overlapctl.collectives.algorithms import Recipe, build
from overlapctl.collectives.algorithms.recipe import parts
from overlapctl.collectives.check import check, checked
from overlapctl.collectives.schedule import Call, Copy, Inner, Reduce, Wait
from overlapctl.errors import UsageError


def test_parts_cover_everything_once():
    assert parts(10, 3, 1) == [(0, 4), (4, 4), (8, 2)]
    assert parts(1, 3, 8) == [(0, 1), (1, 0), (1, 0)]
    assert parts(20, 2, 8) == [(0, 16), (16, 4)]


@pytest.mark.parametrize("op", ["all_gather", "all_to_all"])
def test_at_any_turn_each_rank_is_the_target_of_one_other(op):
    world = 6
    fields = {"splits": ((8,) * world,) * world} if op == "all_to_all" else {"count": 8}
    schedule = build(Call(op=op, world=world, dtype="u8", **fields), Recipe())
    streams = {}
    for program, _, step in schedule.steps():
        if isinstance(step, Copy) and step.target.rank != program.rank:
            streams.setdefault(program.stream, []).append(step.target.rank)
    assert len(streams) == world - 1
    assert all(sorted(targets) == list(range(world)) for targets in streams.values())


def test_moving_operations_need_no_reduction():
    for op in ("all_gather", "broadcast", "gather", "scatter"):
        call = Call(op=op, world=4, dtype="u8", count=100, in_place=op == "broadcast")
        assert build(call, Recipe()).moves_only
    assert not build(Call(op="reduce", world=4, dtype="bf16", count=100), Recipe()).moves_only


def test_parts_are_added_in_rank_order_whoever_owns_the_result():
    call = Call(op="reduce_scatter", world=4, dtype="bf16", count=8)
    schedule = build(call, Recipe(align=1))
    sources = {
        (s.target.rank, s.target.offset): s.source.rank
        for _, _, s in schedule.steps()
        if isinstance(s, Copy)
    }
    reductions = [s for _, _, s in schedule.steps() if isinstance(s, Reduce)]
    assert len(reductions) == 4
    for step in reductions:
        order = [
            sources[x.rank, x.offset] if x.buffer == "staging" else x.rank for x in step.inputs
        ]
        assert order == [0, 1, 2, 3]


def test_a_root_sends_a_broadcast_once():
    call = Call(op="broadcast", world=5, dtype="u8", count=4096, in_place=True)
    schedule = build(call, Recipe(chunks=2))
    sent = sum(
        s.source.count for p, _, s in schedule.steps() if p.rank == 0 and isinstance(s, Copy)
    )
    assert sent == 4096


def test_a_depth_bounds_staging():
    call = Call(op="reduce_scatter", world=4, dtype="bf16", count=1 << 20)
    everything = build(call, Recipe(chunks=8)).buffers_of(0)["staging"]
    two = build(call, Recipe(chunks=8, depth=2)).buffers_of(0)["staging"]
    assert everything.count == 3 << 20
    assert two.count == everything.count // 4
    assert two.size_bytes == 2 * two.count


def test_a_ring_talks_to_neighbours_only():
    order = (2, 0, 3, 1)
    call = Call(op="all_reduce", world=4, dtype="fp16", count=1000, in_place=True)
    schedule = checked(call, Recipe(algorithm="ring", order=order, chunks=2))
    for program, _, step in schedule.steps():
        if isinstance(step, Copy) and step.target.rank != program.rank:
            assert step.target.rank == order[(order.index(program.rank) + 1) % 4]


def test_only_columns_cross_hosts():
    hosts = (0, 0, 0, 1, 1, 1)
    call = Call(op="all_reduce", world=6, dtype="bf16", count=100)
    schedule = checked(call, Recipe(algorithm="hierarchical", hosts=hosts, align=1))
    columns = set()
    for program, _, step in schedule.steps():
        if isinstance(step, Copy):
            assert hosts[step.source.rank] == hosts[step.target.rank] == hosts[program.rank]
        if isinstance(step, Inner):
            columns.add(step.ranks)
        if isinstance(step, Wait):
            assert hosts[step.flag.source] == hosts[step.flag.target]
    assert columns == {(0, 3), (1, 4), (2, 5)}


def test_recipes_that_do_not_fit_are_refused():
    reduce = Call(op="all_reduce", world=4, dtype="bf16", count=8)
    with pytest.raises(UsageError, match="accumulated in fp32"):
        build(reduce, Recipe(push_reduce=True))
    with pytest.raises(UsageError, match="ring for gather"):
        build(Call(op="gather", world=2, dtype="u8", count=1), Recipe(algorithm="ring"))
    with pytest.raises(UsageError, match="name every rank once"):
        build(reduce, Recipe(algorithm="ring", order=(0, 1, 2, 2)))
    with pytest.raises(UsageError, match="different numbers of ranks"):
        build(reduce, Recipe(algorithm="hierarchical", hosts=(0, 0, 0, 1)))
    with pytest.raises(UsageError, match="rings push"):
        build(reduce, Recipe(algorithm="ring", pull=True))
    with pytest.raises(UsageError, match="chunks is 0"):
        Recipe(chunks=0)


def test_building_and_checking_for_8_ranks_is_quick_and_cached():
    call = Call(op="all_reduce", world=8, dtype="bf16", count=1 << 26, in_place=True)
    took = []
    for chunks in (2, 2, 2):
        build.cache_clear()
        start = time.perf_counter()
        check(build(call, Recipe(chunks=chunks)))
        took.append(time.perf_counter() - start)
    assert min(took) < 0.05
    assert checked(call, Recipe()) is checked(call, Recipe())
