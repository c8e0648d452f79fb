"""`outpace compare`."""

import argparse
import json
import secrets
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli import options
from outpace.cli.experiments import (
    EXPERIMENT,
    arm_of,
    can_resume,
    commands,
    folder_of,
    format_interruption,
    format_now,
    from_toml,
    refuse_missing_folder,
    show_result,
    whole_lines,
)
from outpace.cli.main import TerminatedError
from outpace.cli.output import output_place, require_folder_place
from outpace.cli.parser import Parser, duration_type, number_type
from outpace.cli.streams import print_message
from outpace.interop.user_file import require_named
from outpace.records.base import write_atomic
from outpace.records.comparison import Comparison, Experiment, Outcome, Verdict
from outpace.records.errors import BadInputError, escape_controls
from outpace.records.evidence import fewest_rounds
from outpace.records.line_checksums import encode_line
from outpace.records.run import RUN_FILE
from outpace.records.settings import TrainSettings
from outpace.records.strategies import idle_strategy_note
from outpace.records.units import show_seconds

if TYPE_CHECKING:
    from outpace.experiment.compare import ComparisonEnd, Run

_ABOUT = (
    "Find which of several arms is faster, beyond the noise: run them in turn until the "
    "verdict is clear."
)
_EPILOG = (
    "An ARM is a strategy (zero3), settings (precision=bf16,micro_batch=2), environment "
    "variables (NCCL_P2P_DISABLE=1), or several of these separated by commas, optionally "
    "after NAME:. You may also give one experiment.toml, or the comparison.json of an earlier "
    "comparison to repeat it. All other options of outpace train apply to every arm. The "
    "other arms are compared with the first."
)
RESULT, OUTCOMES = "comparison.json", "outcomes.jsonl"
# Settings that determine which data an arm reads, and how.
_READ = (
    "model", "data", "data_weights", "eval_data", "eval_fraction", "task", "text_fields",
    "label_field", "text_field", "tokenizer", "cache_dir", "seq_len",
)  # fmt: skip
# Help for options that belong to the comparison here, but to a run in outpace train.
_TEXTS = {
    "out": "directory for the comparison (default: comparisons/<time>)",
    "resume": "resume the comparison in --out; repeat the options that it was started with",
}
# Fields of an experiment that a resume may change: its length and display, not what it compares.
_MAY_CHANGE = ("rounds", "budget_s", "within", "price")


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Compare the arms, print the verdict and save the comparison.

    Returns 0, or 1 if all runs failed.
    """
    arguments = _parser().read(argv)
    folder, comparison = _compare_and_save(arguments, argv, quiet=arguments.json)
    if arguments.json:
        print(comparison.model_dump_json(indent=2), flush=True)
    else:
        from outpace.reporting.answers.comparison import comparison_answer

        show_result(comparison_answer(comparison), folder, "again", comparison.command)
        if comparison.beside:
            print(*map(escape_controls, comparison.beside), sep="\n  ")
    return 0 if any(one.value is not None for one in comparison.outcomes) else 1


def run_comparison(argv: list[str], quiet: bool) -> Comparison:
    """Run the comparison that the command line asks for, and save it.

    Raises BadInputError if an argument is invalid.
    """
    return _compare_and_save(_parser().read(argv), argv, quiet)[1]


def _compare_and_save(
    arguments: argparse.Namespace, argv: list[str], quiet: bool
) -> tuple[Path | None, Comparison]:
    """Compare the arms or the finished runs, and save the comparison in its folder.

    The folder is None for finished runs that are compared without --out.
    """
    values = vars(arguments)
    out = None if values.get("out") is None else output_place(values["out"])
    _move_run_folders(arguments)
    if out is not None:
        require_folder_place(out)
    if arguments.runs:
        if out is not None and out.exists():
            raise BadInputError(f"{out} exists already. Use another --out.")
        folder, comparison = out, _compare_finished(arguments)
    else:
        folder, comparison = _run_arms(arguments, argv, out, values.get("resume", False), quiet)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        comparison.save(folder / RESULT)
    return folder, comparison


def _run_arms(
    arguments: argparse.Namespace, argv: list[str], out: Path | None, resumes: bool, quiet: bool
) -> tuple[Path, Comparison]:
    from outpace.experiment.arm_facts import compare_with_stored

    values, stored = _read_request(arguments)
    with folder_of(out, resumes, "comparisons", "comparison") as folder:
        experiment, before = _load_progress(folder, values, resumes)
        settings = _arm_settings(experiment)
        _warn_if_single_process(experiment, settings)
        try:
            comparison = _measure_and_judge(experiment, settings, folder, before, quiet)
        except (KeyboardInterrupt, TerminatedError):
            print(format_interruption(folder, "compare", *argv), file=sys.stderr, flush=True)
            raise
    if stored is not None:
        differences = tuple(compare_with_stored(stored, comparison))
        comparison = comparison.model_copy(update={"beside": differences})
    return folder, comparison


def _arm_settings(experiment: Experiment) -> list[TrainSettings]:
    """Return the settings of each arm; empty if the arms are commands."""
    from outpace.experiment import arms

    if experiment.metric is not None:  # arms are commands
        arms.check_metric(experiment.metric)
        return []
    return [arms.settings_of(experiment, arm) for arm in experiment.arms]


def _warn_if_single_process(experiment: Experiment, settings: list[TrainSettings]) -> None:
    names = ", ".join(
        arm.name
        for arm, one in zip(experiment.arms, settings, strict=False)
        if one.plan is None and idle_strategy_note(one.strategy, one.nproc or 1) is not None
    )
    if names:
        print_message(
            f"{names}: on one process, all strategies compute the same thing, and nothing is "
            "communicated. Start several processes with --nproc N"
        )


def _measure_and_judge(
    experiment: Experiment, settings: list[TrainSettings], folder: Path, finished: list[Outcome],
    quiet: bool,
) -> Comparison:  # fmt: skip
    """Run the rounds that are missing after `finished`, and compare the arms.

    If Ctrl-C or a signal interrupts this, the comparison of the finished runs is saved, and the
    exception is raised again.
    """
    from outpace.experiment import arms
    from outpace.experiment.compare import ALPHA
    from outpace.experiment.judge import judge

    folder.mkdir(parents=True, exist_ok=True)
    experiment.save(folder / EXPERIMENT)
    if not quiet:
        print_message(_describe_experiment(experiment, settings, folder))
        needed = fewest_rounds(ALPHA / (len(experiment.arms) - 1))
        if experiment.rounds < needed:
            rounds = f"{experiment.rounds} round{'s' * (experiment.rounds > 1)}"
            print_message(
                f"{rounds} cannot decide, whatever they measure: use --rounds {needed} or more"
            )
    _prepare_data(settings, quiet)
    began_s, started = time.monotonic() - sum(one.took_s for one in finished), format_now()
    run = arms.run_training if settings else arms.run_command
    ended, interrupt = _run_rounds(experiment, folder, run, finished, quiet)
    took_s = time.monotonic() - began_s
    trusted = ("--trusted",) if _list_code(experiment) else ()
    command = ("outpace", "compare", str(folder / RESULT), *trusted)
    comparison = judge(experiment, folder, ended, took_s, started, command)
    if interrupt is not None:
        comparison.save(folder / RESULT)
        raise interrupt
    return comparison


def _prepare_data(settings: list[TrainSettings], quiet: bool) -> None:
    """Prepare the data of all arms, so that it does not count towards the runs' time limit."""
    from outpace.jobs.inputs.inputs import prepare_data
    from outpace.reporting.terminal.progress import TrainingProgress

    seen = []
    for one in settings:
        read = [getattr(one, name) for name in _READ]
        if read not in seen:
            seen.append(read)
            with suppress(BadInputError):  # the arm's runs report it
                prepare_data(one, [] if quiet else [TrainingProgress()])


