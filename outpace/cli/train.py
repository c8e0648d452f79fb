"""`outpace train`."""

import argparse
import atexit
import itertools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from glob import has_magic
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

from outpace.cli import main, options, resume
from outpace.cli.parser import Parser, number_type
from outpace.cli.streams import print_message
from outpace.interop.user_file import require_named
from outpace.jobs.train.prefault import prefault_memory
from outpace.launch.forked_ranks import can_fork, name_rank
from outpace.launch.launcher_env import ranks_from
from outpace.launch.lazy_imports import import_quickly
from outpace.records.base import write_atomic
from outpace.records.errors import BadInputError
from outpace.records.interpreter import PYTHON
from outpace.records.measurement import Measurement
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings

_ABOUT = (
    "Train a transformer. Without options: a small GPT on Python's own source code, in minutes."
)
_RESTARTS = 3  # default with --min-nodes
_EPILOG = (
    "Numbers may be written as 1e6, 10M or 2B. Exit code 75 means: interrupted, saved, can be "
    "resumed with --resume."
)


@dataclass(frozen=True)
class _Request:
    """A request to train: the settings, the origin of each, and the user's command line.

    `progress` says whether to show progress. `trial` is set for two steps that only try out a size
    for --micro-batch auto.
    """

    settings: TrainSettings
    origins: dict[str, str]
    command: list[str]
    progress: bool = True
    trial: bool = False


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Train as the arguments say; returns 0. Raises OutpaceError."""
    argv = with_run_named(argv)
    arguments = _parser().read(argv)
    asked = _read_request(arguments, ["outpace", "train", *argv])
    if arguments.print_config:
        asked = _apply_plan_file(asked, environ)
        print_config(asked.settings, asked.origins, arguments.json)
        return 0
    ranks, handed = _identify_rank(environ), _drop_options(argv, options.OF_STARTING)
    done = _load_finished_result(asked.settings) if arguments.auto_resume else None
    if done is not None:
        if ranks is None or ranks.rank == 0:
            show_measurement(done, arguments.json)
        return 0
    resume.require_inputs(asked.settings, asked.origins)
    _check_launch_options(asked, arguments, ranks)
    if arguments.hosts is not None or arguments.hostfile is not None:
        _start_on_hosts(asked, arguments, handed)
        return 0
    if arguments.auto_resume and asked.settings.resume:
        # The run has a layout; `_replan` finds another if the number of ranks has changed.
        asked = replace(asked, settings=asked.settings.model_copy(update={"plan": None}))
    elif asked.settings.plan is not None:
        asked = _apply_plan(asked, ranks)
        handed = [*_write_request(asked), *(["--json"] if arguments.json else [])]
    if ranks is None and ((asked.settings.nproc or 1) > 1 or arguments.max_restarts):
        _start_local_ranks(asked.settings, handed, arguments.max_restarts or 0)
        return 0
    ranks = ranks or Ranks()
    asked = _replan(asked, ranks) if arguments.auto_resume else asked
    settings = asked.settings
    _check_nproc(settings, asked.origins, ranks)
    end = partial(main.end_at_once, arguments=argv, environ=environ)
    if asked.trial:
        from outpace.jobs.train import job

        job.try_steps(settings, ranks=ranks, end=end)
        return 0
    measurement = _train_here(asked, ranks, environ, end)
    if ranks.rank == 0:
        show_measurement(measurement, arguments.json)
    return 0


def _identify_rank(environ: Mapping[str, str]) -> Ranks | None:
    """Return this process's ranks, or None if no launcher started it.

    Also names the process after its rank.
    """
    ranks = ranks_from(environ)
    if ranks is not None:
        name_rank(ranks.rank)
    return ranks


def _check_launch_options(
    request: _Request, arguments: argparse.Namespace, ranks: Ranks | None
) -> None:
    given = _given_launch_options(arguments)
    hosts = [name for name in given if name in ("--hosts", "--hostfile")]
    if not given:
        return
    if ranks is not None:
        raise BadInputError(
            f"{given[0]} starts ranks, but a launcher has started this process. Leave "
            f"{given[0]} out, or run the command without a launcher."
        )
    if hosts and request.origins["nproc"] not in (options.DEFAULT, options.RUN_FILE):
        raise BadInputError(
            "--hosts and --nproc cannot be combined. Give the number of ranks per host in "
            "--hosts, such as --hosts a:4,b:4"
        )
    if len(hosts) > 1:
        raise BadInputError("--hosts and --hostfile both name hosts. Use only one")
    if not hosts and given[0] != "--max-restarts":
        raise BadInputError(
            f"{given[0]} applies to several hosts: name them with --hosts or --hostfile."
        )
    if {"--min-nodes", "--max-restarts"} & {*given} and request.settings.out is None:
        raise BadInputError("restarts resume the run, so name its directory with --out DIR")


def _start_local_ranks(settings: TrainSettings, arguments: list[str], most: int) -> None:
    """Start ranks on this host, and resume the run with new ranks if one is lost.

    It is resumed at most `most` times.
    """
    from outpace.launch import local
    from outpace.launch.restarts import Restarts

    words = ["train", *arguments]
    restarts = Restarts(most, settings.out, print_message)
    with import_quickly():
        forks = can_fork(settings.device)
    while True:
        begin = partial(main.command, words) if forks else None
        try:
            return local.start(settings.nproc or 1, [*PYTHON, "-m", "outpace", *words], begin=begin)
        except local.WorkerError as error:
            restarts.count(error)
            words = _add_auto_resume(words)


def _start_on_hosts(request: _Request, arguments: argparse.Namespace, handed: list[str]) -> None:
    from outpace.launch import ssh as hosts
    from outpace.records.hosts import Elastic, parse_hosts, read_hosts

    settings = request.settings
    found = (
        read_hosts(arguments.hostfile) if arguments.hosts is None else parse_hosts(arguments.hosts)
    )
    most = arguments.max_nodes or len(found)
    least = arguments.min_nodes or most
    if not least <= most <= len(found):
        raise BadInputError(
            f"--min-nodes {least} and --max-nodes {most} do not fit {len(found)} hosts: they must "
            "satisfy min ≤ max ≤ hosts"
        )
    restarts = arguments.max_restarts
    if restarts is None:
        restarts = 0 if arguments.min_nodes is None else _RESTARTS
    # Inputs on this host must exist on all hosts.
    named = [*settings.data, *(settings.eval_data or ()), settings.model, settings.tokenizer,
             settings.plan, arguments.config, arguments.handed_over]  # fmt: skip
    command = [*PYTHON, "-m", "outpace", "train", *handed]
    training = hosts.Training(
        command=command,
        again=_add_auto_resume(command),
        paths=[str(path) for one in named if one is not None for path in _existing_path(str(one))],
        out=settings.out or Path("runs"),
        elastic=Elastic(min_nodes=least, max_nodes=most, max_restarts=restarts),
    )
    hosts.start(found, training)


def _existing_path(word: str) -> list[Path]:
    """Return the existing file or folder that a setting's value names, in a list, or an empty list.

    For a glob pattern, this is its folder; for a Megatron prefix, the .bin file; for file.py:build,
    the file.
    """
    path = Path(word)
    plain = Path(*takewhile(lambda part: not has_magic(part), path.parts))
    own = Path(word.partition(":")[0])
    places = (path, path.with_name(f"{path.name}.bin"), plain, own) if path.name else (path,)
    return [one for one in places if one.exists()][:1]


def _add_auto_resume(command: list[str]) -> list[str]:
    return command if "--auto-resume" in command else [*command, "--auto-resume"]


def _drop_options(argv: list[str], names: Sequence[str]) -> list[str]:
    kept, words = [], iter(argv)
    for word in words:
        if word in names:
            next(words, None)
        elif word.partition("=")[0] not in names:
            kept.append(word)
    return kept


def _apply_plan(request: _Request, ranks: Ranks | None) -> _Request:
    """Apply the settings of --plan; rank 0 prints which plan was chosen."""
    from outpace.jobs.planning.auto_plan import apply_settings_plan

    say = print_message if ranks is None or ranks.rank == 0 else _say_nothing
    settings, origins = apply_settings_plan(request.settings, request.origins, ranks, say)
    return replace(request, settings=settings, origins=origins)


def _apply_plan_file(request: _Request, environ: Mapping[str, str]) -> _Request:
    """Apply the plan file of --plan; the value "auto" stays until training starts."""
    if request.settings.plan in (None, "auto"):
        return request
    return _apply_plan(request, _identify_rank(environ))


def _say_nothing(sentence: str) -> None:
    """Ignore a message that only rank 0 prints, with `print_message`."""


def _replan(request: _Request, ranks: Ranks) -> _Request:
    """Choose a layout for the current ranks if the resumed run had another number of ranks."""
    if not request.settings.resume or request.trial:
        return request
    from outpace.jobs.planning.replan import replan

    say = print_message if ranks.rank == 0 else _say_nothing
    settings, origins = replan(request.settings, request.origins, ranks, say)
    return replace(request, settings=settings, origins=origins)


def _write_request(request: _Request) -> list[str]:
    """Write the request to a file, and return the option that makes another process read it.

    The file is deleted when this process exits.
    """
    fields = {**vars(request), "settings": request.settings.model_dump(mode="json")}
    with tempfile.NamedTemporaryFile(
        "w", prefix="outpace-plan-", suffix=".json", delete=False, encoding="utf-8"
    ) as file:
        json.dump(fields, file)
    atexit.register(Path(file.name).unlink, missing_ok=True)
    return ["--handed-over", file.name]


def _check_nproc(settings: TrainSettings, origins: dict[str, str], ranks: Ranks) -> None:
    """Raise BadInputError if --nproc contradicts the launcher; a resumed run's nproc is ignored."""
    if origins["nproc"] in (options.DEFAULT, options.RUN_FILE):
        return
    if settings.nproc not in (None, ranks.local_world_size):
        raise BadInputError(
            f"--nproc {settings.nproc}, but the launcher has started {ranks.local_world_size} "
            "processes on this host. Leave --nproc out, or start the command without a launcher."
        )


