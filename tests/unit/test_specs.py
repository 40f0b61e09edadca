import contextlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapctl.errors import UsageError
from overlapctl.records import CommSpec, ComputeSpec
from overlapctl.specs import (
    format_comm,
    format_compute,
    format_size,
    parse_comm,
    parse_compute,
    parse_size,
)

dimension = st.integers(1, 1 << 40)
dtype = st.sampled_from(["bf16", "fp16", "fp32"])
repeats = st.integers(1, 1000)
block = st.sampled_from([16, 32, 64, 128, 256])
tile = st.one_of(
    st.just(()),
    st.tuples(block, block, block, st.sampled_from([1, 2, 4, 8, 16, 32]), st.integers(1, 9)),
)


def compute(op, rank, tile=None):
    return st.builds(
        ComputeSpec,
        op=st.just(op),
        shape=st.tuples(*[dimension] * rank),
        dtype=dtype,
        tile=st.just(()) if tile is None else tile,
        repeats=repeats,
    )


any_compute = st.one_of(
    compute("gemm", 3, tile),
    compute("elementwise", 1),
    compute("layernorm", 2),
    compute("attention", 4),
)


@given(any_compute)
@settings(max_examples=150)
def test_compute_round_trips(spec):
    assert parse_compute(format_compute(spec)) == spec


@given(
    st.builds(
        CommSpec,
        op=st.sampled_from(
            ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "local_copy"]
        ),
        size_bytes=st.integers(1, 1 << 50),
        path=st.sampled_from(["nccl", "light", "copy", "standin"]),
    )
)
@settings(max_examples=100)
def test_comm_round_trips(spec):
    assert parse_comm(format_comm(spec)) == spec


@given(st.integers(0, 1 << 62))
@settings(max_examples=100)
def test_sizes_round_trip(size):
    assert parse_size(format_size(size)) == parse_size(size) == parse_size(str(size)) == size