def _describe_experiment(
    experiment: Experiment, settings: list[TrainSettings], folder: Path
) -> str:
    arms = [arm.name for arm in experiment.arms]
    if settings:
        arms = [f"{name}{_format_processes(one)}" for name, one in zip(arms, settings, strict=True)]
    rounds = f"at most {experiment.rounds} round{'s' * (experiment.rounds > 1)}"
    return (
        f"{', '.join(arms)}: {rounds}, none started after {experiment.budget_s:.0f} s, "
        f"saved in {folder}"
    )


def _format_processes(settings: TrainSettings) -> str:
    if settings.plan is not None:
        return ""
    return f" on {settings.nproc or 1} process{'es' * ((settings.nproc or 1) > 1)}"


def _run_rounds(
    experiment: Experiment, folder: Path, run: "Run", finished: list[Outcome], quiet: bool
) -> tuple["ComparisonEnd", BaseException | None]:
    """Run the missing rounds, and append each outcome to the log as soon as it is known.

    Also return the interruption (Ctrl-C or a signal) that ended the rounds early, or None.
    """
    from outpace.experiment.compare import ComparisonEnd, compare

    seen = list(finished)
    with (folder / OUTCOMES).open("a", encoding="utf-8", buffering=1) as file:

        def note_outcome(outcome: Outcome, verdicts: Mapping[str, Verdict]) -> None:
            seen.append(outcome)
            file.write(encode_line(outcome).decode())
            if not quiet:
                print_message(_format_outcome(outcome, experiment))

        try:
            return compare(experiment, folder, run, finished, note_outcome), None
        except (KeyboardInterrupt, TerminatedError) as interrupt:
            return ComparisonEnd(tuple(seen), "it was interrupted"), interrupt


