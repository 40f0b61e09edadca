"""Groups of thread ranks on fake GPUs: numerics, paths, failures."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
from fake_gpu import FakeGpu, Ranks

from overlapctl.collectives.group import Group, Options
from overlapctl.errors import CollectiveError, UsageError

torch = pytest.importorskip("torch")

SMALL = Options(threshold_bytes=1, limit_s=5.0)


class Inner:
    """Records what was handed over."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append(name)


def make(ranks, rank, options=SMALL):
    return Group(
        driver=ranks.gpus[rank],
        meeting=ranks.meeting(rank),
        inner=Inner(),
        rank=rank,
        world=ranks.world,
        options=options,
    )


def data(rank, numel, dtype):
    g = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=g).to(dtype)


def expected_sum(world, numel, dtype):
    total = torch.zeros(numel)
    for r in range(world):
        total += data(r, numel, dtype)
    return total.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("world", "each"), [(2, 999), (3, 999), (4, 999), (3, 1), (2, 64)])
def test_results_are_exact(world, each, dtype):
    n = each * world
    ranks = Ranks(world)

    def body(rank, gpu):
        group = make(ranks, rank)
        x = data(rank, n, dtype)
        gathered = torch.empty(world * n, dtype=dtype)
        group.all_gather_into_tensor(gathered, x)
        mine = torch.empty(n // world, dtype=dtype)
        group.reduce_scatter_tensor(mine, x)
        total = x.clone()
        work = group.all_reduce(total, async_op=True)
        swapped = torch.empty_like(x)
        group.all_to_all_single(swapped, x)
        sent = x.clone()
        group.broadcast(sent, src=1)
        assert work.wait()
        assert gpu.synchronize()
        everybody = torch.cat([data(r, n, dtype) for r in range(world)])
        assert torch.equal(gathered, everybody)
        whole = expected_sum(world, n, dtype)
        part = slice(rank * n // world, (rank + 1) * n // world)
        assert torch.equal(mine, whole[part])
        assert torch.equal(total, whole)
        assert torch.equal(swapped, everybody.view(world, world, -1)[:, rank].reshape(-1))
        assert torch.equal(sent, data(1, n, dtype))
        assert work.is_completed()
        assert {c.path for c in group.counts} == {"copy_engine"}
        group.close()
        assert not gpu.allocations
        assert not gpu.opened

    ranks.run(body)


def test_many_calls_in_flight_with_delays_stay_ordered():
    world, n = 3, 300
    ranks = Ranks(world, lambda rank: FakeGpu(delay=lambda: random.random() * 1e-3))

    def body(rank, gpu):
        group = make(ranks, rank)
        results = []
        for i in range(25):
            x = data(rank, n, torch.float32) * (i + 1)
            out = torch.empty(world * n)
            results.append((out, group.all_gather_into_tensor(out, x, async_op=True)))
            results.append((x, group.all_reduce(x, async_op=True)))
            time.sleep(random.random() * 2e-3)
        for _, work in results:
            work.wait()
        assert gpu.synchronize()
        for i in range(25):
            parts = [data(r, n, torch.float32) * (i + 1) for r in range(world)]
            assert torch.equal(results[2 * i][0], torch.cat(parts))
            assert torch.equal(results[2 * i + 1][0], parts[0] + parts[1] + parts[2])
        group.close()

    ranks.run(body)


@pytest.mark.parametrize("kind", ["empty", "registered"])
def test_memory_that_peers_see_needs_no_staging(kind):
    world, n = 2, 4096
    ranks = Ranks(world)

    def body(rank, gpu):
        group = make(ranks, rank)
        x = group.empty(n, torch.float32) if kind == "empty" else torch.empty(n)
        if kind == "registered":
            number = group.register(x)
        x.copy_(data(rank, n, torch.float32))
        out = torch.empty(world * n)
        group.all_gather_into_tensor(out, x)
        assert gpu.synchronize()
        assert torch.equal(out, torch.cat([data(r, n, torch.float32) for r in range(world)]))
        if kind == "registered":
            assert not gpu.allocations  # nothing went through the pool
            group.unregister(number)
        else:
            group.release(x)
        group.close()

    ranks.run(body)


def test_calls_that_copy_engines_do_not_carry_are_handed_over_and_counted():
    ranks = Ranks(2)

    def body(rank, gpu):
        group = make(ranks, rank, Options(threshold_bytes=1024, limit_s=5.0))
        group.all_reduce(torch.ones(8))
        group.all_reduce(torch.ones(4096, dtype=torch.int32))
        group.all_to_all_single(torch.ones(4096), torch.ones(4096), [4000, 96], [4000, 96])
        gpu.capturing = True
        group.all_reduce(torch.ones(4096))
        gpu.capturing = False
        assert group._inner.calls == ["all_reduce", "all_reduce", "all_to_all_single", "all_reduce"]
        assert all(c.path == "inner" and c.times == 1 for c in group.counts)
        reasons = " ".join(c.reason for c in group.counts)
        for word in ("below 1024 B", "int32", "uneven", "captured"):
            assert word in reasons
        group.close()

    ranks.run(body)


def test_one_connection_uses_the_process_group(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    ranks = Ranks(2)

    def body(rank, gpu):
        group = make(ranks, rank)
        assert "CUDA_DEVICE_MAX_CONNECTIONS" in group.reason
        group.all_reduce(torch.ones(4096))
        assert group._inner.calls == ["all_reduce"]
        group.close()

    ranks.run(body)


def test_out_of_memory_on_one_rank_hands_over_on_all():
    ranks = Ranks(2, lambda rank: FakeGpu(memory_bytes=1024 if rank else 1 << 40))

    def body(rank, gpu):
        group = make(ranks, rank)
        group.all_reduce(torch.ones(4096))
        assert group._inner.calls == ["all_reduce"]
        assert "rank 1" in group.counts[0].reason
        assert not gpu.allocations
        group.close()

    ranks.run(body)


def test_calls_that_differ_are_refused_before_anything_moves():
    ranks = Ranks(2)

    def body(rank, gpu):
        group = make(ranks, rank)
        x = torch.ones(4096)
        out = torch.zeros(8192)

        def issue():
            if rank:
                group.all_reduce(x)
            else:
                group.all_gather_into_tensor(out, x)
            for _ in range(200):  # the first to issue hears of it at its next call
                time.sleep(0.01)
                group.all_reduce(torch.ones(1))

        with pytest.raises(CollectiveError, match="different collectives as call 1") as caught:
            issue()
        assert "all_reduce of 4096 x float32" in str(caught.value)
        group._watchdog.wait_until_over(10)
        group.close()

    ranks.run(body)


def test_a_missing_rank_is_named_results_are_poisoned_and_nothing_hangs():
    world = 3
    ranks = Ranks(world)
    options = Options(threshold_bytes=1, limit_s=0.6)

    def body(rank, gpu):
        group = make(ranks, rank, options)
        warm = torch.ones(4096)
        group.all_reduce(warm)
        assert gpu.synchronize()
        if rank == 2:
            time.sleep(2.5)  # stalls, and wakes late
            with pytest.raises(CollectiveError, match="rank 2 is missing"):
                group.all_reduce(torch.ones(4096))
            return
        out = torch.ones(4096)
        work = group.all_reduce(out, async_op=True)
        work.wait()
        started = time.monotonic()
        assert gpu.synchronize(10)  # the consumer's stream goes on ...
        assert time.monotonic() - started < 5
        assert torch.isnan(out).all()  # ... with NaN
        assert torch.equal(warm, torch.full((4096,), 3.0))
        assert "call 2" in str(work.exception())
        assert "rank 2 is missing" in str(work.exception())
        with pytest.raises(CollectiveError, match="all_reduce of 4096 x float32"):
            work.wait()
        with pytest.raises(CollectiveError, match="rank 2 is missing"):
            group.all_reduce(out)
        group.close()
        assert gpu.allocations  # quarantined

    ranks.run(body)


def test_a_tensor_freed_in_flight_is_kept():
    ranks = Ranks(2, lambda rank: FakeGpu(delay=lambda: 2e-3))

    def body(rank, gpu):
        group = make(ranks, rank)
        out = torch.empty(8192)
        work = group.all_gather_into_tensor(out, torch.full((4096,), float(rank)), async_op=True)
        junk = [torch.full((4096,), -1.0) for _ in range(20)]
        work.wait()
        assert gpu.synchronize()
        assert torch.equal(out, torch.tensor([0.0, 1.0]).repeat_interleave(4096))
        del junk
        group.close()
        with pytest.raises(UsageError, match="closed"):
            group.all_reduce(out)

    ranks.run(body)
