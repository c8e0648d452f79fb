"""Costs of a run apart from its steps, and the speed that a user without flags gets.

    python benchmarks/lasting.py                  # all parts, most of an hour, records lasting.json
    python benchmarks/lasting.py --part long      # only one of them
    python benchmarks/lasting.py --part auto --case a

checkpoint: steps of GPT-2 124M (case b of the peer benchmarks) before and after two asynchronous
    checkpoints, timed by each step's line: the extra time of the steps after each one, compared
    with those before the first, which must allocate memory that later ones reuse.
long: 20,000 small steps; the process's memory and the time of a step, by thousands of steps.
auto: each case of the peer benchmarks as `--plan auto` trains it, and as it was tried by hand; all
    of them train at the same time and take turns, so changes of the machine affect all equally.
Target: a checkpoint costs at most one step; nothing grows; auto is within 2 % of the best by hand.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

import cases  # noqa: E402
import entrants  # noqa: E402
import race  # noqa: E402
import watching  # noqa: E402
from recording import RESULTS, circumstances, save  # noqa: E402

from outpace.experiment.arms import RunFailure  # noqa: E402
from outpace.experiment.interleaved_runs import TurnTraining, train_in_turn  # noqa: E402
from outpace.experiment.trials import paired_s  # noqa: E402
from outpace.records.measurement import WARMUP_STEPS  # noqa: E402

PRECISION, LIMIT_S = "bf16", 1200.0
EVERY, REPEATS = 12, 3  # steps between checkpoints, and number of repeats
SAVES = {"first": 1, "later": 2}
TOUCHED = 0.8  # share of free memory
WARMUP = 4
LONG_STEPS, THOUSAND = 20_000, 1000
TURNS, TURN_STEPS = 6, 4  # number and steps of each arm's turns
LONG = {"precision": "fp32", "model": "outpace-tiny", "seq_len": 32, "global_batch": 2,
        "eval_batches": 1, "sample_tokens": 0, "device": "cpu"}  # fmt: skip


def _settings_of(case: cases.Case, folder: Path, steps: int) -> dict[str, Any]:
    place = folder / "cases" / f"{case.name}-{PRECISION}-{steps}"
    cases.write(case, place, steps, PRECISION)
    settings: dict[str, Any] = json.loads((place / "case.json").read_text())["settings"]
    return settings


@contextmanager
def _command(settings: dict[str, Any], flags: list[str]) -> Iterator[tuple[list[str], Path]]:
    """Return a command for a run in a separate folder, and the file of its steps' lines."""
    with tempfile.TemporaryDirectory(prefix="lasting-") as made:
        config, out = Path(made) / "outpace.toml", Path(made) / "run"
        cases.write_config(config, settings)
        words = [sys.executable, "-m", "outpace", "train", "--config", str(config), "--out",
                 str(out), "--json", *flags]  # fmt: skip
        yield words, out / "metrics.jsonl"


def _step_times_s(settings: dict[str, Any], flags: list[str]) -> list[float]:
    """Return a run's step times after warm-up. Raises SystemExit if it fails."""
    with _command(settings, flags) as (words, metrics):
        seen = watching.watch(words, metrics, entrants.ENVIRONMENT, LIMIT_S)
    if seen.exit_code != 0:
        raise SystemExit(f"{' '.join(words)} failed ({seen.exit_code}): {seen.said[-2000:]}")
    return race.step_times_s(seen.steps_s, WARMUP)


def checkpoint(folder: Path) -> dict[str, Any]:
    """Return the cost of each asynchronous checkpoint in steps, for each repeat.

    A virtual machine's host may reclaim free memory, and provide it again page by page, ten times
    as slowly as the system does; the cost of a checkpoint that needs such memory is then the
    host's. So half of the repeats start with recently touched memory, and half do not.
    """
    steps = (len(SAVES) + 1) * EVERY
    settings = _settings_of(cases.CASES["b"], folder, steps)
    settings |= {"measure_only": False, "save_every": EVERY, "steps": steps}
    repeats = []
    for number in range(2 * REPEATS):
        at_hand = number % 2 == 0
        if at_hand:
            _touch_memory()
        took = _step_times_s(settings, ["--nproc", "1"])
        step_s = statistics.median(took[: EVERY - WARMUP])
        lost = {}
        for which, save_number in SAVES.items():
            # The interval after the saving step includes the copy.
            after = took[save_number * EVERY - WARMUP :][: EVERY - 1]
            lost[which] = (sum(after) - len(after) * step_s) / step_s
        repeats.append({"at_hand": at_hand, "step_times_s": took, "lost_steps": lost})
        print(f"checkpoint: {lost} steps", file=sys.stderr, flush=True)
    lost_steps = {
        which: {
            place: statistics.median(
                one["lost_steps"][which] for one in repeats if one["at_hand"] is at_hand
            )
            for place, at_hand in (("at hand", True), ("as it is", False))
        }
        for which in SAVES
    }
    return {"repeats": repeats, "lost_steps": lost_steps}