def _compare_finished(arguments: argparse.Namespace) -> Comparison:
    from outpace.experiment.judge import compare_runs

    _refuse_unused(
        arguments, ("runs", "arm", "price", "out"), "finished runs are compared as they are"
    )
    return compare_runs(arguments.runs, arguments.price)


def _move_run_folders(arguments: argparse.Namespace) -> None:
    """Move folders of runs from the argument for arms to that for finished runs (--runs).

    Raises BadInputError if only some arms are folders of runs.
    """
    folders = [Path(word) for word in arguments.arm if (Path(word) / RUN_FILE).is_file()]
    if not folders and not arguments.runs:
        return
    others = [word for word in arguments.arm if Path(word) not in folders]
    if others:
        refuse_missing_folder(others[0], f"arm {others[0]!r}")
        raise BadInputError(
            f"{others[0]!r} is not a finished run, but {(folders or arguments.runs)[0]} is. "
            "Compare finished runs with each other, or strategies and settings."
        )
    arguments.runs = [*arguments.runs, *folders]


def _format_outcome(outcome: Outcome, experiment: Experiment) -> str:
    head = f"round {outcome.round + 1} of at most {experiment.rounds}: {outcome.arm}"
    if outcome.value is None:
        return f"{head} failed: {outcome.failure}"
    if experiment.metric is not None:  # a metric has the command's own unit
        return f"{head}: metric {outcome.value:.6g}"
    return f"{head} takes {show_seconds(outcome.value)} a step"


def _read_request(arguments: argparse.Namespace) -> tuple[dict[str, Any], Comparison | None]:
    """Return the fields of the requested experiment.

    If the argument is the file of a comparison that is to be repeated, also return that comparison;
    otherwise None.
    """
    values: dict[str, Any] = {}
    words = arguments.arm
    if len(words) == 1 and words[0].endswith(".json"):
        _refuse_unused(
            arguments,
            ("arm", "out", "resume", "trusted"),
            f"a repeated comparison takes its arms and settings from {words[0]}",
        )
        stored = Comparison.load(Path(words[0]))
        _require_trust(stored.experiment, Path(words[0]), arguments.trusted)
        return {**stored.experiment.model_dump(mode="json"), "in_turn": True}, stored
    if len(words) == 1 and words[0].endswith(".toml"):
        values = from_toml(Path(words[0]))
        values["arms"] += commands(arguments.command)
    else:
        values["arms"] = [*map(arm_of, words), *commands(arguments.command)]
    common = {name: value for name, value in options.from_flags(arguments).items()
              if name not in ("out", "resume")}  # fmt: skip
    plain = json.loads(json.dumps(common, default=str))
    values["common"] = {**values.get("common", {}), **plain}
    for name, key in (("rounds", "rounds"), ("budget", "budget_s"), ("within", "within"),
                      ("price", "price"), ("metric", "metric")):  # fmt: skip
        if getattr(arguments, name) is not None:
            values[key] = getattr(arguments, name)
    return values, None


