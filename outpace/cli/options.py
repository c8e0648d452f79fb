"""Flags and TOML keys of TrainSettings, and the origin of each value.

Precedence: command line, --config file, run.json of the resumed run, default.
"""

import argparse
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from outpace.cli.parser import Parser, read_duration, whole_number
from outpace.records.base import read_toml
from outpace.records.errors import BadInputError, excerpt, shorten, suggest
from outpace.records.settings import Size, TrainSettings
from outpace.records.units import read_bytes

COMMAND_LINE = "command line"
DEFAULT = "default"
RUN_FILE = "run.json"
# Settings that may name files or folders, in which a leading ~ is the home directory.
_PLACES = frozenset(
    {"out", "cache_dir", "offload_dir", "data", "eval_data", "tokenizer", "model", "plan"}
)
# Options for starting ranks. They are not settings, and are not passed to the ranks.
OF_STARTING = ("--hosts", "--hostfile", "--min-nodes", "--max-nodes", "--max-restarts")
# Words for on and off, in lower case.
BOOLEANS = {"true": True, "on": True, "yes": True, "1": True,
            "false": False, "off": False, "no": False, "0": False}  # fmt: skip

_GROUPS = {
    "model": "model",
    "data": "data",
    "batch": "batch",
    "length": "length (give one)",
    "optimization": "optimization",
    "adapters": "adapters (LoRA)",
    "computation": "computation",
    "run": "run",
}


@dataclass(frozen=True)
class Shape:
    """Type of a setting, as needed to read its value from the command line or from a file.

    `kind` is the type of one value, and `many` says whether there may be several. `choices` are the
    allowed values, if they are listed. `words` are allowed instead of a number. If `size`, the
    number is a size in bytes, such as 512GiB.
    """

    kind: type
    choices: tuple[str, ...] = ()
    many: bool = False
    words: tuple[str, ...] = ()
    size: bool = False


def shape(annotation: Any) -> Shape:
    """Return the type of a field, unwrapping Optional, Annotated, tuple and Literal."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if annotation == Size:
        return Shape(int, size=True)
    if origin in (typing.Union, types.UnionType):
        held = [shape(a) for a in arguments if a is not type(None)]
        words = [word for other in held[1:] for word in other.choices]
        return replace(held[0], words=tuple(words))
    if origin is typing.Annotated:
        return shape(arguments[0])
    if origin is tuple:
        inner = shape(arguments[0])
        return Shape(inner.kind, inner.choices, many=True)
    if origin is typing.Literal:
        return Shape(str, tuple(arguments))
    return Shape(annotation)


def flag(name: str) -> str:
    """Return the flag of a field: 'global_batch' -> '--global-batch'."""
    return "--" + name.replace("_", "-")


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Format settings as command-line arguments, without those that are None."""
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        elif isinstance(value, (tuple, list)):
            words += [flag(name), *map(str, value)]
        elif value is not None:
            words += [flag(name), str(value)]
    return words


def add_settings(parser: Parser, texts: Mapping[str, str] = MappingProxyType({})) -> None:
    """Add a flag for every field of TrainSettings, in groups.

    `texts` replaces the help of fields that have another meaning in this command.
    """
    groups = {key: parser.arguments.add_argument_group(title) for key, title in _GROUPS.items()}
    for name, field in TrainSettings.model_fields.items():
        extra = field.json_schema_extra
        group = groups[str(extra["group"]) if isinstance(extra, dict) else "run"]
        expected = shape(field.annotation)
        text = texts.get(name, field.description or "").replace("%", "%%")
        if expected.many and expected.choices:
            text += f": {', '.join(expected.choices)}"
        if field.default not in (None, ()) and "default" not in text:
            text += f" (default: {as_words(field.default)})"
        options: dict[str, Any] = {"help": text, "dest": name}
        if expected.kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif expected.many:
            options.update(nargs="+", action="extend")
        if expected.kind is not bool:
            options["metavar"] = _metavar(name, expected)
        names = [flag(name)]
        if name.endswith("_s"):
            names.insert(0, flag(name.removesuffix("_s")))  # the help names the unit
        group.add_argument(*names, **options)


def _metavar(name: str, expected: Shape) -> str:
    if expected.many and expected.choices:
        return "NAME"
    if expected.choices:
        return "{" + ",".join(expected.choices) + "}"
    if expected.words:
        return "{N," + ",".join(expected.words) + "}"
    words = {int: "SIZE" if expected.size else "N", float: "X", Path: "DIR"}
    return words.get(expected.kind, name.rsplit("_", 1)[-1].upper())


def as_words(value: Any) -> str:
    """Format a value as on the command line."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (tuple, list)):
        return " ".join(as_words(part) for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def from_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings given on the command line."""
    given = {name: value for name, value in vars(arguments).items() if name in _fields()}
    return {name: convert(name, value, flag(name)) for name, value in given.items()}


def from_toml(path: Path) -> dict[str, Any]:
    """Return the settings of a TOML file, whose keys are in kebab or snake case.

    Raises BadInputError for an unknown key or an invalid value.
    """
    values: dict[str, Any] = {}
    for key, value in read_toml(path, "--config ").items():
        name = key.replace("-", "_")
        if name not in _fields():
            between = "_" if "_" in key else "-"
            close = suggest(key, [field.replace("_", between) for field in _fields()])
            raise BadInputError(f"{path}: unknown key {key!r}.{close} See outpace train --help.")
        if name in values:
            raise BadInputError(f"{path}: {key!r} is given twice, with - and with _")
        values[name] = convert(name, value, f"{path}: {key}")
    return values


