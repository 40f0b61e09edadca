import pytest

from overlapctl.collectives.check import checked
from overlapctl.collectives.schedule import Call
from overlapctl.collectives.topology import recipe_for, ring_order
from overlapctl.errors import UsageError
from overlapctl.records import Link, Topology


def links(pairs, kind="nvlink", count=4):
    return Topology(
        devices=("GPU",) * count,
        links=tuple(
            Link(source=a, target=b, kind=kind, links=1, peer_access=True)
            for x, y in pairs
            for a, b in ((x, y), (y, x))
        ),
    )


MESH = [(a, b) for a in range(4) for b in range(a)]
SQUARE = [(0, 2), (2, 1), (1, 3), (3, 0)]
REDUCE = Call(op="all_reduce", world=4, dtype="bf16", count=1 << 26)
EXCHANGE = Call(op="all_to_all", world=4, dtype="bf16", splits=((64,) * 4,) * 4)


def test_a_full_mesh_goes_direct_with_chunks_of_at_least_8_mib():
    recipe = recipe_for(REDUCE, links(MESH))
    assert (recipe.algorithm, recipe.chunks, recipe.depth) == ("direct", 4, 2)
    small = Call(op="all_reduce", world=4, dtype="bf16", count=1000)
    assert recipe_for(small, links(MESH)).chunks == 1
    assert recipe_for(EXCHANGE, links(MESH)).algorithm == "direct"


def test_a_partial_mesh_goes_around_a_ring_of_its_links():
    recipe = recipe_for(REDUCE, links(SQUARE))
    assert (recipe.algorithm, recipe.order) == ("ring", (0, 2, 1, 3))
    checked(REDUCE, recipe)
    assert recipe_for(EXCHANGE, links(SQUARE)).algorithm == "inner"


def test_pcie_goes_around_a_ring():
    assert recipe_for(REDUCE, links(MESH, "pcie")).algorithm == "ring"
    assert recipe_for(EXCHANGE, links(MESH, "pcie")).algorithm == "direct"


def test_ranks_without_peer_access_use_the_inner_group_where_they_must():
    chain = links([(0, 1), (1, 2), (2, 3)])
    assert recipe_for(REDUCE, chain).algorithm == "inner"
    near = Call(op="send_recv", world=4, dtype="u8", count=9, root=1, peer=2)
    far = Call(op="send_recv", world=4, dtype="u8", count=9, root=0, peer=3)
    assert recipe_for(near, chain).algorithm == "direct"
    assert recipe_for(far, chain).algorithm == "inner"


def test_hosts_alike_go_hierarchical():
    two = links([(0, 1)], count=2)
    recipe = recipe_for(REDUCE, two, devices=(0, 1, 0, 1), hosts=(0, 0, 1, 1))
    assert (recipe.algorithm, recipe.hosts) == ("hierarchical", (0, 0, 1, 1))
    checked(REDUCE, recipe)
    three = recipe_for(REDUCE, links(MESH), devices=(0, 1, 2, 0), hosts=(0, 0, 0, 1))
    assert three.algorithm == "inner"


def test_ranks_may_share_a_device():
    assert recipe_for(REDUCE, links([], count=1), devices=(0,) * 4).algorithm == "direct"


def test_rings_are_found_or_not():
    assert ring_order(1, set()) == (0,)
    assert ring_order(3, {(0, 1), (1, 0), (1, 2), (2, 1)}) is None


def test_devices_must_be_one_per_rank():
    with pytest.raises(UsageError, match="3 devices for 4 ranks"):
        recipe_for(REDUCE, links(MESH), devices=(0, 1, 2))
