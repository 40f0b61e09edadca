"""Runs common operations shaped and unshaped and prints what the GPU really launched, as JSON.

``python reach_program.py {before|after|threads|preload}``: when the shim attaches - before CUDA is
initialised, after it, while eight threads launch, or by preload (started by ``overlapctl run``).
"""

import json
import sys
import tempfile
import threading
from pathlib import Path

import torch
import triton
import triton.language as tl

import overlapctl
from overlapctl.launch.attach import ensure_attached

PAD = 1024


@triton.jit
def read_dynamic_size(out):
    size = tl.inline_asm_elementwise(
        "mov.u32 $0, %dynamic_smem_size;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(out, size)


def operations():
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    a, b = torch.randn(2048, 2048, **bf16), torch.randn(2048, 2048, **bf16)
    f, g = torch.randn(2048, 2048, device="cuda"), torch.randn(2048, 2048, device="cuda")
    q = torch.randn(2, 8, 1024, 128, **bf16)
    image, weight = torch.randn(8, 64, 56, 56, **bf16), torch.randn(64, 64, 3, 3, **bf16)
    norm = torch.randn(4096, 2048, **bf16)
    attention = torch.nn.functional.scaled_dot_product_attention
    compiled = torch.compile(lambda x: torch.nn.functional.gelu(x * 2 + 1).sum(-1))

    def flash():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return attention(q, q, q)

    def backward():
        x = a.detach().requires_grad_()
        (x @ b).float().square().mean().backward()
        return x.grad

    def triton_kernel():
        out = torch.zeros(1, device="cuda", dtype=torch.int32)
        read_dynamic_size[(1,)](out)
        return out

    return {
        "cublas_bf16": lambda: a @ b,
        "cublas_fp32": lambda: f @ g,
        "aten_elementwise": lambda: torch.add(f, 1.0),
        "layer_norm": lambda: torch.nn.functional.layer_norm(norm, (2048,)),
        "flash_attention": flash,
        "convolution": lambda: torch.nn.functional.conv2d(image, weight, padding=1),
        "torch_compile": lambda: compiled(f),
        "backward": backward,
        "triton": triton_kernel,
    }


def profiled_kernels(run):
    """Kernels of one run as the profiler's activity records have them: name and shared memory."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [
        {"name": e["name"], "smem": e["args"]["shared memory"]}
        for e in events
        if e.get("cat") == "kernel"
    ]


def captured(run):
    """Capture `run` inside the region, replay outside it: the sizes stay in the graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with overlapctl.overlap(PAD, strict=True) as session, torch.cuda.graph(graph):
        out = run()
    graph.replay()
    torch.cuda.synchronize()
    kernels = profiled_kernels(graph.replay)
    return {
        "captured": sum(k.captured for k in session.explain().kernels),
        "kernels": kernels,
        "value": out.float().sum().item(),
    }


def attach_while_threads_launch():
    stop = threading.Event()
    x = torch.randn(256, 256, device="cuda")
    torch.cuda.synchronize()

    def launch():
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                torch.add(x, 1.0)

    threads = [threading.Thread(target=launch) for _ in range(8)]
    for thread in threads:
        thread.start()
    attachment = ensure_attached()
    with overlapctl.overlap(PAD, strict=True) as session:
        stop.wait(0.2)
    stop.set()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    return attachment, session.stats().shaped


def main():
    mode = sys.argv[1]
    report = {"mode": mode, "operations": {}}
    if mode == "before":
        assert not torch.cuda.is_initialized()
        attachment = ensure_attached()
    elif mode == "threads":
        attachment, report["shaped_by_threads"] = attach_while_threads_launch()
    else:
        torch.zeros(1, device="cuda").add_(1)
        attachment = ensure_attached()
    report["kind"] = attachment.kind
    for name, run in operations().items():
        run()
        torch.manual_seed(1)
        plain = run()
        before = profiled_kernels(run)
        with overlapctl.overlap(PAD, strict=True) as session:
            shaped = run()
            torch.cuda.synchronize()
            after = profiled_kernels(run)
        report["operations"][name] = {
            "equal": torch.equal(plain, shaped) if name != "triton" else None,
            "value": shaped.flatten()[0].item() if name == "triton" else None,
            "before": before,
            "after": after,
            "rows": [
                {
                    "kernel": k.kernel,
                    "static": k.static_smem,
                    "before": k.before,
                    "after": k.after,
                    "shaped": k.shaped,
                    "rule": k.rule.value,
                    "failed": k.failed,
                }
                for k in session.explain().kernels
            ],
        }
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    a, b = torch.randn(1024, 1024, **bf16), torch.randn(1024, 1024, **bf16)
    report["graph"] = captured(lambda: torch.relu(a @ b))
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
