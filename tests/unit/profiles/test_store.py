import dataclasses
import json
import os
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from overlapctl.errors import ProfileError
from overlapctl.profiles import Miss, ProfileStore, default_folder, dump_profile


@pytest.fixture
def store(tmp_path) -> ProfileStore:
    return ProfileStore(tmp_path / "profiles")


def test_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("OVERLAPCTL_CACHE_DIR", str(tmp_path))
    assert default_folder() == tmp_path / "profiles"
    monkeypatch.setenv("OVERLAPCTL_CACHE_DIR", "")
    assert default_folder().parts[-2:] == ("overlapctl", "profiles")


def test_save_and_load(store, samples):
    profile = samples.profile(samples.verdict("priority", p=7.0))
    path = store.save(profile)
    assert store.load(samples.KEY) == profile
    assert path.name.startswith("nvidia-h200-driver-580.159-torch-2.11.0-")
    assert path.stat().st_mode & 0o777 == 0o600
    assert [e.profile for e in store.entries()] == [profile]


def test_keys_never_share_a_file(store, samples):
    for field in dataclasses.fields(samples.KEY):
        other = dataclasses.replace(samples.KEY, **{field.name: "other"})
        assert store.path(other) != store.path(samples.KEY)
    long = dataclasses.replace(samples.KEY, gpu="x" * 5000)
    assert len(store.path(long).name) < 200


def test_a_miss_names_the_differing_fields_nearest_first(store, samples):
    assert str(store.load(samples.KEY)) == "no profile is stored"
    far = dataclasses.replace(samples.KEY, driver="1", torch="2", nccl="3")
    near = dataclasses.replace(samples.KEY, nccl="2.29")
    for key in (far, near):
        store.save(samples.profile(key=key))
    miss = store.load(samples.KEY)
    assert isinstance(miss, Miss)
    assert [[d.field for d in fields] for _, fields in miss.nearest] == [
        ["nccl"],
        ["driver", "torch", "nccl"],
    ]
    assert "nccl is '2.28.9', the profile's is '2.29' (1 further stored)" in str(miss)


def test_a_copied_file_does_not_answer_for_another_key(store, samples):
    other = dataclasses.replace(samples.KEY, driver="1")
    path = store.save(samples.profile())
    path.rename(store.path(other))
    assert isinstance(store.load(other), Miss)


def test_a_copied_file_gives_no_verdicts_to_another_key_and_is_kept(store, samples):
    other = dataclasses.replace(samples.KEY, driver="1")
    content = store.save(samples.profile(samples.verdict(of=samples.case(64)))).read_bytes()
    path = store.path(other)
    path.write_bytes(content)
    path.chmod(0o600)
    merged = store.merge(samples.profile(samples.verdict(of=samples.case(896)), key=other))
    assert [v.case for v in merged.verdicts] == [samples.case(896)]
    assert path.with_name(f"{path.name}.broken-1").read_bytes() == content


def test_merge_keeps_other_cases_and_replaces_the_same(store, samples):
    short, long = samples.case(64), samples.case(896)
    store.merge(samples.profile(samples.verdict(of=short), samples.verdict(of=long)))
    again = samples.verdict("priority", p=6.0, of=short)
    merged = store.merge(samples.profile(again, created="2026-02-02T00:00:00+00:00"))
    assert [(v.case, v.chosen) for v in merged.verdicts] == [
        (short, "priority"),
        (long, "default"),
    ]
    assert merged.created.startswith("2026-02")
    assert store.load(samples.KEY) == merged


def test_a_broken_file_is_moved_aside_not_deleted(store, samples):
    path = store.save(samples.profile())
    for number in (1, 2):
        path.write_bytes(b'{"schema": %d' % number)
        with pytest.raises(ProfileError, match="no complete JSON"):
            store.load(samples.KEY)
        store.merge(samples.profile())
        assert path.with_name(f"{path.name}.broken-{number}").read_bytes().endswith(b"%d" % number)
    assert isinstance(store.load(samples.KEY), type(samples.profile()))
    assert [bool(e.problem) for e in store.entries()] == [False, True, True]


def test_a_newer_file_is_left_alone(store, samples):
    path = store.save(samples.profile())
    newer = json.dumps(json.loads(path.read_text()) | {"version": 99})
    path.write_text(newer)
    for action in (store.save, store.merge):
        with pytest.raises(ProfileError, match="newer"):
            action(samples.profile())
    assert path.read_text() == newer
    assert "newer" in store.entries()[0].problem


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_others_can_write_is_not_honoured(store, samples, mode):
    path = store.save(samples.profile())
    path.chmod(mode)
    with pytest.raises(ProfileError, match="written by other users") as caught:
        store.load(samples.KEY)
    assert "chmod go-w" in caught.value.remedy