def _train_here(
    request: _Request, ranks: Ranks, environ: Mapping[str, str], end: Callable[[str, int], NoReturn]
) -> Measurement:
    """Train in this process as one rank. Rank 0 shows progress on standard error."""
    prefaulter = prefault_memory(request.settings, ranks, environ)  # runs while torch loads
    with import_quickly():
        from outpace.jobs.train import job
        from outpace.jobs.train.auto_micro_batch import trial_runner
        from outpace.jobs.train.context import RunContext
        from outpace.reporting.terminal.progress import TrainingProgress

    callbacks = [TrainingProgress()] if request.progress and ranks.rank == 0 else []
    context = RunContext(
        ranks=ranks,
        origins=request.origins,
        command=request.command,
        callbacks=callbacks,
        end=end,
        attempt=trial_runner(environ),
        explain=_write_hang_page,
        page_prefaulter=prefaulter,
    )
    return job.train(request.settings, context)


def _write_hang_page(path: Path) -> None:
    """Write the hang report `path` as an HTML page next to it, and print where it is."""
    from outpace.records.hang_report import HangReport
    from outpace.reporting.documents.hang import hang_document
    from outpace.reporting.page import page

    page_path = path.with_suffix(".html")
    write_atomic(page_path, page([hang_document(HangReport.load(path))]))
    print_message(f"what each rank was doing: {page_path}")


