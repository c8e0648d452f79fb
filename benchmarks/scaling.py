"""Growth of the costs for which users wait: each cost as a curve, with its exponent.

    python benchmarks/scaling.py                    # records results/scaling.json; ~30 minutes
    python benchmarks/scaling.py --curve report     # repeats this curve; keeps the others
    python benchmarks/scaling.py --quick            # a quick check, records nothing

A curve is a cost at several sizes, each measured several times, small and large in turn. Its
exponent is that of the power law through the upper half of its sizes, by least squares over the
logarithms of medians: 1 is linear, 2 quadratic. Each has an upper bound, with the reason; excesses
above the tolerance are reported. Steps and memory are those of outpace's own training code on
random tokens, with each size in a separate process.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recording import RESULTS, save

TOLERANCE = 0.1  # of an exponent
STEPS = 4  # timed steps per size
_SPEC = {"family": "llama", "layers": 2, "hidden": 256, "heads": 4, "kv_heads": 4, "vocab": 1024}
_SEQ_LEN = 256


@dataclass(frozen=True)
class Curve:
    """A cost by size. `measure` returns costs by name ("s", "bytes", …) for one size."""

    sizes: Sequence[int]
    quick: Sequence[int]
    measure: Callable[[int, Path], dict[str, float]]
    of: str
    most: dict[str, float]  # exponents, by the cost's name
    because: str
    repeats: int = 3


def step_of(**changes: int) -> dict[str, float]:
    """Return the seconds of a step and the peak bytes of tensors, from a separate process."""
    words = [sys.executable, __file__, "--step", json.dumps(changes)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def one_step(changes: dict[str, int]) -> None:
    """Run the step for `step_of`."""
    import torch
    from strategy_run import StrategyRun

    from outpace.jobs.ranks.process_groups import process_groups
    from outpace.records.model import ModelSpec
    from outpace.records.plan import Plan
    from outpace.records.ranks import Ranks
    from outpace.training.synthetic import SyntheticTraining

    seq_len = changes.pop("seq_len", _SEQ_LEN)
    batch = changes.pop("batch", 1)
    hidden = changes.get("hidden", _SPEC["hidden"])
    spec = {**_SPEC, "ffn": 8 * int(hidden) // 3, "max_positions": seq_len, **changes}
    course = SyntheticTraining(ModelSpec.parse(spec, "scaling"), batch, seq_len)
    with process_groups(Ranks(), torch.device("cpu"), 300.0) as groups:
        contender = StrategyRun(Plan(micro_batch=batch), course, groups)
        took = [contender.step().seconds for _ in range(STEPS)]
    print(json.dumps({"s": statistics.median(took), "bytes": contender.cost.peak_bytes}))


def layers(size: int, _: Path) -> dict[str, float]:
    return step_of(layers=size)


def width(size: int, _: Path) -> dict[str, float]:
    return step_of(hidden=size, heads=size // 64, kv_heads=size // 64)


def sequence(size: int, _: Path) -> dict[str, float]:
    return step_of(seq_len=size, layers=1, hidden=64, heads=1, kv_heads=1)


def vocabulary(size: int, _: Path) -> dict[str, float]:
    return step_of(vocab=size, layers=1, hidden=64, heads=1, kv_heads=1)


def tokenising(megabytes: int, folder: Path) -> dict[str, float]:
    """Tokenize copies of the default corpus, in which each document has words of its own."""
    path = folder / f"{megabytes}.jsonl"
    if not path.is_file():
        write_corpus(path, megabytes * 10**6)
    code = (
        "import sys, time, resource, pathlib\n"
        "from outpace.data.corpus import prepare\n"
        "from outpace.data.tokenizer import train_tokenizer\n"
        "path, cache = map(pathlib.Path, sys.argv[1:])\n"
        "with path.open() as file:\n"
        "    texts = [file.readline() for _ in range(200)]\n"
        "tokenizer = train_tokenizer(iter(texts), 4096)\n"
        "began = time.perf_counter()\n"
        "prepare((str(path),), weights=None, text_field='text', tokenizer=tokenizer,\n"
        "        cache_dir=cache, split='all', eval_fraction=0.05, processes=2)\n"
        "took = time.perf_counter() - began\n"
        "peak = max(resource.getrusage(who).ru_maxrss << 10\n"
        "           for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))\n"
        "print(took, peak)\n"
    )
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        words = [sys.executable, "-c", code, str(path), cache]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
    took_s, peak = map(float, done.stdout.split())
    return {"s": took_s, "bytes": peak}


def write_corpus(path: Path, size: int) -> None:
    """Write a .jsonl file of `size` bytes."""
    from outpace.data.sources import open_source

    texts = [one.read_text(errors="replace") for one in open_source("stdlib").files]
    chance, written = random.Random(0), 0
    with path.open("w") as file:
        while written < size:
            text = chance.choice(texts)
            text = text.replace("self", f"name_{chance.randrange(10**6)}")
            written += file.write(json.dumps({"text": text}) + "\n")


def shards(count: int, folder: Path) -> dict[str, float]:
    """Open data of `count` tokenized files."""
    from outpace.data.corpus import prepare
    from outpace.data.tokenizer_training import train_tokenizer

    where = folder / f"shards-{count}"
    tokenizer = train_tokenizer(iter(["some words to know"] * 100), 300)

    def opened() -> float:
        began = time.perf_counter()
        prepare((str(where),), weights=None, text_field="text", tokenizer=tokenizer,
                cache_dir=folder / "cache", split="all", eval_fraction=0.05,
                processes=2)  # fmt: skip
        return time.perf_counter() - began

    if not where.is_dir():
        for number in range(count):
            part = where / f"{number // 1000:03d}"
            part.mkdir(parents=True, exist_ok=True)
            (part / f"{number}.txt").write_text(f"some words, and the number {number}\n")
        opened()
    return {"s": opened()}


def ranks(count: int, folder: Path) -> dict[str, float]:
    """Return the seconds from the command to the first step's line."""
    spec, out = folder / "spec.json", folder / f"ranks-{count}-{time.monotonic_ns()}"
    spec.write_text(json.dumps({**_SPEC, "hidden": 64, "ffn": 128, "max_positions": 64}))
    words = [sys.executable, "-m", "outpace", "train", "--model", str(spec), "--nproc", str(count),
             "--seq-len", "32", "--global-batch", str(count), "--steps", "1", "--threads", "1",
             "--measure-only", "--sample-tokens", "0", "--eval-batches", "1", "--out",
             str(out)]  # fmt: skip
    began = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        metrics = out / "metrics.jsonl"
        while process.poll() is None and not (metrics.is_file() and metrics.stat().st_size):
            time.sleep(0.01)
        took_s = time.perf_counter() - began
    assert process.returncode == 0
    return {"s": took_s}