def test_a_folder_others_can_write_is_not_honoured(store, samples):
    store.save(samples.profile())
    store.folder.chmod(0o777)
    with pytest.raises(ProfileError, match="written by other users"):
        store.load(samples.KEY)
    with pytest.raises(ProfileError, match="written by other users"):
        store.save(samples.profile())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_not_honoured(store, samples):
    path = store.save(samples.profile())
    os.chown(path, 12345, -1)
    with pytest.raises(ProfileError, match="belongs to user 12345"):
        store.load(samples.KEY)


def test_a_pipe_does_not_hang_the_reader(store, samples):
    path = store.save(samples.profile())
    path.unlink()
    os.mkfifo(path, 0o600)
    assert "ordinary file" in store.entries()[0].problem


def test_an_unwritable_folder_is_an_error_with_a_remedy(tmp_path, samples):
    (tmp_path / "file").write_text("")
    store = ProfileStore(tmp_path / "file" / "profiles")
    for action in (store.check_writable, lambda: store.save(samples.profile())):
        with pytest.raises(ProfileError, match="cannot write to") as caught:
            action()
        assert "OVERLAPCTL_CACHE_DIR" in caught.value.remedy


def test_a_full_disk_leaves_the_old_file_and_no_other(store, samples, monkeypatch):
    path = store.save(samples.profile())
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ProfileError, match="No space left"):
            store.merge(samples.profile(samples.verdict()))
    assert path.read_bytes() == before
    assert not list(store.folder.glob(".tmp-*"))


def test_check_writable_leaves_nothing(store):
    store.check_writable()
    assert [p.name for p in store.folder.iterdir() if p.name != ".lock"] == []


def test_stale_temporary_files_are_cleaned(store, samples):
    store.save(samples.profile())
    (store.folder / ".tmp-dead").write_text("half")
    store.merge(samples.profile())
    assert not (store.folder / ".tmp-dead").exists()


def test_remove(store, samples):
    path = store.save(samples.profile())
    with pytest.raises(ProfileError, match="no profile is called 'nothing'"):
        store.remove("nothing")
    with pytest.raises(ProfileError):
        store.remove("../secret")
    assert store.remove(path.stem) == path
    assert store.entries() == []


def test_random_corruption_never_loses_or_crashes(store, samples):
    full = samples.profile(samples.verdict("priority", p=6.0))
    path = store.save(full)
    good = path.read_bytes()
    draw = random.Random(3)
    for _ in range(50):
        cut = draw.randrange(len(good))
        broken = good[:cut] + bytes([draw.randrange(256)]) * draw.randrange(2)
        path.write_bytes(broken)
        asides = set(store.folder.glob("*.broken-*"))
        store.merge(full)
        new = set(store.folder.glob("*.broken-*")) - asides
        assert [p.read_bytes() for p in new] == [broken]
        assert store.load(samples.KEY) == full


WRITER = textwrap.dedent("""
    import dataclasses, pathlib, sys
    from overlapctl.profiles import ProfileStore, parse_profile
    folder, source, start, count = sys.argv[1:]
    profile = parse_profile(pathlib.Path(source).read_bytes(), source=source)
    store = ProfileStore(pathlib.Path(folder))
    template = profile.verdicts[0]
    print("ready", flush=True)
    for number in range(int(start), int(start) + int(count)):
        case = dataclasses.replace(template.case, depth=number)
        verdict = dataclasses.replace(template, case=case)
        store.merge(dataclasses.replace(profile, verdicts=(verdict,)))
""")


def start_writer(store, source: Path, start: int, count: int) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, store.folder, source, str(start), str(count)]
    process = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def source(tmp_path, samples) -> Path:
    path = tmp_path / "source.json"
    path.write_text(dump_profile(samples.profile(samples.verdict())))
    return path


def test_two_writers_lose_nothing(store, source, samples):
    writers = [start_writer(store, source, start, 15) for start in (100, 200)]
    assert [w.wait(60) for w in writers] == [0, 0]
    depths = {v.case.depth for v in store.load(samples.KEY).verdicts}
    assert depths == {*range(100, 115), *range(200, 215)}


def test_a_killed_writer_leaves_old_or_new(store, source, samples):
    draw = random.Random(1)
    known = 0
    for round_ in range(6):
        writer = start_writer(store, source, 1000 * (round_ + 1), 100_000)
        time.sleep(0.02 + 0.1 * draw.random())
        writer.kill()
        writer.wait()
        stored = store.load(samples.KEY)
        depths = [] if isinstance(stored, Miss) else [v.case.depth for v in stored.verdicts]
        assert len(depths) >= known
        own = [d for d in depths if d >= 1000 * (round_ + 1)]
        assert own == list(range(1000 * (round_ + 1), 1000 * (round_ + 1) + len(own)))
        known = len(depths)
    store.merge(samples.profile())
    assert not list(store.folder.glob(".tmp-*"))
    assert not list(store.folder.glob("*.broken-*"))
    assert known > 0
