import pytest

from overlapctl.launch.conflicts import Conflict, find_conflicts


def mapped(path: str) -> str:
    return (
        "7f0000000000-7f0000001000 r-xp 00000000 08:01 42    /usr/lib/libc.so.6\n"
        f"7f0000002000-7f0000003000 r-xp 00000000 08:01 43    {path}\n"
        "7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0    [stack]\n"
        "7f0000004000-7f0000005000 rw-p 00000000 00:00 0\n"
    )


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        ("/opt/nvidia/nsight-systems/2025.1/libToolsInjection64.so", "Nsight Systems"),
        ("/opt/nsight compute/libcuda-injection.so", "Nsight Compute"),
        ("/usr/lib/libcuinj64.so.12.8", "nvprof"),
        ("/usr/local/cuda/compute-sanitizer/libsanitizer-collection.so", "compute-sanitizer"),
        ("/usr/lib/x86_64-linux-gnu/libcudadebugger.so.1", "cuda-gdb"),
    ],
)
def test_tools_are_found_among_the_loaded_libraries(path, tool):
    assert find_conflicts({}, mapped(path)) == (Conflict(tool, f"{path} is loaded"),)


@pytest.mark.parametrize(
    ("variable", "value", "tool"),
    [
        ("CUDA_INJECTION64_PATH", "/opt/libToolsInjection64.so", "Nsight Systems"),
        ("NVTX_INJECTION64_PATH", "/opt/libToolsInjection64.so", "Nsight Systems"),
        ("CUDA_INJECTION64_PATH", "/x/mine.so", "the CUDA injection library mine.so"),
        ("NSYS_PROFILING_SESSION_ID", "77", "Nsight Systems"),
        ("NV_COMPUTE_PROFILER_PERFWORKS_DIR", "/opt", "Nsight Compute"),
    ],
)
def test_tools_are_found_in_the_environment(variable, value, tool):
    assert [c.tool for c in find_conflicts({variable: value}, "")] == [tool]


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({}, "/venv/nvidia/cuda_cupti/lib/libcupti.so.13"),
        ({"CUDA_INJECTION64_PATH": "none"}, "/usr/lib/libm.so.6"),
        ({"CUDA_INJECTION64_PATH": ""}, "/usr/lib/libcuda.so.580"),
        ({"CUDA_INJECTION64_PATH": "/venv/libkineto.so"}, "/venv/libtorch_cuda.so"),
        ({"NVTX_INJECTION64_PATH": "/x/annotations.so"}, "/usr/lib/libm.so.6"),
    ],
)
def test_the_pytorch_profiler_and_listeners_are_no_conflict(environ, path):
    assert find_conflicts(environ, mapped(path)) == ()


def test_a_tool_seen_twice_is_told_once():
    found = find_conflicts(
        {"CUDA_INJECTION64_PATH": "/o/libToolsInjection64.so"}, mapped("/o/libToolsInjection64.so")
    )
    assert found == (Conflict("Nsight Systems", "CUDA_INJECTION64_PATH=/o/libToolsInjection64.so"),)


def test_this_process_has_none():
    assert find_conflicts({}) == ()
