"""The machine, and upper bounds of its rates."""

import importlib.metadata
import shutil
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from recording import circumstances

from gpu.check import Check

_PACKAGES = ("triton", "pydantic", "torchao", "accelerate", "peft", "scipy", "nvidia-ml-py")
_SMI_COLUMNS = ("name", "driver_version", "power.limit", "clocks.max.sm", "clocks.max.mem",
                "clocks.current.sm", "persistence_mode", "ecc.mode.current", "mig.mode.current",
                "compute_mode")  # fmt: skip


def environment(check: Check) -> None:
    """Record machine, versions and commit, which accompany every figure."""
    check.put("circumstances", circumstances())
    check.put("packages", {name: _version(name) for name in _PACKAGES})
    if check.cuda:
        properties = torch.cuda.get_device_properties(0)
        check.put("device", {
            "name": properties.name, "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size, "cudnn": torch.backends.cudnn.version(),
            "capability": list(torch.cuda.get_device_capability()), **_smi(),
        })  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _smi() -> dict[str, str]:
    if shutil.which("nvidia-smi") is None:
        return {}
    query = f"--query-gpu={','.join(_SMI_COLUMNS)}"
    done = subprocess.run(["nvidia-smi", query, "--id=0", "--format=csv,noheader"],
                          capture_output=True, text=True, timeout=20, check=False)  # fmt: skip
    cells = [cell.strip() for cell in done.stdout.strip().split(",")]
    return dict(zip(_SMI_COLUMNS, cells, strict=False))


def seconds(check: Check, call: Callable[[], object], for_s: float = 0.15, warm: int = 3) -> Any:
    """Return the duration of every call, by events on a GPU, whose queue is kept full."""
    for _ in range(warm):
        call()
    if not check.cuda:
        began_s = time.perf_counter()
        call()
        return [time.perf_counter() - began_s]
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True)]
    marks[0].record()
    until_s = time.perf_counter() + for_s
    while time.perf_counter() < until_s or len(marks) < 6:
        call()
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        if len(marks) > 3:  # keep a few calls ahead of the device, not hundreds
            marks[-3].synchronize()
    torch.cuda.synchronize()
    return [one.elapsed_time(other) / 1e3 for one, other in pairwise(marks)]


def device_seconds(check: Check, call: Callable[[], object], calls: int = 5) -> float | None:
    """Return the sum of a call's kernel times, without launches; None without a GPU."""
    if not check.cuda:
        return None
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in seen.key_averages()) / calls / 1e6


def rate(check: Check, amount: float, call: Callable[[], object]) -> dict[str, Any]:
    """Return `amount` (bytes or FLOPs) per second: the median, and every duration."""
    times = seconds(check, call)
    return {"rate": amount / median(times), "times_s": times[:50]}


def ceilings(check: Check) -> None:
    """Measure matmuls, copies, and the head of GPT-2 with and without padding."""
    check.row("bf16 products", 3.0, lambda: _matmuls(check))
    if check.cuda:
        check.row("fp8 products", 3.0, lambda: _fp8_matmuls(check))
    check.row("copies", 3.0, lambda: _copies(check))
    for vocab in (512,) if check.small else (50257, 50304):
        check.row(f"head of {vocab:,}", 3.0, lambda vocab=vocab: _head(check, vocab))


def _matmuls(check: Check) -> dict[str, Any]:
    found = {}
    for size in (128,) if check.small else (4096, 8192):
        a, b = (torch.randn(size, size, device=check.device, dtype=torch.bfloat16)
                for _ in range(2))  # fmt: skip
        found[f"{size}"] = rate(check, 2 * size**3, lambda a=a, b=b: a @ b)
    return {**found, "best_flops_per_s": max(one["rate"] for one in found.values())}


def _fp8_matmuls(check: Check) -> dict[str, Any]:
    size, one = 8192, torch.ones((), device="cuda")
    a, b = (torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))

    def matmul(fast: bool) -> object:
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return {f"fast accumulation {fast}": rate(check, 2 * size**3, lambda fast=fast: matmul(fast))
            for fast in (False, True)}  # fmt: skip


def _copies(check: Check) -> dict[str, Any]:
    count = 1 << (16 if check.small else 28)
    x, y = (torch.empty(count, device=check.device) for _ in range(2))
    found = {"on the device": rate(check, 2 * x.nbytes, lambda: y.copy_(x))}
    if check.cuda:
        on_device = y[: count // 4]
        pinned = torch.empty(count // 4, pin_memory=True)
        pageable = torch.empty(count // 4)
        size = pinned.nbytes
        found |= {
            "pinned to device": rate(
                check, size, lambda: on_device.copy_(pinned, non_blocking=True)
            ),
            "device to pinned": rate(
                check, size, lambda: pinned.copy_(on_device, non_blocking=True)
            ),
            "device to pageable": rate(check, size, lambda: pageable.copy_(on_device)),
        }
    return found


def _head(check: Check, vocab: int) -> dict[str, Any]:
    tokens, width = (64, 32) if check.small else (16384, 768)
    make = torch.randn
    hidden = make(tokens, width, device=check.device, dtype=torch.bfloat16)
    weight = make(vocab, width, device=check.device, dtype=torch.bfloat16)
    grad = make(tokens, vocab, device=check.device, dtype=torch.bfloat16)
    flops = 2 * tokens * width * vocab
    return {
        "forward": rate(check, flops, lambda: hidden @ weight.t()),
        "gradient of the hidden states": rate(check, flops, lambda: grad @ weight),
        "gradient of the weights": rate(check, flops, lambda: grad.t() @ hidden),
    }