def _touch_memory() -> None:
    """Touch most of the free memory once, in a process that then ends."""
    count = int(psutil.virtual_memory().available * TOUCHED)
    subprocess.run([sys.executable, "-c", f"import torch; torch.ones({count // 4})"], check=True)


def long(folder: Path) -> dict[str, Any]:
    """Return medians of steps, and the memory at the end of each thousand."""
    with _command({**LONG, "steps": LONG_STEPS}, ["--nproc", "1"]) as (words, metrics):
        thousands = list(watching.grown(words, metrics, THOUSAND))
        lines = metrics.read_text().splitlines()
    steps = [json.loads(line)["step_time_s"] for line in lines]
    medians = [statistics.median(steps[at : at + THOUSAND])
               for at in range(0, LONG_STEPS, THOUSAND)]  # fmt: skip
    quarter = len(medians) // 4
    return {
        "steps": LONG_STEPS, "median_step_s": medians, "resident_bytes": thousands,
        # Compare the last quarter with the second, since caches fill in the first.
        "time_ratio": fmean(medians[-quarter:]) / fmean(medians[quarter : 2 * quarter]),
        "memory_growth_bytes": thousands[-1] - thousands[quarter],
    }  # fmt: skip


def _arms(case: cases.Case) -> dict[str, dict[str, Any]]:
    """Return settings of the pick, and of what users would try by hand on a two-core host."""
    return {
        "picked": {"plan": "auto"},
        "one process": {"nproc": 1},
        "one process, compiled": {"nproc": 1, "compile": True},
        "one process, half the micro-batch": {"nproc": 1, "micro_batch": case.batch // 2},
        "DDP on two": {"nproc": 2},
        "ZeRO-1 on two": {"nproc": 2, "strategy": "zero1"},
    }


def auto(folder: Path, case: cases.Case) -> dict[str, Any]:
    """Measure the pick and the manual settings, which train together and take turns."""
    settings = _settings_of(case, folder, WARMUP_STEPS + TURNS * (TURN_STEPS + 1))
    arms = _arms(case)
    with tempfile.TemporaryDirectory(prefix="lasting-") as made:
        turned = train_in_turn(
            [TurnTraining({**settings, **own}, Path(made, str(place)), Path(made, f"{place}.toml"),
                     TURN_STEPS) for place, own in enumerate(arms.values())],
            TURNS, LIMIT_S,
        )  # fmt: skip
    seconds = {}
    for arm, one, step_s in zip(arms, turned, paired_s(turned), strict=True):
        if isinstance(one.result, RunFailure) or step_s is None:
            raise SystemExit(f"({case.name}) {arm} failed: {one.result}")
        seconds[arm] = step_s
        print(f"auto, ({case.name}) {arm}: {step_s:.3f} s", file=sys.stderr, flush=True)
    best = min((arm for arm in arms if arm != "picked"), key=lambda arm: seconds[arm])
    return {"title": case.title, "turns_s": dict(zip(arms, [t.turns for t in turned], strict=True)),
            "step_time_s": seconds, "best": best,
            "ratio": seconds["picked"] / seconds[best]}  # fmt: skip


PARTS = {"checkpoint": checkpoint, "long": long}


def main() -> None:
    """Measure the requested parts, and record each as soon as it is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=(*PARTS, "auto"))
    parser.add_argument("--case", choices=cases.CASES, help="of auto; else all")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "outpace-peers")
    arguments = parser.parse_args()
    path = RESULTS / "lasting.json"
    parts = json.loads(path.read_text())["parts"] if path.is_file() else {}
    for name, measure in PARTS.items():
        if arguments.part in (None, name):
            parts[name] = {"found": measure(arguments.folder), **circumstances()}
            save("lasting", {"parts": parts})
    for name, case in cases.CASES.items() if arguments.part in (None, "auto") else ():
        if arguments.case in (None, name):
            found = {**parts.get("auto", {}).get("found", {}), name: auto(arguments.folder, case)}
            parts["auto"] = {"found": found, **circumstances()}
            save("lasting", {"parts": parts})


if __name__ == "__main__":
    main()
