"""Every strategy on the same global batch: time, bytes, idle time and memory of each rank.

    python benchmarks/strategies.py            # records results/strategies.json
    python benchmarks/strategies.py --quick    # a quick check, records nothing

There is a job of 2 and one of 4 processes, with one thread each. In a job, all strategies are laid
out at the same time, as `outpace train --strategy X` would, and run a step in turn, A B C … in one
round and … C B A in the next. A step's time is the slowest rank's. A rank is idle while its main
thread neither computes nor waits for a core. Bytes are counted in one step, tensors in the first
two. After the rounds, only ring and ddp alternate, A B B A. Then each strategy trains alone for a
while (`outpace train`); the average utilisation of each device, or here of each core, comes from
its result.json.

The 4 processes share the machine's cores, so their times compare strategies but say nothing about
scaling; `benchmarks/idle.py` measures pipelines without that limit.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from overhead import interval

SPEC = {"family": "llama", "layers": 8, "hidden": 192, "heads": 4, "kv_heads": 4, "ffn": 512,
        "vocab": 2048, "max_positions": 256, "tied": True}  # fmt: skip
GLOBAL_BATCH, SEQ_LEN = 16, 128
_TOKENS = 1_000_000  # random ones, to train on
RING_TARGET = 1.15


def worker(out: Path, rounds: int, pairs: int) -> None:
    """Run one rank: lay out all strategies, and let them take turns."""
    import torch
    from strategy_run import StrategyRun, gather_from_ranks, plans

    from outpace.catalog.accelerators import find_accelerator
    from outpace.jobs.ranks.process_groups import process_groups
    from outpace.launch.launcher_env import ranks_from
    from outpace.probing.hardware.machine import identify
    from outpace.records.model import ModelSpec
    from outpace.records.plan import Plan, Strategy
    from outpace.training.synthetic import SyntheticTraining

    torch.set_num_threads(1)
    ranks = ranks_from(os.environ)
    assert ranks is not None
    course = SyntheticTraining(ModelSpec.parse(SPEC, "strategies"), GLOBAL_BATCH, SEQ_LEN)
    machine = identify(find_accelerator)
    refused: dict[str, str] = {}
    contenders: dict[str, StrategyRun] = {}
    with process_groups(ranks, torch.device("cpu"), 300.0) as groups:
        for strategy in get_args(Strategy):
            for plan in plans(strategy, course, ranks, machine):
                if isinstance(plan, Plan):
                    name = strategy + (" --server-updates" if plan.server_updates else "")
                    contenders[name] = StrategyRun(plan, course, groups)
                else:
                    refused[strategy] = plan
        names = list(contenders)
        steps: dict[str, list[Any]] = {name: [] for name in names}
        for number in range(rounds):
            for name in names if number % 2 == 0 else reversed(names):
                steps[name].append(contenders[name].step())
        duel: list[Any] = []
        for number in range(pairs):
            order = ("ring", "ddp") if number % 2 == 0 else ("ddp", "ring")
            took = {name: contenders[name].step().seconds for name in order}
            duel.append((took["ring"], took["ddp"]))
        mine = ({name: [asdict(t) for t in took] for name, took in steps.items()}, duel,
                {name: asdict(one.cost) for name, one in contenders.items()})  # fmt: skip
        said = gather_from_ranks(groups, mine)
    if ranks.rank == 0:
        found = {
            "strategies": {
                name: {
                    "mesh": contenders[name].plan.mesh,
                    "processes": contenders[name].plan.world_size,
                    "plan": contenders[name].plan.model_dump(mode="json"),
                    "steps": [one[0][name] for one in said],  # by rank
                    "weight": [one[2][name] for one in said],
                }
                for name in names
            },
            "refused": refused,
            "ring_ddp_s": [
                [max(pair[which] for pair in at) for which in (0, 1)]
                for at in zip(*(one[1] for one in said), strict=True)
            ],
        }
        (out / "found.json").write_text(json.dumps(found))


def trained(name: str, processes: int, steps: int) -> list[dict[str, Any]]:
    """Return the utilisation in a run's result.json, one load per host; none for a short run."""
    import numpy as np

    strategy, *more = name.split()
    more += ["--servers", str(processes // 2)] if strategy == "ps" else []
    more += ["--nproc", "1" if strategy == "single" else str(processes)]
    with tempfile.TemporaryDirectory() as folder:
        model, data, out = (Path(folder) / part for part in ("model.json", "train.bin", "run"))
        model.write_text(json.dumps(SPEC))
        np.random.default_rng(0).integers(0, SPEC["vocab"], _TOKENS, dtype=np.uint16).tofile(data)
        command = [sys.executable, "-m", "outpace", "train", "--model", str(model),
                   "--data", str(data), "--strategy", strategy, *more, "--steps", str(steps),
                   "--global-batch", str(GLOBAL_BATCH), "--seq-len", str(SEQ_LEN),
                   "--precision", "fp32", "--device", "cpu", "--out", str(out),
                   "--json"]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL,
                       env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
        result: dict[str, Any] = json.loads((out / "result.json").read_text())
        return list(result["utilisation"])


def run(processes: int, rounds: int, pairs: int, steps: int) -> dict[str, Any]:
    """Run a job on this machine, and summarise it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={processes}", __file__, "--worker", folder,
                   "--rounds", str(rounds), "--pairs", str(pairs)]  # fmt: skip
        subprocess.run(command, check=True)
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    for name, one in found["strategies"].items():
        one.update(sum_up(one), utilisation=trained(name, processes, steps))
    ratio, low, high = interval([ring / ddp for ring, ddp in found["ring_ddp_s"]])
    found["ring_over_ddp"] = {
        "ratio": ratio, "low": low, "high": high, "target": RING_TARGET,
        "reached": ratio <= RING_TARGET,
    }  # fmt: skip
    return found


def sum_up(one: dict[str, Any]) -> dict[str, Any]:
    """Return medians over steps, and the busiest rank relative to the mean of active ranks."""
    steps, weight = (one[key][: one["processes"]] for key in ("steps", "weight"))
    times = [max(took["seconds"] for took in at) for at in zip(*steps, strict=True)]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    busy = [statistics.median(took["busy_s"] for took in rank) for rank in steps]
    # A rank that is done early waits for the slowest, which is also a part of the step.
    shares = [
        statistics.median(
            took["busy_s"] / seconds for took, seconds in zip(rank, times, strict=True)
        )
        for rank in steps
    ]
    memory = [rank["peak_bytes"] for rank in weight]
    sent = [rank["sent_bytes"] for rank in weight]
    return {
        "step_time_s": middle,
        "quartiles_s": [low, high],
        "idle_share": 1 - statistics.mean(shares),
        "busy_s_by_rank": busy,
        "busy_busiest_over_mean": max(busy) / statistics.mean(busy),
        "sent_bytes": sum(sent),
        "sent_bytes_busiest": max(sent),
        "peak_bytes": max(memory),
        "peak_busiest_over_mean": max(memory) / statistics.mean(memory),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, action="append", help="default: 2 and 4")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pairs", type=int, default=60, help="of ring and ddp")
    parser.add_argument("--steps", type=int, default=120, help="of a run, for its utilisation")
    parser.add_argument("--quick", action="store_true", help="two rounds; nothing is recorded")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        worker(asked.worker, asked.rounds, asked.pairs)
        return
    from recording import save

    rounds, pairs, steps = (2, 2, 10) if asked.quick else (asked.rounds, asked.pairs, asked.steps)
    worlds = {}
    for processes in asked.processes or (2, 4):
        found = worlds[str(processes)] = run(processes, rounds, pairs, steps)
        for name, one in found["strategies"].items():
            print(f"{processes} {name:22} {one['mesh']:28} {one['step_time_s'] * 1000:8.1f} ms "
                  f"idle {one['idle_share']:.2f} sent {one['sent_bytes'] / 2**20:8.2f} MiB "
                  f"memory {one['peak_bytes'] / 2**20:7.1f} MiB; busiest over mean: "
                  f"time {one['busy_busiest_over_mean']:.2f}, "
                  f"memory {one['peak_busiest_over_mean']:.2f}")  # fmt: skip
        print(processes, "ring / ddp", found["ring_over_ddp"], found["refused"], flush=True)
    if not asked.quick:
        shape = {"model": SPEC, "global_batch": GLOBAL_BATCH, "seq_len": SEQ_LEN}
        print(save("strategies", {"shape": shape, "rounds": rounds, "worlds": worlds}))


if __name__ == "__main__":
    main()
