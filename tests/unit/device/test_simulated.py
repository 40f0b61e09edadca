import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapctl.device import Device, open_device
from overlapctl.device.catalogue import MODELS, model_names
from overlapctl.errors import DeviceError


@pytest.mark.parametrize("name", model_names())
def test_every_model_opens_and_names_itself(name):
    device = open_device(f"sim:{name}")
    assert isinstance(device, Device)
    assert device.is_simulated
    assert device.facts().source == "catalogue"
    assert open_device(device.spec) == device
    assert len(device.topology().devices) == 2


@given(
    st.sampled_from(sorted(MODELS)),
    st.none() | st.integers(1, 1024),
    st.none() | st.floats(0.001, 10_000).map(lambda x: float(f"{x:.6g}")),
    st.integers(1, 8),
    st.sampled_from(["2.28.9", "2.29.7"]),
)
@settings(max_examples=60)
def test_variants_round_trip(name, sms, link, world, nccl):
    parts = [f"sim:{name}", f"world={world}", f"nccl={nccl}"]
    parts += [f"sms={sms}"] if sms else []
    parts += [f"link={link}"] if link else []
    device = open_device(",".join(parts))
    assert open_device(device.spec) == device
    base = MODELS[name].facts
    assert device.facts().sm_count == (sms or base.sm_count)
    assert device.facts().rates.link_gbps == (link or base.rates.link_gbps)
    assert len(device.topology().devices) == world
    assert len(device.topology().links) == world * (world - 1)
    assert device.versions()["nccl"] == nccl


def test_arithmetic_scales_with_sms_and_memory_does_not():
    half, full = open_device("sim:h200,sms=66").facts(), open_device("sim:h200").facts()
    assert half.rates.tensor_tflops == pytest.approx(full.rates.tensor_tflops / 2)
    assert half.rates.fp32_tflops == pytest.approx(full.rates.fp32_tflops / 2)
    assert half.rates.hbm_gbps == full.rates.hbm_gbps


def test_a_variant_never_shares_a_topology_signature_with_the_model():
    signatures = {
        open_device(spec).topology().signature
        for spec in ("sim:h200", "sim:h200,sms=100", "sim:h200,link=50", "sim:h200,world=8")
    }
    assert len(signatures) == 4
    assert "2x NVIDIA H200, nvlink x18" in signatures


def test_clocks_and_versions_are_constant():
    device = open_device("sim:a100")
    assert device.clocks() == device.clocks()
    assert device.clocks().sm_mhz == 1410
    assert device.clocks().power_w is None
    assert device.versions()["driver"] == "simulated"
    assert set(device.versions()) == {"driver", "torch", "nccl", "triton"}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("sim:h20", "did you mean h200"),
        ("sim:", "known are a100"),
        ("sim:h200,", "'' in 'sim:h200,' is no variant"),
        ("sim:h200,cores=3", "'cores'"),
        ("sim:h200,sms", "sms=''"),
        ("sim:h200,sms=0", "from 1 to 1024"),
        ("sim:h200,sms=-1", "from 1 to 1024"),
        ("sim:h200,sms=9999999999999", "from 1 to 1024"),
        ("sim:h200,world=65", "from 1 to 64"),
        ("sim:h200,link=0", "above 0"),
        ("sim:h200,link=nan", "above 0"),
        ("sim:h200,link=inf", "above 0"),
        ("sim:h200,link=fast", "above 0"),
        ("sim:h200,nccl=new", "no version"),
        ("sim:h200,sms=1,sms=2", "given twice"),
        ("gpu", 'use "cuda:0"'),
        ("cuda:-1", 'use "cuda:0"'),
        ("", 'use "cuda:0"'),
    ],
)
def test_a_wrong_spec_is_refused_with_a_remedy(spec, words):
    with pytest.raises(DeviceError, match=re.escape(words)):
        open_device(spec)
