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
    can_resume,
    folder_of,
    format_interruption,
    format_now,
    show_result,
    whole_lines,
)
from outpace.cli.main import TerminatedError
from outpace.cli.parser import Parser, duration_type, number_type
from outpace.cli.streams import print_message
from outpace.records.base import write_atomic
from outpace.records.errors import BadInputError
from outpace.records.line_checksums import encode_line
from outpace.records.machine import Machine
from outpace.records.plan import PlanFile
from outpace.records.ranks import Ranks
from outpace.records.settings import OF_A_RUN, TrainSettings
from outpace.records.tuning import TUNING_FILE, PlanTrial, Tuning

if TYPE_CHECKING:
    from outpace.experiment.tune import Limits, TuningEnd
    from outpace.jobs.planning.proposer import Proposer

_ABOUT = (
    "Find the fastest plan for training on this machine: the planner proposes, short trials decide."
)
_EPILOG = (
    "Takes all options of outpace train: those you give are fixed, the rest is tuned. Each trial "
    "trains in separate processes, with a time limit and --memory-limit; a trial that fails is a "
    "result. The first proposals are better if machine.json of outpace probe is in the current "
    "folder. Then: outpace train --plan DIR/plan.json."
)
TRIALS_FILE, PLAN_FILE = "trials.jsonl", "plan.json"
HOST_FILE = "host.json"  # the machine of the trials
# Help for options that belong to the tuning here, but to a run in outpace train.
_TEXTS = {
    "out": "directory for the tuning (default: tunings/<time>)",
    "resume": "resume the tuning in --out; repeat the options that it was started with",
}
_OF_FREE = 0.9  # share of free host memory for all processes of a trial
_OWN = ("out", "resume", "plan")  # belong to the tuning, not to the training
# Settings that do not apply to trials: their length, and settings of output.
_NOT_OF_TRIALS = OF_A_RUN | {"steps", "tokens", "epochs"}


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Tune, print the fastest plan and the trials; return 0, or 1 if all trials failed."""
    arguments = _parser().read(argv)
    folder, asked, tuning = _tune_and_save(arguments, argv)
    if arguments.json:
        print(tuning.model_dump_json(indent=2), flush=True)
    else:
        from outpace.reporting.answers.tuning import tuning_answer

        then = _training_command(asked, folder) if tuning.fastest is not None else ()
        show_result(tuning_answer(tuning), folder, "then", then)
    return 0 if tuning.fastest is not None else 1


def run_tuning(argv: list[str]) -> Tuning:
    """Tune as the command line `argv` says, save the tuning and return it.

    Raises BadInputError if an argument is invalid.
    """
    return _tune_and_save(_parser().read(argv), argv)[2]


def _tune_and_save(
    arguments: argparse.Namespace, argv: list[str]
) -> tuple[Path, dict[str, Any], Tuning]:
    """Tune and save; return the folder, the settings that the user gave, and the tuning."""
    settings, origins = _read_settings(arguments)
    user_settings = _given_settings(settings, origins)
    with folder_of(settings.out, settings.resume, "tunings", "tuning run") as folder:
        finished = _load_trials(folder, user_settings, settings.resume)
        try:
            tuning = _run_tuning(arguments, settings, origins, user_settings, folder, finished)
        except (KeyboardInterrupt, TerminatedError):
            print(format_interruption(folder, "tune", *argv), file=sys.stderr, flush=True)
            raise
    return folder, user_settings, tuning


def _run_tuning(
    arguments: argparse.Namespace, settings: TrainSettings, origins: dict[str, str],
    user_settings: dict[str, Any], folder: Path, finished: list[PlanTrial],
) -> Tuning:  # fmt: skip
    """Run the trials that are missing after the `finished` ones, and save the tuning.

    If Ctrl-C or a signal interrupts this, the finished trials are saved, and the exception is
    raised again.
    """
    from outpace.experiment.tune import Limits, summarise
    from outpace.jobs.inputs.inputs import prepare_data
    from outpace.jobs.planning.proposer import Proposer, rates_to_begin_with
    from outpace.reporting.terminal.progress import TrainingProgress

    host_bytes = _usable_host_bytes(settings)
    proposer = Proposer(settings, origins, host_bytes)
    # Otherwise, the first trial would have to prepare the data within its time limit.
    prepare_data(settings, [TrainingProgress()])
    _require_same_machine(folder, proposer.machine)
    rates = rates_to_begin_with(settings)  # after all checks that may refuse
    if rates is not None:
        proposer = Proposer(settings, origins, host_bytes, rates)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / ASKED_FILE, json.dumps(user_settings, indent=2) + "\n")
    if not (folder / HOST_FILE).is_file():
        proposer.machine.save(folder / HOST_FILE)
    began_s, started = time.monotonic() - sum(trial.took_s for trial in finished), format_now()
    limits = Limits(arguments.trials, arguments.budget, arguments.within)
    ended, interrupt = _run_trials(proposer, user_settings, folder, limits, finished, host_bytes)
    tuning = Tuning(
        settings=user_settings,
        trials=ended.trials,
        **summarise(ended.trials),
        stopped=ended.stopped,
        considered=proposer.considered,
        took_s=time.monotonic() - began_s,
        machine=proposer.machine,
        started=started,
        command=("outpace", "tune", *options.as_flags({**user_settings, **_limit_flags(limits)})),
    )
    tuning.save(folder / TUNING_FILE)
    if tuning.fastest is not None:
        found = tuning.fastest.plan
        PlanFile.from_plan(found, settings.seq_len, settings.global_batch).save(folder / PLAN_FILE)
    if interrupt is not None:
        raise interrupt
    return tuning


def _usable_host_bytes(settings: TrainSettings) -> int | None:
    """Return the host memory that a trial on the CPU may use; None on other devices."""
    from outpace.jobs.defaults import resolve_device
    from outpace.probing.hardware.process_memory import free_bytes

    if resolve_device(settings, Ranks()).type != "cpu":
        return None
    return int(_OF_FREE * free_bytes())


def _require_same_machine(folder: Path, machine: Machine) -> None:
    path = folder / HOST_FILE
    if not path.is_file():
        return
    then = Machine.load(path)
    for name in machine.differences(then):
        raise BadInputError(
            f"{folder} holds trials of another machine: {name} was {getattr(then, name)}, and here "
            f"it is {getattr(machine, name)}. Resume the tuning on that machine, or use another "
            "--out."
        )


def _run_trials(
    proposer: "Proposer",
    user_settings: dict[str, Any],
    folder: Path,
    limits: "Limits",
    finished: list[PlanTrial],
    host_bytes: int | None,
) -> tuple["TuningEnd", BaseException | None]:
    """Run trials, and append each to the log as soon as it has ended.

    Also return the interruption (Ctrl-C or a signal) that ended them early, or None.
    """
    from outpace.experiment.trials import Trials, fit_together
    from outpace.experiment.tune import NextTrial, TuningEnd, tune

    own = {name: value for name, value in user_settings.items() if name not in _NOT_OF_TRIALS}
    trials, seen = Trials(own, folder, host_bytes), list(finished)
    with (folder / TRIALS_FILE).open("a", encoding="utf-8", buffering=1) as file:

        def record_trial(trial: PlanTrial) -> None:
            seen.append(trial)
            file.write(encode_line(trial).decode())
            print_message(_format_trial(trial))

        def run_final(number: int, several: Sequence[NextTrial]) -> Sequence[PlanTrial]:
            titles = ", ".join(one.proposal.title for one in several)
            plans = [one.proposal.plan for one in several]
            if fit_together(plans, seen, host_bytes, proposer.machine):
                print_message(f"measured in turn, to distinguish them: {titles}")
                return trials.run_in_turn(number, several)
            print_message(
                "measured again, one after the other (they do not fit into memory together): "
                f"{titles}"
            )
            return [
                trials.run(at, one).model_copy(update={"raced": True})
                for at, one in enumerate(several, number)
            ]

        try:
            return tune(proposer, trials.run, run_final, limits, finished, record_trial), None
        except (KeyboardInterrupt, TerminatedError) as interrupt:
            return TuningEnd(tuple(seen), "it was interrupted"), interrupt


def _limit_flags(limits: "Limits") -> dict[str, Any]:
    return {"trials": limits.trials, "budget": limits.budget_s, "within": limits.within}


def _format_trial(trial: PlanTrial) -> str:
    from outpace.records.units import show_seconds
    from outpace.reporting.answers.tuning import disturbance_words

    predicted = f"predicted {show_seconds(trial.predicted_s)}"
    if trial.step_time_s is None:
        return f"trial {trial.number}: {trial.title} ({predicted}) failed: {trial.failure}"
    return (
        f"trial {trial.number}: {trial.title} takes {show_seconds(trial.step_time_s)} a step "
        f"({predicted}){disturbance_words(trial)}"
    )


def _read_settings(arguments: argparse.Namespace) -> tuple[TrainSettings, dict[str, str]]:
    layers = {options.COMMAND_LINE: options.from_flags(arguments)}
    if arguments.config is not None:
        layers[str(arguments.config)] = options.from_toml(arguments.config)
    settings, origins = options.build(layers)
    if settings.plan is not None:
        raise BadInputError(
            "--plan already determines how to train, which `outpace tune` is meant to find. Leave "
            "out --plan."
        )
    if settings.micro_batch == "auto":
        raise BadInputError(
            "--micro-batch auto: `outpace tune` searches micro-batch sizes itself. Leave out "
            "--micro-batch."
        )
    if settings.memory_budget is not None:
        raise BadInputError(
            "--memory-budget chooses what to recompute, and so does `outpace tune`. Use "
            "--memory-limit instead: plans that do not fit are not tried."
        )
    return settings, origins


def _given_settings(settings: TrainSettings, origins: Mapping[str, str]) -> dict[str, Any]:
    values = settings.model_dump(mode="json")
    return {
        name: value
        for name, value in values.items()
        if origins[name] != options.DEFAULT and name not in _OWN
    }


def _load_trials(folder: Path, user_settings: dict[str, Any], resumes: bool) -> list[PlanTrial]:
    """Return the finished trials of a resumed tuning.

    Raises BadInputError if the tuning had other settings.
    """
    path = folder / TRIALS_FILE
    if not can_resume(folder, path, resumes, "tuning run"):
        return []
    try:
        then = dict(json.loads((folder / ASKED_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise BadInputError(
            f"{folder / ASKED_FILE} cannot be read ({error}), so the settings of this "
            "tuning run are unknown. Use another --out."
        ) from None
    changed = {
        name for name in {*then, *user_settings} if then.get(name) != user_settings.get(name)
    }
    if changed.difference(_NOT_OF_TRIALS):
        raise BadInputError(f"{folder} holds a tuning run with other settings. Use another --out.")
    return [PlanTrial.parse(values, str(path)) for values in whole_lines(path)]


def _training_command(user_settings: Mapping[str, Any], folder: Path) -> list[str]:
    own = {name: value for name, value in user_settings.items() if name != "nproc"}
    return ["outpace", "train", *options.as_flags(own), "--plan", str(folder / PLAN_FILE)]


def _parser() -> Parser:
    parser = Parser("tune", _ABOUT, _EPILOG, usage="[options]")
    parser.add_json()
    add = parser.option
    add("--config", "FILE.toml", Path, "TOML file with settings")
    add("--trials", "N", number_type(int, 1), "maximum number of trials (default: 8)", default=8)
    add("--budget", "TIME", duration_type(1),
        "start no trial after this time: 90, 10m, 1h (default: 600 s)", default=600.0)  # fmt: skip
    add("--within", "X", number_type(float, 0.0, 1),
        "stop when no remaining plan can be faster by more than this fraction (default: 0.02)",
        default=0.02)  # fmt: skip
    options.add_settings(parser, _TEXTS)
    return parser
