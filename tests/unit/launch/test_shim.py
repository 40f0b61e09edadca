import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapctl import env
from overlapctl.errors import AttachError, UsageError
from overlapctl.launch import shim as face
from overlapctl.launch.policy_text import MAX_PATTERNS, policy_to_text
from overlapctl.launch.ring import NativeRecord
from overlapctl.launch.shim import Shim, Status
from overlapctl.records import KernelRule, Policy, Role, Rule

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "helpers"))

import shim_build

pytestmark = [pytest.mark.native, shim_build.needs_compiler]


@pytest.fixture(scope="module")
def shim():
    return Shim(shim_build.shim())


STRUCTURES = {
    "ovl_attach_report": face._Report,
    "ovl_kernel_rule": face._KernelRule,
    "ovl_policy": face._Policy,
    "ovl_counters": face._Counters,
    "ovl_kernel_row": face._KernelRow,
    "ovl_record": NativeRecord,
}


def test_structures_statuses_and_rules_mirror_the_header(tmp_path):
    lines = [
        f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));'
        for name, mirror in STRUCTURES.items()
        for field, _ in mirror._fields_
    ]
    lines += [f'printf("{name} %zu\\n", sizeof({name}));' for name in STRUCTURES]
    lines += [f'printf("{s.name} %d\\n", OVL_{"" if s == 0 else "E_"}{s.name});' for s in Status]
    lines += [f'printf("{rule.name} %d\\n", OVL_RULE_{rule.name});' for rule in Rule]
    source = tmp_path / "layout.c"
    source.write_text(
        '#include "overlapctl_shim.h"\n#include <stdio.h>\nint main(void) {\n'
        + "\n".join(lines)
        + "\nreturn 0;\n}\n"
    )
    program = shim_build.compile_c(tmp_path / "layout", [source])
    told = dict(line.split() for line in subprocess.check_output([program], text=True).splitlines())
    expected = {
        f"{name}.{field}": str(getattr(mirror, field).offset)
        for name, mirror in STRUCTURES.items()
        for field, _ in mirror._fields_
    }
    expected |= {name: str(ctypes.sizeof(mirror)) for name, mirror in STRUCTURES.items()}
    expected |= {s.name: str(s.value) for s in Status}
    expected |= {rule.name: str(i) for i, rule in enumerate(Rule)}
    assert told == expected


def test_policies_nest_and_pop_in_any_order(shim):
    first = shim.push(Policy(pad_bytes=4096))
    second = shim.push(
        Policy(include=("a*",), exclude=("b",), rules=(KernelRule(pattern="c", carveout=50),))
    )
    assert shim.depth() == 2
    shim.pop(first)
    assert shim.depth() == 1
    shim.pop(second)
    assert shim.depth() == 0
    with pytest.raises(UsageError, match=f"token={first}: not in force"):
        shim.pop(first)


def test_too_many_patterns_are_refused(shim):
    with pytest.raises(UsageError):
        shim.push(Policy(include=tuple(f"kernel{i}" for i in range(100_000))))
    assert shim.depth() == 0


def test_roles(shim):
    assert shim.role_of_name("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)") is Role.COMMUNICATION
    assert shim.role_of_name("ampere_sgemm_128x64_tn") is Role.COMPUTE
    shim.add_role_pattern("my_exchange_*", Role.COMMUNICATION)
    assert shim.role_of_name("my_exchange_rows") is Role.COMMUNICATION
    assert shim.set_thread_role(Role.IGNORED) is None
    assert shim.set_thread_role(None) is Role.IGNORED
    shim.set_stream_role(0x1234, Role.COMMUNICATION)
    shim.set_stream_role(0x1234, None)


def test_nothing_has_been_launched(shim):
    shim.reset()
    assert shim.kernels() == []
    assert shim.records() == []
    assert shim.counters().launches == 0
    assert shim.attachment == "none"


def test_a_missing_library_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(face, "__file__", str(tmp_path / "shim.py"))
    monkeypatch.delenv(env.SHIM, raising=False)
    with pytest.raises(AttachError, match=r"pip install \."):
        face.load()


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_library_others_can_write_is_refused(tmp_path, mode):
    copy = tmp_path / "shim.so"
    copy.write_bytes(shim_build.shim().read_bytes())
    copy.chmod(mode)
    with pytest.raises(AttachError, match="group or others"):
        face.load(copy)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_library_of_another_user_is_refused(tmp_path):
    copy = tmp_path / "shim.so"
    copy.write_bytes(b"")
    os.chown(copy, 12345, 12345)
    with pytest.raises(AttachError, match="belongs to user 12345"):
        face.load(copy)


def test_a_file_that_is_no_shim_is_refused(tmp_path):
    file = tmp_path / "shim.so"
    file.write_bytes(b"no library")
    file.chmod(0o644)
    with pytest.raises(AttachError, match="cannot be loaded"):
        face.load(file)


def test_another_abi_version_is_refused(tmp_path):
    source = tmp_path / "old.c"
    source.write_text("unsigned ovl_abi_version(void) { return 99; }\n")
    old = shim_build.compile_c(tmp_path / "old.so", [source], "-shared", "-fPIC")
    old.chmod(0o755)
    with pytest.raises(AttachError, match="ABI version 99"):
        face.load(old)


PATTERN = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(
    policy=st.builds(
        Policy,
        pad_bytes=st.integers(0, 1 << 20),
        max_blocks_per_sm=st.integers(0, 64),
        carveout=st.integers(-1, 100),
        comm_priority=st.booleans(),
        include=st.lists(PATTERN, max_size=3).map(tuple),
        exclude=st.lists(PATTERN, max_size=3).map(tuple),
        rules=st.lists(
            st.builds(
                KernelRule,
                pattern=PATTERN,
                pad_bytes=st.integers(0, 1 << 20),
                max_blocks_per_sm=st.integers(0, 64),
                carveout=st.integers(-1, 100),
            ),
            max_size=3,
        ).map(tuple),
        shape_captures=st.booleans(),
    )
)
def test_every_policy_written_as_text_is_understood_in_full(shim, policy):
    token, ignored = ctypes.c_uint64(), ctypes.c_int(-1)
    text = policy_to_text(policy)
    library = ctypes.CDLL(str(shim.path))
    status = library.ovl_policy_push_text(
        text.encode("ascii"), ctypes.byref(token), ctypes.byref(ignored)
    )
    assert (status, ignored.value) == (0, 0)
    shim.pop(token.value)


def test_a_policy_too_large_for_text_is_refused():
    with pytest.raises(ValueError, match="patterns of one kind"):
        policy_to_text(Policy(include=("k",) * (MAX_PATTERNS + 1)))
    with pytest.raises(ValueError, match="bytes"):
        policy_to_text(Policy(include=("k" * 70000,)))
