# ruff: noqa: N802  (the names are those of the driver and of NVML)
"""The real path against a driver and an NVML made up here: three GPUs, one of them hidden."""

import enum
import sys
import types

import pytest

from overlapctl.device import nvml, open_device, probe
from overlapctl.errors import DeviceError

BUSES = (0x3B, 0x5E, 0x86)  # as NVML counts; CUDA below sees only the last two
H200 = {
    "MULTIPROCESSOR_COUNT": 132, "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
    "MAX_REGISTERS_PER_BLOCK": 65536, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233472,
    "MAX_SHARED_MEMORY_PER_BLOCK": 49152, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": 1024, "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
    "MAX_THREADS_PER_BLOCK": 1024, "MAX_BLOCKS_PER_MULTIPROCESSOR": 32, "WARP_SIZE": 32,
    "L2_CACHE_SIZE": 60 << 20, "ASYNC_ENGINE_COUNT": 3, "CLOCK_RATE": 1_980_000,
    "MEMORY_CLOCK_RATE": 3_201_000, "GLOBAL_MEMORY_BUS_WIDTH": 6144,
    "COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0,
    "PCI_DOMAIN_ID": 0, "PCI_DEVICE_ID": 0,
}  # fmt: skip


class Result(enum.IntEnum):
    SUCCESS = 0
    OUT_OF_MEMORY = 2
    NO_DEVICE = 100


class Driver(types.ModuleType):
    def __init__(self):
        super().__init__("cuda.bindings.driver")
        self.name, self.attributes = b"NVIDIA H200\0\0", dict(H200)
        self.init, self.retain = Result.SUCCESS, Result.SUCCESS
        self.held = 0
        names = {f"CU_DEVICE_ATTRIBUTE_{n}": n for n in (*H200, "PCI_BUS_ID")}
        self.CUdevice_attribute = types.SimpleNamespace(**names)

    def cuInit(self, flags):
        return (self.init,)

    def cuDeviceGetCount(self):
        return (Result.SUCCESS, 2)

    def cuDeviceGet(self, index):
        return (Result.SUCCESS, index)

    def cuDeviceGetName(self, length, device):
        return (Result.SUCCESS, self.name)

    def cuDeviceTotalMem(self, device):
        return (Result.SUCCESS, 150_109_880_320)

    def cuDeviceGetAttribute(self, name, device):
        value = BUSES[1 + device] if name == "PCI_BUS_ID" else self.attributes[name]
        return (Result.SUCCESS, value)

    def cuDeviceCanAccessPeer(self, device, peer):
        return (Result.SUCCESS, 1)

    def cuDevicePrimaryCtxRetain(self, device):
        self.held += self.retain == Result.SUCCESS
        return (self.retain, "context")

    def cuCtxPushCurrent(self, context):
        return (Result.SUCCESS,)

    def cuCtxGetStreamPriorityRange(self):
        return (Result.SUCCESS, 0, -4)

    def cuCtxPopCurrent(self):
        return (Result.SUCCESS, "context")

    def cuDevicePrimaryCtxRelease(self, device):
        self.held -= 1
        return (Result.SUCCESS,)

    def cuDriverGetVersion(self):
        return (Result.SUCCESS, 13010)


class Nvml(types.ModuleType):
    NVML_NVLINK_MAX_LINKS, NVML_NVLINK_DEVICE_TYPE_SWITCH = 18, 2
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self):
        super().__init__("pynvml")
        self.remote, self.ancestor = "switch", 20

    def nvmlInit(self):
        pass

    def nvmlSystemGetDriverVersion(self):
        return "580.159.04"

    def nvmlDeviceGetHandleByPciBusId(self, bus):
        return BUSES.index(int(bus.decode().split(":")[1], 16))

    def nvmlDeviceGetClockInfo(self, handle, which):
        return 1000 + 100 * handle + which

    def nvmlDeviceGetPowerUsage(self, handle):
        raise self.NVMLError("not supported")

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 40 + handle

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return 0x1 | 0x4 | 0x40

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if self.remote is None:
            raise self.NVMLError("no link")
        return int(link < 18 - handle)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):
        return 2 if self.remote == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):
        return types.SimpleNamespace(domain=0, bus=BUSES[3 - handle if link < 4 else 0], device=0)

    def nvmlDeviceGetTopologyCommonAncestor(self, handle, other):
        return self.ancestor


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    package = types.ModuleType("cuda.bindings")
    package.driver = fake
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    return fake


