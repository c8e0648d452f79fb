"""`outpace compare`."""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outpace.cli import options
from outpace.cli.experiments import arm_of, commands, from_toml, goes_on
from outpace.cli.parser import Parser, number_type
from outpace.records.comparison import Comparison, Experiment, Outcome, Verdict
from outpace.records.errors import BadInputError

_ABOUT = "Which is faster, and is that more than noise: arms in turn until a verdict is clear."
_EPILOG = (
    "An ARM is a strategy (zero3), settings (precision=bf16,micro_batch=2), environment variables "
    "(NCCL_P2P_DISABLE=1), any of these with commas between and NAME: before them, or one "
    "experiment.toml; or the comparison.json of another comparison, to repeat it. All else that "
    "outpace train takes is common to all arms. The first arm is what others are compared with."
)
RESULT, OUTCOMES = "comparison.json", "outcomes.jsonl"


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Compare, print the verdict, keep all of it; returns 0. Raises OutpaceError."""
    arguments = _parser().read(argv)
    given = vars(arguments).get("out")
    out = None if given is None else Path(given)
    folder, stored = out or _default_folder(), None
    if arguments.runs:
        comparison = _of_runs(arguments)
    else:
        experiment, stored = _experiment(arguments)
        before = _before(folder, experiment, vars(arguments).get("resume", False))
        comparison = _compared(experiment, folder, before, arguments.json)
    if out is not None or not arguments.runs:
        folder.mkdir(parents=True, exist_ok=True)
        comparison.save(folder / RESULT)
    if arguments.json:
        print(comparison.model_dump_json(indent=2), flush=True)
    else:
        from rich.console import Console

        from outpace.report.comparison import shown

        Console().print(shown(comparison, str(folder) if folder.is_dir() else None))
        for line in _beside(stored, comparison) if stored is not None else ():
            print(line)
    return 0


def _compared(
    experiment: Experiment, folder: Path, before: list[Outcome], quiet: bool
) -> Comparison:
    """Run it, with every outcome written as soon as it is there."""
    from outpace.experiment import arms
    from outpace.experiment.compare import compare

    own = experiment.arms[0].command is not None
    if own and experiment.metric is not None:
        arms.check_metric(experiment.metric)
    for arm in () if own else experiment.arms:
        arms.settings_of(experiment, arm)
    folder.mkdir(parents=True, exist_ok=True)
    experiment.save(folder / "experiment.json")
    began_s, started = time.monotonic(), _now()
    with (folder / OUTCOMES).open("a", encoding="utf-8", buffering=1) as file:

        def told(outcome: Outcome, verdicts: Mapping[str, Verdict]) -> None:
            file.write(outcome.model_dump_json() + "\n")
            if not quiet:
                print(_line(outcome), file=sys.stderr, flush=True)

        run = arms.run_command if own else arms.run_training
        ended = compare(experiment, folder, run, before, told)
    took_s = time.monotonic() - began_s
    command = ("outpace", "compare", f"{folder.name}/{RESULT}")
    return _judged(experiment, folder, ended, took_s, started, command)


def _of_runs(arguments: argparse.Namespace) -> Comparison:
    """Of runs that are over."""
    from outpace.experiment.compare import Ended
    from outpace.experiment.stored import NOT_IN_TURN, arms_of, outcomes_of

    if arguments.arm or arguments.command:
        raise BadInputError("--runs compares what was run; leave out arms and commands.")
    experiment = arms_of(arguments.runs)
    ended = Ended(tuple(outcomes_of(arguments.runs, experiment)), "the runs are over")
    words = ("outpace", "compare", "--runs", *map(str, arguments.runs))
    found = _judged(experiment, Path(), ended, 0.0, _now(), words)
    return found.model_copy(update={"differing": (NOT_IN_TURN, *found.differing)})


def _judged(
    experiment: Experiment, folder: Path, ended: Any, took_s: float, started: str,
    command: tuple[str, ...],
) -> Comparison:  # fmt: skip
    """What the outcomes come to."""
    from outpace.catalog.accelerators import find_accelerator
    from outpace.experiment.facts import differing, read_facts
    from outpace.experiment.results import curves, losses_in_words, results
    from outpace.probe.machine import identify

    facts = read_facts(folder, ended.outcomes)
    return Comparison(
        experiment=experiment,
        command=command,
        arms=tuple(results(experiment, folder, ended.outcomes)),
        outcomes=ended.outcomes,
        differing=tuple(differing(experiment, facts)),
        losses=losses_in_words(experiment, curves(experiment, folder, ended.outcomes)),
        stopped=ended.stopped,
        took_s=took_s,
        machine=identify(find_accelerator),
        started=started,
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _line(outcome: Outcome) -> str:
    if outcome.value is None:
        return f"round {outcome.round + 1}: {outcome.arm} failed: {outcome.failure}"
    return f"round {outcome.round + 1}: {outcome.arm} {outcome.value:.6g}"


def _experiment(arguments: argparse.Namespace) -> tuple[Experiment, Comparison | None]:
    """What is asked for; and the comparison that it repeats, if it does."""
    values: dict[str, Any] = {}
    stored = None
    words = arguments.arm
    if len(words) == 1 and words[0].endswith(".json"):
        stored = Comparison.load(Path(words[0]))
        return stored.experiment, stored
    if len(words) == 1 and words[0].endswith(".toml"):
        values = from_toml(Path(words[0]))
    else:
        values["arms"] = [*map(arm_of, words), *commands(arguments.command)]
    common = {name: value for name, value in options.from_flags(arguments).items()
              if name not in ("out", "resume")}  # fmt: skip
    plain = json.loads(json.dumps(common, default=_plainly))
    values["common"] = {**values.get("common", {}), **plain}
    for name, key in (("rounds", "rounds"), ("budget", "budget_s"), ("within", "within"),
                      ("price", "price"), ("metric", "metric")):  # fmt: skip
        if getattr(arguments, name) is not None:
            values[key] = getattr(arguments, name)
    return Experiment.parse(values, "the experiment"), stored


def _plainly(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else str(value)


def _before(folder: Path, experiment: Experiment, resumes: bool) -> list[Outcome]:
    """Outcomes of whole rounds that are there already. Raises BadInputError."""
    path = folder / OUTCOMES
    if not goes_on(folder, path, resumes, "a comparison"):
        return []
    if Experiment.load(folder / "experiment.json") != experiment:
        raise BadInputError(f"{folder} holds another experiment. Use another --out.")
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [Outcome.parse(json.loads(line), str(path)) for line in lines]
    last = max((one.round for one in found), default=-1)
    whole = [one for one in found if one.round < last or _is_whole(found, last, experiment)]
    path.write_text("".join(one.model_dump_json() + "\n" for one in whole), encoding="utf-8")
    return whole


def _is_whole(found: list[Outcome], number: int, experiment: Experiment) -> bool:
    return sum(one.round == number for one in found) == len(experiment.arms)


def _beside(stored: Comparison, now: Comparison) -> list[str]:
    """Whether what was found before is found again."""
    lines = [f"beside what was stored ({stored.started}, {stored.machine.cpu}):"]
    for name, new in now.verdicts().items():
        old = stored.verdicts().get(name)
        if old is None or None in (old.low, old.high, new.low, new.high):
            lines.append(f"  {name}: too few rounds to say")
            continue
        assert old.low is not None and old.high is not None
        assert new.low is not None and new.high is not None
        apart = old.low > new.high or new.low > old.high
        word = "differs from" if apart else "agrees with"
        lines.append(
            f"  {name}: {new.slowdown:+.1%} ({new.low:+.1%} to {new.high:+.1%}) {word} "
            f"{old.slowdown:+.1%} ({old.low:+.1%} to {old.high:+.1%})"
        )
    return lines


def _default_folder() -> Path:
    return Path("comparisons") / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")


def _parser() -> Parser:
    parser = Parser("compare", _ABOUT, _EPILOG, usage="ARM ARM … [options]")
    parser.add_json()
    add = parser.arguments.add_argument
    add("arm", nargs="*", default=[], metavar="ARM", help="what is compared")
    add("--command", action="append", default=[], metavar="CMD",
        help="an arm that is a command of your own; repeat it")  # fmt: skip
    add("--metric", default=None, metavar="REGEX",
        help="finds the figure in a command's output: one group around the number")  # fmt: skip
    add("--rounds", type=number_type(int, 1), default=None, metavar="N",
        help="at most (default: 40)")  # fmt: skip
    add("--budget", type=number_type(float, 1), default=None, metavar="S",
        help="no round begins after so many seconds (default: 600)")  # fmt: skip
    add("--within", type=number_type(float, 0.0001, 1), default=None, metavar="X",
        help="a smaller difference is as good as none (default: 0.015)")  # fmt: skip
    add("--price", type=number_type(float, 0), default=None, metavar="X",
        help="of a device and hour: what a million tokens cost with each arm")  # fmt: skip
    add("--runs", nargs="*", default=[], type=Path, metavar="RUN",
        help="compare what was already run")  # fmt: skip
    options.add_settings(parser)
    return parser