def show_measurement(measurement: Measurement, as_json: bool) -> None:
    """Print the result of a run to standard output."""
    if as_json:
        print(measurement.model_dump_json(indent=2), flush=True)
        return
    from outpace.reporting.terminal.console import Console
    from outpace.reporting.terminal.summary import summary

    Console().print(summary(measurement))


def print_config(settings: TrainSettings, origins: dict[str, str], as_json: bool) -> None:
    """Print every setting, its value and its origin."""
    values = settings.model_dump(mode="json")
    if as_json:
        table = {name: {"value": values[name], "origin": origins[name]} for name in values}
        print(json.dumps(table, indent=2))
        return
    from outpace.reporting.terminal.config import config_table
    from outpace.reporting.terminal.console import Console

    Console().print(config_table(settings, origins))


def _parser() -> Parser:
    parser = Parser("train", _ABOUT, _EPILOG, usage="[options]")
    parser.add_json()
    add = parser.option
    add("--config", "FILE.toml", Path,
        "TOML file with settings by the names below; the command line overrides it")  # fmt: skip
    parser.switch("--print-config", "show each setting and its origin, and do not train")
    add("--hosts", "A:4,B:4", str,
        "train on these hosts over ssh, with this number of ranks on each")  # fmt: skip
    add("--hostfile", "FILE", Path, "like --hosts, from a file with a line 'A slots=4' per host")
    add("--min-nodes", "N", number_type(int, 1),
        "keep training while at least N hosts are left (default: all hosts)"
    )  # fmt: skip
    add("--max-nodes", "N", number_type(int, 1),
        "use at most N of the hosts at once (default: all)")  # fmt: skip
    add("--max-restarts", "N", number_type(int, 0),
        "resume from the last checkpoint up to N times when a rank or host is lost "
        f"(default: {_RESTARTS} with --min-nodes, else 0)")  # fmt: skip
    parser.switch("--auto-resume", "resume the run in --out if there is one, otherwise start it")
    # File with a request of outpace.train or of the process that started this one.
    add("--handed-over", None, Path, argparse.SUPPRESS)
    options.add_settings(parser)
    return parser


