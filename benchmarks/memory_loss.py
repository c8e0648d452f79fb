"""Peak memory and time of the loss over GPT-2's vocabulary, chunked and plain.

    python benchmarks/memory_loss.py            # records results/memory_loss.json

This runs a forward and backward of the loss alone: 2,048 tokens, hidden 768, vocabulary 50,257,
including the gradients of hidden states and weight (147 MiB for the weight's). Each memory figure
comes from a fresh process, once from the allocator's events (tensors in addition to those that
existed before) and once from the kernel's peak of resident memory. Times come from one process that
alternates plain, chunked, chunked, plain.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOKENS, HIDDEN, VOCAB = 2048, 768, 50257
KINDS = ("plain", "chunked")
DTYPES = ("fp32", "bf16")


def make_step(kind: str, dtype: str, tokens: int = TOKENS) -> Callable[[], float]:
    """Return a forward and backward of the loss, as in `outpace train` with this precision."""
    import torch

    from outpace.nn.loss import linear_loss_sum

    low = {"fp32": None, "bf16": torch.bfloat16}[dtype]
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=draw).requires_grad_()
    weight = (torch.randn(VOCAB, HIDDEN, generator=draw) * 0.02).requires_grad_()
    targets = torch.randint(VOCAB, (tokens,), generator=draw)

    def step() -> float:
        hidden.grad = weight.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low is not None):
            loss = linear_loss_sum(hidden, weight, None, targets, kind, low)  # type: ignore[arg-type]
        (loss / tokens).backward()
        return loss.item() / tokens

    return step


def tensor_peak(step: Callable[[], float]) -> tuple[int, float]:
    """Return the bytes of the step's live tensors at their peak, and the loss."""
    from outpace.trace.allocations import Allocations

    with Allocations() as allocated:
        loss = step()
    return allocated.peak_bytes, loss


def resident_peak(step: Callable[[], float]) -> tuple[int | None, float]:
    """Return the peak increase of resident memory in bytes (None except on Linux), and the loss."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    except OSError:
        return None, step()
    before = _status("VmRSS")
    loss = step()
    return _status("VmHWM") - before, loss


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure_memory(measure: str, kind: str, dtype: str) -> None:
    """Print one figure, in a fresh process."""
    make_step(kind, dtype, tokens=8)()  # start thread pools and libraries
    step = make_step(kind, dtype)
    peak, loss = (tensor_peak if measure == "tensors" else resident_peak)(step)
    print(json.dumps({"bytes": peak, "loss": loss}))


def in_fresh_process(measure: str, kind: str, dtype: str) -> dict[str, Any]:
    """Return the figure that a new interpreter prints."""
    command = [sys.executable, __file__, "--worker", measure, kind, dtype]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figure: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figure


def measure_times(dtype: str, repeats: int) -> dict[str, Any]:
    """Return the seconds of each step, alternating between the two kinds."""
    steps = {kind: make_step(kind, dtype) for kind in KINDS}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for step in steps.values():
        step()
    for repeat in range(repeats):
        for kind in KINDS if repeat % 2 == 0 else reversed(KINDS):
            start = time.perf_counter()
            steps[kind]()
            times[kind].append(time.perf_counter() - start)
    ratios = [c / p for c, p in zip(times["chunked"], times["plain"], strict=True)]
    return {"seconds": times, "median_chunked_over_plain": statistics.median(ratios)}


def measure_all(memory_repeats: int, time_repeats: int) -> dict[str, Any]:
    """Measure all cases with all repeats."""
    cases = {}
    for dtype in DTYPES:
        case: dict[str, Any] = {}
        for measure in ("tensors", "resident"):
            found = {
                kind: [in_fresh_process(measure, kind, dtype) for _ in range(memory_repeats)]
                for kind in KINDS
            }
            case[f"{measure}_peak"] = found
            middle = {
                kind: statistics.median(run["bytes"] for run in found[kind])
                for kind in KINDS
                if all(run["bytes"] is not None for run in found[kind])
            }
            case[f"{measure}_chunked_over_plain"] = (
                middle["chunked"] / middle["plain"] if len(middle) == 2 else None
            )
        case["time"] = measure_times(dtype, time_repeats)
        cases[dtype] = case
    return cases


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--memory-repeats", type=int, default=3)
    parser.add_argument("--time-repeats", type=int, default=8)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        measure_memory(*asked.worker)
        return
    from recording import save

    cases = measure_all(asked.memory_repeats, asked.time_repeats)
    shape = {"tokens": TOKENS, "hidden": HIDDEN, "vocab": VOCAB}
    path = save("memory_loss", {"shape": shape, "cases": cases})
    for dtype, case in cases.items():
        for kind in KINDS:
            tensors = statistics.median(run["bytes"] for run in case["tensors_peak"][kind])
            print(f"{dtype} {kind}: {tensors / 2**20:.0f} MiB of tensors")
        print(
            f"{dtype} chunked over plain: memory {case['tensors_chunked_over_plain']:.3f}, "
            f"time {case['time']['median_chunked_over_plain']:.3f}"
        )
    print(path)


if __name__ == "__main__":
    main()
