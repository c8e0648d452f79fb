"""Overhead of `outpace train` over a bare PyTorch loop.

    python benchmarks/overhead.py                  # all cases, records two results
    python benchmarks/overhead.py --set overhead_engines
    python benchmarks/overhead.py --case single-fp32 --quick    # records nothing

The same model, kernels and batches are trained twice in one process: by outpace's own loop, with
its metrics, accounting and guards, and by a loop written by hand on the same engine (`bare.py`:
DDP, fully_shard, torch.distributed.pipelining, DTensor). Steps alternate, A B B A. The placement of
a process's memory favours one of the two by up to 1 %, so pairs come from several processes, and
each loop comes first in every other one. Pairs are added until the half-width of the 95 % interval
of the median ratio is at most 0.7 %, or a third of the distance between the ratio and the target,
or the maximum number of rounds is reached (which the result says). Target: upper bound <= 1.02 for
one process and DDP, 1.03 for the others.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# Strategy, processes, precision, and the target for the ratio's upper bound.
CASES = {
    "single-fp32": ("single", 1, "fp32", 1.02),
    "single-bf16": ("single", 1, "bf16", 1.02),
    "ddp-fp32": ("ddp", 2, "fp32", 1.02),
    "ddp-bf16": ("ddp", 2, "bf16", 1.02),
    "zero3-fp32": ("zero3", 2, "fp32", 1.03),
    "gpipe-fp32": ("gpipe", 2, "fp32", 1.03),
    "tp-fp32": ("tp", 2, "fp32", 1.03),
}
# The recorded results, and the cases of each.
SETS = {
    "overhead": [case for case in CASES if case.startswith(("single", "ddp"))],
    "overhead_engines": [case for case in CASES if not case.startswith(("single", "ddp"))],
}
HALF_WIDTH = 0.007
PAIRS = 120  # pairs per round, each of which is a separate process (or a pair of them)
LEAST_ROUNDS, MOST_ROUNDS = 4, 16
GLOBAL_BATCH, SEQ_LEN = 4, 256


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Return the median of the ratios and its 95 % interval.

    The interval is between order statistics (an inverted sign test), so it makes no assumption
    about the distribution: a shared machine's spikes are neither normal nor symmetric.
    """
    ordered, n = sorted(ratios), len(ratios)
    below, rank = 0.0, 0
    while below + math.comb(n, rank) / 2**n <= 0.025:
        below += math.comb(n, rank) / 2**n
        rank += 1
    low, high = ordered[max(rank - 1, 0)], ordered[min(n - rank, n - 1)]
    return statistics.median(ordered), low, high


def worker(case: str, out: Path, bare_first: bool, count: int) -> None:
    """Run one rank of a round: build both loops and alternate between them, `count` steps each."""
    import torch.distributed as dist
    from bare import bare_loop

    from outpace.jobs.train.context import RunContext
    from outpace.jobs.train.job import prepare_run
    from outpace.launch.launcher_env import ranks_from
    from outpace.records.ranks import Ranks
    from outpace.records.settings import TrainSettings

    strategy, _, precision, _ = CASES[case]
    ranks = ranks_from(os.environ) or Ranks()
    settings = TrainSettings(
        model="outpace-small",
        seq_len=SEQ_LEN,
        global_batch=GLOBAL_BATCH,
        steps=count + 3,
        strategy=strategy,
        precision=precision,
        out=out / "run",
        eval_batches=1,
        sample_tokens=0,
    )
    with prepare_run(settings, RunContext(ranks)) as ready:
        ours = ready.loop.iterate()
        bare = bare_loop(ready)
        control = ready.job.groups.control

        def timed(loop: Iterator[object]) -> float:
            dist.barrier(control)
            began = time.perf_counter()
            next(loop)
            return time.perf_counter() - began

        for loop in (bare, ours) if bare_first else (ours, bare):
            timed(loop)
        pairs: list[tuple[float, float]] = []
        while len(pairs) < count:
            if (len(pairs) + bare_first) % 2:
                b, a = timed(bare), timed(ours)
            else:
                a, b = timed(ours), timed(bare)
            pairs.append((a, b))
    if ranks.rank == 0:
        (out / "pairs.json").write_text(json.dumps(pairs))


def run_round(case: str, bare_first: bool, count: int) -> list[tuple[float, float]]:
    """Run the processes of one round; return the seconds of outpace's and of the bare steps."""
    _, nproc, _, _ = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        inner = [__file__, "--worker", case, "--out", str(out), "--pairs", str(count)]
        if bare_first:
            inner.append("--bare-first")
        command = [sys.executable, *inner]
        if nproc > 1:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                       f"--nproc-per-node={nproc}", *inner]  # fmt: skip
        subprocess.run(command, check=True)
        return [(a, b) for a, b in json.loads((out / "pairs.json").read_text())]


def run_case(case: str, count: int, least: int, most: int) -> dict:
    """Add rounds of `count` pairs until the interval is narrow, and summarise."""
    strategy, nproc, precision, target = CASES[case]
    rounds: list[list[tuple[float, float]]] = []
    narrow = False
    while len(rounds) < most and not (narrow and len(rounds) >= least):
        rounds.append(run_round(case, len(rounds) % 2 == 1, count))
        pairs = [pair for pairs in rounds for pair in pairs]
        ratio, low, high = interval([a / b for a, b in pairs])
        narrow = (high - low) / 2 <= max(HALF_WIDTH * ratio, abs(target - ratio) / 3)
        print(f"{case}: {len(pairs)} pairs, {low:.4f} – {high:.4f}", file=sys.stderr, flush=True)
    return {
        "strategy": strategy,
        "processes": nproc,
        "precision": precision,
        "ratio": ratio,
        "low": low,
        "high": high,
        "narrow_enough": narrow,
        "target": target,
        "reached": high <= target,
        "median_outpace_step_s": statistics.median(a for a, _ in pairs),
        "median_bare_step_s": statistics.median(b for _, b in pairs),
        "rounds_s": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=SETS, help="one of the two results")
    parser.add_argument("--case", choices=CASES, help="one case; nothing is recorded")
    parser.add_argument("--quick", action="store_true", help="a few pairs; nothing is recorded")
    parser.add_argument("--pairs", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--bare-first", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.out, arguments.bare_first, arguments.pairs)
        return
    from recording import save

    rounds = (6, 1, 1) if arguments.quick else (PAIRS, LEAST_ROUNDS, MOST_ROUNDS)
    shape = {"global_batch": GLOBAL_BATCH, "seq_len": SEQ_LEN, "model": "outpace-small"}
    for name in [arguments.set] if arguments.set else SETS:
        cases = {}
        for case in SETS[name]:
            if arguments.case in (None, case):
                cases[case] = run_case(case, *rounds)
                said = {key: value for key, value in cases[case].items() if key != "rounds_s"}
                print(case, json.dumps(said, indent=1), flush=True)
        if not arguments.quick and arguments.case is None:
            print(save(name, {"shape": shape, "cases": cases}))


if __name__ == "__main__":
    main()
