"""What a run costs beside its steps, and whether who sets no flag gets the speed.

    python benchmarks/lasting.py                  # all parts, some 20 minutes, records lasting.json
    python benchmarks/lasting.py --part long      # one of them anew

checkpoint: of GPT-2 124M (the race's case b) steps before and after one asynchronous checkpoint,
    from when each step's line is there: what the steps after it took longer than as many before.
long: 20,000 small steps; memory of the process and the time of a step, thousand by thousand.
auto: each case of the race as `--plan auto` trains it, and as it was tried by hand, in turn.
Target: a checkpoint costs at most one step; nothing grows; auto is within 2 % of the best by hand.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

import cases  # noqa: E402
import entrants  # noqa: E402
import watching  # noqa: E402
from recording import RESULTS, circumstances, save  # noqa: E402

PRECISION, LIMIT_S = "bf16", 1200.0
BEFORE, AFTER, REPEATS = 12, 10, 3  # steps beside a checkpoint
WARMUP = 4
LONG_STEPS, THOUSAND = 20_000, 1000
ROUNDS, COUNTED = 2, 8
LONG = {"precision": "fp32", "model": "outpace-tiny", "seq_len": 32, "global_batch": 2,
        "eval_batches": 1, "sample_tokens": 0, "device": "cpu"}  # fmt: skip
# Beside what the planner picks: what a person would try on a host of two cores.
BY_HAND = {
    "one process": ["--nproc", "1"],
    "one process, compiled": ["--nproc", "1", "--compile"],
    "one process, half the micro-batch": ["--nproc", "1", "--micro-batch"],
    "DDP on two": ["--nproc", "2"],
    "ZeRO-1 on two": ["--nproc", "2", "--strategy", "zero1"],
}


def _settings_of(case: cases.Case, folder: Path, steps: int) -> dict[str, Any]:
    place = folder / "cases" / f"{case.name}-{PRECISION}-{steps}"
    cases.write(case, place, steps, PRECISION)
    settings: dict[str, Any] = json.loads((place / "case.json").read_text())["settings"]
    return settings


def _train(settings: dict[str, Any], flags: list[str]) -> watching.Seen:
    """A run of the command in a place of its own. Raises SystemExit where it fails."""
    with tempfile.TemporaryDirectory(prefix="lasting-") as made:
        config, out = Path(made) / "outpace.toml", Path(made) / "run"
        lines = (f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        config.write_text("".join(lines))
        words = [sys.executable, "-m", "outpace", "train", "--config", str(config), "--out",
                 str(out), "--json", *flags]  # fmt: skip
        seen = watching.watch(words, out / "metrics.jsonl", entrants.ENVIRONMENT, LIMIT_S)
    if seen.exit_code != 0:
        raise SystemExit(f"{' '.join(words)} failed ({seen.exit_code}): {seen.said[-2000:]}")
    return seen


def _intervals(ends_s: tuple[float, ...]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(ends_s)]


def checkpoint(folder: Path) -> dict[str, Any]:
    """Steps that one asynchronous checkpoint costs, of each repeat."""
    settings = _settings_of(cases.CASES["b"], folder, BEFORE + AFTER)
    settings |= {"measure_only": False, "save_every": BEFORE, "steps": BEFORE + AFTER}
    repeats = []
    for _ in range(REPEATS):
        took = _intervals(_train(settings, ["--nproc", "1"]).steps_s)
        # The interval after the step that saves has the copy in it.
        before, after = took[WARMUP - 1 : BEFORE - 1], took[BEFORE - 1 :]
        step_s = statistics.median(before)
        repeats.append({"before_s": before, "after_s": after,
                        "lost_steps": (sum(after) - len(after) * step_s) / step_s})  # fmt: skip
        print(f"checkpoint: {repeats[-1]['lost_steps']:.2f} steps", file=sys.stderr)
    return {"repeats": repeats, "lost_steps": statistics.median(r["lost_steps"] for r in repeats)}


def long(folder: Path) -> dict[str, Any]:
    """Medians of steps and the memory at the end of each thousand."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lasting-") as made:
        config, out = Path(made) / "outpace.toml", Path(made) / "run"
        settings = {**LONG, "steps": LONG_STEPS}
        lines = (f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        config.write_text("".join(lines))
        words = [sys.executable, "-m", "outpace", "train", "--config", str(config), "--out",
                 str(out), "--json", "--nproc", "1"]  # fmt: skip
        thousands = list(watching.grown(words, out / "metrics.jsonl", THOUSAND))
        steps = [json.loads(line)["step_time_s"] for line in
                 (out / "metrics.jsonl").read_text().splitlines()]  # fmt: skip
    medians = [statistics.median(steps[at : at + THOUSAND])
               for at in range(0, LONG_STEPS, THOUSAND)]  # fmt: skip
    quarter = len(medians) // 4
    return {
        "steps": LONG_STEPS, "median_step_s": medians, "resident_bytes": thousands,
        # The last quarter beside the second: in the first, caches fill.
        "time_ratio": _mean(medians[-quarter:]) / _mean(medians[quarter : 2 * quarter]),
        "memory_growth_bytes": thousands[-1] - thousands[quarter],
    }  # fmt: skip


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _arms(case: cases.Case) -> Iterator[tuple[str, list[str]]]:
    """What is tried of a case; classifiers are not planned yet, so the defaults are the pick."""
    yield "picked", [] if case.labelled else ["--plan", "auto"]
    for name, flags in BY_HAND.items():
        half = [str(case.batch // 2)] if flags[-1] == "--micro-batch" else []
        yield name, [*flags, *half]


def auto(folder: Path) -> dict[str, Any]:
    """Of each case the pick's step and those tried by hand, in turn."""
    found = {}
    for name, case in cases.CASES.items():
        steps = WARMUP + COUNTED
        settings = {**_settings_of(case, folder, steps), "steps": steps}
        times: dict[str, list[float]] = {}
        for number in range(ROUNDS):
            arms = list(_arms(case))
            for arm, flags in arms if number % 2 == 0 else reversed(arms):
                took = _intervals(_train(settings, flags).steps_s)[WARMUP - 1 :]
                times.setdefault(arm, []).extend(took)
                print(f"auto, ({name}) {arm}: {statistics.median(took):.3f} s", file=sys.stderr)
        medians = {arm: statistics.median(took) for arm, took in times.items()}
        best = min((arm for arm in medians if arm != "picked"), key=lambda arm: medians[arm])
        found[name] = {"title": case.title, "step_times_s": times, "best": best,
                       "ratio": medians["picked"] / medians[best]}  # fmt: skip
    return found


PARTS = {"checkpoint": checkpoint, "long": long, "auto": auto}


def main() -> None:
    """Measure and record what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "outpace-peers")
    arguments = parser.parse_args()
    path = RESULTS / "lasting.json"
    parts = json.loads(path.read_text())["parts"] if path.is_file() else {}
    for name, measure in PARTS.items():
        if arguments.part in (None, name):
            parts[name] = {"found": measure(arguments.folder), **circumstances()}
            save("lasting", {"parts": parts})


if __name__ == "__main__":
    main()
