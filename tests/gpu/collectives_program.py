"""One rank of a group whose processes share a GPU; started by test_collectives.py."""

import os
import sys

import pytest
import torch

from overlapctl.collectives import Group, Options
from overlapctl.errors import CollectiveError

TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}


def data(rank, numel, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator).to(dtype).cuda()


def numerics(rank, world, reduce_with):
    options = Options(threshold_bytes=1, limit_s=60.0, reduce_with=reduce_with)
    group = Group(options=options)
    assert group.reason is None, group.reason
    for dtype in TOLERANCE:
        for n in (world, 999 * world, (1 << 20) * world):
            x = data(rank, n, dtype)
            gathered = torch.empty(world * n, dtype=dtype, device="cuda")
            group.all_gather_into_tensor(gathered, x)
            mine = torch.empty(n // world, dtype=dtype, device="cuda")
            group.reduce_scatter_tensor(mine, x)
            total = x.clone()
            group.all_reduce(total)
            swapped = torch.empty_like(x)
            group.all_to_all_single(swapped, x)
            sent = x.clone()
            group.broadcast(sent, src=world - 1)
            everybody = torch.stack([data(r, n, dtype) for r in range(world)])
            whole = everybody.double().sum(0)
            bound = everybody.double().abs().sum(0) * TOLERANCE[dtype]
            part = slice(rank * n // world, (rank + 1) * n // world)
            assert torch.equal(gathered, everybody.view(-1))
            assert torch.equal(swapped, everybody.view(world, world, -1)[:, rank].reshape(-1))
            assert torch.equal(sent, everybody[-1])
            assert ((total.double() - whole).abs() <= bound).all()
            assert ((mine.double() - whole[part]).abs() <= bound[part]).all()
    assert {c.path for c in group.counts} == {"copy_engine"}, group.counts
    group.close()


def missing(rank, world, _):
    group = Group(options=Options(threshold_bytes=1, limit_s=5.0))
    x = torch.ones(1 << 20, device="cuda")
    group.all_reduce(x)
    torch.cuda.synchronize()
    if rank == world - 1:
        os._exit(0)  # dies without a word
    work = group.all_reduce(x, async_op=True)
    work.wait()
    torch.cuda.synchronize()
    assert torch.isnan(x).all()
    with pytest.raises(CollectiveError, match=f"rank {world - 1} is missing"):
        work.wait()
    assert torch.ones(8, device="cuda").sum().item() == 8  # the GPU is usable
    os._exit(0)  # gloo would wait for the dead rank


def main():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("gloo")
    what, argument = sys.argv[1:]
    {"numerics": numerics, "missing": missing}[what](rank, world, argument)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
