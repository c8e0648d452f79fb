"""`outpace tune`."""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli import options
from outpace.cli.experiments import (
    ASKED_FILE,
    folder_of,
    goes_on,
    going_on,
    now,
    show,
    whole_lines,
)
from outpace.cli.main import TerminatedError
from outpace.cli.parser import Parser, duration_type, number_type
from outpace.records.base import write_atomic
from outpace.records.errors import BadInputError
from outpace.records.lines import encode_line
from outpace.records.machine import Machine
from outpace.records.plan import PlanFile
from outpace.records.ranks import Ranks
from outpace.records.settings import OF_A_RUN, TrainSettings
from outpace.records.tuning import TUNING_FILE, PlanTrial, Tuning

if TYPE_CHECKING:
    from outpace.experiment.tune import Ended, Limits
    from outpace.launch.tuning import Proposer

_ABOUT = (
    "The fastest plan for a training on this machine: the planner proposes, short trials decide."
)
_EPILOG = (
    "Takes what outpace train takes; what is given is kept, the rest is tuned. A trial trains in "
    "processes of its own, with limits of time and of --memory-limit: one that fails is a result. "
    "With machine.json of outpace probe here, the first proposals are better. Then: outpace train "
    "--plan DIR/plan.json."
)
TRIALS_FILE, PLAN_FILE = "trials.jsonl", "plan.json"
HOST_FILE = "host.json"  # whose trials they are
# Of the tuning, where they are a run's for outpace train.
_TEXTS = {
    "out": "directory of the tuning (default: tunings/<time>)",
    "resume": "go on with the tuning in --out, by the command that began it",
}
_OF_FREE = 0.9  # of the host's free memory, for a trial's processes together
_OWN = ("out", "resume", "plan")  # of the tuning, not of what is trained
# Of the real training: trials are short, and nobody looks at them one by one.
_NOT_OF_TRIALS = OF_A_RUN | {"steps", "tokens", "epochs"}


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Tune, print the plan and what was tried; returns 0, 1 where all trials failed."""
    arguments = _parser().read(argv)
    settings, origins = _settings(arguments)
    asked = _asked(settings, origins)
    with folder_of(settings.out, settings.resume, "tunings", "tuning") as folder:
        before = _before(folder, asked, settings.resume)
        try:
            tuning = _tuned(arguments, settings, origins, asked, folder, before)
        except (KeyboardInterrupt, TerminatedError):
            print(going_on(folder, "tune", *argv), file=sys.stderr, flush=True)
            raise
    if arguments.json:
        print(tuning.model_dump_json(indent=2), flush=True)
    else:
        from outpace.report.tuning import shown

        then = _command(asked, folder) if tuning.fastest is not None else ()
        show(shown(tuning), folder, "then", then)
    return 0 if tuning.fastest is not None else 1


def _tuned(
    arguments: argparse.Namespace, settings: TrainSettings, origins: dict[str, str],
    asked: dict[str, Any], folder: Path, before: list[PlanTrial],
) -> Tuning:  # fmt: skip
    """Tune and keep what is found, also where it is interrupted."""
    from outpace.experiment.tune import Limits, tuned
    from outpace.launch.materials import prepare_data
    from outpace.launch.tuning import Proposer, rates_to_begin_with
    from outpace.report.progress import Progress

    host_bytes = _host_bytes(settings)
    proposer = Proposer(settings, origins, host_bytes)
    # Else the first trial does it, within its limit of time.
    prepare_data(settings, [Progress()])
    _require_host(folder, proposer.machine)
    rates = rates_to_begin_with(settings)  # once nothing is left that may be refused
    if rates is not None:
        proposer = Proposer(settings, origins, host_bytes, rates)
    write_atomic(folder / ASKED_FILE, json.dumps(asked, indent=2) + "\n")
    began_s, started = time.monotonic() - sum(trial.took_s for trial in before), now()
    limits = Limits(arguments.trials, arguments.budget, arguments.within)
    ended, interrupt = _trials(proposer, asked, folder, limits, before, host_bytes)
    tuning = Tuning(
        settings=asked,
        trials=ended.trials,
        **tuned(ended.trials),
        stopped=ended.stopped,
        considered=proposer.considered,
        took_s=time.monotonic() - began_s,
        machine=proposer.machine,
        started=started,
        command=("outpace", "tune", *options.as_flags({**asked, **_given(limits)})),
    )
    tuning.save(folder / TUNING_FILE)
    if tuning.fastest is not None:
        found = tuning.fastest.plan
        PlanFile.from_plan(found, settings.seq_len, settings.global_batch).save(folder / PLAN_FILE)
    if interrupt is not None:
        raise interrupt
    return tuning


def _host_bytes(settings: TrainSettings) -> int | None:
    """For a trial on a CPU: else the one that is too large takes the machine down with it."""
    from outpace.launch.resolve import resolve_device
    from outpace.probe.limits import free_bytes

    if resolve_device(settings, Ranks()).type != "cpu":
        return None
    return int(_OF_FREE * free_bytes())


def _require_host(folder: Path, machine: Machine) -> None:
    """Of trials on another machine nothing can be learned here. Raises BadInputError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / HOST_FILE
    if not path.is_file():
        machine.save(path)
        return
    then = Machine.load(path)
    for name in machine.differences(then):
        raise BadInputError(
            f"{folder} holds trials of another machine: {name} was {getattr(then, name)}, "
            f"and is {getattr(machine, name)} here. Go on there, or use another --out."
        )


