"""The planner against this machine: steps of configurations that it has never seen.

    python benchmarks/planner_measured.py            # records results/planner_measured.json
    python benchmarks/planner_measured.py --quick    # shows that it works, records nothing

`outpace probe` measures the machine first. Then jobs of 1, 2 and 4 processes take steps of every
configuration (models, strategies, micro-batches, recomputation, precisions); of a job's
configurations one step each in turn, forwards and backwards, so that noise meets all. The planner
predicts every one from the probe alone. The five fastest of a group (one model and number of
processes) are stepped again in pairs, so that noise does not crown one, and the planner's pick is
compared with the fastest: its regret.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

GPT = {"family": "gpt2", "hidden": 256, "heads": 4, "vocab": 4096, "max_positions": 256}
LLAMA = {"family": "llama", "hidden": 192, "heads": 4, "kv_heads": 2, "ffn": 512, "vocab": 2048,
         "max_positions": 256, "tied": True}  # fmt: skip
WIDE = {"family": "llama", "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1408, "vocab": 8192,
        "max_positions": 256}  # fmt: skip
# Name, model, sequence, global batch.
COURSES: tuple[tuple[str, dict[str, Any], int, int], ...] = (
    ("gpt 4 × 256", {**GPT, "layers": 4}, 128, 8),
    ("llama 8 × 192", {**LLAMA, "layers": 8}, 128, 16),
    ("llama 4 × 512", {**WIDE, "layers": 4}, 128, 8),
)
# Of all processes: strategy with its axes; micro-batches and recomputation are varied.
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
# Seconds of a probe for steps, and for the rest.
_STEPS_S, _REST_S = 330.0, 90.0
_PASSES = 2  # over all groups: a machine is slower for minutes at a time
_AGAIN = 5  # of a group, stepped again in pairs


def plans_for(layout: dict[str, Any], world: int, batch: int, kv_heads: int) -> list[Any]:
    """A layout's configurations."""
    from outpace.records.plan import Plan

    if kv_heads % layout.get("tp", 1):
        return []
    shares = layout.get("dp_replicate", 1) * layout.get("dp_shard", 1)
    share = batch // shares
    found = []
    if layout["strategy"] in _PIPELINES:
        for count in (share, share // 2):
            if count >= layout["pp"]:
                values = {"micro_batch": share // count, "pp_microbatches": count}
                found.append(Plan.parse({**layout, **values}, "benchmark"))
        return found
    for micro in sorted({share, max(1, share // 4)}):
        found.append(Plan.parse({**layout, "micro_batch": micro}, "benchmark"))
    full = {**layout, "micro_batch": share, "checkpointing": "full"}
    found.append(Plan.parse(full, "benchmark"))
    if world == 1 or layout["strategy"] == "ddp":
        found.append(Plan.parse({**layout, "micro_batch": share, "precision": "bf16"}, "benchmark"))
    return found


def worker(out: Path, course_number: int, rounds: int) -> None:
    """One rank: every configuration of one model and number of processes, in turn."""
    import torch

    from outpace.experiment.contender import Contender, everyone
    from outpace.launch.environment import ranks_from
    from outpace.launch.group import process_groups
    from outpace.records.model import ModelSpec
    from outpace.records.ranks import Ranks
    from outpace.train.synthetic import Course

    ranks = ranks_from(os.environ) or Ranks()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // ranks.world_size))
    name, values, seq_len, batch = COURSES[course_number]
    spec = ModelSpec.parse(values, name)
    course = Course(spec, batch, seq_len)
    plans = [plan for layout in LAYOUTS[ranks.world_size]
             for plan in plans_for(layout, ranks.world_size, batch, spec.kv_heads)]  # fmt: skip
    with process_groups(ranks, torch.device("cpu"), 300.0, 0) as groups:
        contenders = [Contender(plan, course, groups) for plan in plans]
        steps: list[list[float]] = [[] for _ in contenders]
        for number in range(rounds):
            order = range(len(contenders))
            for place in order if number % 2 == 0 else reversed(order):
                steps[place].append(_step_s(contenders[place]))
        slowest = _slowest(everyone(groups, steps))
        medians = [statistics.median(one) for one in slowest]
        best = sorted(range(len(medians)), key=medians.__getitem__)[:_AGAIN]
        again: dict[int, list[float]] = {place: [] for place in best}
        for number in range(2 * rounds):
            for place in best if number % 2 == 0 else reversed(best):
                again[place].append(_step_s(contenders[place]))
        said = everyone(groups, [again[place] for place in best])
        peaks = everyone(groups, [one.weight.peak_bytes for one in contenders])
    if ranks.rank == 0:
        rows = [
            {
                "plan": plan.model_dump(mode="json"),
                "steps_s": slowest[place],
                "peak_bytes": max(peak[place] for peak in peaks),
            }
            for place, plan in enumerate(plans)
        ]
        for place, took in zip(best, _slowest(said), strict=True):
            rows[place]["again_s"] = took
        (out / "found.json").write_text(json.dumps(rows))


def _step_s(contender: Any) -> float:
    """A step that follows one of its own kind, as in training."""
    contender.step()
    seconds: float = contender.step().seconds
    return seconds


def _slowest(of_ranks: list[list[list[float]]]) -> list[list[float]]:
    """Of each configuration and step: the slowest rank's."""
    return [
        [max(at) for at in zip(*(rank[place] for rank in of_ranks), strict=True)]
        for place in range(len(of_ranks[0]))
    ]


def measured(world: int, course: int, rounds: int) -> list[dict[str, Any]]:
    """A job of `world` processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__)), "--worker", folder, "--course", str(course),
                   "--rounds", str(rounds)]  # fmt: skip
        if world > 1:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                       f"--nproc-per-node={world}", *command[1:]]  # fmt: skip
        cores = len(os.sched_getaffinity(0))
        environ = {**os.environ, "OMP_NUM_THREADS": str(max(1, cores // world))}
        subprocess.run(command, check=True, env=environ)
        found: list[dict[str, Any]] = json.loads((Path(folder) / "found.json").read_text())
        return found


def probe(world: int, quick: bool) -> Any:
    """The machine's record, with collectives and steps of `world` processes."""
    steps = _probe(world, ["steps"], quick, _STEPS_S)
    rest = _probe(world, ["matmul", "memory", "allreduce"], quick, _REST_S)
    both = rest.probed.model_copy(
        update={"figures": (*rest.probed.figures, *steps.probed.figures),
                "notes": (*rest.probed.notes, *steps.probed.notes)}
    )  # fmt: skip
    return rest.model_copy(update={"probed": both})


def _probe(world: int, sections: list[str], quick: bool, budget_s: float) -> Any:
    from outpace.records.machine import Machine

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "machine.json"
        command = [sys.executable, "-m", "outpace", "probe", *sections, "--nproc",
                   str(max(2, world)), "--model", "gpt2", "--out", str(out),
                   *(["--quick"] if quick else ["--budget", str(budget_s)])]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return Machine.load(out)


def predicted(cluster: Any, world: int, course: int, plan: dict[str, Any]) -> dict[str, Any]:
    """What the planner says of a configuration, from the probe alone."""
    from outpace.planner.job import Job
    from outpace.planner.outline_flops import forward_flops
    from outpace.planner.outlines import outline, parameters
    from outpace.planner.plans import one
    from outpace.planner.space import Wanted
    from outpace.records.model import ModelSpec
    from outpace.records.plan import Plan

    name, values, seq_len, batch = COURSES[course]
    model = outline(ModelSpec.parse(values, name), name)
    asked = Plan.parse(plan, "benchmark")
    wanted = Wanted(model, seq_len, batch, world, world, asked.precision, on_host=True)
    found = one(Job(model, cluster, wanted), asked).estimate
    flops = 3 * forward_flops(model, seq_len, batch)
    return {"predicted_s": found.step_time_s, "predicted_bytes": found.peak_memory_bytes,
            "parts_s": found.parts_s, "flops": flops, "parameters": parameters(model)}  # fmt: skip


def main() -> int:
    """Probe, measure, predict, and say how far off it was."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", type=Path)
    parser.add_argument("--course", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--quick-probe", action="store_true", help="a minute for each probe")
    parser.add_argument("--out", type=Path, help="write all rows and probes here, too")
    parser.add_argument("--stored", type=Path, help="predict and score rows and probes of --out")
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments.worker, arguments.course, arguments.rounds)
        return 0
    import coverage_intervals as coverage
    from recording import save

    rows, machines = _stored(arguments.stored) if arguments.stored else _measure(arguments)
    ratios: dict[str, list[float]] = {}
    for row in rows:
        took = statistics.median(row["steps_s"])
        ratios.setdefault(f"{row['model']} on {row['world']}", []).append(took / row["predicted_s"])
    spread = coverage.residuals(ratios)
    result = {"scores": scores(rows), "regrets": regrets(rows), "residuals": spread, "rows": rows,
              "probes": _dumped(machines)}  # fmt: skip
    print(json.dumps({k: v for k, v in result.items() if k not in ("rows", "probes")}, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result))
    if not arguments.quick:
        save("planner_measured", result)
        coverage.keep("probed", spread)
    return 0


def _measure(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[int, Any]]:
    """Probes, and steps of every configuration with what is predicted of them."""
    from outpace.planner.machines import of_probe

    machines, clusters = {}, {}
    courses = range(1 if arguments.quick else len(COURSES))
    worlds = (1, 2) if arguments.quick else tuple(LAYOUTS)
    for world in worlds:
        # One process is measured beside two.
        again = world == 2 and 1 in machines
        machines[world] = (
            machines[1] if again else probe(world, arguments.quick or arguments.quick_probe)
        )
        clusters[world] = of_probe(machines[world], world)
        print(*clusters[world].notes, sep="\n", file=sys.stderr, flush=True)
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for number in range(1 if arguments.quick else _PASSES):
        for world, course in product(worlds, courses):
            found = measured(world, course, arguments.rounds)
            print(f"pass {number + 1}: {COURSES[course][0]} on {world}", file=sys.stderr)
            groups[world, course] = _joined(groups.get((world, course)), found)
            if arguments.out:  # what is there already, should the rest be interrupted
                told = {"rows": _rows(groups, clusters), "probes": _dumped(machines)}
                arguments.out.write_text(json.dumps(told))
    return _rows(groups, clusters), machines


def _stored(path: Path) -> tuple[list[dict[str, Any]], dict[int, Any]]:
    """Steps and probes that were measured before, with what is predicted from these probes now."""
    from outpace.planner.machines import of_probe
    from outpace.records.machine import Machine

    kept = json.loads(path.read_text(encoding="utf-8"))
    machines = {int(world): Machine.parse(one, str(path)) for world, one in kept["probes"].items()}
    names = [name for name, *_ in COURSES]
    machines.setdefault(2, machines[1])
    clusters = {world: of_probe(machines[world], world) for world in machines}
    rows = [
        {**row, **predicted(clusters[row["world"]], row["world"], names.index(row["model"]),
                            row["plan"])}
        for row in kept["rows"]
    ]  # fmt: skip
    return rows, machines


def _joined(before: list[dict[str, Any]] | None, found: list[dict[str, Any]]) -> Any:
    """Steps of both passes; those that were stepped again in either."""
    if before is None:
        return found
    return [
        {
            **one,
            "steps_s": one["steps_s"] + other["steps_s"],
            **({"again_s": both} if (both := one.get("again_s", []) + other.get("again_s", []))
               else {}),
        }
        for one, other in zip(before, found, strict=True)
    ]  # fmt: skip


def _rows(
    groups: dict[tuple[int, int], list[dict[str, Any]]], clusters: dict[int, Any]
) -> list[dict[str, Any]]:
    """What was measured beside what is predicted."""
    return [
        {**row, **predicted(clusters[world], world, course, row["plan"]), "world": world,
         "model": COURSES[course][0]}
        for (world, course), found in groups.items() for row in found
    ]  # fmt: skip


def _dumped(machines: dict[int, Any]) -> dict[str, Any]:
    """Each probe once: two processes are of the one that one process is of."""
    once = {world: machine for world, machine in machines.items()
            if world != 2 or machine is not machines.get(1)}  # fmt: skip
    return {str(world): machine.model_dump(mode="json") for world, machine in once.items()}


def scores(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every target, beside what one fitted constant reaches.

    That is FLOP/s of all cores for the time, bytes for each parameter for the memory, and any of a
    group's configurations for the pick.
    """
    times = [statistics.median(row["steps_s"]) for row in rows]
    rate = statistics.median(row["flops"] / took for row, took in zip(rows, times, strict=True))
    each = statistics.median(row["peak_bytes"] / row["parameters"] for row in rows)
    errors = _off([row["predicted_s"] for row in rows], times)
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


def _off(found: list[float], true: list[float]) -> list[float]:
    return sorted(abs(one / other - 1) for one, other in zip(found, true, strict=True))


def _percentile(values: list[float]) -> float:
    """The 95th, of sorted ones."""
    return values[min(len(values) - 1, round(0.95 * len(values)))]


def regrets(rows: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Of each group what the pick takes longer than the fastest, and what any one does."""
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
