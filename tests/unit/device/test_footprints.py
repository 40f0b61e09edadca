import pytest

from overlapctl.device import open_device
from overlapctl.device.footprints import communication_footprint, one_warp_footprint
from overlapctl.errors import UsageError


def facts(name):
    return open_device(f"sim:{name}").facts()


@pytest.mark.parametrize(
    ("name", "version", "left"),
    # Shared memory an SM has left beside one NCCL block, by hand from the published binaries.
    [
        ("a100", "2.28.9", 77_568),
        ("a100", "2.29.7", 70_528),
        ("a40", "2.27.5", 12_032),
        ("l40s", "2.32.3", 4_992),
        ("h200", "2.28.9", 127_616),
        ("b200", "2.29.7", 112_384),
        ("rtx-pro-6000", "2.28.9", 17_024),
        ("rtx-pro-6000", "2.29.7", 1_792),
    ],
)
def test_nccl_shared_memory_by_version_and_architecture(name, version, left):
    gpu = facts(name)
    nccl = communication_footprint(gpu, "nccl", "all_reduce", version)
    assert nccl.registers == 96
    assert gpu.smem_per_sm - nccl.smem - gpu.smem_reserved_per_block == left


def test_nccl_on_h200_is_as_measured():
    nccl = communication_footprint(facts("h200"), "nccl", "all_reduce")
    assert (nccl.blocks, nccl.threads, nccl.static_smem, nccl.dynamic_smem) == (
        24,
        544,
        22_592,
        82_240,
    )


def test_threads_depend_on_operation_and_link():
    h200, l40s = facts("h200"), facts("l40s")
    assert communication_footprint(h200, "nccl", "all_to_all").threads == 640
    assert communication_footprint(h200, "nccl", "all_reduce", link="pcie").threads == 288
    assert communication_footprint(l40s, "nccl", "all_gather").threads == 288
    assert communication_footprint(l40s, "standin", "local_copy").threads == 288


def test_a_slower_link_alone_does_not_change_the_kernel():
    slow = open_device("sim:h200,link=20").facts()
    assert communication_footprint(slow, "nccl", "all_reduce") == communication_footprint(
        facts("h200"), "nccl", "all_reduce"
    )


def test_other_paths():
    h200 = facts("h200")
    assert communication_footprint(h200, "copy", "all_gather") is None
    light = communication_footprint(h200, "light", "all_reduce")
    assert light.smem == 0
    assert light.blocks == 24
    assert one_warp_footprint(h200).threads == 32
    assert communication_footprint(facts("mi300x"), "nccl", "all_reduce").threads == 256


def test_wrong_arguments_are_refused():
    with pytest.raises(UsageError, match="'mpi'"):
        communication_footprint(facts("h200"), "mpi", "all_reduce")
    with pytest.raises(UsageError, match="'new'"):
        communication_footprint(facts("h200"), "nccl", "all_reduce", "new")
    unknown = communication_footprint(facts("h200"), "nccl", "all_reduce", "none")
    assert unknown == communication_footprint(facts("h200"), "nccl", "all_reduce")
