"""The cost of a custom module: the check of the first batch, and each step after it.

    python benchmarks/own_modules.py                       # records results/own_modules.json
    python benchmarks/own_modules.py --before FOLDER       # compared with another checkout
    python benchmarks/own_modules.py --quick               # a quick check, records nothing

A plain stack of encoder blocks runs with `outpace.parallelize` on two processes with one thread
each. `--before` runs steps of the same stack with the package in FOLDER, in turn with this one, ten
steps each, A B B A; both keep running. The check is the first step's time relative
to the median of later steps (next to the first step of a job without checks), and a rank's peak
memory is that of its whole process. Strategies whose ranks have the same samples are also checked
with dropout, which takes more work.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, TextIO

ROOT = Path(__file__).resolve().parent.parent
DROPS = " with dropout"
DROPPING = tuple(name + DROPS for name in ("ddp", "gpipe", "1f1b", "tp"))
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "gpipe", "1f1b", *DROPPING)
PROCESSES, LAYERS, WIDTH, SEQ_LEN, BATCH = 2, 6, 256, 64, 16
STEPS = 10  # steps per turn of one checkout


def worker(strategy: str, check: str) -> None:
    """Run one rank: as many steps as each line of standard input requests; print their seconds."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import outpace
    from outpace.records.plan import Plan

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rate = 0.1 if strategy.endswith(DROPS) else 0.0
    strategy = strategy.removesuffix(DROPS)
    block = nn.TransformerEncoderLayer
    module = nn.Sequential(*(block(WIDTH, 4, 4 * WIDTH, rate, batch_first=True)
                             for _ in range(LAYERS)))  # fmt: skip
    pipeline, split = strategy in ("gpipe", "1f1b"), strategy == "tp"
    sizes: dict[str, Any] = {"dp_replicate" if strategy == "ddp" else "dp_shard": PROCESSES}
    if split:
        sizes = {"tp": PROCESSES}
    if pipeline:
        sizes = {"pp": PROCESSES, "pp_microbatches": 4}
    parts = 4 if pipeline else 1 if split else PROCESSES
    plan = Plan(strategy=strategy, micro_batch=BATCH // parts, **sizes)
    batch = {"x": torch.randn(BATCH, SEQ_LEN, WIDTH), "targets": torch.randn(BATCH, SEQ_LEN, WIDTH)}
    # Earlier checkouts do not know `check`.
    options: dict[str, Any] = {} if check == "unknown" else {"check": check}
    if split:
        options["layouts"] = {"*.linear1": "colwise", "*.linear2": "rowwise"}
    model = outpace.parallelize(module, plan, loss=squared_error, **options)
    optimizer = model.make_optimizer(torch.optim.AdamW)
    share = model.share(batch)
    for line in sys.stdin:
        seconds, processor = [], []
        for _ in range(int(line)):
            began, used = time.perf_counter(), time.process_time()
            model.forward_backward(share)
            optimizer.step()
            seconds.append(time.perf_counter() - began)
            processor.append(time.process_time() - used)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        told = {"seconds": seconds, "processor_s": processor, "peak_bytes": peak}
        print(json.dumps(told), flush=True)
    dist.destroy_process_group()


def squared_error(module: Any, batch: Any) -> Any:
    """Return the loss of the stack."""
    return ((module(batch["x"]) - batch["targets"]) ** 2).mean()


class Steps(NamedTuple):
    """Results of steps: seconds of the slower rank, processor time of all ranks, peak of a rank."""

    seconds: list[float]
    processor_s: list[float]
    peak_bytes: int


class World:
    """The processes of one checkout, which run steps on request."""

    def __init__(self, checkout: Path, strategy: str, check: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", strategy, check]
        self._ranks = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ
                | {"PYTHONPATH": str(checkout), "RANK": str(rank), "LOCAL_RANK": str(rank),
                   "WORLD_SIZE": str(PROCESSES), "LOCAL_WORLD_SIZE": str(PROCESSES),
                   "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(PROCESSES)
        ]  # fmt: skip

    def step(self, count: int) -> Steps:
        """Run `count` steps on each rank."""
        for rank in self._ranks:
            _stream(rank.stdin).write(f"{count}\n")
            _stream(rank.stdin).flush()
        said = [json.loads(_stream(rank.stdout).readline()) for rank in self._ranks]
        return Steps(
            [max(pair) for pair in zip(*(one["seconds"] for one in said), strict=True)],
            [sum(pair) for pair in zip(*(one["processor_s"] for one in said), strict=True)],
            max(one["peak_bytes"] for one in said),
        )

    def end(self) -> None:
        """Close the ranks' inputs, which makes them exit."""
        for rank in self._ranks:
            _stream(rank.stdin).close()
        for rank in self._ranks:
            rank.wait(60)


def _stream(stream: TextIO | Any) -> TextIO:
    assert stream is not None
    return stream


def look_of(strategy: str, rounds: int) -> dict[str, Any]:
    """Compare first steps with and without the check in separate jobs, in multiples of a step."""
    found: dict[str, list[Any]] = {"on": [], "off": []}
    for number in range(rounds):
        for check in ("on", "off") if number % 2 == 0 else ("off", "on"):
            world = World(ROOT, strategy, check)
            first, later = world.step(1), world.step(2 * STEPS)
            world.end()
            found[check].append({
                "first_s": first.seconds[0],
                "first_processor_s": first.processor_s[0],
                "step_s": statistics.median(later.seconds),
                "step_processor_s": statistics.median(later.processor_s),
                "peak_bytes": later.peak_bytes,
            })  # fmt: skip

    def in_steps(clock: str) -> float:
        return statistics.median(
            (on[f"first_{clock}"] - off[f"first_{clock}"]) / off[f"step_{clock}"]
            for on, off in zip(found["on"], found["off"], strict=True)
        )

    peaks = {check: min(one["peak_bytes"] for one in found[check]) for check in found}
    return {
        "repeats": found,
        "look_in_steps": in_steps("s"),
        "look_in_steps_of_processor_time": in_steps("processor_s"),
        "peak_over_off": peaks["on"] / peaks["off"],
    }


def price_of(strategy: str, before: Path, rounds: int) -> dict[str, Any]:
    """Compare steps of this checkout with those of `before`, in turn, after both have warmed up."""
    worlds = {"now": World(ROOT, strategy, "on"), "before": World(before, strategy, "unknown")}
    turns: dict[str, list[Steps]] = {name: [] for name in worlds}
    for world in worlds.values():
        world.step(STEPS)
    for number in range(rounds):
        for name in worlds if number % 2 == 0 else reversed(worlds):
            turns[name].append(worlds[name].step(STEPS))
    for world in worlds.values():
        world.end()

    def over(clock: str) -> float:
        medians = {
            name: [statistics.median(getattr(steps, clock)) for steps in turns[name]]
            for name in turns
        }
        return statistics.median(
            now / then for now, then in zip(medians["now"], medians["before"], strict=True)
        )

    return {
        **{name: [steps._asdict() for steps in taken] for name, taken in turns.items()},
        "now_over_before": over("seconds"),
        "now_over_before_in_processor_time": over("processor_s"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="a checkout to compare steps with")
    parser.add_argument("--only", help="these strategies, by commas; keeps the others' records")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="one round; records nothing")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        worker(*chosen.worker)
        return
    rounds = 1 if chosen.quick else chosen.rounds
    strategies = chosen.only.split(",") if chosen.only else STRATEGIES
    cases: dict[str, Any] = {}
    for strategy in strategies:
        cases[strategy] = {"look": look_of(strategy, min(rounds, 5))}
        said = cases[strategy]["look"]
        if chosen.before and not strategy.endswith(DROPS):
            cases[strategy]["price"] = price_of(strategy, chosen.before, rounds)
            said = said | cases[strategy]["price"]
        figures = {name: f"{value:.3f}" for name, value in said.items() if type(value) is float}
        print(strategy, *(f"{name} {value}" for name, value in figures.items()), flush=True)
    if not chosen.quick:
        from recording import RESULTS, circumstances, save

        now = circumstances()
        for one in cases.values():
            one["recorded"] = {"date": now["date"], "commit": now["commit"]}
        if chosen.only:
            earlier = json.loads((RESULTS / "own_modules.json").read_text())
            cases = {**earlier["cases"], **cases}
        stack = {"layers": LAYERS, "width": WIDTH, "seq_len": SEQ_LEN, "global_batch": BATCH}
        commit = before_commit(chosen.before) if chosen.before else None
        if commit is not None:  # other commits use a different folder
            sys.argv = [commit[:7] if one == str(chosen.before) else one for one in sys.argv]
        save("own_modules", {"stack": stack, "processes": PROCESSES, "before": commit,
                             "cases": cases})  # fmt: skip


def before_commit(checkout: Path) -> str:
    """Return the commit of another checkout."""
    done = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


if __name__ == "__main__":
    main()
