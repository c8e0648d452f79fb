"""Memory of a BERT classifier with and without 16-bit autocast, by batch size; and its speed.

    python benchmarks/mixed_precision_memory.py --part traced   # records ..._traced.json, no GPU
    python benchmarks/mixed_precision_memory.py --part cpu      # ..._cpu.json
    python benchmarks/mixed_precision_memory.py --part speed    # ..._speed.json, 2 processes
    python benchmarks/mixed_precision_memory.py --quick         # two layers, records nothing

traced: the case that Hugging Face published (transformers' guide "Performance and Scalability" of
2021; the figures are from huggingface/transformers#9742): run_glue.py, bert-base-cased, MRPC,
sequences of 128, DDP on 2 GPUs, a torch 1.8 pre-release and transformers 4.3, read from nvidia-smi.
`traced_memory.py` derives it from the model's real code with that software's rules, and with
today's. Nothing is fitted: if the derivation is correct, what nvidia-smi shows beyond the
allocator's reserve (CUDA's context, NCCL) is the same constant for all rows, which is shown.

cpu: the same model on this machine, forward, backward and AdamW, each in a fresh process: the peak
of live tensors from the allocator's events, the peak of anonymous resident memory (RssAnon), and
the prediction of fake tensors for the same step.

speed: steps of a small transformer in fp32 and bf16 under each strategy, alternating, with one
thread per process.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from contests import Contest, run
from overhead import interval

MIB = 2**20
SEQ_LEN, LAYERS, VOCAB = 128, 12, 28996  # bert-base-cased
# MRPC has 3,668 training pairs (Dolan and Brockett 2005; GLUE, table 1: 3.7k), on 2 GPUs.
SHARE = 3668 // 2
BATCHES = (1, 2, 4, 8, 16, 32, 64)
# MiB without and with --fp16, as published.
PUBLISHED = {8: (4247, 4163), 16: (4971, 4793), 32: (6827, 6207), 64: (10037, 8061)}
TARGETS = {32: 620, 64: 1976}
TOLERANCE = 0.25
LIMITS_GIB = (3, 4, 6, 8)

SPEED_SPEC = {"family": "llama", "layers": 4, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 704,
              "vocab": 2048, "max_positions": 256, "tied": True}  # fmt: skip
SPEED_STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "tp", "gpipe")
SPEED_BATCH, SPEED_SEQ_LEN = 8, 256


def bf16_units(cpu_features: tuple[str, ...], capability: tuple[int, int] | None) -> str | None:
    """Return the name of the units that multiply bf16 matrices, if this hardware has any.

    `cpu_features` are as in /proc/cpuinfo, `capability` is a CUDA device's (8.0, Ampere, is the
    first with bf16: CUDA C++ Programming Guide, "Compute Capabilities"). AVX-512's units are wide,
    but not matrix units.
    """
    if capability is not None:
        return "tensor cores" if capability >= (8, 0) else None
    for feature, name in (
        ("amx_bf16", "AMX tiles"),
        ("sve_bf16", "SVE bf16 instructions"),
        ("avx512_bf16", "AVX-512 bf16 instructions"),
    ):
        if feature in cpu_features:
            return name
    return None


def fp16_units(cpu_features: tuple[str, ...], capability: tuple[int, int] | None) -> str | None:
    """Return the same for fp16: tensor cores from 7.0 (Volta) on; torch uses none on CPUs."""
    return "tensor cores" if capability is not None and capability >= (7, 0) else None


def classifier(layers: int) -> Any:
    """Build BERT as `run_glue.py` does, with attention's scores in memory."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCAB, num_hidden_layers=layers, attn_implementation="eager", num_labels=2
    )
    return BertForSequenceClassification(config).train()


def batch_of(size: int) -> dict[str, Any]:
    """Return pairs padded by one position: without padding, transformers omits the mask."""
    import torch

    tokens = torch.ones(size, SEQ_LEN, dtype=torch.int64)
    mask = torch.ones_like(tokens)
    mask[:, -1] = 0
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "token_type_ids": torch.zeros_like(tokens),
        "labels": torch.zeros(size, dtype=torch.int64),
    }


