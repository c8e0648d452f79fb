"""`outpace tune` compared with whole grids: what its few trials miss.

    python benchmarks/tune.py              # records results/tune.json; 3 hours on 2 cores
    python benchmarks/tune.py --problem 3  # repeats the third; keeps the others
    python benchmarks/tune.py --problem 3 --keep-grid  # keeps its grid, on the same machine
    python benchmarks/tune.py --quick      # a quick check, records nothing

For each problem (a model, a sequence length, a number of processes, a memory limit), every
configuration of a grid is measured as `outpace tune` measures a trial, and `outpace tune` is run.
Then the grid's five best and the tuner's pick are measured again in turn: all of them train at the
same time, and each runs for two seconds of each round while the others are suspended; four rounds,
with four new starts. So the winner depends neither on noise, nor on changes of the machine over
minutes, nor on where the memory of one start is placed (about 3 % from start to start). The figure
of a trial, and of a turn, is the first quartile of its steps. Regret is how much longer the pick
takes than the fastest of these, as the median over rounds, where the fastest is that of the other
starts. Its price is the tuner's time relative to the grid's, both from the start of the first trial
to the end of the last.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from recording import RESULTS, circumstances, save

GPT = {"family": "gpt2", "hidden": 256, "heads": 8, "vocab": 4096, "max_positions": 512}
LLAMA = {"family": "llama", "hidden": 256, "heads": 8, "kv_heads": 8, "ffn": 704, "vocab": 4096,
         "max_positions": 512}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """A model to train, and its number of processes; None: as many as the tuner chooses."""

    name: str
    spec: dict[str, Any]
    seq_len: int
    global_batch: int
    nproc: int | None
    memory_limit: str | None = None

    def given(self, folder: Path) -> dict[str, Any]:
        """Return settings of outpace train."""
        path = folder / f"{self.spec['family']}-{self.spec['layers']}.json"
        path.write_text(json.dumps(self.spec))
        values = {"model": str(path), "seq_len": self.seq_len, "global_batch": self.global_batch,
                  "nproc": self.nproc, "memory_limit": self.memory_limit}  # fmt: skip
        return {name: value for name, value in values.items() if value is not None}


PROBLEMS = (
    Problem("gpt 4 × 256 on 2", {**GPT, "layers": 4}, 128, 16, 2),
    Problem("llama 4 × 256, long, on 2", {**LLAMA, "layers": 4}, 512, 8, 2, "900MiB"),
    Problem("llama 8 × 256 on 4", {**LLAMA, "layers": 8}, 64, 16, 4),
    Problem("gpt 6 × 256 on 1 or 2", {**GPT, "layers": 6}, 256, 8, None),
)
MODES = ("none", "selective", "full")
# By number of processes: strategies with their axes.
LAYOUTS: dict[int, tuple[dict[str, Any], ...]] = {
    1: ({"strategy": "single"},),
    2: (
        {"strategy": "ddp", "dp_replicate": 2},
        {"strategy": "zero1", "dp_shard": 2},
        {"strategy": "zero2", "dp_shard": 2},
        {"strategy": "zero3", "dp_shard": 2},
        {"strategy": "tp", "tp": 2},
        {"strategy": "1f1b", "pp": 2},
    ),
    4: (
        {"strategy": "ddp", "dp_replicate": 4},
        {"strategy": "zero1", "dp_shard": 4},
        {"strategy": "zero3", "dp_shard": 4},
        {"strategy": "tp", "tp": 4},
        {"strategy": "1f1b", "pp": 4},
        {"strategy": "3d", "tp": 2, "dp_shard": 2},
    ),
}
_AGAIN, _STARTS, _ROUNDS = 5, 4, 4
LEAST = 48


def grid(problem: Problem, precision: str) -> Iterator[Any]:
    """Yield every configuration."""
    from outpace.records.plan import Plan

    worlds = (1, 2) if problem.nproc is None else (problem.nproc,)
    for layout in (one for world in worlds for one in LAYOUTS[world]):
        share = problem.global_batch // (layout.get("dp_replicate", 1) * layout.get("dp_shard", 1))
        micros = [share >> shift for shift in range(share.bit_length()) if share >> shift]
        for micro, mode in product(micros[:4], MODES):
            values = {**layout, "micro_batch": micro, "checkpointing": mode, "precision": precision}
            if "pp" in layout:
                count = share // micro
                if count < layout["pp"]:
                    continue
                values["pp_microbatches"] = count
            yield Plan.parse(values, "benchmark")


def measured(given: dict[str, Any], chosen: list[Any], folder: Path) -> list[Any]:
    """Run a trial of each, one after the other."""
    from outpace.experiment.trials import Trials

    trials, found = Trials(given, folder), []
    for number, one in enumerate(chosen, 1):
        found.append(trials.run(number, one))
        took_s = found[-1].compared_s
        print(f"{number} of {len(chosen)}: {one.proposal.title}: {took_s}", file=sys.stderr,
              flush=True)  # fmt: skip
    return found


def in_turn(
    given: dict[str, Any], plans: dict[str, Any], expected_s: float, folder: Path, rounds: int
) -> Iterator[dict[str, float | None]]:
    """Return the plans' step times in each round, each round in a different order."""
    from outpace.experiment import interleaved_runs
    from outpace.experiment.trials import TURN_S, first_quartile

    entrants = []
    for number, plan in enumerate(plans.values()):
        where = folder / str(number)
        where.mkdir(parents=True)
        plan.save(where / "plan.json")
        own = {**given, "plan": str(where / "plan.json")}
        steps = max(round(TURN_S / expected_s), 2)
        entrants.append(
            interleaved_runs.TurnTraining(own, where / "run", where / "config.toml", steps)
        )
    turned = interleaved_runs.train_in_turn(entrants, rounds, 3600.0)
    for at in range(rounds):
        took_s = [one.turns[at] if len(one.turns) == rounds else () for one in turned]
        yield {
            key: first_quartile(own_s) if own_s else None
            for key, own_s in zip(plans, took_s, strict=True)
        }