def _trials(
    proposer: "Proposer",
    asked: dict[str, Any],
    folder: Path,
    limits: "Limits",
    before: list[PlanTrial],
    host_bytes: int | None,
) -> tuple["Ended", BaseException | None]:
    """Each is written as soon as it is there; and what interrupted them, if so."""
    from outpace.experiment.trials import Trials, fit_together
    from outpace.experiment.tune import Chosen, Ended, tune

    own = {name: value for name, value in asked.items() if name not in _NOT_OF_TRIALS}
    trials, seen = Trials(own, folder, host_bytes), list(before)
    with (folder / TRIALS_FILE).open("a", encoding="utf-8", buffering=1) as file:

        def record_trial(trial: PlanTrial) -> None:
            seen.append(trial)
            file.write(encode_line(trial).decode())
            _say(_line(trial))

        def race(number: int, several: Sequence[Chosen]) -> Sequence[PlanTrial]:
            titles = ", ".join(one.proposal.title for one in several)
            plans = [one.proposal.plan for one in several]
            if fit_together(plans, seen, host_bytes, proposer.machine):
                _say(f"in turn, to tell them apart: {titles}")
                return trials.race(number, several)
            _say(f"once more, one after the other (they do not fit together): {titles}")
            return [
                trials.run(at, one).model_copy(update={"raced": True})
                for at, one in enumerate(several, number)
            ]

        try:
            return tune(proposer, trials.run, race, limits, before, record_trial), None
        except (KeyboardInterrupt, TerminatedError) as interrupt:
            return Ended(tuple(seen), "it was interrupted"), interrupt


def _say(words: str) -> None:
    print(f"outpace: {words}", file=sys.stderr, flush=True)


def _given(limits: "Limits") -> dict[str, Any]:
    """By the names of flags."""
    return {"trials": limits.trials, "budget": limits.budget_s, "within": limits.within}


def _line(trial: PlanTrial) -> str:
    from outpace.records.units import show_seconds
    from outpace.report.tuning import disturbed

    predicted = f"predicted {show_seconds(trial.predicted_s)}"
    if trial.step_time_s is None:
        return f"trial {trial.number}: {trial.title} ({predicted}) failed: {trial.failure}"
    return (
        f"trial {trial.number}: {trial.title} takes {show_seconds(trial.step_time_s)} a step "
        f"({predicted}){disturbed(trial)}"
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
    if settings.memory_budget is not None:
        raise BadInputError(
            "--memory-budget chooses what is recomputed, and so does outpace tune. Use "
            "--memory-limit: what does not fit is not tried."
        )
    return settings, origins


def _asked(settings: TrainSettings, origins: Mapping[str, str]) -> dict[str, Any]:
    """What a person said, as JSON has it."""
    values = settings.model_dump(mode="json")
    return {
        name: value
        for name, value in values.items()
        if origins[name] != options.DEFAULT and name not in _OWN
    }


def _before(folder: Path, asked: dict[str, Any], resumes: bool) -> list[PlanTrial]:
    """Trials that are there already. Raises BadInputError."""
    path = folder / TRIALS_FILE
    if not goes_on(folder, path, resumes, "tuning"):
        return []
    try:
        then = dict(json.loads((folder / ASKED_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise BadInputError(
            f"{folder / ASKED_FILE} cannot be read ({error}), so it is not known what was tuned. "
            "Use another --out."
        ) from None
    changed = {name for name in {*then, *asked} if then.get(name) != asked.get(name)}
    if changed.difference(_NOT_OF_TRIALS):
        raise BadInputError(f"{folder} holds a tuning with other settings. Use another --out.")
    return [PlanTrial.parse(values, str(path)) for values in whole_lines(path)]


def _command(asked: Mapping[str, Any], folder: Path) -> list[str]:
    """That trains by the plan that was found."""
    own = {name: value for name, value in asked.items() if name != "nproc"}
    return ["outpace", "train", *options.as_flags(own), "--plan", str(folder / PLAN_FILE)]


def _parser() -> Parser:
    parser = Parser("tune", _ABOUT, _EPILOG, usage="[options]")
    parser.add_json()
    add = parser.arguments.add_argument
    add("--config", type=Path, default=None, metavar="FILE.toml", help="settings by their names")
    add("--trials", type=number_type(int, 1), default=8, metavar="N", help="at most (default: 8)")
    add("--budget", type=duration_type(1), default=600.0, metavar="TIME",
        help="no trial begins after so long: 90, 10m, 1h (default: 600 s)")  # fmt: skip
    add("--within", type=number_type(float, 0.0, 1), default=0.02, metavar="X",
        help="stop where no plan left can win by more than this share (default: 0.02)")  # fmt: skip
    options.add_settings(parser, _TEXTS)
    return parser