def read_settings(argv: list[str]) -> tuple[TrainSettings, dict[str, str]]:
    """Return the settings and their origins for a run whose ranks a scheduler starts.

    Raises BadInputError if a setting is invalid, or an option would start ranks.
    """
    arguments = _parser().read(with_run_named(argv))
    given = _given_launch_options(arguments)
    if given:
        raise BadInputError(
            f"{given[0]}: the cluster's scheduler starts and restarts the ranks. Leave out "
            f"{given[0]}"
        )
    asked = _read_request(arguments, [])
    return asked.settings, asked.origins


def _given_launch_options(arguments: argparse.Namespace) -> list[str]:
    return [name for name in options.OF_STARTING if getattr(arguments, name[2:].replace("-", "_"))]


def _read_request(arguments: argparse.Namespace, command: list[str]) -> _Request:
    """Return the request to train, with its settings merged from all origins.

    These are the command line, a file, the resumed run and the defaults. If another process has
    written the request to a file, it is read from there.
    """
    if arguments.handed_over is not None:
        handed = json.loads(arguments.handed_over.read_text(encoding="utf-8"))
        settings = TrainSettings.parse(handed["settings"], "outpace.train")
        if arguments.auto_resume:
            has_begun = _has_begun({"": {"out": settings.out}})
            settings = settings.model_copy(update={"resume": has_begun})
        return _Request(**{"command": command, **handed, "settings": settings})
    layers = {options.COMMAND_LINE: options.from_flags(arguments)}
    if arguments.config is not None:
        layers[str(arguments.config)] = options.from_toml(arguments.config)
    if arguments.auto_resume:
        layers[options.COMMAND_LINE]["resume"] = _has_begun(layers)
    return _Request(*merge(layers), command)


def _has_begun(layers: dict[str, dict[str, object]]) -> bool:
    """Return whether the directory of --out holds a run.

    All ranks get the same answer, because run.json is only written after the rendezvous.
    """
    named = [layer["out"] for layer in layers.values() if layer.get("out") is not None]
    if not named:
        raise BadInputError("--auto-resume needs a run. Give its directory with --out DIR")
    return (Path(str(named[0])) / options.RUN_FILE).is_file()


def _load_finished_result(settings: TrainSettings) -> Measurement | None:
    """Return the result of the run to resume, if it has already made all requested steps."""
    if not settings.resume or settings.out is None:
        return None
    from outpace.records.run import RunRecord
    from outpace.training.run_dir import RESULT_FILE

    path = settings.out / RESULT_FILE
    if not path.is_file():
        return None
    record, found = RunRecord.load(settings.out / options.RUN_FILE), Measurement.load(path)
    asked_for = ("steps", "tokens", "epochs")
    same = all(getattr(settings, name) == getattr(record.settings, name) for name in asked_for)
    return found if same and found.steps >= record.total_steps else None


def with_run_named(argv: list[str]) -> list[str]:
    """Rewrite `--resume DIR` as `--resume --out DIR`.

    Raises BadInputError if --out names another run.
    """
    words: list[str] = []
    for place, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag == "--resume" and equals:
            words += ["--resume", "--out", value]
        elif place and argv[place - 1] == "--resume" and not word.startswith("-"):
            words += ["--out", word]
        else:
            words.append(word)
    named = [after for word, after in itertools.pairwise(words) if word == "--out"]
    named += [word.partition("=")[2] for word in words if word.startswith("--out=")]
    if words != argv and len(set(named)) > 1:
        raise BadInputError(
            f"--resume {named[0]} and --out {named[1]} are different runs. --resume continues in "
            "the run's folder: leave --out out."
        )
    return words


def merge(layers: dict[str, dict[str, object]]) -> tuple[TrainSettings, dict[str, str]]:
    """Merge settings from several origins, by precedence; return them and the origin of each.

    With `resume`, settings that no other origin has are those of the resumed run.
    """
    asked = {name: value for layer in reversed(layers.values()) for name, value in layer.items()}
    if not asked.get("resume"):
        return options.build(layers)
    if asked.get("out") is None:
        raise BadInputError("--resume needs a run. Give its directory: --resume DIR")
    run = Path(str(asked["out"]))
    of_run = resume.settings_of(run)
    resume.check_unchanged(asked, of_run, run)
    if "model" not in asked:
        require_named(of_run["model"], run)
    resume.require_as_written(run)
    return options.build({**layers, options.RUN_FILE: of_run})
