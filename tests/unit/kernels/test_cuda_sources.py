"""The CUDA kernels keep the footprint they promise, as far as a compiler alone can tell."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import overlapctl.kernels
from overlapctl.errors import DeviceError, UsageError
from overlapctl.kernels import cuda_module, light_all_reduce, one_warp, standin

FOLDER = Path(overlapctl.kernels.__file__).parent
NVCC = shutil.which("nvcc") or next(
    (str(p) for p in sorted(Path("/usr/local").glob("cuda*/bin/nvcc"))), None
)
CONTRACTS = [
    *(
        one_warp.contract(prefix + suffix)
        for prefix in ("", "tail_")
        for suffix in ("copy", "add_bf16", "add_fp16", "add_fp32")
    ),
    standin.STANDIN_CONTRACT,
    *(light_all_reduce.contract(dtype) for dtype in ("bf16", "fp16", "fp32")),
]


@pytest.fixture(scope="module")
def resources(tmp_path_factory):
    """Registers, spilled bytes and static shared memory of every kernel, by name."""
    if NVCC is None:
        pytest.skip("nvcc is not installed")
    found = {}
    for source in sorted({contract.source for contract in CONTRACTS}):
        out = tmp_path_factory.mktemp("cubin") / "kernel.cubin"
        command = [NVCC, "-std=c++17", "-arch=sm_90", "-cubin", "-Xptxas", "-v", "-o", out]
        log = subprocess.run(
            [*command, FOLDER / source], check=True, capture_output=True, text=True
        ).stderr
        for entry in log.split("Compiling entry function '")[1:]:
            registers = int(re.search(r"Used (\d+) registers", entry)[1])
            smem = re.search(r"(\d+) bytes smem", entry)
            spilled = int(re.search(r"(\d+) bytes spill stores", entry)[1])
            found[entry.split("'")[0]] = (registers, spilled, int(smem[1]) if smem else 0)
    return found


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.name)
def test_compiled_for_sm_90_a_kernel_keeps_its_promise_and_spills_nothing(contract, resources):
    registers, spilled, smem = resources[contract.name]
    cuda_module.check_contract(contract, registers=registers, static_smem=smem)
    assert spilled == 0


def test_the_one_warp_kernels_need_a_single_register_granule(resources):
    # 8 registers x 32 threads = 256: what a persistent cuBLAS GEMM leaves of each quarter SM.
    bulk = [name for name in resources if "one_warp" in name and "tail" not in name]
    assert len(bulk) == 4
    assert all(resources[name][0] <= 8 for name in bulk)


def test_the_standin_takes_as_many_registers_as_nccl(resources):
    registers, _, _ = resources["overlapctl_comm_standin"]
    assert -(-registers // 8) * 8 == 96
    assert standin.STANDIN_SMEM == 103_808


def test_every_kernel_in_the_sources_has_a_contract_and_a_communication_name():
    names = set()
    for contract in CONTRACTS:
        assert contract.name.startswith("overlapctl_comm_")
        names.add(contract.source)
    assert names == {path.name for path in FOLDER.glob("*.cu")}


def test_a_broken_promise_is_an_error_that_names_kernel_and_number():
    contract = one_warp.contract("copy")
    with pytest.raises(DeviceError, match="one_warp_copy was compiled to 24 registers"):
        cuda_module.check_contract(contract, registers=24, static_smem=0)
    with pytest.raises(DeviceError, match="20000 B of static shared memory"):
        cuda_module.check_contract(contract, registers=8, static_smem=20_000)
    with pytest.raises(DeviceError, match="40 registers"):
        cuda_module.check_contract(standin.STANDIN_CONTRACT, registers=40, static_smem=0)


def test_bytes_split_into_whole_units_and_a_tail():
    assert one_warp.split_bytes(0) == (0, 0)
    assert one_warp.split_bytes(15) == (0, 15)
    assert one_warp.split_bytes(4096 * 3 + 18) == (4096 * 3 + 16, 2)


def test_pacing_gives_the_rate_to_all_blocks_together():
    # 24 blocks x 174,080 B in that time are 100 bytes per ns.
    assert standin.ns_per_tile(24, 100.0) == pytest.approx(24 * 174_080 / 100)
    assert standin.ns_per_tile(24, 0.0) == 0.0


def test_operands_that_do_not_fit_are_refused():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.zeros(64, dtype=torch.float32)
    one_warp.check_operands(x[:32], x[32:])
    with pytest.raises(UsageError, match="overlap"):
        one_warp.check_operands(x[:40], x[24:])
    with pytest.raises(UsageError, match="src is 8 x"):
        one_warp.check_operands(x[:4], x[8:16])
    with pytest.raises(UsageError, match="src starts at an address"):
        one_warp.check_operands(x[:4], x[9:13])
    with pytest.raises(UsageError, match="src is not contiguous"):
        one_warp.check_operands(x[:4], x[32:40:2])
