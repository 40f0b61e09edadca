"""Groups of several processes that share one GPU, through CUDA IPC, compared with fp64.

A gloo group bootstraps them and carries out what they hand over.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs one CUDA GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).with_name("collectives_program.py")
LIMIT_S = 240


def run_ranks(world, what, argument=""):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), what, argument],
            env={**os.environ, **common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    failed = [o for process, o in zip(ranks, outputs, strict=True) if process.returncode != 0]
    assert not failed, failed[0][-4000:]


@pytest.mark.parametrize("reduce_with", ["ordinary", "one_warp"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_results_agree_with_fp64(world, reduce_with):
    run_ranks(world, "numerics", reduce_with)


def test_a_dead_rank_is_named_and_the_gpu_stays_usable():
    run_ranks(3, "missing")