def planner_devices(count: int, _: Path) -> dict[str, float]:
    from outpace.jobs.planning.request import PlanQuestion, job
    from outpace.planner.plan import plans

    asked = PlanQuestion("llama-3-70b", "hgx-h100", nodes=count // 8, seq_len=8192)
    began = time.perf_counter()
    answer = plans(job(asked))
    return {"s": time.perf_counter() - began, "plans": float(answer.considered)}


def planner_layers(count: int, folder: Path) -> dict[str, float]:
    from outpace.jobs.planning.request import PlanQuestion, job
    from outpace.planner.plan import plans

    spec = folder / f"layers-{count}.json"
    spec.write_text(json.dumps({"family": "llama", "layers": count, "hidden": 4096, "heads": 32,
                                "kv_heads": 8, "ffn": 14336, "vocab": 128256,
                                "max_positions": 8192}))  # fmt: skip
    asked = PlanQuestion(str(spec), "hgx-h100", nodes=64, seq_len=8192)
    began = time.perf_counter()
    answer = plans(job(asked))
    return {"s": time.perf_counter() - began, "plans": float(answer.considered)}


def trace(count: int, _: Path) -> dict[str, float]:
    from outpace.catalog.accelerators import ACCELERATORS
    from outpace.jobs.memory.trace_worker import TraceRequest, account_of
    from outpace.records.model import ModelSpec
    from outpace.records.plan import Plan
    from outpace.records.settings import TrainSettings

    values = {"family": "llama", "layers": count, "hidden": 4096, "heads": 32, "kv_heads": 8,
              "ffn": 14336, "vocab": 32000, "max_positions": 4096}  # fmt: skip
    ask = TraceRequest(
        spec=ModelSpec.parse(values, "scaling"),
        plan=Plan(strategy="zero3", dp_shard=8, precision="bf16"), seq_len=4096, accumulation=1,
        rank=0, settings=TrainSettings(), accelerator=ACCELERATORS["H100 SXM"], ranks_per_host=8,
    )  # fmt: skip
    began = time.perf_counter()
    account_of(ask)
    return {"s": time.perf_counter() - began}


def report(steps: int, folder: Path) -> dict[str, float]:
    """Write the page of a run with this many steps; return its time and size."""
    from report import made_s, write_run

    run, out = folder / f"run-{steps}", folder / "report.html"
    if not run.is_dir():
        run.mkdir()
        write_run(run, steps)
    took_s = made_s(run, out)
    return {"s": took_s, "bytes": float(out.stat().st_size)}


def compare(arms: int, folder: Path) -> dict[str, float]:
    """Return the time that a comparison of commands takes apart from the commands."""
    words = [f"--command=echo t={1 + arm / 1000}" for arm in range(arms)]
    out = folder / f"compare-{arms}-{time.monotonic_ns()}"
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "outpace", "compare", *words, "--metric=t=(.*)",
                    "--rounds=2", "--out", str(out)], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    return {"s": time.perf_counter() - began}


