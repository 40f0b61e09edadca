"""The real device tells what CUDA and NVML tell, and the catalogue agrees."""

import dataclasses

import pytest

from overlapctl.device import Device, open_device
from overlapctl.device.catalogue import find_model
from overlapctl.errors import DeviceError

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(scope="module")
def device():
    return open_device("cuda:0")


def test_the_first_gpu_is_the_default(device):
    assert open_device(None).spec == device.spec == "cuda:0"
    assert isinstance(device, Device)
    assert not device.is_simulated


def test_facts_are_those_torch_reads_from_the_runtime(device):
    facts, properties = device.facts(), torch.cuda.get_device_properties(0)
    assert facts.source == "driver"
    assert facts.name == properties.name
    assert facts.arch == f"sm_{properties.major}{properties.minor}"
    assert facts.sm_count == properties.multi_processor_count
    assert facts.memory_bytes == properties.total_memory
    assert facts.l2_bytes == properties.L2_cache_size
    assert facts.max_threads_per_sm == properties.max_threads_per_multi_processor
    assert facts.smem_per_sm == properties.shared_memory_per_multiprocessor
    assert facts.smem_per_block_optin == properties.shared_memory_per_block_optin
    assert facts.registers_per_sm == properties.regs_per_multiprocessor
    assert facts.smem_per_block_optin + facts.smem_reserved_per_block == facts.smem_per_sm


def test_the_catalogue_agrees_with_the_driver(device):
    facts = device.facts()
    if find_model(facts.name, facts.memory_bytes) is None:
        assert "not in the catalogue" in device.differences()[0]
    else:
        assert device.differences() == []


def test_priorities_are_those_of_the_driver(device):
    least, greatest = torch.cuda.Stream.priority_range()
    # torch clamps the range it reports, never beyond the driver's.
    assert device.facts().priority_least == least
    assert device.facts().priority_greatest <= greatest < 0


def test_facts_are_equal_when_read_twice(device):
    assert dataclasses.asdict(open_device("cuda:0").facts()) == dataclasses.asdict(device.facts())


def test_clocks_are_plausible_under_load(device):
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(200):
        x @ x
    clocks = device.clocks()
    torch.cuda.synchronize()
    assert 200 <= clocks.sm_mhz <= 4000
    assert clocks.memory_mhz > 200
    assert 10 < clocks.power_w < 2000
    assert 10 < clocks.temperature_c < 110


def test_topology_names_every_visible_gpu(device):
    topology, count = device.topology(), torch.cuda.device_count()
    assert topology.devices == tuple(torch.cuda.get_device_name(i) for i in range(count))
    assert len(topology.links) == count * (count - 1)
    for link in topology.links:
        access = torch.cuda.can_device_access_peer(link.source, link.target)
        assert link.peer_access == access


def test_versions_are_known(device):
    versions = device.versions()
    assert versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert versions["nccl"] == ".".join(map(str, torch.cuda.nccl.version()))
    assert versions["driver"] != "none"


def test_an_index_beyond_the_last_gpu_is_refused():
    with pytest.raises(DeviceError, match="does not exist"):
        open_device(f"cuda:{torch.cuda.device_count()}")
