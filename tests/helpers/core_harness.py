"""The shim's core driven against the fake driver, without patching any code."""

from __future__ import annotations

import ctypes as c
import functools
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import shim_build

FAKE = shim_build.ROOT / "tests" / "helpers" / "fake_driver"
CORE = ("match", "decide", "roles", "policy", "driver", "functions", "records", "launch", "fork")
CORE_SOURCES = [shim_build.SHIM / "src" / f"{part}.c" for part in (*CORE, "api")]
COMPUTE, COMMUNICATION, IGNORED, BY_NAME = range(4)
ATTR_COOPERATIVE, ATTR_CLUSTER, ATTR_PRIORITY, ATTR_PREFERRED_CLUSTER, ATTR_CARVEOUT = (
    2,
    4,
    8,
    11,
    14,
)


class Attribute(c.Structure):
    _fields_ = (("id", c.c_int), ("pad", c.c_char * 4), ("value", c.c_int * 16))


class Config(c.Structure):
    _fields_ = (
        ("grid", c.c_uint * 3),
        ("block", c.c_uint * 3),
        ("smem", c.c_uint),
        ("stream", c.c_void_p),
        ("attrs", c.POINTER(Attribute)),
        ("count", c.c_uint),
    )


class Call(c.Structure):
    _fields_ = (
        ("symbol", c.c_char * 40),
        *((name, c.c_uint64) for name in ("function", "stream", "parameters", "extra")),
        ("grid", c.c_uint32 * 3),
        ("block", c.c_uint32 * 3),
        ("smem", c.c_uint32),
        ("attribute_count", c.c_uint32),
        ("attribute_ids", c.c_int32 * 64),
        ("attribute_values", c.c_int32 * 64),
        ("result", c.c_int32),
    )

    @property
    def attributes(self) -> list[tuple[int, int]]:
        count = self.attribute_count
        return list(zip(self.attribute_ids[:count], self.attribute_values[:count], strict=True))


class KernelRule(c.Structure):
    _fields_ = (
        ("pattern", c.c_char_p),
        ("pad_bytes", c.c_uint32),
        ("max_blocks_per_sm", c.c_int32),
        ("carveout", c.c_int32),
    )


class Policy(c.Structure):
    _fields_ = (
        ("pad_bytes", c.c_uint32),
        ("max_blocks_per_sm", c.c_int32),
        ("carveout", c.c_int32),
        ("comm_priority", c.c_int32),
        ("shape_captures", c.c_int32),
        ("include_count", c.c_uint32),
        ("exclude_count", c.c_uint32),
        ("rule_count", c.c_uint32),
        ("include", c.POINTER(c.c_char_p)),
        ("exclude", c.POINTER(c.c_char_p)),
        ("rules", c.POINTER(KernelRule)),
    )


COUNTERS = (
    *("launches", "shaped", "prioritised", "carved", "failed", "cooperative", "captured"),
    *("graph_launches", "unknown", "dropped_records"),
)


class Counters(c.Structure):
    _fields_ = tuple((name, c.c_uint64) for name in COUNTERS)


class Row(c.Structure):
    _fields_ = (
        ("name", c.c_char * 256),
        ("function", c.c_uint64),
        *(
            (name, c.c_uint64)
            for name in ("launches", "shaped", "prioritised", "carved", "failed", "captured")
        ),
        *(
            (name, c.c_int32)
            for name in (
                *("role", "threads", "registers", "static_smem", "before", "after"),
                *("blocks_before", "blocks_after", "rule"),
            )
        ),
    )


class Record(c.Structure):
    _fields_ = (
        *((name, c.c_uint64) for name in ("sequence", "ticks", "function", "stream", "blocks")),
        ("thread_id", c.c_uint32),
        *((name, c.c_int32) for name in ("threads", "before", "after", "result")),
        ("cluster", c.c_uint16),
        *((name, c.c_uint8) for name in ("role", "rule", "actions")),
    )


def attribute(number: int, *value: int) -> Attribute:
    return Attribute(number, b"", (c.c_int * 16)(*value))


