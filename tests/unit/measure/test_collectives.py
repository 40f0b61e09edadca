"""Collectives: sizes, checks of results, and the real operations over gloo on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapctl.errors import UsageError
from overlapctl.measure.collectives import (
    BufferSizes,
    _pattern,
    _pattern_sum,
    buffer_sizes,
    build_collective,
    check_comm,
)
from overlapctl.records import CommSpec

CPU = torch.device("cpu")


def test_sizes_are_of_the_tensor_each_rank_passes_in():
    def sizes(op, size_bytes=48):
        return buffer_sizes(CommSpec(op=op, size_bytes=size_bytes), 4)

    assert sizes("all_reduce") == BufferSizes(24, 24)
    assert sizes("all_gather") == BufferSizes(24, 96)
    assert sizes("reduce_scatter") == BufferSizes(24, 6)
    assert sizes("all_to_all") == BufferSizes(24, 24)


@pytest.mark.parametrize(
    ("spec", "ranks", "message"),
    [
        (CommSpec(op="all_reduce", size_bytes=3), 2, "multiple of 2"),
        (CommSpec(op="all_reduce", size_bytes=0), 2, "size_bytes of all_reduce is 0"),
        (CommSpec(op="reduce_scatter", size_bytes=10), 4, "multiple of 8"),
        (CommSpec(op="all_to_all", size_bytes=10), 4, "multiple of 8"),
        (CommSpec(op="all_gather", size_bytes=8), 1, "asked for on 1 GPU"),
        (CommSpec(op="all_gather", size_bytes=8, path="light"), 2, "light path does all_reduce"),
        (CommSpec(op="all_reduce", size_bytes=8, path="copy"), 2, "use local_copy"),
        (CommSpec(op="local_copy", size_bytes=8, path="light"), 1, "path of local_copy is light"),
        (CommSpec(op="all_reduce", size_bytes=8), 64, "64 ranks"),
    ],
)
def test_what_does_not_go_together_is_refused(spec, ranks, message):
    with pytest.raises(UsageError, match=message):
        check_comm(spec, ranks)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(1, 50), st.integers(0, 7), st.integers(1, 36))
def test_the_payload_is_the_same_from_any_start_and_sums_are_exact(start, count, rank, ranks):
    whole = _pattern(rank, start + count, CPU)
    assert torch.equal(_pattern(rank, count, CPU, start=start), whole[start:])
    total = sum(_pattern(r, count, CPU).to(torch.int64) for r in range(ranks))
    assert torch.equal(_pattern_sum(0, count, ranks, CPU).to(torch.int64), total)
    assert int(total.max()) <= 256


def test_payloads_of_ranks_differ():
    assert not torch.equal(_pattern(0, 64, CPU), _pattern(1, 64, CPU))


def test_a_local_copy_is_checked_element_by_element():
    comm = build_collective(CommSpec(op="local_copy", size_bytes=2000, path="copy"), CPU)
    comm.reset()
    assert comm.wrong_elements() == 1000
    assert comm.issue() is None
    assert comm.wrong_elements() == 0


def _run_rank(rank, ranks, store, out):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    wrong = {}
    for op in ("all_reduce", "all_gather", "all_to_all"):
        comm = build_collective(
            CommSpec(op=op, size_bytes=6 * 1000),
            CPU,
            group=dist.group.WORLD,
            rank=rank,
            ranks=ranks,
        )
        comm.reset()
        before = comm.wrong_elements()
        comm.issue().wait()
        after_one = comm.wrong_elements()
        comm.reset()
        comm.issue().wait()
        wrong[op] = (before, after_one, comm.wrong_elements())
    dist.destroy_process_group()
    out.put((rank, wrong))


def test_real_collectives_give_what_is_expected(tmp_path):
    context = mp.get_context("spawn")
    out = context.SimpleQueue()
    mp.spawn(_run_rank, args=(2, str(tmp_path / "store"), out), nprocs=2)
    for _ in range(2):
        _, wrong = out.get()
        for op, (before, after_one, after_reset) in wrong.items():
            assert before > 0, op  # nothing has been sent yet
            assert (after_one, after_reset) == (0, 0), op