Round = dict[str, float | None]


def regret(pick: str, starts: list[list[Round]]) -> float:
    """Return how much longer the pick takes than the fastest: the median over rounds of all starts.

    For each start, the fastest is that of the other starts: among several equal plans, the one
    favoured by chance looks fastest, but not when it is measured again.
    """
    found = []
    for at, rounds in enumerate(starts):
        beside = [one for other in starts[:at] + starts[at + 1 :] or starts for one in other]
        fastest = min(rounds[0], key=lambda key: _ratio(key, pick, beside))
        found += [took[pick] / took[fastest] - 1 for took in rounds if took[pick] and took[fastest]]
    assert found, "the pick never ran again"
    return max(statistics.median(found), 0.0)


def _ratio(key: str, pick: str, rounds: list[Round]) -> float:
    ratios = [took[key] / took[pick] for took in rounds if took[key] and took[pick]]
    return statistics.median(ratios) if ratios else math.inf


def finals(
    given: dict[str, Any], plans: list[Any], expected_s: float, folder: Path, quick: bool
) -> dict[str, Any]:
    """Compare the pick, the first of `plans`, with the others: its regret, and every turn."""
    keys = {plan.model_dump_json(): plan for plan in plans}
    starts = [
        list(in_turn(given, keys, expected_s, folder / "again" / str(start),
                     1 if quick else _ROUNDS))
        for start in range(1 if quick else _STARTS)
    ]  # fmt: skip
    return {
        "regret": regret(plans[0].model_dump_json(), starts),
        "again_s": [[[took[key] for took in rounds] for rounds in starts] for key in keys],
    }


def proposals(problem: Problem, folder: Path) -> list[Any]:
    """Return the proposer's prediction for each plan of the problem's grid."""
    from outpace.jobs.planning.proposer import Proposer
    from outpace.records.settings import TrainSettings

    given = problem.given(folder)
    proposer = Proposer(TrainSettings.parse(given, "benchmark"),
                        dict.fromkeys(given, "command line"))  # fmt: skip
    plans = grid(problem, proposer.default.precision)
    return [proposer.proposal(plan) for plan in plans]


