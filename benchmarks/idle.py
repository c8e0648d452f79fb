"""Idle time of pipelines: measured, by the papers' formulas, and by simulation.

    python benchmarks/idle.py            # records results/idle.json
    python benchmarks/idle.py --quick    # a quick check, records nothing

On 2 processes, stages compute with one thread each. On 4 and 8, they wait for a set time instead,
so that processes need no cores; the schedule, sends and receives are real. Stages are equal, with
backwards as long as forwards or twice as long, or one stage is twice as long as the others.
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
from typing import Any

from overhead import interval

COMPUTING, WAITING = 2, (4, 8)
SPEC = {"family": "llama", "hidden": 192, "heads": 4, "ffn": 512, "vocab": 512,
        "max_positions": 256}  # fmt: skip
# A multiple of the stages of every schedule, and one that is not. A block's backward takes about
# twice as long as its forward.
LAYERS = {"equal stages": 8, "unequal stages": 5}
MICRO_BATCH, SEQ_LEN = 2, 128
FORWARD_S = 0.03  # for a micro-batch through all stages of a rank
# Backward relative to forward, and the length of each stage.
SHAPES = {
    "backward as forward": (1, False),
    "backward twice forward": (2, False),
    "a stage twice as long": (2, True),
}


def worker(out: Path, repeats: int) -> None:
    """Run one rank of a job: every schedule in every shape."""
    import torch

    from outpace.jobs.ranks.process_groups import process_groups
    from outpace.launch.launcher_env import ranks_from
    from outpace.records.pipelines import SCHEDULES

    torch.set_num_threads(1)
    ranks = ranks_from(os.environ)
    assert ranks is not None
    make = computing if ranks.world_size == COMPUTING else waiting
    found = []
    with process_groups(ranks, torch.device("cpu"), 300.0) as groups:
        for strategy in SCHEDULES:
            for shape in LAYERS if make is computing else SHAPES:
                seen = make(strategy, shape, groups, repeats)
                found.append({"strategy": strategy, "shape": shape, "repeats": seen})
    if ranks.rank == 0:
        (out / "found.json").write_text(json.dumps(found))


def microbatches(strategy: str, ranks: int) -> int:
    """Return one micro-batch for each of two stages per rank, which suits every schedule."""
    return 1 if strategy == "mp" else 2 * ranks


def watched(layout, batch, strategy, times, groups, repeats: int) -> list[dict[str, Any]]:
    """Run steps of a pipeline, and return each with its expectation; the first is a warm-up."""
    from idle_pipelines import judge, watch

    from outpace.planner.pipeline.schedules import orders

    ranks = groups.ranks.world_size
    todo = orders(strategy, ranks, microbatches(strategy, ranks))
    seen = [watch(layout, batch, todo, groups) for _ in range(repeats + 1)][1:]
    return [asdict(judge(strategy, one, todo, times)) for one in seen]


def waiting(strategy, shape: str, groups, repeats: int) -> list[dict[str, Any]]:
    """Measure stages that wait."""
    from idle_pipelines import waiting_pipeline

    from outpace.planner.pipeline.simulator import StageTime
    from outpace.records.pipelines import SCHEDULES

    ranks, per_rank = groups.ranks.world_size, SCHEDULES[strategy].stages_per_rank
    ratio, unequal = SHAPES[shape]
    forward_s = FORWARD_S / per_rank
    times = [StageTime(forward_s, ratio * forward_s / 2, ratio * forward_s / 2)] * ranks * per_rank
    if unequal:
        slow = ranks // 2
        times[slow] = StageTime(*(2 * seconds for seconds in vars(times[slow]).values()))
    count = microbatches(strategy, ranks)
    layout, batch = waiting_pipeline(strategy, count, times, groups)
    return watched(layout, batch, strategy, times, groups, repeats)


def computing(strategy, shape: str, groups, repeats: int) -> list[dict[str, Any]]:
    """Measure a transformer's stages, on a batch of the same size for every schedule."""
    import torch

    from outpace.nn.loss import LanguageModelObjective
    from outpace.nn.transformer import Transformer
    from outpace.parallel import LayoutRequest, apply
    from outpace.records.model import ModelSpec
    from outpace.records.plan import Plan

    ranks, device = groups.ranks.world_size, torch.device("cpu")
    count = microbatches(strategy, ranks)
    whole = 2 * ranks * MICRO_BATCH
    plan = Plan(strategy=strategy, pp=ranks, pp_microbatches=count, micro_batch=whole // count)
    spec = ModelSpec.parse({**SPEC, "layers": LAYERS[shape]}, "idle")
    objective = LanguageModelObjective(Transformer(spec), "plain")
    layout = apply(LayoutRequest(objective, plan, groups.ranks, device))
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, spec.vocab, (whole, SEQ_LEN), generator=drawn)
    batch = {"tokens": tokens, "targets": tokens}
    return watched(layout, batch, strategy, (), groups, repeats)


def run(processes: int, repeats: int) -> list[dict[str, Any]]:
    """Run a job on this machine, and summarise it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={processes}", __file__, "--worker", folder,
                   "--repeats", str(repeats)]  # fmt: skip
        subprocess.run(command, check=True)
        found: list[dict[str, Any]] = json.loads((Path(folder) / "found.json").read_text())
    for one in found:
        middle, low, high = interval([repeat["measured"] for repeat in one["repeats"]])
        one.update({
            "microbatches": microbatches(one["strategy"], processes),
            "measured": middle, "low": low, "high": high,
            "formula": one["repeats"][0]["formula"], "played": one["repeats"][0]["simulated"],
            "replayed": statistics.median(repeat["replayed"] for repeat in one["repeats"]),
        })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, action="append", help="default: 2, 4 and 8")
    parser.add_argument("--repeats", type=int, default=5, help="steps of each pipeline")
    parser.add_argument("--quick", action="store_true", help="one step; nothing is recorded")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        worker(asked.worker, asked.repeats)
        return
    from recording import save

    worlds = {}
    for processes in asked.processes or (COMPUTING, *WAITING):
        found = worlds[str(processes)] = run(processes, 1 if asked.quick else asked.repeats)
        for one in found:
            said = {
                key: "–" if one[key] is None else f"{one[key]:.3f}"
                for key in ("measured", "formula", "played", "replayed")
            }
            print(processes, f"{one['strategy']:12} {one['shape']:24}", said, flush=True)
    if not asked.quick:
        print(save("idle", {"worlds": worlds}))


if __name__ == "__main__":
    main()
