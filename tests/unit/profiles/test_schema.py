import dataclasses
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapctl.errors import ProfileError
from overlapctl.profiles import SCHEMA, VERSION, dump_profile, parse_profile
from overlapctl.profiles.schema import NewerProfileError

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
times = st.floats(0, 1e6, allow_nan=False)


@pytest.fixture(scope="module")
def full(samples):
    return samples.profile(samples.verdict("priority+3/SM", p3=6.0, p=8.0), samples.verdict())


def parse(document) -> object:
    return parse_profile(json.dumps(document).encode(), source="f.json")


def test_document_is_readable_and_versioned(full):
    text = dump_profile(full)
    document = json.loads(text)
    assert (
        (document["schema"], document["version"])
        == (SCHEMA, VERSION)
        == (
            "overlapctl-profile",
            1,
        )
    )
    assert document["profile"]["key"]["gpu"] == "NVIDIA H200"
    assert text.count("\n") > 30  # indented: a person can read it


@settings(max_examples=40, deadline=None)
@given(gpu=names, reason=names, totals=st.dictionaries(names, times, max_size=4), gain=times)
def test_round_trip(samples, gpu, reason, totals, gain):
    verdict = dataclasses.replace(samples.verdict(), totals=totals, gain=gain, reason=reason)
    key = dataclasses.replace(samples.KEY, gpu=gpu)
    profile = dataclasses.replace(samples.profile(verdict, key=key), reason=reason)
    assert parse_profile(dump_profile(profile).encode(), source="f") == profile


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_json_cannot_keep_is_not_written(samples, value):
    verdict = dataclasses.replace(samples.verdict(), gain=value)
    with pytest.raises(ProfileError, match=r"JSON|different"):
        dump_profile(dataclasses.replace(samples.profile(), verdicts=(verdict,)))


def test_white_space_may_change(full):
    compact = json.dumps(json.loads(dump_profile(full)))
    assert parse_profile(compact.encode(), source="f") == full


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema="somebody-elses"), "not an overlapctl profile"),
        (lambda d: d.pop("schema"), "not an overlapctl profile"),
        (lambda d: d.update(version="1"), "version is '1'"),
        (lambda d: d.update(version=0), "version is 0"),
        (lambda d: d.update(version=True), "version is True"),
        (lambda d: d.pop("sha256"), "sha256"),
        (lambda d: d.update(extra=1), "extra"),
        (lambda d: d.update(profile=[]), "profile"),
        (lambda d: d["profile"].pop("policy"), r"profile\.policy"),
        (lambda d: d["profile"]["policy"].update(pad_bytes="7"), r"policy\.pad_bytes.*'7'"),
        (lambda d: d["profile"]["policy"].update(unknown=7), r"policy\.unknown"),
        (lambda d: d["profile"]["policy"].update(pad_bytes=7), "does not match its sha256"),
    ],
)
def test_wrong_documents_are_refused(full, change, message):
    document = json.loads(dump_profile(full))
    change(document)
    with pytest.raises(ProfileError, match=message) as caught:
        parse(document)
    assert caught.value.what.startswith("f.json")
    assert caught.value.remedy


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"1", b"\xff\xfe", b"[" * 100_000])
def test_other_files_are_refused(data):
    with pytest.raises(ProfileError):
        parse_profile(data, source="f.json")


def test_a_newer_document_says_so(full):
    document = json.loads(dump_profile(full)) | {"version": 2, "more": True}
    with pytest.raises(NewerProfileError, match="newer overlapctl") as caught:
        parse(document)
    assert "upgrade" in caught.value.remedy


def test_corruption_is_an_error_or_harmless(full):
    data = dump_profile(full).encode()
    draw = random.Random(7)
    refused = 0
    for number in range(200):
        broken = bytearray(data)
        if number % 2:
            del broken[draw.randrange(len(data)) :]
        else:
            broken[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        try:
            assert parse_profile(bytes(broken), source="f.json") == full
        except ProfileError:
            refused += 1
    assert refused > 150  # what was harmless was white space