@given(st.text(max_size=40))
@settings(max_examples=200)
def test_no_text_ends_in_anything_but_a_usage_error(text):
    for parse in (parse_size, parse_compute, parse_comm):
        with contextlib.suppress(UsageError):
            assert parse(text) is not None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("48KiB", 49152),
        ("48K", 49152),
        ("48kb", 49152),
        ("896MB", 896 << 20),
        ("896MiB", 896 << 20),
        ("1.5MB", 3 << 19),
        ("2 GiB", 2 << 30),
        ("0", 0),
        ("49152", 49152),
        ("100B", 100),
        (" 7 ", 7),
        (0, 0),
        (49152, 49152),
    ],
)
def test_sizes_by_hand(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("-4K", "'-4K' is negative"),
        (-1, "-1 is negative"),
        ("", "'' is no size"),
        ("K", "'K' is no size"),
        ("4X", "'4X' is no size"),
        ("4KiBs", "no size"),
        ("1e6", "no size"),
        ("nan", "no size"),
        ("٤٨K", "no size"),  # other scripts' digits
        (True, "True is no size"),
        (1.5, "1.5 is no size"),
        (None, "None is no size"),
        ("0.3K", "307.2 bytes, not a whole number"),
        ("1.5", "1.5 bytes, not a whole number"),
        (1 << 63, "does not fit 64 bits"),
        ("99999999999G", "does not fit 64 bits"),
    ],
)
def test_nonsense_sizes_are_refused(value, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        parse_size(value)


def test_sizes_are_written_with_the_largest_unit_that_divides_them():
    assert [format_size(n) for n in (0, 1, 1536, 49152, 896 << 20, 3 << 30)] == [
        "0B",
        "1B",
        "1536B",
        "48KiB",
        "896MiB",
        "3GiB",
    ]
    with pytest.raises(UsageError, match="negative"):
        format_size(-1)


def test_compute_by_hand():
    gemm = {"op": "gemm", "shape": (8192, 8192, 8192)}
    assert parse_compute("gemm:8192x8192x8192") == ComputeSpec(**gemm)
    tiled = ComputeSpec(**gemm, tile=(64, 64, 64, 4, 3))
    assert parse_compute("gemm:8192x8192x8192:bf16:64x64x64") == tiled
    assert parse_compute("gemm:8192x8192x8192:bf16:64x64x64:4w3s") == tiled
    wide = ComputeSpec(**gemm, dtype="fp16", tile=(128, 256, 32, 8, 4), repeats=2)
    assert parse_compute(" gemm:8192x8192x8192:fp16:128x256x32:8w4s*2 ") == wide
    assert parse_compute("gemm:2^13x2^13x8192") == ComputeSpec(**gemm)
    million = ComputeSpec(op="elementwise", shape=(1 << 31,), dtype="bf16")
    for text in ("elementwise:2^31:bf16", "elementwise:2**31", "elementwise:2147483648"):
        assert parse_compute(text) == million
    assert parse_compute("elementwise:2**31*4").repeats == 4
    assert parse_compute("layernorm:16384x8192:bf16").shape == (16384, 8192)
    assert parse_compute("attention:4x32x4096x128:bf16").shape == (4, 32, 4096, 128)


def test_what_is_the_default_is_not_written():
    assert format_compute(parse_compute("gemm:1x2x3:bf16:64x64x64:4w3s")) == (
        "gemm:1x2x3:bf16:64x64x64"
    )
    assert format_compute(parse_compute("elementwise:2147483648")) == "elementwise:2^31:bf16"
    assert format_comm(parse_comm("all_reduce:896MB:nccl")) == "all_reduce:896MiB"


@pytest.mark.parametrize(
    ("text", "part", "remedy"),
    [
        ("", "operation ''", "gemm, elementwise"),
        ("gem:1x1x1", "operation 'gem'", "gemm, elementwise"),
        ("gemm", "has no shape", "gemm:8192x8192x8192"),
        ("gemm:1x2", "has 2 dimensions, not 3 (M x N x K)", "gemm:8192"),
        ("gemm:1x2x-3", "K '-3'", "gemm:8192"),
        ("gemm:0x2x3", "M '0'", "gemm:8192"),
        ("gemm:axbxc", "M 'a'", "gemm:8192"),
        ("gemm:1x2x3:int4", "dtype 'int4'", "bf16, fp16, fp32"),
        ("gemm:1x2x3:bf16:64x64", "tile '64x64'", "64x64x64"),
        ("gemm:1x2x3:bf16:60x64x64", "60 is no power of two", "64x64x64"),
        ("gemm:1x2x3:bf16:8x64x64", "8 is no power of two of at least 16", "64x64x64"),
        ("gemm:1x2x3:bf16:64x64x64:3s", "'3s'", "4w3s is 4 warps"),
        ("gemm:1x2x3:bf16:64x64x64:3w3s", "3 warps cannot", "1, 2, 4"),
        ("gemm:1x2x3:bf16:64x64x64:4w3s:x", "'x'", "gemm:8192"),
        ("gemm:1x2x3*0", "repeats '0'", "*4"),
        ("elementwise:2^31:bf16:64x64x64", "'64x64x64'", "elementwise:2^31:bf16"),
        ("elementwise:2^63", "'2^63'", "elementwise:2^31"),
        ("elementwise:9^999999999", "'9^999999999'", "elementwise:2^31"),
        ("layernorm:8192", "rows x columns", "layernorm:16384x8192"),
        ("attention:1x2x3", "has 3 dimensions, not 4", "attention:4x32"),
    ],
)
def test_a_wrong_compute_names_the_part_and_gives_an_example(text, part, remedy):
    with pytest.raises(UsageError) as caught:
        parse_compute(text)
    assert part in caught.value.what
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "part", "remedy"),
    [
        ("reduce:1MB", "collective 'reduce'", "all_reduce, all_gather"),
        ("all_reduce", "has no size", "all_reduce:896MB"),
        ("all_reduce:0", "size is 0", "all_reduce:896MB"),
        ("all_reduce:-1MB", "'-1MB' is negative", "48KiB"),
        ("all_reduce:big", "'big' is no size", "48KiB"),
        ("all_reduce:1MB:mpi", "path 'mpi'", "nccl, light, copy, standin"),
        ("all_reduce:1MB:nccl:x", "'x'", "all_reduce:896MB"),
    ],
)
def test_a_wrong_comm_names_the_part_and_gives_an_example(text, part, remedy):
    with pytest.raises(UsageError) as caught:
        parse_comm(text)
    assert part in caught.value.what
    assert remedy in caught.value.remedy
