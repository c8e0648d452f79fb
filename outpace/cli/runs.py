"""`outpace runs`."""

import itertools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.cli import options
from outpace.cli.parser import Parser
from outpace.cli.run_filters import condition_of, field_of
from outpace.experiment.past_runs import (
    PastRunFolder,
    count_runs,
    find_runs,
    is_run,
    mark_running,
    read_past_run,
    sizes,
)
from outpace.records.errors import BadInputError
from outpace.records.run import RunRecord, require_run

_ABOUT = "List past runs, newest first, or show one of them in full."
_EPILOG = (
    "A single run is shown in full. Conditions may use the fields of the list, of result.json, and "
    "of the run's plan and settings: --where strategy=ddp 'final_loss<2.5'. All conditions must "
    "hold."
)
# The folder of outpace train, and those of compare and tune, whose many runs are shown with --all.
_OWN, _OTHERS = "runs", ("comparisons", "tunings")
# Settings of the folder, not of the training.
_OF_THE_MOMENT = ("out", "resume")


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """List runs, or show one; returns 0. Raises BadInputError if an argument is invalid."""
    arguments = _parser().read(argv)
    paths = arguments.path
    if paths[:1] == [Path("show")]:
        if len(paths) != 2:
            raise BadInputError(
                f"`outpace runs show` shows one run, but {len(paths) - 1} are given. `outpace "
                "runs` lists all runs."
            )
        return _print_run(paths[1], arguments.json)
    if paths[:1] == [Path("diff")]:
        named = shlex.join(map(str, paths[1:])) or "RUN RUN"
        raise BadInputError(
            f"`outpace runs` has no diff. `outpace compare {named}` shows how runs differ, and in "
            "which part of a step."
        )
    filters = arguments.where or arguments.sort is not None
    if len(paths) == 1 and is_run(paths[0]) and not filters:
        return _print_run(paths[0], arguments.json)
    folders = search_folders(paths, arguments.all)
    runs = find_runs(folders)
    kept = select(runs, arguments.where, arguments.sort, arguments.reverse)
    _print_list(kept, len(runs), folders, arguments.json)
    others = (
        0 if paths or arguments.all or arguments.json else count_runs(_existing_folders(_OTHERS))
    )
    if others:
        print(f"{others} more from comparisons and tunings: outpace runs --all")
    return 0


def select(
    runs: Sequence[PastRunFolder],
    where: Sequence[str] = (),
    sort: str | None = None,
    reverse: bool = False,
) -> list[PastRunFolder]:
    """Return the runs that meet all conditions, in the requested order."""
    conditions = [condition_of(word) for word in where]
    by = None if sort is None else field_of(sort, "--sort")
    kept = [one for one in runs if all(condition.is_met(one) for condition in conditions)]
    return _sort_runs(kept, by, reverse)


def search_folders(paths: list[Path], everywhere: bool = False) -> list[Path]:
    """Return the folders to search. Raises BadInputError if one of `paths` does not exist."""
    for path in paths:
        if not path.is_dir():
            raise BadInputError(f"there is no folder {path}. Give a run, or a folder with runs.")
    return paths or _existing_folders((_OWN, *_OTHERS) if everywhere else (_OWN,))


def _existing_folders(names: Sequence[str]) -> list[Path]:
    return [Path(name) for name in names if Path(name).is_dir()]


def _sort_runs(runs: list[PastRunFolder], name: str | None, reverse: bool) -> list[PastRunFolder]:
    """Sort by a field, ascending unless `reverse`; runs without a value come last in both cases."""
    if name is None:
        return runs[::-1] if reverse else runs
    values = [(one.value(name), one) for one in runs]
    known = [pair for pair in values if pair[0] is not None]
    known.sort(key=lambda pair: _sort_key(pair[0]), reverse=reverse)
    return [one for _, one in known] + [one for value, one in values if value is None]


def _sort_key(value: Any) -> tuple[bool, float, str]:
    """Return a key that sorts numbers before text."""
    is_number = isinstance(value, (int, float))
    return (not is_number, value if is_number else 0.0, "" if is_number else str(value))


def _print_list(runs: list[PastRunFolder], total: int, folders: list[Path], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"runs": [one.row.model_dump(mode="json") for one in runs]}, indent=2))
        return
    if not runs:
        names = ", ".join(map(str, folders)) or f"a subfolder {_OWN} of this one"
        print(
            (f"none of the {total} runs in {names} meets the conditions")
            if total
            else f"no runs in {names}"
        )
        return
    from outpace.reporting.terminal.console import Console
    from outpace.reporting.terminal.run_list import runs_table

    Console().print(runs_table([one.row for one in runs]))


def _print_run(folder: Path, as_json: bool) -> int:
    if not is_run(folder):
        require_run(folder)
    (past,) = mark_running([read_past_run(folder)])
    command = None if past.record is None else repeat_command(past.record)
    files = sizes(folder)
    if as_json:
        document = {
            **past.row.model_dump(mode="json"),
            "record": past.record and past.record.model_dump(mode="json"),
            "result": past.result and past.result.model_dump(mode="json"),
            "failure": past.failure and past.failure.model_dump(mode="json"),
            "bytes": files,
            "again": command,
        }
        print(json.dumps(document, indent=2))
        return 0
    from outpace.reporting.terminal.console import Console
    from outpace.reporting.terminal.run_list import run_text

    console = Console(highlight=False)
    console.print(run_text(past, files))
    if command is not None:  # on one line, to copy
        console.print(f" Again: {command}", markup=False, soft_wrap=True)
    return 0


def repeat_command(record: RunRecord) -> str:
    """Return the command that repeats a training, with all of its settings as flags."""
    if record.settings.model.startswith("python:"):  # a live module, which a flag cannot name
        return shlex.join(["python", *record.command])
    given = {
        name: value
        for name, value in record.settings
        if record.origins.get(name, options.DEFAULT) != options.DEFAULT and value != ()
    }
    starting = list(_launch_options(record.command))
    if record.plan.world_size > 1 and not starting:
        # The settings do not contain the number of processes of a launcher.
        given.setdefault("nproc", record.plan.world_size)
    own = {name: value for name, value in given.items() if name not in _OF_THE_MOMENT}
    return shlex.join(["outpace", "train", *starting, *options.as_flags(own)])


def _launch_options(command: Sequence[str]) -> Iterator[str]:
    """Yield the options in a command that say how ranks are started (--hosts, --max-restarts, …).

    They are not settings of the run.
    """
    for word, following in itertools.pairwise((*command, "")):
        name, equals, _ = word.partition("=")
        if name in options.OF_STARTING:
            yield from (word,) if equals else (word, following)


def _parser() -> Parser:
    parser = Parser("runs", _ABOUT, _EPILOG, usage="[FOLDER …] [options] | [show] RUN [--json]")
    parser.add_json()
    add = parser.option
    add("path", "FOLDER", Path,
        f"folders to search, with their subfolders (default: {_OWN})", default=[], nargs="*"
    )  # fmt: skip
    parser.switch("--all", "also show runs of comparisons and tunings")
    add("--where", "CONDITION", str,
        "show only runs that meet this condition: NAME, one of = != < <= > >=, and a value",
        default=[], nargs="+", action="extend")  # fmt: skip
    add("--sort", "NAME", str, "sort by this field, smallest first (default: newest first)")
    parser.switch("--reverse", "reverse the order")
    return parser
