"""Experiments given on the command line or in a TOML file, and their folders."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from outpace.cli import options
from outpace.cli.output import require_folder_place
from outpace.records.base import read_toml, write_atomic
from outpace.records.comparison import Arm
from outpace.records.errors import BadInputError, suggest
from outpace.records.line_checksums import strip_checksum
from outpace.records.plan import Strategy
from outpace.records.run import require_run, suggest_runs
from outpace.records.settings import TrainSettings

if TYPE_CHECKING:
    from outpace.reporting.render.document import Answer

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
# The first file that a tuning and a comparison write.
BEGUN = ASKED_FILE, EXPERIMENT = "settings.json", "experiment.json"
_OF_AN_ARM = ("name", "environment", "command")


@contextmanager
def folder_of(out: Path | None, resumes: bool, parent: str, what: str) -> Iterator[Path]:
    """Yield the folder for results: `out`, or a new one in `parent` that is named after the time.

    If the new folder is still empty when the context ends, it is removed. `what` names the results
    in errors. Raises BadInputError if `out` cannot be used, or if it is None although `resumes` is
    set.
    """
    if out is None and resumes:
        raise BadInputError(f"--resume needs a {what}. Give its directory with --out DIR.")
    if out is not None:
        require_folder_place(out)
        yield out
        return
    base = Path(parent) / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    base.parent.mkdir(parents=True, exist_ok=True)
    made = _make_folder(base)
    try:
        yield made
    finally:
        with suppress(OSError):  # usually not empty
            made.rmdir()
            made.parent.rmdir()


def _make_folder(base: Path) -> Path:
    """Create a folder, with a number appended if another process has taken the name."""
    number, path = 1, base
    while True:
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
            path = base.with_name(f"{base.name}-{number}")
        else:
            return path


def format_now() -> str:
    """Return the current time in UTC, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def show_result(result: "Answer", folder: Path | None, what: str, command: Sequence[str]) -> None:
    """Print a result, the folder in which it is saved, and a command that the user can copy.

    `what` says what the command does ("again").
    """
    from rich.text import Text

    from outpace.reporting.terminal.answer import answer_text
    from outpace.reporting.terminal.console import Console

    console = Console()
    console.print(answer_text(result))
    if folder is not None:
        console.print(Text(f"saved in {folder}" + f"; {what}:" * bool(command)), soft_wrap=True)
        if command:
            console.print(Text(shlex.join(command)), soft_wrap=True)


def format_interruption(folder: Path, *command: str) -> str:
    """Return the message after an interruption: where results are saved, and how to resume.

    `command` is the user's command line without `outpace`.
    """
    if not any((folder / name).is_file() for name in BEGUN):
        return "outpace: interrupted before the start, so nothing was saved"
    words = ["outpace", *command]
    if not any(word == "--out" or word.startswith("--out=") for word in words):
        words += ["--out", str(folder)]
    if "--resume" not in words:
        words.append("--resume")
    return f"outpace: the results so far are saved in {folder}; resume with:\n{shlex.join(words)}"


def can_resume(folder: Path, log: Path, resumes: bool, what: str) -> bool:
    """Return whether `folder` has finished runs, in the file `log`, after which to continue.

    `resumes` says whether the user gave --resume, and `what` names the results in errors. Raises
    BadInputError if there is nothing to resume, or if `folder` is not empty and is not being
    resumed.
    """
    if not log.is_file():
        if resumes and not folder.is_dir():
            raise BadInputError(f"--resume: there is no {what} in {folder} to resume.")
        there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        # A folder without a finished run starts from the beginning.
        if there and not (resumes and there & set(BEGUN)):
            raise BadInputError(f"{folder} exists and is not empty. Use another --out.")
        return False
    if not resumes:
        raise BadInputError(
            f"{folder} holds a {what}. Use --resume to continue it, or another --out."
        )
    return True


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Read the JSON objects of a log, and remove an unfinished last line from the file.

    Raises BadInputError if the log is damaged.
    """
    written = path.read_bytes()
    whole = written[: written.rfind(b"\n") + 1]
    try:
        found = [json.loads(strip_checksum(line)) for line in whole.split(b"\n") if line]
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path} is damaged: {error}. Use another --out.") from None
    if len(whole) < len(written):
        write_atomic(path, whole.decode())
    return found


def arm_of(word: str) -> Arm:
    """Parse an arm of a comparison: its strategy, settings and environment variables.

    Examples are 'zero3', 'precision=bf16' and 'NCCL_P2P_DISABLE=1', optionally after 'name:'.
    Raises BadInputError if a strategy, setting or value is unknown or given twice.
    """
    name, colon, rest = word.partition(":")
    if not colon or "=" in name or "," in name:
        name, rest = word, word
    settings: dict[str, Any] = {}
    environment: dict[str, str] = {}
    for part in rest.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        found: dict[str, Any] = {}
        if not equals:
            found = {"strategy": _check_strategy(key, word)}
        elif not _VARIABLE.fullmatch(key):
            found = _parse_setting(key, value, f"arm {word}")
        for name in found.keys() & settings.keys() or ({key} & environment.keys()):
            raise BadInputError(
                f"arm {word!r} has two values of {name}. Separate arms by spaces, and settings "
                "of one arm by commas."
            )
        settings |= found
        environment |= {} if found else {key: value}
    given = {"name": name, "settings": settings, "environment": environment}
    return Arm.parse(given, f"arm {word!r}")


def _check_strategy(name: str, word: str) -> str:
    known = get_args(Strategy)
    if name not in known:
        close = suggest(name, known)
        if name and not close:
            refuse_missing_folder(name, f"arm {word!r}")
        raise BadInputError(
            f"arm {word!r}: {name!r} is neither a strategy nor the folder of a run."
            f"{close}{suggest_runs(Path(name))} Write a strategy, settings "
            "(micro_batch=2,precision=bf16) or environment variables (NAME=value), separated by "
            "commas; or give the folders of finished runs, or the .toml file of an experiment."
        )
    return name


def refuse_missing_folder(word: str, where: str) -> None:
    """Raise BadInputError if a word is or looks like a path, but not that of a run's folder."""
    path = Path(word)
    if path.suffix in (".toml", ".json"):  # of an experiment, which is given alone
        return
    if path.exists() or (len(path.parts) > 1 and "=" not in word):
        try:
            require_run(path)
        except BadInputError as error:
            raise BadInputError(f"{where}: {error}") from None