# traced


def trace_documented(size: int, low: Any, of_2021: bool, layers: int) -> dict[str, float]:
    """Return peaks in MiB, including the end of an epoch, whose last batch is smaller."""
    from traced_memory import Case, trace_training

    last = SHARE % size
    batches = [size] * 3 + ([last] if last else []) + [size] * 2
    peaks = trace_training(
        lambda: classifier(layers), batch_of, Case(batches, low, of_2021, ddp=True)
    )
    return {
        "allocated_mib": peaks.allocated_bytes / MIB,
        "reserved_mib": peaks.reserved_bytes / MIB,
    }


def traced(batches: tuple[int, ...], layers: int) -> dict[str, Any]:
    """Return all rows by both sets of rules, next to the published figures."""
    import torch

    rules: dict[str, Any] = {}
    for name, of_2021 in (("torch-1.8", True), ("today", False)):
        rows = rules[name] = {}
        for size in batches:
            row: dict[str, Any] = {
                "fp32": trace_documented(size, None, of_2021, layers),
                "fp16": trace_documented(size, torch.float16, of_2021, layers),
            }
            for kind in ("allocated", "reserved"):
                key = f"{kind}_mib"
                row[f"{kind}_saving_mib"] = row["fp32"][key] - row["fp16"][key]
            rows[str(size)] = row
            show = {key: round(row[f"{key}_saving_mib"]) for key in ("allocated", "reserved")}
            print(f"{name} batch {size}: saved {show}", file=sys.stderr, flush=True)
    return {"rules": rules, "published_mib": {str(k): v for k, v in PUBLISHED.items()}}


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """Compare the published savings with the traced ones; return the constant that remains."""
    rows = found["rules"]["torch-1.8"]
    verdicts = {}
    for size, target in TARGETS.items():
        got = rows[str(size)]["reserved_saving_mib"]
        off = got / target - 1
        verdicts[str(size)] = {
            "published_mib": target, "traced_mib": got, "off": off,
            "reached": abs(off) <= TOLERANCE,
        }  # fmt: skip
    rest = {
        f"{size} {precision}": reading - rows[str(size)][precision]["reserved_mib"]
        for size, readings in PUBLISHED.items()
        for precision, reading in zip(("fp32", "fp16"), readings, strict=True)
    }
    return {"verdicts": verdicts, "beyond_reserve_mib": rest, "tolerance": TOLERANCE}


# cpu


def cpu_step(model: Any, optimizer: Any, size: int, precision: str) -> None:
    """Run forward, backward and AdamW, and free the gradients."""
    import torch

    cast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()
    with cast:
        loss = model(**batch_of(size)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def cpu_worker(size: int, precision: str, layers: int) -> dict[str, Any]:
    """Return the peaks of a step, and those that fake tensors predict, in a fresh process."""
    import torch

    from outpace.trace.allocations import Allocations
    from outpace.trace.resident import anonymous_bytes, resident_growth

    model = classifier(layers)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=2e-5, foreach=False)
    cpu_step(model, optimizer, 1, precision)  # from here on, the optimizer has its state
    kept = 3 * sum(p.nbytes for p in parameters) + sum(b.nbytes for b in model.buffers())
    before = anonymous_bytes()
    with resident_growth(0.005) as grown, Allocations() as allocated:
        began = time.perf_counter()
        cpu_step(model, optimizer, size, precision)
        seconds = time.perf_counter() - began
    return {
        "tensors_bytes": kept + allocated.peak_bytes,
        "anonymous_bytes": None if before is None else before + grown[0],
        "anonymous_before_bytes": before,
        "traced_bytes": trace_cpu(size, precision, layers),
        "step_s": seconds,
    }


