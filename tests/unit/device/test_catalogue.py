import dataclasses

import pytest

from overlapctl.device.architectures import ARCHITECTURES
from overlapctl.device.catalogue import MODELS, find_model, model, model_names
from overlapctl.errors import DeviceError

KIB = 1024
every_model = pytest.mark.parametrize("entry", MODELS.values(), ids=MODELS)


def test_the_promised_models_are_there():
    assert set(model_names()) == {
        "a40", "a100", "a100-40", "a100-80", "l40s", "h100", "h100-sxm", "h100-pcie", "h200",
        "b200", "rtx-pro-6000", "mi250x", "mi300x", "mi355x",
    }  # fmt: skip


@every_model
def test_every_number_has_a_source(entry):
    fields = {f.name for f in dataclasses.fields(entry)}
    assert set(entry.sources) - {"*"} <= fields
    assert all(entry.sources.values())
    assert "*" in entry.sources
    # What a data sheet's overview does not tell needs a source of its own.
    assert entry.link == "nvlink" or "link_gbps" in entry.sources


@every_model
def test_limits_of_an_architecture_fit_together(entry):
    facts = entry.facts
    assert facts.carveout_steps == tuple(sorted(facts.carveout_steps))
    assert facts.carveout_steps[-1] == facts.smem_per_sm
    assert facts.smem_per_block_optin + facts.smem_reserved_per_block == facts.smem_per_sm
    assert facts.smem_per_block <= facts.smem_per_block_optin
    assert facts.max_threads_per_sm % facts.warp_size == 0
    assert facts.priority_greatest < facts.priority_least
    rates = facts.rates
    assert 0 < rates.hbm_gbps <= entry.hbm_gbps
    assert 0 < rates.link_gbps <= entry.link_gbps
    assert 0 < rates.tensor_tflops <= entry.tensor_tflops
    assert rates.fp32_tflops < rates.tensor_tflops


@every_model
def test_the_clock_is_the_one_the_fp32_rate_implies(entry):
    # FMA lanes per SM: GA100, CDNA 2: 64; CDNA 3 and 4: 128 (dual issue); other NVIDIA: 128.
    lanes = 64 if entry.arch in ("sm_80", "gfx90a") else 128
    implied = entry.fp32_tflops * 1e6 / (entry.sm_count * lanes * 2)
    assert entry.sm_mhz == pytest.approx(implied, rel=0.01)


@every_model
def test_a_gpu_of_that_name_is_found_again(entry):
    assert find_model(entry.name, entry.memory_bytes) is entry


@pytest.mark.parametrize(
    ("name", "gigabytes", "key"),
    [
        ("NVIDIA A100-PCIE-40GB", 42.4, "a100-40"),
        ("NVIDIA A100 80GB PCIe", 85, "a100-80"),
        ("NVIDIA H100 80GB HBM3", 85, "h100-sxm"),
        ("NVIDIA H100 PCIe", 85, "h100-pcie"),
        ("NVIDIA H200", 150, "h200"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 100, "rtx-pro-6000"),
        ("NVIDIA A400", 4, None),
        ("NVIDIA GB200", 190, None),
        ("Tesla V100-SXM2-16GB", 16, None),
        ("NVIDIA L40", 48, None),
    ],
)
def test_driver_names_find_their_model_or_none(name, gigabytes, key):
    found = find_model(name, int(gigabytes * 1e9))
    assert (found.key if found else None) == key


def test_limits_are_those_of_the_programming_guide():
    columns = ("smem_per_sm", "smem_per_block_optin", "max_threads_per_sm", "max_blocks_per_sm")
    expected = {
        "sm_80": (164 * KIB, 163 * KIB, 2048, 32),
        "sm_86": (100 * KIB, 99 * KIB, 1536, 16),
        "sm_89": (100 * KIB, 99 * KIB, 1536, 24),
        "sm_90": (233472, 232448, 2048, 32),
        "sm_100": (228 * KIB, 227 * KIB, 2048, 32),
        "sm_120": (100 * KIB, 99 * KIB, 1536, 24),
        "gfx90a": (64 * KIB, 64 * KIB, 2048, 32),
        "gfx942": (64 * KIB, 64 * KIB, 2048, 32),
        "gfx950": (160 * KIB, 160 * KIB, 2048, 32),
    }
    for arch, values in expected.items():
        assert tuple(getattr(ARCHITECTURES[arch], c) for c in columns) == values, arch


def test_h200_is_as_measured():
    facts = model("H200").facts
    assert (facts.sm_count, facts.smem_per_sm, facts.smem_per_block_optin) == (132, 233472, 232448)
    assert (facts.rates.hbm_gbps, facts.rates.tensor_tflops, facts.rates.link_gbps) == (
        4300,
        790,
        370,
    )


def test_an_unknown_name_lists_close_and_known_ones():
    with pytest.raises(DeviceError) as caught:
        model("mi300")
    assert "mi300x" in caught.value.remedy.split("?")[0]
    assert all(name in caught.value.remedy for name in model_names())
    with pytest.raises(DeviceError) as caught:
        model("zzz")
    assert "did you mean" not in caught.value.remedy