@pytest.fixture(autouse=True)
def fake_nvml(monkeypatch):
    fake = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    caches = (nvml._nvml, nvml._handle)
    for cache in caches:
        cache.cache_clear()
    yield fake
    for cache in caches:
        cache.cache_clear()


def test_facts_agree_with_the_catalogue_and_leave_no_context(driver):
    device = open_device(None)
    assert (device.spec, device.is_simulated) == ("cuda:0", False)
    assert device.differences() == ["priority_greatest is -4 by the driver, -5 in the catalogue"]
    assert device.facts().rates.link_gbps == 370
    assert driver.held == 0


def test_the_driver_wins_and_differences_are_told(driver):
    driver.attributes["MULTIPROCESSOR_COUNT"] = 66
    device = open_device("cuda:1")
    assert device.facts().sm_count == 66
    assert device.facts().rates.tensor_tflops == pytest.approx(395)
    assert "sm_count is 66 by the driver, 132 in the catalogue" in device.differences()


def test_a_gpu_without_a_context_gets_the_table_s_priorities(driver):
    driver.retain = Result.OUT_OF_MEMORY
    assert open_device("cuda:0").facts().priority_greatest == -5


def test_an_unknown_gpu_gets_derived_rates(driver):
    driver.name = b"NVIDIA X1"
    device = open_device("cuda:0")
    # 2 x 3.201 GHz x 768 B x 4300/4800
    assert device.facts().rates.hbm_gbps == pytest.approx(4404.6, rel=1e-3)
    assert device.facts().rates.tensor_tflops == pytest.approx(790, rel=0.01)
    assert "not in the catalogue" in device.differences()[0]


def test_an_unknown_architecture_gets_steps_within_its_memory():
    row = probe.architecture("sm_75", 64 << 10)
    assert row.carveout_steps[-1] == 64 << 10
    assert probe.architecture("sm_121", 100 << 10).carveout_steps[-1] == 100 << 10


def test_clocks_are_those_of_the_gpu_cuda_means(driver):
    clocks = open_device("cuda:0").clocks()  # CUDA's first is NVML's second
    assert (clocks.sm_mhz, clocks.memory_mhz, clocks.temperature_c) == (1101, 1102, 41)
    assert clocks.power_w is None
    assert clocks.throttle_reasons == ("software-power-cap", "hardware-thermal")


def test_links_through_a_switch_count_the_smaller_side(driver):
    topology = open_device("cuda:0").topology()
    assert [(k.kind, k.links, k.peer_access) for k in topology.links] == [("nvlink", 16, True)] * 2


def test_direct_links_count_per_peer(driver, fake_nvml):
    fake_nvml.remote = "gpu"
    assert open_device("cuda:0").topology().signature == "2x NVIDIA H200, nvlink x4"


@pytest.mark.parametrize(("ancestor", "kind"), [(20, "pcie"), (40, "system"), (50, "system")])
def test_without_nvlink_the_link_and_its_rate_are_pcie(driver, fake_nvml, ancestor, kind):
    fake_nvml.remote, fake_nvml.ancestor = None, ancestor
    device = open_device("cuda:0")
    assert {link.kind for link in device.topology().links} == {kind}
    assert device.facts().rates.link_gbps == pytest.approx(25.9)


def test_without_nvml_everything_else_works(driver, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    device = open_device("cuda:0")
    assert device.clocks().sm_mhz is None
    assert device.versions()["driver"] == "CUDA 13.1"
    assert device.topology().links[0].kind == "pcie"


def test_versions(driver):
    assert open_device("cuda:0").versions()["driver"] == "580.159.04"


def test_an_index_out_of_range_names_the_range(driver):
    with pytest.raises(DeviceError, match="cuda:0 to cuda:1"):
        open_device("cuda:2")


def test_no_gpu_is_an_error_by_name_and_a_simulation_by_default(driver):
    driver.init = Result.NO_DEVICE
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES"):
        open_device("cuda")
    assert open_device(None).spec == "sim:h200"


def test_no_driver_and_rocm_are_told_apart(driver, monkeypatch):
    def missing(flags):
        raise RuntimeError("libcuda.so.1 not found")

    driver.cuInit = missing
    monkeypatch.setattr("overlapctl.device.cuda.metadata.version", lambda name: "2.9.0+cu130")
    with pytest.raises(DeviceError, match=r"no NVIDIA driver: libcuda.so.1 not found"):
        open_device("cuda:0")
    monkeypatch.setattr("overlapctl.device.cuda.metadata.version", lambda name: "2.9.0+rocm6.4")
    with pytest.raises(DeviceError, match="built for ROCm"):
        open_device("cuda:0")
