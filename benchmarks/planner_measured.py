"""The planner compared with this machine: steps of configurations that it has never seen.

    python benchmarks/planner_measured.py            # records results/planner_measured.json
    python benchmarks/planner_measured.py --quick    # a quick check, records nothing

`outpace probe` measures the machine first. Then a job of 1, of 2 and of 4 processes runs steps of
every configuration (models, strategies, micro-batches, recomputation, precisions) and of the
probe's own small training runs, one step each in turn, in a different order every round, so that
noise affects all equally. The planner predicts every configuration twice, from the probe alone:
with the steps that the probe ran before, and with those of its training runs that ran in turn. The
first prediction includes the change of the machine's speed within half an hour in its error. The
five fastest of a group (one model and number of processes) run again in pairs, so that noise does
not decide the winner, and the planner's pick is compared with the fastest: its regret.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GPT = {"family": "gpt2", "hidden": 256, "heads": 4, "vocab": 4096, "max_positions": 256}
LLAMA = {"family": "llama", "hidden": 192, "heads": 4, "kv_heads": 2, "ffn": 512, "vocab": 2048,
         "max_positions": 256, "tied": True}  # fmt: skip
WIDE = {"family": "llama", "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1408, "vocab": 8192,
        "max_positions": 256}  # fmt: skip
# Name, model, sequence length, global batch.
COURSES: tuple[tuple[str, dict[str, Any], int, int], ...] = (
    ("gpt 4 × 256", {**GPT, "layers": 4}, 128, 8),
    ("llama 8 × 192", {**LLAMA, "layers": 8}, 128, 16),
    ("llama 4 × 512", {**WIDE, "layers": 4}, 128, 8),
)
# For all processes: strategy with its axes; micro-batches and recomputation are varied.
LAYOUTS: dict[int, tuple[dict[str, Any], ...]] = {
    1: ({"strategy": "single"},),
    2: (
        {"strategy": "ddp", "dp_replicate": 2},
        {"strategy": "zero1", "dp_shard": 2},
        {"strategy": "zero2", "dp_shard": 2},
        {"strategy": "zero3", "dp_shard": 2},
        {"strategy": "tp", "tp": 2},
        {"strategy": "gpipe", "pp": 2},
        {"strategy": "1f1b", "pp": 2},
    ),
    4: (
        {"strategy": "ddp", "dp_replicate": 4},
        {"strategy": "zero3", "dp_shard": 4},
        {"strategy": "tp", "tp": 4},
        {"strategy": "1f1b", "pp": 4},
        {"strategy": "3d", "tp": 2, "dp_shard": 2},
    ),
}
_PIPELINES = ("gpipe", "1f1b")
# Layouts with varied micro-batches and recomputation too: more would leave fewer steps for each.
_VARIED = ("single", "ddp", "zero3", "1f1b")
# Seconds of a probe for steps, and for everything else.
_STEPS_S, _REST_S = 150.0, 90.0
# Seconds per number of processes for all in turn, and for repeating a group's fastest.
_TURNS_S, _AGAIN_S = 300.0, 40.0
_LEAST_ROUNDS = 5
# Number of models in memory at the same time, with all of their configurations.
_TOGETHER = {1: 3, 2: 1, 4: 1}
_AGAIN = 5  # per group, run again in pairs


def plans_for(layout: dict[str, Any], world: int, batch: int, kv_heads: int) -> list[Any]:
    """Return a layout's configurations."""
    from outpace.records.plan import Plan

    if kv_heads % layout.get("tp", 1):
        return []
    shares = layout.get("dp_replicate", 1) * layout.get("dp_shard", 1)
    share = batch // shares
    found, varied = [], layout["strategy"] in _VARIED
    if layout["strategy"] in _PIPELINES:
        for count in (share, share // 2)[: 2 if varied else 1]:
            if count >= layout["pp"]:
                values = {"micro_batch": share // count, "pp_microbatches": count}
                found.append(Plan.parse({**layout, **values}, "benchmark"))
        return found
    for micro in sorted({share, max(1, share // 4) if varied else share}):
        found.append(Plan.parse({**layout, "micro_batch": micro}, "benchmark"))
    if not varied:
        return found
    full = {**layout, "micro_batch": share, "checkpointing": "full"}
    found.append(Plan.parse(full, "benchmark"))
    if world == 1 or layout["strategy"] == "ddp":
        found.append(Plan.parse({**layout, "micro_batch": share, "precision": "bf16"}, "benchmark"))
    return found


def worker(out: Path, courses: list[int], share: float) -> None:
    """Run one rank: every configuration and reference of this number of processes, in turn."""
    import torch
    from strategy_run import StrategyRun, gather_from_ranks

    from outpace.catalog.references import references
    from outpace.jobs.ranks.process_groups import process_groups
    from outpace.launch.launcher_env import ranks_from
    from outpace.records.ranks import Ranks
    from outpace.training.synthetic import SyntheticTraining

    ranks = ranks_from(os.environ) or Ranks()
    world = ranks.world_size
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    asked = [(number, plan) for number in courses for plan in _all_plans(number, world)]
    known = references(world, "cpu", quick=True)
    with process_groups(ranks, torch.device("cpu"), 600.0) as groups:
        contenders = [
            *(StrategyRun(plan, SyntheticTraining(_spec(n), COURSES[n][3], COURSES[n][2]), groups)
              for n, plan in asked),
            *(
                StrategyRun(
                    one.plan, SyntheticTraining(one.spec, one.global_batch, one.seq_len), groups
                )
                for one in known.values()
            ),
        ]  # fmt: skip
        slowest = _slowest(
            gather_from_ranks(groups, _in_turn(contenders, groups, share * _TURNS_S))
        )
        medians = [statistics.median(one) for one in slowest]
        again: dict[int, list[float]] = {}
        for number in courses:
            own = [place for place, (of, _) in enumerate(asked) if of == number]
            best = sorted(own, key=medians.__getitem__)[:_AGAIN]
            took = _in_turn([contenders[place] for place in best], groups, share * _AGAIN_S)
            again |= dict(zip(best, _slowest(gather_from_ranks(groups, took)), strict=True))
        peaks = gather_from_ranks(groups, [one.cost.peak_bytes for one in contenders])
    if ranks.rank == 0:
        rows = [
            {
                "model": COURSES[number][0],
                "world": world,
                "plan": plan.model_dump(mode="json"),
                "steps_s": slowest[place],
                "peak_bytes": max(peak[place] for peak in peaks),
                **({"again_s": again[place]} if place in again else {}),
            }
            for place, (number, plan) in enumerate(asked)
        ]
        beside = dict(zip(known, slowest[len(asked) :], strict=True))
        found = {"world": world, "rows": rows, "references": beside}
        (out / "found.json").write_text(json.dumps(found))


def _spec(course: int) -> Any:
    from outpace.records.model import ModelSpec

    name, values, *_ = COURSES[course]
    return ModelSpec.parse(values, name)


def _all_plans(course: int, world: int) -> list[Any]:
    spec, batch = _spec(course), COURSES[course][3]
    return [plan for layout in LAYOUTS[world]
            for plan in plans_for(layout, world, batch, spec.kv_heads)]  # fmt: skip


def _in_turn(contenders: list[Any], groups: Any, seconds: float) -> list[list[float]]:
    """Return each one's step times on this rank, until the first rank finds that time is up."""
    from strategy_run import gather_from_ranks

    steps: list[list[float]] = [[] for _ in contenders]
    began_s, number, over = time.monotonic(), 0, False
    while not over:
        order = list(range(len(contenders)))
        random.Random(number).shuffle(order)  # the same on all ranks
        for place in order:
            steps[place].append(_step_s(contenders[place]))
        number += 1
        own = number >= _LEAST_ROUNDS and time.monotonic() - began_s > seconds
        over = gather_from_ranks(groups, own)[0]
    return steps


def _step_s(contender: Any) -> float:
    """Time a step that follows a step of the same kind, as in training."""
    contender.step()
    seconds: float = contender.step().seconds
    return seconds


def _slowest(of_ranks: list[list[list[float]]]) -> list[list[float]]:
    """Return the slowest rank's time for each configuration and step."""
    return [
        [max(at) for at in zip(*(rank[place] for rank in of_ranks), strict=True)]
        for place in range(len(of_ranks[0]))
    ]


def measured(world: int, courses: list[int], share: float) -> dict[str, Any]:
    """Run a job of `world` processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__)), "--worker", folder, "--courses",
                   *map(str, courses), "--share", str(share)]  # fmt: skip
        if world > 1:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                       f"--nproc-per-node={world}", *command[1:]]  # fmt: skip
        cores = len(os.sched_getaffinity(0))
        environ = {**os.environ, "OMP_NUM_THREADS": str(max(1, cores // world))}
        subprocess.run(command, check=True, env=environ)
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
        return found


def probe(world: int, quick: bool) -> Any:
    """Return the machine's record, with collectives and steps of `world` processes."""
    steps = _probe(world, ["steps"], quick, _STEPS_S)
    rest = _probe(world, ["matmul", "memory", "allreduce"], quick, _REST_S)
    both = rest.probed.model_copy(
        update={"figures": (*rest.probed.figures, *steps.probed.figures),
                "notes": (*rest.probed.notes, *steps.probed.notes)}
    )  # fmt: skip
    return rest.model_copy(update={"probed": both})


def with_steps(machine: Any, world: int, found: dict[str, list[float]]) -> Any:
    """Return the probe's record with these steps instead of its references' own."""
    from outpace.catalog.references import references
    from outpace.records.figure import Figure, Key

    known = references(world, "cpu")
    steps = tuple(
        Figure(
            key=Key(kind="step", what="time", of={"reference": name, "ranks": world,
                                                  "device": "cpu", "digest": known[name].digest}),
            unit="s", value=statistics.median(took), origin="measured",
            rounds=tuple((one,) for one in took),
        )
        for name, took in found.items()
    )  # fmt: skip
    others = tuple(one for one in machine.probed.figures if one.key.kind != "step")
    probed = machine.probed.model_copy(update={"figures": (*others, *steps)})
    return machine.model_copy(update={"probed": probed})


def _probe(world: int, sections: list[str], quick: bool, budget_s: float) -> Any:
    from outpace.records.machine import Machine

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "machine.json"
        command = [sys.executable, "-m", "outpace", "probe", *sections, "--nproc",
                   str(world), "--model", "gpt2", "--out", str(out),
                   *(["--quick"] if quick else ["--budget", str(budget_s)])]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return Machine.load(out)


def predicted(cluster: Any, row: dict[str, Any]) -> Any:
    """Return the planner's prediction of a configuration."""
    from outpace.planner.model.outline import outline
    from outpace.planner.plan_estimate import estimate_plan
    from outpace.planner.problem import PlanningProblem
    from outpace.planner.search.search_request import SearchRequest
    from outpace.records.plan import Plan

    number, world = _course(row), row["world"]
    name, _, seq_len, batch = COURSES[number]
    asked = Plan.parse(row["plan"], "benchmark")
    model = outline(_spec(number), name)
    wanted = SearchRequest(model, seq_len, batch, world, world, asked.precision, on_host=True)
    return estimate_plan(PlanningProblem(model, cluster, wanted), asked).estimate


def _course(row: dict[str, Any]) -> int:
    return [name for name, *_ in COURSES].index(row["model"])


def with_predictions(kept: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows with two predictions: from the probe's own steps, and from steps in turn."""
    from outpace.planner.calibration.cluster import of_probe
    from outpace.planner.model.outline import outline, parameters
    from outpace.planner.model.outline_flops import forward_flops
    from outpace.records.machine import Machine

    machines = {int(world): Machine.parse(one, "probes") for world, one in kept["probes"].items()}
    rows = []
    for found in kept["found"]:
        world = found["world"]
        machine = machines[max(2, world)]
        before = of_probe(machine, world)
        beside = of_probe(with_steps(machine, world, found["references"]), world)
        print(*before.notes, *beside.notes, sep="\n", file=sys.stderr, flush=True)
        for row in found["rows"]:
            name, _, seq_len, batch = COURSES[_course(row)]
            model, said = outline(_spec(_course(row)), name), predicted(beside, row)
            rows.append({
                **row,
                "predicted_s": said.step_time_s,
                "predicted_before_s": predicted(before, row).step_time_s,
                "predicted_bytes": said.peak_memory_bytes,
                "parts_s": said.parts_s,
                "flops": 3 * forward_flops(model, seq_len, batch),
                "parameters": parameters(model),
            })  # fmt: skip
    return rows


def main() -> int:
    """Probe, measure, predict, and print the errors."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", type=Path)
    parser.add_argument("--courses", type=int, nargs="+")
    parser.add_argument("--share", type=float, default=1.0, help="of the usual time for steps")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="write steps and probes here, too")
    parser.add_argument("--stored", type=Path, help="predict and score steps and probes of --out")
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments.worker, arguments.courses, arguments.share)
        return 0
    import coverage_intervals as coverage
    from recording import save

    kept = json.loads(arguments.stored.read_text()) if arguments.stored else _measure(arguments)
    rows = with_predictions(kept)
    ratios: dict[str, list[float]] = {}
    for row in rows:
        took = statistics.median(row["steps_s"])
        ratios.setdefault(f"{row['model']} on {row['world']}", []).append(
            took / row["predicted_before_s"]
        )
    spread = coverage.residuals(ratios)
    references = [
        {"world": found["world"], "models": sorted({row["model"] for row in found["rows"]}),
         "references": found["references"]}
        for found in kept["found"]
    ]  # fmt: skip
    result = {"scores": scores(rows), "regrets": regrets(rows), "noise": noise(rows),
              "residuals": spread, "rows": rows, "references": references,
              "probes": kept["probes"]}  # fmt: skip
    print(json.dumps({k: result[k] for k in ("scores", "regrets", "noise", "residuals")}, indent=2))
    if not arguments.quick:
        save("planner_measured", result)
        coverage.keep("probed", spread)
    return 0


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return probes by number of processes, and each job's results; resumes from --out."""
    worlds = (1, 2) if arguments.quick else tuple(LAYOUTS)
    numbers = list(range(1 if arguments.quick else len(COURSES)))
    kept: dict[str, Any] = {"probes": {}, "found": []}
    if arguments.out and arguments.out.is_file():
        kept = json.loads(arguments.out.read_text())
    there = {(found["world"], row["model"]) for found in kept["found"] for row in found["rows"]}
    for world in worlds:
        probed = str(max(2, world))  # a single process is probed together with two
        for begin in range(0, len(numbers), _TOGETHER[world]):
            courses = numbers[begin : begin + _TOGETHER[world]]
            if (world, COURSES[courses[0]][0]) in there:
                continue
            if probed not in kept["probes"]:
                kept["probes"][probed] = probe(int(probed), arguments.quick).model_dump(mode="json")
            kept["found"].append(measured(world, courses, arguments.share))
            print(f"{courses} on {world} are measured", file=sys.stderr, flush=True)
            if arguments.out:  # save what is done, in case the rest is interrupted
                arguments.out.write_text(json.dumps(kept))
    return kept


def scores(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every target, next to the result of one fitted constant.

    The constant is FLOP/s of all cores for the time, bytes per parameter for the memory, and any of
    a group's configurations for the pick.
    """
    times = [statistics.median(row["steps_s"]) for row in rows]
    rate = statistics.median(row["flops"] / took for row, took in zip(rows, times, strict=True))
    each = statistics.median(row["peak_bytes"] / row["parameters"] for row in rows)
    errors = _off([row["predicted_s"] for row in rows], times)
    before = _off([row["predicted_before_s"] for row in rows], times)
    blind = _off([row["flops"] / rate for row in rows], times)
    peaks = [row["peak_bytes"] for row in rows]
    memory = _off([row["predicted_bytes"] for row in rows], peaks)
    blind_memory = _off([row["parameters"] * each for row in rows], peaks)
    picks = list(regrets(rows).values())
    picked, any_of = (statistics.fmean(column) for column in zip(*picks, strict=True))
    # bf16 wins wherever it is tried; without it a pick is harder.
    plain = list(regrets([row for row in rows if row["plan"]["precision"] == "fp32"]).values())
    picked_plain, any_plain = (statistics.fmean(column) for column in zip(*plain, strict=True))
    found = [
        ("step time, mean error", len(rows), statistics.fmean(errors), 0.08,
         statistics.fmean(blind)),
        ("step time, 95th percentile", len(rows), _percentile(errors), 0.20, _percentile(blind)),
        ("step time from earlier steps, mean error", len(rows), statistics.fmean(before), 0.08,
         statistics.fmean(blind)),
        ("step time from earlier steps, 95th percentile", len(rows), _percentile(before), 0.20,
         _percentile(blind)),
        ("peak memory, mean error", len(rows), statistics.fmean(memory), 0.03,
         statistics.fmean(blind_memory)),
        ("mean regret", len(picks), picked, 0.03, any_of),
        ("mean regret, fp32 alone", len(plain), picked_plain, 0.03, any_plain),
    ]  # fmt: skip
    return [
        {"on": "2 cores, probed", "figure": figure, "rows": count, "value": value,
         "target": target, "constant": constant, "reached": value <= target}
        for figure, count, value, target, constant in found
    ]  # fmt: skip


def noise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the accuracy of medians of steps: bootstrap standard errors, and numbers of steps."""
    draw, found = random.Random(0), {}
    for world in sorted({row["world"] for row in rows}):
        own = [row["steps_s"] for row in rows if row["world"] == world]
        errors = [
            statistics.stdev(statistics.median(draw.choices(steps, k=len(steps)))
                             for _ in range(200)) / statistics.median(steps)
            for steps in own
        ]  # fmt: skip
        found[str(world)] = {"rows": len(own), "steps": min(map(len, own)),
                             "standard_error": statistics.fmean(errors)}  # fmt: skip
    return found


def _off(found: list[float], true: list[float]) -> list[float]:
    return sorted(abs(one / other - 1) for one, other in zip(found, true, strict=True))


def _percentile(values: list[float]) -> float:
    """Return the 95th percentile of sorted values."""
    return values[min(len(values) - 1, round(0.95 * len(values)))]


def regrets(rows: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return each group's regrets: of the pick, and the mean over all configurations."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(f"{row['model']} on {row['world']}", []).append(row)
    found = {}
    for name, group in groups.items():
        best = min(statistics.median(row["again_s"]) for row in group if "again_s" in row)
        pick = min(group, key=lambda row: row["predicted_s"])
        took = [statistics.median(row.get("again_s", row["steps_s"])) for row in (pick, *group)]
        found[name] = (max(0.0, took[0] / best - 1),
                       statistics.fmean(max(0.0, one / best - 1) for one in took[1:]))  # fmt: skip
    return found


if __name__ == "__main__":
    raise SystemExit(main())
