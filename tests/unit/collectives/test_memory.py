"""The pool, registrations and reductions, one rank at a time."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
from fake_gpu import FakeGpu, Ranks

from overlapctl.collectives.bootstrap import meet
from overlapctl.collectives.memory import PeerMemory, Pool, Registry, size_class
from overlapctl.collectives.reduce import reduce_into
from overlapctl.collectives.schedule import Reduce, Region
from overlapctl.errors import DeviceError

torch = pytest.importorskip("torch")


def lone_pool(gpu, segment_bytes=1 << 16):
    return Pool(gpu, 0, PeerMemory(gpu, 0, lambda mine: [mine]), segment_bytes=segment_bytes)


def test_size_classes_round_up_by_a_quarter_at_most():
    for size in [1, 511, 513, 5000, 1 << 20, (1 << 20) + 1, 123_456_789]:
        rounded = size_class(size)
        assert size <= rounded <= max(512, size * 1.25 + 512)
        assert rounded % 512 == 0
        assert size_class(rounded) == rounded


def test_blocks_never_overlap_and_come_back_whole():
    rng, gpu = random.Random(3), FakeGpu()
    pool, held = lone_pool(gpu), []
    for _ in range(400):
        if held and rng.random() < 0.5:
            pool.give(held.pop(rng.randrange(len(held))))
        else:
            held.append(pool.take(rng.randrange(1, 20_000)))
        spans = sorted((b.segment, b.offset, b.offset + b.size) for b in held)
        for (s1, _, end), (s2, start, _) in pairwise(spans):
            assert s1 != s2 or end <= start
        assert pool.free_bytes + sum(b.size for b in held) == pool.total_bytes
    for block in held:
        pool.give(block)
    assert all(s.free == {0: s.size} for s in pool._segments)
    pool.close()
    assert not gpu.allocations


def test_ranks_find_each_others_tensors_and_open_a_handle_once():
    ranks = Ranks(2)

    def body(rank, gpu):
        control, reason = meet(ranks.meeting(rank), rank, 2, limit_s=5)
        assert reason is None
        peers = PeerMemory(gpu, rank, control.exchange)
        registry = Registry(gpu, rank, peers)
        tensor = torch.full((64,), float(rank))
        first, second = registry.register(tensor), registry.register(tensor)
        assert len(gpu.opened) == 1
        place = registry.find(tensor[8:].data_ptr(), 32)
        seen = gpu.view(place.address(1 - rank), 8, torch.float32)
        assert torch.equal(seen, torch.full((8,), float(1 - rank)))
        control.exchange(b"seen")
        registry.unregister(first)
        registry.unregister(second)
        assert not gpu.opened
        assert registry.find(tensor.data_ptr(), 4) is None

    ranks.run(body)


def test_memory_that_one_rank_cannot_export_is_refused_on_all():
    ranks = Ranks(2)
    ranks.gpus[1].exportable = False

    def body(rank, gpu):
        control, _ = meet(ranks.meeting(rank), rank, 2, limit_s=5)
        registry = Registry(gpu, rank, PeerMemory(gpu, rank, control.exchange))
        with pytest.raises(DeviceError, match="rank 1: not exportable"):
            registry.register(torch.ones(4))
        assert not gpu.opened

    ranks.run(body)


def test_nothing_is_left_in_shared_memory():
    before = set(Path("/dev/shm").glob("overlapctl-*"))
    ranks = Ranks(2)
    ranks.run(lambda rank, gpu: meet(ranks.meeting(rank), rank, 2, limit_s=5))
    assert set(Path("/dev/shm").glob("overlapctl-*")) <= before


def step(inputs, accumulate="fp32", scale=1.0):
    region = Region(0, "output", 0, 1)
    return Reduce((region,) * inputs, region, output_scale=scale, accumulate=accumulate)


def test_sums_round_as_asked():
    terms = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)]
    out = torch.empty(1, dtype=torch.bfloat16)
    reduce_into(step(3), out, terms)
    assert out.item() == 258
    reduce_into(step(3, "bf16"), out, terms)
    assert out.item() == 256  # 257 is no bf16 and rounds to even, twice
    reduce_into(step(3, scale=0.5), out, terms)
    assert out.item() == 129


def test_the_adder_runs_only_where_it_gives_the_same_bits():
    used = []

    def add(dst, src):
        used.append(dst)
        dst.add_(src)

    def run(inputs, out, how):
        used.clear()
        reduce_into(how, out, inputs, adder=add, copy=lambda d, s: d.copy_(s))
        return len(used)

    a, b, c = (torch.randn(64) for _ in range(3))
    out = torch.empty(64)
    assert run([a, b], out, step(2)) == 1
    assert torch.equal(out, a + b)
    assert run([a, b], out, step(2, scale=0.5)) == 0
    assert run([x.bfloat16() for x in (a, b, c)], torch.empty(64).bfloat16(), step(3)) == 0
    assert run([a[1:33], b[:32]], out[:32], step(2)) == 0  # not 16-byte aligned
    want = a + b
    assert run([a, b], b, step(2)) == 1  # in place of the second
    assert torch.equal(b, want)