def grid_measured(problem: Problem, proposed: list[Any], folder: Path) -> list[Any]:
    """Run a trial of each."""
    from outpace.experiment.tune import NextTrial

    chosen = [NextTrial("of the grid", one, one.step_time_s) for one in proposed]
    return measured(problem.given(folder), chosen, folder / "grid")


def grid_kept(rows: list[dict[str, Any]], proposed: list[Any]) -> list[Any]:
    """Return the same trials as recorded earlier, without plans and runs."""
    from outpace.records.tuning import PlanTrial

    return [
        PlanTrial.parse(
            {**row, "plan": proposal.plan.model_dump(mode="json"), "run": ""}, "tune.json"
        )
        for row, proposal in zip(rows, proposed, strict=True)
    ]


def tuned(problem: Problem, folder: Path) -> Any:
    """Return the result of `outpace tune`."""
    from outpace.records.tuning import Tuning

    config = folder / "tune.toml"
    given = problem.given(folder)
    config.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in given.items()))
    out = folder / "tuning"
    subprocess.run([sys.executable, "-m", "outpace", "tune", "--config", str(config), "--out",
                    str(out)], check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    return Tuning.load(out / "tuning.json")


def one(
    problem: Problem, folder: Path, most: int | None, kept: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """Return a problem's row. `kept`: trials of the grid, if it was measured before."""
    proposed = proposals(problem, folder)[:most]
    trials = grid_kept(kept, proposed) if kept else grid_measured(problem, proposed, folder)
    tuning = tuned(problem, folder)
    times = {trial.number: trial.compared_s for trial in trials if trial.compared_s}
    ran = sorted(times, key=lambda number: times[number])
    pick = tuning.fastest
    assert pick is not None and tuning.step_time_s is not None
    plans = [pick.plan, *(proposed[number - 1].plan for number in ran[:_AGAIN])]
    found = finals(problem.given(folder), plans, tuning.step_time_s, folder, most is not None)
    return {
        "problem": problem.name,
        "configurations": len(trials),
        "strategies": len({one.plan.strategy for one in proposed}),
        "failed": len(trials) - len(ran),
        **found,
        "any": statistics.fmean(times.values()) / times[ran[0]] - 1,
        "default": tuning.gain,
        "trials": len(tuning.trials),
        "share": tuning.took_s / sum(trial.took_s for trial in trials),
        "pick": pick.title,
        "tuning": tuning.model_dump(mode="json", exclude={"machine", "command", "settings"}),
        "grid": [trial.model_dump(mode="json", exclude={"plan", "run"}) for trial in trials],
    }


def recorded() -> dict[str, dict[str, Any]]:
    """Return the latest recorded rows, by problem."""
    path = RESULTS / "tune.json"
    rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    return {row["problem"]: row for row in rows}


def main() -> int:
    """Measure the grid of every requested problem, tune it, and print what was missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--problem", type=int, choices=range(1, len(PROBLEMS) + 1))
    parser.add_argument("--keep-grid", action="store_true")
    arguments = parser.parse_args()
    asked = PROBLEMS[:1] if arguments.quick else PROBLEMS
    if arguments.problem is not None:
        asked = (PROBLEMS[arguments.problem - 1],)
    unknown = [one.name for one in asked if one.name not in recorded()]
    if arguments.keep_grid and (arguments.quick or unknown):
        parser.error("--keep-grid is for whole problems that are recorded, and "
                     f"{'--quick measures a part' if arguments.quick else f'{unknown} are not'}: "
                     "measure without it")  # fmt: skip
    for problem in asked:
        with tempfile.TemporaryDirectory() as folder:
            trials = recorded()[problem.name]["grid"] if arguments.keep_grid else None
            row = one(problem, Path(folder), 3 if arguments.quick else None, trials)
        shown = {k: v for k, v in row.items() if k not in ("tuning", "grid", "again_s")}
        print(json.dumps(shown, indent=2), flush=True)
        if not arguments.quick:
            assert row["configurations"] >= LEAST and row["strategies"] >= 3
            rows = {**recorded(), problem.name: {**row, **circumstances()}}
            known = [rows[one.name] for one in PROBLEMS if one.name in rows]
            save("tune", {"rows": known, "problems": len(PROBLEMS)})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
