from overlapctl.profiles import FieldDifference, differences, profile_key
from overlapctl.records import Clocks, DeviceFacts, DeviceRates, Link, ProfileKey, Topology


class FakeDevice:
    """Nothing but what a key is made of."""

    spec = "fake:0"

    def __init__(self, *, is_simulated=False, versions=None):
        self.is_simulated = is_simulated
        self._versions = versions or {"driver": "580.1", "torch": "2.11", "nccl": "2.28.9"}

    def facts(self) -> DeviceFacts:
        return DeviceFacts(
            name="NVIDIA H200", vendor="nvidia", arch="sm_90", sm_count=132, warp_size=32,
            max_threads_per_sm=2048, max_threads_per_block=1024, max_blocks_per_sm=32,
            registers_per_sm=65536, registers_per_block=65536, register_granule=256,
            subpartitions=4, smem_per_sm=233472, smem_per_block=49152, smem_per_block_optin=232448,
            smem_reserved_per_block=1024, smem_granule=128, carveout_steps=(0, 233472),
            l2_bytes=1, memory_bytes=1, priority_least=0, priority_greatest=-5,
            rates=DeviceRates(hbm_gbps=1, link_gbps=1, tensor_tflops=1, fp32_tflops=1),
        )  # fmt: skip

    def topology(self) -> Topology:
        name = self.facts().name
        link = Link(source=0, target=1, kind="nvlink", links=18, peer_access=True)
        return Topology(devices=(name, name), links=(link,))

    def clocks(self) -> Clocks:
        return Clocks(sm_mhz=None, memory_mhz=None, power_w=None, temperature_c=None)

    def versions(self) -> dict[str, str]:
        return self._versions


def test_key_takes_every_field_from_the_device():
    assert profile_key(FakeDevice()) == ProfileKey(
        gpu="NVIDIA H200",
        driver="580.1",
        torch="2.11",
        nccl="2.28.9",
        triton="unknown",
        topology="2x NVIDIA H200, nvlink x18",
    )


def test_a_simulated_device_never_shares_a_key_with_the_real_one():
    real, simulated = profile_key(FakeDevice()), profile_key(FakeDevice(is_simulated=True))
    assert differences(simulated, real) == (
        FieldDifference("gpu", "NVIDIA H200 (simulated)", "NVIDIA H200"),
    )


def test_differences_come_in_the_order_of_the_key():
    here = profile_key(FakeDevice())
    other = profile_key(FakeDevice(versions={"driver": "570.9", "torch": "2.10", "nccl": "2.28.9"}))
    assert [d.field for d in differences(other, here)] == ["driver", "torch"]
    assert str(differences(other, here)[0]) == "driver is '580.1', the profile's is '570.9'"
    assert differences(here, here) == ()
