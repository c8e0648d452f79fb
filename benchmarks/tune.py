"""`outpace tune` against whole grids: what its few trials miss of what many would have found.

    python benchmarks/tune.py            # records results/tune.json; 90 minutes on 2 cores
    python benchmarks/tune.py --out DIR  # keeps grids and problems, and goes on from there
    python benchmarks/tune.py --quick    # shows that it works, records nothing

Of each problem (a model, a sequence, a number of processes, a limit of memory) every configuration
of a grid is measured as `outpace tune` measures a trial, and `outpace tune` is run. Then the grid's
five best and the tuner's pick are measured again in turn, in another order each round, so that
noise does not crown one. Regret is what the pick takes longer than one of these, by the median of
the rounds' ratios, where that is most; its price is the tuner's whole time as a share of the
grid's.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

GPT = {"family": "gpt2", "hidden": 256, "heads": 8, "vocab": 4096, "max_positions": 512}
LLAMA = {"family": "llama", "hidden": 256, "heads": 8, "kv_heads": 8, "ffn": 704, "vocab": 4096,
         "max_positions": 512}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """What is trained, and on how many processes; None: as many as the tuner likes."""

    name: str
    spec: dict[str, Any]
    seq_len: int
    global_batch: int
    nproc: int | None
    memory_limit: str | None = None

    def given(self, folder: Path) -> dict[str, Any]:
        """Settings of outpace train."""
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
# By number of processes: strategy with its axes.
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
_AGAIN, _ROUNDS = 5, 5
LEAST = 48


def grid(problem: Problem, precision: str) -> Iterator[Any]:
    """Every configuration."""
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


def measured(
    given: dict[str, Any], plans: list[Any], predicted_s: list[float], folder: Path
) -> list[Any]:
    """A trial of each, one after the other."""
    from outpace.experiment.tune import run_trial
    from outpace.launch.tuning import Proposal
    from outpace.planner.titles import title

    found = []
    for number, (plan, seconds) in enumerate(zip(plans, predicted_s, strict=True), 1):
        proposal = Proposal(plan, title(plan), seconds, 0.0, 0.0, (), plan)
        found.append(run_trial(given, folder, number, "of the grid", proposal, seconds))
        took = found[-1].step_time_s
        print(f"{number} of {len(plans)}: {proposal.title}: {took}", file=sys.stderr, flush=True)
    return found


def in_turn(
    given: dict[str, Any], plans: dict[str, Any], expected_s: float, folder: Path, rounds: int
) -> Iterator[dict[str, float | None]]:
    """Of each round the plans' step times, measured in an order of its own."""
    for number in range(rounds):
        keys = random.Random(number).sample(list(plans), len(plans))
        took = measured(given, [plans[key] for key in keys], [expected_s] * len(keys),
                        folder / f"again-{number}")  # fmt: skip
        yield {key: trial.step_time_s for key, trial in zip(keys, took, strict=True)}


def regret(pick: str, rounds: list[dict[str, float | None]]) -> float:
    """What the pick takes longer than the plan that it is slowest beside."""
    medians = [0.0]
    for other in rounds[0]:
        ratios = [took[pick] / took[other] for took in rounds if took[pick] and took[other]]
        medians += [statistics.median(ratios) - 1] if ratios else []
    assert len(medians) > 1, "the pick never ran again"
    return max(medians)


def grid_measured(problem: Problem, folder: Path, kept: Path, most: int | None) -> list[Any]:
    """A trial of each of its plans; those of `kept`, if there are any."""
    from outpace.launch.tuning import Proposer
    from outpace.records.settings import TrainSettings
    from outpace.records.tuning import Trial

    if kept.is_file():
        return [Trial.parse(values, str(kept)) for values in json.loads(kept.read_text())]
    given = problem.given(folder)
    proposer = Proposer(TrainSettings.parse(given, "benchmark"),
                        dict.fromkeys(given, "command line"))  # fmt: skip
    plans = list(grid(problem, proposer.default.precision))[:most]
    expected = [proposer.proposal(plan).step_time_s for plan in plans]
    trials = measured(given, plans, expected, folder / "grid")
    kept.write_text(json.dumps([trial.model_dump(mode="json") for trial in trials]))
    return trials


def one(problem: Problem, folder: Path, trials: list[Any], most: int | None) -> dict[str, Any]:
    """A problem's row, given its grid's trials."""
    from outpace.records.tuning import Tuning

    given = problem.given(folder)
    config = folder / "tune.toml"
    config.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in given.items()))
    out = folder / "tuning"
    subprocess.run([sys.executable, "-m", "outpace", "tune", "--config", str(config), "--out",
                    str(out)], check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    tuning = Tuning.load(out / "tuning.json")
    ran = sorted((t for t in trials if t.step_time_s), key=lambda t: t.step_time_s)
    pick = tuning.fastest
    assert pick is not None and tuning.step_time_s is not None
    finalists = {t.plan.model_dump_json(): t.plan for t in (pick, *ran[:_AGAIN])}
    rounds = list(in_turn(given, finalists, tuning.step_time_s, folder,
                          _ROUNDS if most is None else 1))  # fmt: skip
    return {
        "problem": problem.name,
        "configurations": len(trials),
        "strategies": len({trial.plan.strategy for trial in trials}),
        "failed": sum(trial.step_time_s is None for trial in trials),
        "regret": regret(pick.plan.model_dump_json(), rounds),
        "any": statistics.fmean(t.step_time_s for t in ran) / ran[0].step_time_s - 1,
        "default": tuning.gain,
        "trials": len(tuning.trials),
        "share": tuning.took_s / sum(t.took_s for t in trials),
        "pick": pick.title,
        "again_s": [[took[key] for took in rounds] for key in finalists],
        "tuning": tuning.model_dump(mode="json", exclude={"machine", "command", "settings"}),
        "grid": [trial.model_dump(mode="json", exclude={"plan", "run"}) for trial in trials],
    }


def all_of(problems: Sequence[Problem], out: Path, most: int | None) -> Iterator[dict[str, Any]]:
    """Each problem's row: that of `out`, if it is there. All grids come first."""
    out.mkdir(parents=True, exist_ok=True)
    grids = []
    for number, problem in enumerate(problems):
        with tempfile.TemporaryDirectory() as folder:
            grids.append(grid_measured(problem, Path(folder), out / f"grid-{number}.json", most))
    for number, (problem, trials) in enumerate(zip(problems, grids, strict=True)):
        row = out / f"row-{number}.json"
        if not row.is_file():
            with tempfile.TemporaryDirectory() as folder:
                found = one(problem, Path(folder), trials, most)
            row.write_text(json.dumps(found))
            shown = {k: v for k, v in found.items() if k not in ("tuning", "grid", "again_s")}
            print(json.dumps(shown, indent=2), flush=True)
        yield json.loads(row.read_text())


def main() -> int:
    """Tune every problem, measure its grid, and say what was missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="folder of what was measured, and will be")
    arguments = parser.parse_args()
    from recording import save

    most = 3 if arguments.quick else None
    with tempfile.TemporaryDirectory() as own:
        rows = list(all_of(PROBLEMS[:1] if most else PROBLEMS, arguments.out or Path(own), most))
    if not arguments.quick:
        assert all(row["configurations"] >= LEAST and row["strategies"] >= 3 for row in rows)
        save("tune", {"rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