_LINEAR = "each one adds the same work"
CURVES = {
    "layers": Curve((4, 8, 16, 32), (1, 2), layers, "a step by layers", {"s": 1, "bytes": 1},
                    _LINEAR),
    "width": Curve((256, 512, 1024, 2048), (64, 128), width, "a step by hidden width",
                   {"s": 2, "bytes": 2}, "matrices grow with the square of the width"),
    "sequence": Curve((2048, 4096, 8192, 16384, 32768), (128, 256), sequence,
                      "a step by sequence", {"s": 2, "bytes": 1},
                      "attention computes all pairs of tokens, but stores none"),
    "vocabulary": Curve((16384, 32768, 65536, 131072), (512, 1024), vocabulary,
                        "a step by vocabulary", {"s": 1, "bytes": 1}, _LINEAR),
    "tokenising": Curve((250, 500, 1000), (1, 2), tokenising, "tokenising by megabytes",
                        {"s": 1, "bytes": 0}, "texts are read in chunks", 1),
    "shards": Curve((1000, 10_000, 100_000), (10, 20), shards,
                    "opening tokenised data by files", {"s": 1}, _LINEAR),
    "ranks": Curve((1, 2, 4, 8), (1, 2), ranks, "the first step by processes on this host",
                   {"s": 1}, "the processes share the cores"),
    "planner-devices": Curve((8, 64, 512, 4096, 32_768, 100_000), (8, 16), planner_devices,
                             "a plan by devices", {"s": 1},
                             "the number of layouts grows with that of the divisors"),
    "planner-layers": Curve((16, 32, 64, 128, 256), (2, 4), planner_layers, "a plan by layers",
                            {"s": 1}, "the number of stages grows with that of the divisors"),
    "trace": Curve((4, 16, 64, 256), (2, 4), trace, "a memory trace by layers", {"s": 1},
                   "equal layers are extrapolated, not traced"),
    "report": Curve((1000, 10_000, 100_000, 400_000), (10, 20), report,
                    "a report by steps", {"s": 1, "bytes": 0}, "curves have 1,600 points at most"),
    "compare": Curve((2, 8, 32), (2, 3), compare, "a comparison by arms", {"s": 1}, _LINEAR),
}  # fmt: skip


def exponent(sizes: Sequence[int], medians: Sequence[float]) -> float:
    """Return the power law's exponent over the upper half, or three sizes if that is more."""
    kept = min(max(math.ceil(len(sizes) / 2), 3), len(sizes))
    x = [math.log(size) for size in sizes[-kept:]]
    y = [math.log(value) for value in medians[-kept:]]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    up = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return up / sum((a - mean_x) ** 2 for a in x)


def measured(name: str, curve: Curve, quick: bool) -> dict[str, Any]:
    """Return a curve's row."""
    sizes, repeats = (curve.quick, 1) if quick else (curve.sizes, curve.repeats)
    found: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats):
            for size in sizes if number % 2 == 0 else reversed(sizes):
                found[size].append(curve.measure(size, Path(folder)))
                print(f"{name} {size}: {found[size][-1]}", file=sys.stderr, flush=True)
    costs = {}
    for cost, most in curve.most.items():
        medians = [statistics.median(one[cost] for one in found[size]) for size in sizes]
        grows = exponent(sizes, medians)
        costs[cost] = {"medians": medians, "exponent": grows, "most": most,
                       "within": grows <= most + TOLERANCE}  # fmt: skip
    return {"of": curve.of, "because": curve.because, "sizes": list(sizes), "costs": costs,
            "repeats": {str(size): rows for size, rows in found.items()}}  # fmt: skip


def main() -> None:
    """Measure the requested curves, and save each when it is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--curve", choices=CURVES)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        one_step(json.loads(arguments.step))
        return
    os.chdir(Path(__file__).resolve().parent.parent)
    path = RESULTS / "scaling.json"
    known = json.loads(path.read_text())["curves"] if path.is_file() else {}
    for name in [arguments.curve] if arguments.curve else CURVES:
        row = measured(name, CURVES[name], arguments.quick)
        print(json.dumps({name: row["costs"]}, indent=1), flush=True)
        if not arguments.quick:
            known[name] = row
            ordered = {each: known[each] for each in CURVES if each in known}
            save("scaling", {"curves": ordered, "tolerance": TOLERANCE})


if __name__ == "__main__":
    main()