def _parse_setting(key: str, value: Any, where: str) -> dict[str, Any]:
    name = key.replace("-", "_")
    known = TrainSettings.model_fields
    if name not in known or name in ("out", "resume"):
        raise BadInputError(f"{where}: {key!r} is not a setting.{suggest(name, known)}")
    return {
        name: _to_json_value(options.convert(name, _parse_boolean(name, value), f"{where}: {key}"))
    }


def _parse_boolean(name: str, value: Any) -> Any:
    """Convert 'true', 'off', … to a boolean if the setting is one, else return `value`."""
    if options.shape(TrainSettings.model_fields[name].annotation).kind is bool:
        return options.BOOLEANS.get(str(value).lower(), value)
    return value


def _to_json_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_json_value(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def commands(lines: Sequence[str]) -> list[Arm]:
    """Return an arm for each command line, named after it."""
    return [Arm.parse({"name": line, "command": line}, "--command") for line in lines]


def from_toml(path: Path) -> dict[str, Any]:
    """Read an experiment file, and return the fields of an Experiment.

    Raises BadInputError if the file has another form.
    """
    table = read_toml(path)
    common = _parse_settings(table.pop("common", {}), f"{path}: common")
    given = table.pop("arm", [])
    grid = table.pop("grid", {})
    if not isinstance(grid, dict):
        raise BadInputError(
            f"{path}: grid: write it as a table of settings with a list of values for each"
        )
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise BadInputError(f"{path}: arms: write each arm as a table under [[arm]]")
    arms = [_parse_arm(one, place, path) for place, one in enumerate(given)]
    return {**table, "common": common, "arms": [*_cross_with_grid(arms, grid, path)]}


def _parse_arm(table: Mapping[str, Any], place: int, path: Path) -> Arm:
    where = f"{path}: arm {place + 1}"
    own = {name: table[name] for name in _OF_AN_ARM if name in table}
    rest = {name: value for name, value in table.items() if name not in _OF_AN_ARM}
    settings = _parse_settings(rest, where)
    variables = own.get("environment", {})
    if not isinstance(variables, dict):
        raise BadInputError(f"{where}: environment: write it as a table of variables")
    own["environment"] = {
        key: str(value) if type(value) in (int, float) else value
        for key, value in variables.items()
    }
    own.setdefault("name", own.get("command") or _format_arm_name(settings, variables))
    return Arm.parse({**own, "settings": settings}, where)


def _parse_settings(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise BadInputError(f"{where}: write it as a table of settings")
    settings: dict[str, Any] = {}
    for key, value in table.items():
        settings |= _parse_setting(key, value, where)
    return settings


def _cross_with_grid(arms: Sequence[Arm], grid: Mapping[str, Any], path: Path) -> list[Arm]:
    """Combine each arm with every combination of the grid's values.

    Keys in capitals are environment variables; others are settings.
    """
    if not grid:
        return list(arms)
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise BadInputError(f"{path}: grid: {name} needs a list of values")
    combined = []
    for arm in arms or [Arm(name="-")]:
        for values in product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            own = {key: str(value) for key, value in chosen.items() if _VARIABLE.fullmatch(key)}
            rest = {key: value for key, value in chosen.items() if key not in own}
            grid_settings = _parse_settings(rest, f"{path}: grid")
            name = _format_arm_name(grid_settings, own)
            changed = {
                "name": name if arm.name == "-" else f"{arm.name}, {name}",
                "settings": {**arm.settings, **grid_settings},
                "environment": {**arm.environment, **own},
            }
            combined.append(arm.model_copy(update=changed))
    return combined


def _format_arm_name(settings: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    words = [
        str(value) if key == "strategy" else f"{key}={options.as_words(value)}"
        for key, value in settings.items()
    ]
    return ", ".join([*words, *(f"{key}={value}" for key, value in environment.items())]) or "-"