def convert(name: str, value: Any, where: str) -> Any:
    """Convert the value of a setting to the type of its field.

    Raises BadInputError if that is not possible.
    """
    expected = shape(_fields()[name].annotation)
    if name.endswith("_s") and isinstance(value, str):
        try:
            return read_duration(value)
        except ValueError as error:
            raise BadInputError(f"{where}: {error}") from None
    if name in _PLACES:
        value = _expand_home(value)
    _refuse_split_name(name, expected, value, where)
    if not expected.many:
        return _convert_one(expected, value, where)
    words = value if isinstance(value, (list, tuple)) else [value]
    if expected.kind is not str or expected.choices:  # a path may contain a comma
        words = [part for word in words for part in _split_at_commas(word)]
    return tuple(_convert_one(expected, word, where) for word in words)


def _expand_home(value: Any) -> Any:
    """Expand ~ in paths, which the shell does not do in --out=~/runs or in quotes."""
    if isinstance(value, (list, tuple)):
        return [_expand_home(one) for one in value]
    if isinstance(value, str) and value.startswith("~"):
        return str(Path(value).expanduser())
    return value


def _split_at_commas(word: Any) -> list[Any]:
    if not isinstance(word, str):
        return [word]
    return [part.strip() for part in word.split(",") if part.strip()]


def _convert_one(expected: Shape, value: Any, where: str) -> Any:
    if expected.choices and value not in expected.choices:
        raise BadInputError(
            f"{where}: {excerpt(value)} is not one of {', '.join(expected.choices)}."
            f"{suggest(str(value), expected.choices)}"
        )
    if expected.kind is int and not expected.size and _is_fraction(value):
        raise BadInputError(
            f"{where}: {excerpt(value)} is not a whole number. Give a count (of steps, "
            "samples, ranks), not a fraction"
        )
    if not isinstance(value, str) or expected.kind not in (int, float) or value in expected.words:
        return value
    if expected.size:
        try:
            return read_bytes(value)
        except ValueError as error:
            raise BadInputError(f"{where}: {error}") from None
    reader = whole_number if expected.kind is int else float
    try:
        return reader(value)
    except ValueError:
        example = "a whole number, such as 200, 1e6 or 10M" if expected.kind is int else "a number"
        words = "".join(f", not {word!r}" for word in expected.words)
        raise BadInputError(f"{where}: {excerpt(value)} is not {example}{words}") from None


def _refuse_split_name(name: str, expected: Shape, value: Any, where: str) -> None:
    """Refuse `--offload optimizer`, which means --offload-optimizer, and suggest that option."""
    if not expected.choices or not isinstance(value, str) or value in expected.choices:
        return
    other = f"{name}_{value.replace('-', '_')}"
    if other not in _fields():
        return
    takes = shape(_fields()[other].annotation)
    written = f"{flag(other)} {_metavar(other, takes)}"
    raise BadInputError(
        f"{where}: {value!r} is not one of {', '.join(expected.choices)}. Did you mean {written}?"
    )


def _is_fraction(value: Any) -> bool:
    """Return whether 0 < value < 1, which other tools read as a fraction of all steps."""
    try:
        return isinstance(value, (str, float)) and 0 < float(value) < 1
    except ValueError:
        return False


def build(layers: Mapping[str, Mapping[str, Any]]) -> tuple[TrainSettings, dict[str, str]]:
    """Merge settings from several origins, such as the command line and a file.

    `layers` holds the values of each origin, by precedence: the first one with a value for a
    setting wins. Returns the settings and the origin of each. Errors (BadInputError) name the
    origin of a value.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in layers.items():
        for name, value in layer.items():
            if name not in values:
                values[name], origins[name] = value, origin
    _drop_overridden_lengths(values, origins, list(layers))
    try:
        settings = TrainSettings.model_validate(values)
    except ValidationError as error:
        # For a field that accepts a number or a word, the first problem explains the error.
        first = {str(problem["loc"][:1]): problem for problem in reversed(error.errors())}
        sentences = map(partial(_format_problem, origins), reversed(first.values()))
        raise BadInputError("\n".join(sentences)) from None
    return settings, {name: origins.get(name, DEFAULT) for name in _fields()}


def _drop_overridden_lengths(
    values: dict[str, Any], origins: dict[str, str], order: list[str]
) -> None:
    """Keep the steps, tokens or epochs of only one origin: the first in `order` that has any.

    They all set the length of training, so an origin of lower precedence must not add another one.
    """
    lengths = [name for name in ("steps", "tokens", "epochs") if values.get(name) is not None]
    nearest_layer = min((order.index(origins[name]) for name in lengths), default=0)
    for name in lengths:
        if order.index(origins[name]) > nearest_layer:
            del values[name], origins[name]


def _format_problem(origins: Mapping[str, str], problem: Any) -> str:
    if not problem["loc"]:  # about several settings together
        files = dict.fromkeys(one for one in origins.values() if one != COMMAND_LINE)
        return ": ".join([*([", ".join(files)] if files else []), str(problem["ctx"]["error"])])
    name = str(problem["loc"][0])
    origin = origins.get(name, DEFAULT)
    where = flag(name) if origin == COMMAND_LINE else f"{origin}: {name}"
    message, value = problem["msg"], problem["input"]
    if problem["type"] == "extra_forbidden":
        return f"{origin}: unknown key {name!r}.{suggest(name, _fields())}"
    shown = shorten(value) if isinstance(value, str) else excerpt(value)
    return f"{where} {shown}: {message[0].lower()}{message[1:]}"


def _fields() -> Any:
    return TrainSettings.model_fields