def _require_trust(experiment: Experiment, path: Path, trusted: bool) -> None:
    """Raise BadInputError if the file `path` would run code, unless the user trusts it."""
    for settings in (experiment.common, *(arm.settings for arm in experiment.arms)):
        require_named(str(settings.get("model", "")), path)
    code = _list_code(experiment)
    if code and not trusted:
        raise BadInputError(
            f"{path} would run this on your machine:\n  "
            + "\n  ".join(code)
            + "\nIf you wrote the file, or have read it, add --trusted."
        )


def _list_code(experiment: Experiment) -> list[str]:
    """Return the arms' commands and environment variables, both of which can run any code."""
    commands = [arm.command for arm in experiment.arms if arm.command is not None]
    pairs = {pair for arm in experiment.arms for pair in arm.environment.items()}
    return [*commands, *(f"{name}={value}" for name, value in sorted(pairs))]


def _refuse_unused(arguments: argparse.Namespace, allowed: Collection[str], why: str) -> None:
    """Raise BadInputError if options other than `allowed` were given; `why` begins the message."""
    defaults = _parser().read([])
    given = [
        "arms" if name == "arm" else options.flag(name)
        for name, value in vars(arguments).items()
        if name not in (*allowed, "json") and value != getattr(defaults, name, None)
    ]
    if given:
        raise BadInputError(f"{why}. Leave out {', '.join(given)}.")


def _load_progress(
    folder: Path, values: dict[str, Any], resumes: bool
) -> tuple[Experiment, list[Outcome]]:
    """Return the experiment, and the outcomes of its finished rounds.

    Outcomes of an unfinished round are removed from the log. Raises BadInputError if `folder` holds
    a different experiment.
    """
    from outpace.experiment.compare import whole_rounds

    path = folder / OUTCOMES
    if not can_resume(folder, path, resumes, "comparison"):
        return Experiment.parse({"seed": secrets.randbits(31), **values}, "the experiment"), []
    stored = Experiment.load(folder / EXPERIMENT)
    kept = {name: getattr(stored, name) for name in (*_MAY_CHANGE, "seed")}
    experiment = Experiment.parse({**kept, **values}, "the experiment")
    changed = {name: getattr(experiment, name) for name in _MAY_CHANGE}
    if stored.model_copy(update=changed) != experiment:
        raise BadInputError(
            f"{folder} holds a different experiment: its arms, common settings or metric "
            "differ. Give the same ones, or use another --out."
        )
    outcomes = [Outcome.parse(one, str(path)) for one in whole_lines(path)]
    whole = whole_rounds(experiment, outcomes)
    if len(whole) < len(outcomes):
        write_atomic(path, "".join(one.model_dump_json() + "\n" for one in whole))
    return experiment, whole


def _parser() -> Parser:
    parser = Parser("compare", _ABOUT, _EPILOG, usage="ARM ARM … [options]")
    parser.add_json()
    add = parser.option
    add("arm", "ARM", str,
        "what to compare: strategies, settings, or finished runs", default=[], nargs="*"
    )  # fmt: skip
    add("--command", "CMD", str,
        "command to run as an arm; may be repeated", default=[], action="append")  # fmt: skip
    add(
        "--metric",
        "REGEX",
        str,
        "regular expression for the figure in a command's output, with one group around the number",
    )
    add("--rounds", "N", number_type(int, 1), "maximum number of rounds (default: 40)")
    add("--budget", "TIME", duration_type(1),
        "start no round after this time: 90, 10m, 1h (default: 600 s)")  # fmt: skip
    add("--within", "X", number_type(float, 0.0001, 1),
        "treat arms as equal if they differ by less than this fraction (default: 0.015)"
    )  # fmt: skip
    add("--price", "X", number_type(float, 0),
        "price of a device (on a CPU: of the host) per hour, to show the cost per million tokens"
    )  # fmt: skip
    parser.switch("--trusted",
        "run the commands and set the variables of a comparison.json; use it only with a file that "
        "you trust")  # fmt: skip
    add("--runs", "RUN", Path, "folders of finished runs to compare; may be repeated",
        default=[], nargs="*", action="extend")  # fmt: skip
    options.add_settings(parser, _TEXTS)
    return parser
