"""The strict prologue decoder: what it accepts, what it refuses, and that it reads no further."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import shim_build

pytestmark = [pytest.mark.native, shim_build.needs_compiler]

ACCEPTED = {
    "push rbp": "55",
    "push r12": "4154",
    "pop r15": "415f",
    "endbr64": "f30f1efa",
    "mov rbp,rsp": "4889e5",
    "mov r13d,edi": "4189fd",
    "mov rax,[rbx+8]": "488b4308",
    "mov [rsp-0x18],rbx": "48895c24e8",
    "sub rsp,8": "4883ec08",
    "sub rsp,0x408": "4881ec08040000",
    "and rsp,-32": "4883e4e0",
    "add rsp,8": "4883c408",
    "xor eax,eax": "31c0",
    "xor r8d,r8d": "4531c0",
    "test rdi,rdi": "4885ff",
    "mov eax,1": "b801000000",
    "mov r10,imm64": "49ba0102030405060708",
    "mov rax,imm32": "48c7c001000000",
    "lea rax,[rsp+8]": "488d442408",
    "lea rax,[rdi+rsi*4]": "488d04b7",
    "lea rax,[rdi+0x1000]": "488d8700100000",
    "nop": "90",
}
REFUSED = {
    "jmp rel32": "e900000000",
    "jmp rel8": "eb00",
    "call rel32": "e800000000",
    "je rel8": "7400",
    "je rel32": "0f8400000000",
    "ret": "c3",
    "int3": "cc",
    "syscall": "0f05",
    "jmp [rip]": "ff2500000000",
    "jmp rax": "ffe0",
    "mov rax,[rip+x]": "488b0500000000",
    "mov [rip+x],rax": "48890500000000",
    "lea rax,[rip+x]": "488d0500000000",
    "lea with a register operand": "488dc0",
    "sub r12,8": "4983ec08",
    "sub esp,8": "83ec08",
    "cmp rsp,8": "4883fc08",
    "mov dword [rax],1": "c70001000000",
    "operand size prefix": "6689e5",
    "two REX prefixes": "484889e5",
    "rep prefix": "f3a4",
    "push imm32": "6800000000",
    "loop": "e200",
    "fs segment": "64488b042528000000",
}


@pytest.fixture(scope="module")
def decode() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(str(shim_build.shim())).ovl_decode_prologue
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def decode_bytes(decode: ctypes._NamedFuncPointer, code: bytes, need: int) -> int:
    return int(decode(ctypes.c_char_p(code), len(code), need))


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepts_and_measures(decode: ctypes._NamedFuncPointer, name: str) -> None:
    code = bytes.fromhex(ACCEPTED[name])
    assert decode_bytes(decode, code, 1) == len(code)
    assert decode_bytes(decode, code + b"\xcc" * 16, len(code)) == len(code)


@pytest.mark.parametrize("name", ACCEPTED)
def test_refuses_each_truncation(decode: ctypes._NamedFuncPointer, name: str) -> None:
    code = bytes.fromhex(ACCEPTED[name])
    # A truncated longer instruction may begin like a shorter one only if it is whole itself.
    assert all(decode_bytes(decode, code[:n], len(code)) == -1 for n in range(len(code)))


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(decode: ctypes._NamedFuncPointer, name: str) -> None:
    assert decode_bytes(decode, bytes.fromhex(REFUSED[name]) + b"\x90" * 16, 1) == -1


def test_the_measured_driver_prologue_takes_whole_instructions(
    decode: ctypes._NamedFuncPointer,
) -> None:
    code = bytes.fromhex("554889e54154 4883ec08".replace(" ", ""))
    assert [decode_bytes(decode, code, need) for need in (1, 2, 5, 6, 7, 10, 11)] == [
        1,
        4,
        6,
        6,
        10,
        10,
        -1,
    ]


@pytest.mark.parametrize("need", [0, -1])
def test_needs_a_positive_length(decode: ctypes._NamedFuncPointer, need: int) -> None:
    assert decode_bytes(decode, b"\x55" * 8, need) == -1


def test_null_code_is_refused(decode: ctypes._NamedFuncPointer) -> None:
    assert decode(None, 8, 5) == -1


@settings(max_examples=300, deadline=None)
@given(
    code=st.one_of(
        st.binary(max_size=24),
        st.lists(st.sampled_from([*ACCEPTED.values(), *REFUSED.values()]), max_size=6).map(
            lambda parts: bytes.fromhex("".join(parts))
        ),
    ),
    cut=st.integers(0, 24),
    need=st.integers(1, 16),
)
def test_never_reads_past_what_is_available(
    decode: ctypes._NamedFuncPointer, guarded: int, code: bytes, cut: int, need: int
) -> None:
    code = code[:cut]
    # The code ends where a page without access begins: a read past it ends the process.
    start = guarded - len(code)
    ctypes.memmove(start, code, len(code))
    length = decode(start, len(code), need)
    assert length == -1 or need <= length <= len(code)
    if length > 0:  # whole instructions: the same code decodes alike with more behind it
        assert decode_bytes(decode, code + b"\xcc" * 16, need) == length


@pytest.fixture(scope="module")
def guarded() -> int:
    """End address of a readable page that an inaccessible one follows."""
    size = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = libc.mmap(None, 2 * size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert libc.mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(size), 0) == 0
    return int(start) + size