class Core:
    """Hooks, public ABI and fake driver of one process."""

    def __init__(self, fake: Path, harness: Path) -> None:
        self.fake: Any = c.CDLL(str(fake))
        self.abi: Any = c.CDLL(str(harness))
        self.path = fake
        for name in ("fake_function", "fake_kernel"):
            getattr(self.fake, name).restype = c.c_void_p
        self.abi.harness_hook.restype = c.c_void_p
        self.abi.harness_symbol.restype = c.c_char_p
        self.abi.ovl_rule_name.restype = c.c_char_p
        self.abi.ovl_rule_text.restype = c.c_char_p
        self.abi.ovl_kernel_rows.restype = c.c_size_t
        self.abi.ovl_records_read.restype = c.c_size_t
        self.abi.ovl_kernel_rows.argtypes = (c.c_void_p, c.c_size_t)
        self.abi.ovl_records_read.argtypes = (c.c_void_p, c.c_void_p, c.c_size_t)
        self.abi.ovl_policy_pop.argtypes = (c.c_uint64,)
        self.abi.ovl_role_set_stream.argtypes = (c.c_void_p, c.c_int)
        assert self.abi.harness_attach(str(fake).encode())

    def function(self, name: str = "gemm", registers: int = 128, static: int = 0) -> int:
        return int(self.fake.fake_function(name.encode(), registers, static))

    def hook(self, symbol: str) -> Any:
        address = self.abi.harness_hook(symbol.encode())
        assert address, symbol
        return c.CFUNCTYPE(c.c_int)(address)

    def launch(
        self,
        function: int | None,
        *,
        grid: int = 4096,
        threads: int = 128,
        smem: int = 16384,
        stream: int = 0,
        parameters: int = 0,
        extra: int = 0,
        symbol: str = "cuLaunchKernel",
    ) -> int:
        numbers = (c.c_uint(n) for n in (grid, 1, 1, threads, 1, 1, smem))
        tail = [c.c_void_p(stream), c.c_void_p(parameters)]
        if "Cooperative" not in symbol:
            tail.append(c.c_void_p(extra))
        return int(self.hook(symbol)(c.c_void_p(function), *numbers, *tail))

    def launch_ex(
        self,
        function: int,
        *attributes: Attribute,
        grid: int = 4096,
        threads: int = 128,
        smem: int = 16384,
        stream: int = 0,
        symbol: str = "cuLaunchKernelEx",
    ) -> int:
        array = (Attribute * max(1, len(attributes)))(*attributes)
        config = Config(
            (c.c_uint * 3)(grid, 1, 1),
            (c.c_uint * 3)(threads, 1, 1),
            smem,
            stream,
            array if attributes else None,
            len(attributes),
        )
        before = bytes(config), bytes(array)
        result = int(self.hook(symbol)(c.byref(config), c.c_void_p(function), None, None))
        assert (bytes(config), bytes(array)) == before, "the caller's structures were changed"
        return result

    def push(self, **fields: Any) -> int:
        token = c.c_uint64()
        assert self.push_status(token, **fields) == 0
        return token.value

    def push_status(self, token: Any, **fields: Any) -> int:
        include = [p.encode() for p in fields.pop("include", ())]
        exclude = [p.encode() for p in fields.pop("exclude", ())]
        rules = [KernelRule(p.encode(), *rest) for p, *rest in fields.pop("rules", ())]
        values: dict[str, Any] = {"carveout": -1, "shape_captures": 1, **fields}
        policy = Policy(
            include_count=len(include),
            exclude_count=len(exclude),
            rule_count=len(rules),
            include=(c.c_char_p * len(include))(*include),
            exclude=(c.c_char_p * len(exclude))(*exclude),
            rules=(KernelRule * len(rules))(*rules),
            **values,
        )
        return int(self.abi.ovl_policy_push(c.byref(policy), c.byref(token)))

    def pop(self, token: int) -> int:
        return int(self.abi.ovl_policy_pop(token))

    def calls(self, prefix: str = "cuLaunch") -> list[Call]:
        out = []
        for i in range(self.fake.fake_call_count()):
            call = Call()
            self.fake.fake_call_at(i, c.byref(call))
            if call.symbol.decode().startswith(prefix):
                out.append(call)
        return out

    def counters(self) -> Counters:
        out = Counters()
        self.abi.ovl_counters_read(c.byref(out))
        return out

    def rows(self) -> list[Row]:
        count = self.abi.ovl_kernel_rows(None, 0)
        rows = (Row * max(1, count))()
        self.abi.ovl_kernel_rows(rows, count)
        return list(rows)[:count]

    def row(self, function: int) -> Row:
        (row,) = [row for row in self.rows() if row.function == function]
        return row

    def rule(self, function: int) -> str:
        return str(self.abi.ovl_rule_name(self.row(function).rule).decode())

    def records(self, start: int = 0, capacity: int = 10000) -> tuple[int, list[Record]]:
        cursor = c.c_uint64(start)
        out = (Record * capacity)()
        count = self.abi.ovl_records_read(c.byref(cursor), out, capacity)
        return cursor.value, list(out)[:count]

    def reset(self) -> None:
        self.fake.fake_clear()
        self.abi.ovl_role_set_thread(BY_NAME)
        self.abi.harness_forget_partitions()
        self.abi.ovl_records_listen(-self.abi.ovl_records_listen(0) + 1)
        self.abi.ovl_reset()


@functools.cache
def libraries(options: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """Build the fake driver and the harness, once per test process."""
    ready = os.environ.get("OVERLAPCTL_TEST_LIBRARIES")
    if ready:
        return Path(ready) / "libcuda_fake.so", Path(ready) / "libharness.so"
    folder = Path(tempfile.mkdtemp(prefix="overlapctl-core-"))
    shared = ("-shared", "-fPIC", "-fvisibility=hidden", "-I", str(FAKE), *options)
    fake = shim_build.compile_c(folder / "libcuda_fake.so", [FAKE / "fake_driver.c"], *shared)
    harness = shim_build.compile_c(
        folder / "libharness.so", [*CORE_SOURCES, FAKE / "harness.c"], *shared
    )
    return fake, harness


@functools.cache
def core() -> Core:
    return Core(*libraries())


def sanitized(program: Path, source: Path, checks: str) -> Path:
    """Build `source` with the core under the compiler's `checks`; skip where it has none."""
    # GCC's thread sanitizer refuses fences, which it does not model; what it checks stays sound.
    options = [f"-fsanitize={checks}", "-g", "-Wno-tsan"] if checks else []
    if checks:
        probe = program.with_name("probe.c")
        probe.write_text("int main(void) { return 0; }")
        built = subprocess.run(
            [str(shim_build.COMPILER), *options, str(probe), "-o", str(probe.with_suffix(""))],
            capture_output=True,
        )
        if built.returncode or subprocess.run([probe.with_suffix("")]).returncode:
            pytest.skip(f"the compiler has no {checks} sanitizer that runs here")
    fake, _ = libraries()
    return shim_build.compile_c(
        program,
        [*CORE_SOURCES, FAKE / "harness.c", source],
        *options,
        "-I",
        str(FAKE),
        str(fake),
        f"-Wl,-rpath,{fake.parent}",
    )