def trace_cpu(size: int, precision: str, layers: int) -> int:
    """Return the peak of the same step under fake tensors."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from outpace.trace.tracker import Tracker

    tracker = Tracker()
    with FakeTensorMode(), tracker:
        model = classifier(layers)
        tracker.record([*model.parameters(), *model.buffers()])
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, foreach=False)
        cpu_step(model, optimizer, 1, precision)
        tracker.peak_bytes = tracker.live_bytes
        cpu_step(model, optimizer, size, precision)
    return tracker.peak_bytes


def on_cpu(batches: tuple[int, ...], layers: int) -> dict[str, Any]:
    """Measure each batch size in each precision in separate processes, and what fits limits."""
    rows: dict[str, Any] = {}
    for size in batches:
        for precision in ("fp32", "bf16"):
            command = [sys.executable, __file__, "--worker", str(size), precision, str(layers)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            one = json.loads(done.stdout.splitlines()[-1])
            rows.setdefault(str(size), {})[precision] = one
            print(size, precision, one, file=sys.stderr, flush=True)
    fits = {
        str(limit): {
            precision: max(
                (int(s) for s, row in rows.items()
                 if row[precision]["tensors_bytes"] <= limit * 2**30),
                default=None,
            )
            for precision in ("fp32", "bf16")
        }
        for limit in LIMITS_GIB
    }  # fmt: skip
    return {"rows": rows, "largest_batch_by_limit_gib": fits, "layers": layers}


# speed


def speed(rounds: int) -> dict[str, Any]:
    """Measure every strategy in both precisions, in turn, and list the hardware's 16-bit units."""
    from outpace.catalog.accelerators import find_accelerator
    from outpace.probing.hardware.machine import identify

    found: dict[str, Any] = {}
    for processes, strategies in ((1, ("single",)), (2, SPEED_STRATEGIES)):
        entries = {
            f"{strategy} {precision}": {"strategy": strategy, "precision": precision}
            for strategy in strategies
            for precision in ("fp32", "bf16")
        }
        took = run(Contest(SPEED_SPEC, SPEED_BATCH, SPEED_SEQ_LEN, entries), processes, rounds)
        for strategy in strategies:
            found[strategy] = {name: took[f"{strategy} {name}"] for name in ("fp32", "bf16")}
    for one in found.values():
        pairs = zip(one["fp32"]["seconds"], one["bf16"]["seconds"], strict=True)
        one["speedup"], one["low"], one["high"] = interval([a / b for a, b in pairs])
    features = identify(find_accelerator).cpu_features
    return {
        "strategies": found,
        "units": {"bf16": bf16_units(features, None), "fp16": fp16_units(features, None)},
        "shape": {"model": SPEED_SPEC, "global_batch": SPEED_BATCH, "seq_len": SPEED_SEQ_LEN},
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("traced", "cpu", "speed"), help="default: all")
    parser.add_argument("--batch", type=int, action="append", help="default: 1 to 64")
    parser.add_argument("--rounds", type=int, default=16, help="of pairs, for speed")
    parser.add_argument("--quick", action="store_true", help="small; nothing is recorded")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        size, precision, layers = asked.worker
        print(json.dumps(cpu_worker(int(size), precision, int(layers))))
        return
    from recording import save

    batches = tuple(asked.batch or ((8, 64) if asked.quick else BATCHES))
    layers = 2 if asked.quick else LAYERS
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "traced": lambda: traced(batches, layers),
        "cpu": lambda: on_cpu(batches[:1] if asked.quick else batches, layers),
        "speed": lambda: speed(2 if asked.quick else asked.rounds),
    }
    for part in [asked.part] if asked.part else makers:
        found = makers[part]()
        if part == "traced" and not asked.quick and not asked.batch:
            found.update(judged(found))
            print(json.dumps({k: v for k, v in found.items() if k != "rules"}, indent=1))
        if part == "speed":
            for name, one in found["strategies"].items():
                print(f"{name:8} bf16 {one['speedup']:.2f} times as fast as fp32 "
                      f"({statistics.median(one['fp32']['seconds']) * 1000:.0f} ms)")  # fmt: skip
        if not asked.quick:
            print(save(f"mixed_precision_{part}", found))


if __name__ == "__main__":
    main()
