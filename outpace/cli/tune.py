"""`outpace tune`."""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli import options
from outpace.cli.experiments import goes_on
from outpace.cli.parser import Parser, number_type
from outpace.records.errors import BadInputError
from outpace.records.settings import TrainSettings
from outpace.records.tuning import TUNING_FILE, Trial, Tuning

if TYPE_CHECKING:
    from outpace.experiment.tune import Limits

_ABOUT = (
    "The fastest plan for a training on this machine: the planner proposes, short trials decide."
)
_EPILOG = (
    "Takes what outpace train takes; what is given is kept, the rest is tuned. A trial trains in "
    "processes of its own, with limits of time and of --memory-limit: one that fails is a result. "
    "With machine.json of outpace probe here, the first proposals are better. Then: outpace train "
    "--plan DIR/plan.json."
)
TRIALS_FILE, ASKED_FILE, PLAN_FILE = "trials.jsonl", "settings.json", "plan.json"
# Of the real training, or of its own directory: trials have theirs.
_NOT_OF_TRIALS = ("out", "resume", "plan", "steps", "tokens", "epochs", "measure_only")


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Tune, print the plan and what was tried; returns 0, 1 where all trials failed."""
    arguments = _parser().read(argv)
    settings, origins = _settings(arguments)
    given = _given(settings, origins)
    folder = settings.out or _default_folder()
    before = _before(folder, given, settings.resume)
    tuning = _tuned(arguments, settings, origins, given, folder, before)
    tuning.save(folder / TUNING_FILE)
    if tuning.fastest is not None:
        tuning.fastest.plan.save(folder / PLAN_FILE)
    if arguments.json:
        print(tuning.model_dump_json(indent=2), flush=True)
    else:
        from rich.console import Console

        from outpace.report.tuning import shown

        Console().print(shown(tuning, str(folder), _command(given, folder)))
    return 0 if tuning.fastest is not None else 1


def _tuned(
    arguments: argparse.Namespace, settings: TrainSettings, origins: dict[str, str],
    given: dict[str, Any], folder: Path, before: list[Trial],
) -> Tuning:  # fmt: skip
    from outpace.experiment import tune
    from outpace.launch.tuning import Proposer

    proposer = Proposer(settings, origins)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ASKED_FILE).write_text(json.dumps(given, indent=2) + "\n", encoding="utf-8")
    began_s, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    with (folder / TRIALS_FILE).open("a", encoding="utf-8", buffering=1) as file:

        def told(trial: Trial) -> None:
            file.write(trial.model_dump_json() + "\n")
            print(f"outpace: {_line(trial)}", file=sys.stderr, flush=True)

        ended = tune.tune(
            proposer, partial(tune.run_trial, given, folder), _limits(arguments), before, told
        )
    return Tuning(
        settings=given,
        trials=ended.trials,
        **tune.tuned(ended.trials),
        stopped=ended.stopped,
        considered=proposer.considered,
        took_s=time.monotonic() - began_s,
        machine=proposer.machine,
        started=started,
        command=("outpace", "tune", *options.as_flags(given)),
    )


def _limits(arguments: argparse.Namespace) -> "Limits":
    from outpace.experiment.tune import Limits

    return Limits(arguments.trials, arguments.budget, arguments.within)


def _line(trial: Trial) -> str:
    from outpace.records.units import show_seconds

    predicted = f"predicted {show_seconds(trial.predicted_s)}"
    if trial.step_time_s is None:
        return f"trial {trial.number}: {trial.title} ({predicted}) failed: {trial.failure}"
    return (
        f"trial {trial.number}: {trial.title} takes {show_seconds(trial.step_time_s)} a step "
        f"({predicted})"
    )


def _settings(arguments: argparse.Namespace) -> tuple[TrainSettings, dict[str, str]]:
    layers = {options.COMMAND_LINE: options.from_flags(arguments)}
    if arguments.config is not None:
        layers[str(arguments.config)] = options.from_toml(arguments.config)
    settings, origins = options.build(layers)
    if settings.plan is not None:
        raise BadInputError(
            "--plan says how to train already; outpace tune finds out. Leave it out."
        )
    if settings.micro_batch == "auto":
        raise BadInputError("--micro-batch auto: outpace tune tries sizes itself. Leave it out.")
    return settings, origins


def _given(settings: TrainSettings, origins: Mapping[str, str]) -> dict[str, Any]:
    """What a person said, as JSON has it."""
    values = settings.model_dump(mode="json")
    return {
        name: value
        for name, value in values.items()
        if origins[name] != options.DEFAULT and name not in _NOT_OF_TRIALS
    }


def _before(folder: Path, given: dict[str, Any], resumes: bool) -> list[Trial]:
    """Trials that are there already. Raises BadInputError."""
    path = folder / TRIALS_FILE
    if not goes_on(folder, path, resumes, "a tuning"):
        return []
    if json.loads((folder / ASKED_FILE).read_text(encoding="utf-8")) != given:
        raise BadInputError(f"{folder} holds a tuning with other settings. Use another --out.")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    path.write_text("".join(whole), encoding="utf-8")
    return [Trial.parse(json.loads(line), str(path)) for line in whole]


def _command(given: Mapping[str, Any], folder: Path) -> str:
    """That trains by the plan that was found."""
    own = {name: value for name, value in given.items() if name != "nproc"}
    return shlex.join(
        ["outpace", "train", *options.as_flags(own), "--plan", str(folder / PLAN_FILE)]
    )


def _default_folder() -> Path:
    return Path("tunings") / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")


def _parser() -> Parser:
    parser = Parser("tune", _ABOUT, _EPILOG, usage="[options]")
    parser.add_json()
    add = parser.arguments.add_argument
    add("--config", type=Path, default=None, metavar="FILE.toml", help="settings by their names")
    add("--trials", type=number_type(int, 1), default=8, metavar="N", help="at most (default: 8)")
    add("--budget", type=number_type(float, 1), default=600.0, metavar="S",
        help="no trial begins after so many seconds (default: 600)")  # fmt: skip
    add("--within", type=number_type(float, 0.0, 1), default=0.02, metavar="X",
        help="stop where no plan left can win by more than this share (default: 0.02)")  # fmt: skip
    options.add_settings(parser)
    return parser
