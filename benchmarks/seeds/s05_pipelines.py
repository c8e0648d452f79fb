"""Naive model parallelism and GPipe: utilisation by n and by m.

    python benchmarks/seeds/s05_pipelines.py            # records results/seeds_pipelines.json
    python benchmarks/seeds/s05_pipelines.py --quick    # small; records nothing

Stages wait for a set time instead of computing, in the real schedule with real sends, so eight of
them need no eight cores; a backward takes twice as long as a forward. With two ranks, the stages of
a transformer compute as well.
"""

import json
import os
from pathlib import Path
from typing import Any

from claims import FOUND, TRAINING, Claim, Experiment, job, run

# Numbers of ranks, and GPipe's micro-batches on each; naive model parallelism has one.
CASES = {2: (1, 8), 4: (1, 2, 4, 8, 16, 32), 8: (1, 8)}
QUICK_CASES = {2: (1, 2)}
FORWARD_S = 0.02
REPEATS = 5
MACHINE, BATCH = "4x-v100", 32

CLAIM = Claim(
    document=TRAINING,
    says="A model that is split over n GPUs keeps one of them busy at a time: utilisation 1/n. "
    "GPipe's m micro-batches raise it to m/(m + n − 1), close to 1 if m is much larger than "
    "n.",
    hardware="none; we assume four V100, gpt2-large in fp32, 32 samples of 1,024 tokens",
    figures={"naive": "1/n", "gpipe": "m/(m + n − 1)"},
)


def formula(ranks: int, microbatches: int) -> float:
    """Return GPipe's utilisation; with one micro-batch, it is naive model parallelism's."""
    return microbatches / (microbatches + ranks - 1)


def predict(quick: bool) -> dict[str, Any]:
    """Return the share of a device's time that passes take, by the number of parts of a batch."""
    from predictions import model, step

    found = {}
    for count in (1, 2, 4, 8, 16, 32):
        plan = {"strategy": "gpipe" if count > 1 else "mp", "pp": 4, "pp_microbatches": count,
                "micro_batch": BATCH // count}  # fmt: skip
        one = step(model("gpt2-large"), MACHINE, plan, 1024, BATCH)
        # Devices also wait for the one with the slowest clock, which the formula does not include.
        optimizer_s, slowest_s = (one["parts_s"][part] for part in ("optimizer_s", "data_s"))
        busy_s = one["busy_share"] * one["step_s"] - optimizer_s
        utilisation = busy_s / (one["step_s"] - optimizer_s - slowest_s)
        found[str(count)] = {**one, "utilisation": utilisation, "formula": formula(4, count)}
    return found


def measure(quick: bool) -> dict[str, Any]:
    """Run a job for each number of ranks."""
    from contests import torchrun

    cases = QUICK_CASES if quick else CASES
    worlds = {str(ranks): job(__file__, ranks, quick, torchrun) for ranks in cases}
    return {"forward_s": FORWARD_S, "worlds": worlds}


def worker(out: Path, quick: bool) -> None:
    """Run one rank of a job: every number of micro-batches."""
    import torch

    from outpace.jobs.ranks.process_groups import process_groups
    from outpace.launch.launcher_env import ranks_from

    torch.set_num_threads(1)
    ranks = ranks_from(os.environ)
    assert ranks is not None
    n = ranks.world_size
    repeats = 1 if quick else REPEATS
    with process_groups(ranks, torch.device("cpu"), 300.0) as groups:
        rows = [waited(n, "mp", 1, groups, repeats)]
        for count in (QUICK_CASES if quick else CASES)[n]:
            rows.append(waited(n, "gpipe", count, groups, repeats))
        if n == 2:
            rows += computed(groups, repeats)
    if ranks.rank == 0:
        (out / FOUND).write_text(json.dumps(rows))


def waited(n: int, strategy: Any, count: int, groups: Any, repeats: int) -> dict[str, Any]:
    """Measure a pipeline of stages that wait."""
    from idle_pipelines import judge, waiting_pipeline, watch

    from outpace.planner.pipeline.schedules import orders
    from outpace.planner.pipeline.simulator import StageTime

    times = [StageTime(FORWARD_S, FORWARD_S, FORWARD_S)] * n
    layout, batch = waiting_pipeline(strategy, count, times, groups)
    todo = orders(strategy, n, count)
    seen = [watch(layout, batch, todo, groups) for _ in range(repeats + 1)][1:]
    idle = [judge(strategy, one, todo, times).measured for one in seen]
    return row(strategy, count, "wait", n, idle)


def computed(groups: Any, repeats: int) -> list[dict[str, Any]]:
    """Measure pipelines of two stages that compute, as in benchmarks/idle.py."""
    from idle import computing, microbatches

    rows = []
    for strategy in ("mp", "gpipe"):
        seen = computing(strategy, "equal stages", groups, repeats)
        count = microbatches(strategy, 2)
        rows.append(row(strategy, count, "compute", 2, [one["measured"] for one in seen]))
    return rows


def row(strategy: str, count: int, stages: str, n: int, idle: list[float]) -> dict[str, Any]:
    """Return a row, whose utilisation is the share that is not idle."""
    from overhead import interval

    middle, low, high = interval([1 - share for share in idle])
    return {"strategy": strategy, "microbatches": count, "stages": stages, "utilisation": middle,
            "low": low, "high": high, "formula": formula(n, count)}  # fmt: skip


EXPERIMENT = Experiment(
    "pipelines", (CLAIM,), predict, measure,
    instead="The stages sleep instead of computing, because the machine has two cores: with more "
            "ranks, this measures the schedule and the sends.",
    worker=worker,
)  # fmt: skip

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
