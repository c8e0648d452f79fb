"""What `outpace train` adds to a bare PyTorch loop.

    python benchmarks/overhead.py            # all four cases, records results/overhead.json
    python benchmarks/overhead.py --case single-fp32

The same model, kernels and batches are trained twice in one process: by outpace's own loop, with
its metrics, accounting and guards, and by a loop written by hand below. Steps alternate, A B B A.
Where a process's memory happens to lie favours one of the two by up to 1 %, so pairs come from
several processes, and either loop is the first in every other one. Pairs are added until the
half-width of the 95 % interval of the median ratio is at most 0.7 %, or the rounds run out (said so
in the result). Target: upper bound <= 1.02.
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
from contextlib import nullcontext
from pathlib import Path

CASES = {
    "single-fp32": (1, "fp32"),
    "single-bf16": (1, "bf16"),
    "ddp-fp32": (2, "fp32"),
    "ddp-bf16": (2, "bf16"),
}
HALF_WIDTH = 0.007
TARGET = 1.02
PAIRS = 120  # of each round, which is a process (or a pair of them) of its own
LEAST_ROUNDS, MOST_ROUNDS = 4, 16
GLOBAL_BATCH, SEQ_LEN = 4, 256


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Median of the ratios and its 95 % interval.

    The interval lies between order statistics (the sign test turned round), so it needs nothing of
    the distribution: a shared machine's spikes are neither normal nor symmetric.
    """
    ordered, n = sorted(ratios), len(ratios)
    below, rank = 0.0, 0
    while below + math.comb(n, rank) / 2**n <= 0.025:
        below += math.comb(n, rank) / 2**n
        rank += 1
    low, high = ordered[max(rank - 1, 0)], ordered[min(n - rank, n - 1)]
    return statistics.median(ordered), low, high


def worker(case: str, out: Path, bare_first: bool) -> None:
    """One rank of a round: builds both loops and alternates them."""
    import torch.distributed as dist

    from outpace.launch.environment import ranks_from
    from outpace.launch.job import prepared
    from outpace.records.ranks import Ranks
    from outpace.records.settings import TrainSettings

    _, precision = CASES[case]
    ranks = ranks_from(os.environ) or Ranks()
    settings = TrainSettings(
        model="outpace-small",
        seq_len=SEQ_LEN,
        global_batch=GLOBAL_BATCH,
        steps=PAIRS + 3,
        precision=precision,
        out=out / "run",
        eval_batches=1,
        sample_tokens=0,
    )
    with prepared(settings, ranks=ranks, origins={}, command=[]) as ready:
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
        while len(pairs) < PAIRS:
            if (len(pairs) + bare_first) % 2:
                b, a = timed(bare), timed(ours)
            else:
                a, b = timed(ours), timed(bare)
            pairs.append((a, b))
    if ranks.rank == 0:
        (out / "pairs.json").write_text(json.dumps(pairs))


def bare_loop(ready) -> Iterator[None]:
    """What a person would write: the same model class, loss kernel, optimizer and batches."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from outpace.nn.loss import LanguageModelObjective
    from outpace.nn.transformer import Transformer

    job = ready.job
    model = Transformer(job.materials.spec)
    model.load_state_dict(ready.loop.layout.model.state_dict())
    dtype = {"fp32": None, "bf16": torch.bfloat16}[job.plan.precision]
    objective = LanguageModelObjective(model, "auto", dtype)
    wrapped = objective
    if job.plan.world_size > 1:
        wrapped = DistributedDataParallel(objective, gradient_as_bucket_view=True)
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=1e-3, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    for batch in bare_batches(job):
        cast = torch.autocast("cpu", dtype=dtype) if dtype else nullcontext()
        with cast:
            loss_sum, count = wrapped(batch)
        (loss_sum / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss_sum.item()
        yield


def bare_batches(job) -> Iterator[dict]:
    """The same samples in the same order as outpace's, all chosen before the first step."""
    import numpy as np

    data, share = job.materials.train_data, job.plan.micro_batch
    keys = data.locate(job.settings.seed, np.arange(job.total_steps * GLOBAL_BATCH))
    for begin in range(job.ranks.rank * share, len(keys), GLOBAL_BATCH):
        yield data.__getitems__(keys[begin : begin + share])


def run_round(case: str, bare_first: bool) -> list[tuple[float, float]]:
    """Start the processes of one round; the seconds of outpace's and of the bare steps."""
    nproc, _ = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        inner = [__file__, "--worker", case, "--out", str(out)]
        if bare_first:
            inner.append("--bare-first")
        command = [sys.executable, *inner]
        if nproc > 1:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                       f"--nproc-per-node={nproc}", *inner]  # fmt: skip
        subprocess.run(command, check=True)
        return [(a, b) for a, b in json.loads((out / "pairs.json").read_text())]


def run_case(case: str) -> dict:
    """Add rounds until the interval is narrow, and sum up."""
    nproc, precision = CASES[case]
    rounds: list[list[tuple[float, float]]] = []
    narrow = False
    while len(rounds) < MOST_ROUNDS and not (narrow and len(rounds) >= LEAST_ROUNDS):
        rounds.append(run_round(case, bare_first=len(rounds) % 2 == 1))
        pairs = [pair for pairs in rounds for pair in pairs]
        ratio, low, high = interval([a / b for a, b in pairs])
        narrow = (high - low) / 2 <= HALF_WIDTH * ratio
        print(f"{case}: {len(pairs)} pairs, {low:.4f} – {high:.4f}", file=sys.stderr, flush=True)
    return {
        "processes": nproc,
        "precision": precision,
        "ratio": ratio,
        "low": low,
        "high": high,
        "narrow_enough": narrow,
        "reached": high <= TARGET,
        "median_outpace_step_s": statistics.median(a for a, _ in pairs),
        "median_bare_step_s": statistics.median(b for _, b in pairs),
        "rounds_s": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--bare-first", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.out, arguments.bare_first)
        return
    from recording import save

    cases = {}
    for case in arguments.case or CASES:
        cases[case] = run_case(case)
        summary = {key: value for key, value in cases[case].items() if key != "rounds_s"}
        print(case, json.dumps(summary, indent=1), flush=True)
    shape = {"global_batch": GLOBAL_BATCH, "seq_len": SEQ_LEN, "model": "outpace-small"}
    print(save("overhead", {"target": TARGET, "shape": shape, "cases": cases}))


if __name__ == "__main__":
    main()
