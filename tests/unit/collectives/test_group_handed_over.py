"""A group on a machine without GPU: real gloo processes carry every call."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    pytest.skip("is about machines without a GPU", allow_module_level=True)

PROGRAM = """
import torch, torch.distributed as dist
from overlapctl.collectives import Group
dist.init_process_group("gloo")
group = Group()
assert "no CUDA GPU" in group.reason
rank = group.rank()
x = torch.full((4,), rank + 1.0)
group.all_reduce(x)
assert x.tolist() == [3.0] * 4
out = torch.empty(4)
work = group.all_gather_into_tensor(out, torch.full((2,), float(rank)), async_op=True)
work.wait()
assert out.tolist() == [0, 0, 1, 1]
group.broadcast(out, src=1)
group.barrier()
assert [c.path for c in group.counts] == ["inner"] * 3
group.close()
dist.destroy_process_group()
"""


def test_without_a_gpu_the_process_group_runs():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    common["PYTHONPATH"] = str(Path(__file__).parents[3])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **common, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [p.communicate(timeout=60)[1] for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    assert [p.returncode for p in ranks] == [0, 0], errors
