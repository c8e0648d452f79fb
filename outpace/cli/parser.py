"""An argument parser whose errors are sentences that suggest the closest valid name."""

import argparse
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from outpace.records.errors import BadInputError, suggest
from outpace.records.units import read_bytes

LONGEST_S = 1e7  # longest wait or task: about four months
MOST = 10**18  # largest count or figure, such as tokens to train on
_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


class Parser:
    """argparse for one command, without abbreviations; bad input raises BadInputError."""

    def __init__(
        self, command: str, about: str, epilog: str | None = None, usage: str | None = None,
        elsewhere: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Create the parser.

        `elsewhere` has options that only other commands have, each with advice for the error
        message.
        """
        self.command = command
        self.elsewhere = elsewhere
        self.arguments = _Argparse(
            prog=f"outpace {command}",
            usage=usage and f"outpace {command} {usage}",
            description=about,
            epilog=epilog,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=_Formatter,
        )

    def option(
        self, name: str, metavar: str | None, kind: Callable[[str], Any], text: str, *,
        default: Any = None, **rest: Any,
    ) -> None:  # fmt: skip
        """Add an option or argument whose values `kind` converts; `rest` is passed to argparse."""
        self.arguments.add_argument(
            name, metavar=metavar, type=kind, help=text, default=default, **rest
        )

    def switch(self, name: str, text: str) -> None:
        """Add an option without a value, off by default."""
        self.arguments.add_argument(name, action="store_true", default=False, help=text)

    def add_json(self) -> None:
        """Add --json, which every command has."""
        self.switch("--json", "print one JSON document on standard output, and nothing else")

    def read(self, argv: list[str]) -> argparse.Namespace:
        """Parse arguments. Raises BadInputError if any is unknown or missing. --help exits."""
        # Check this first, since it may cause the problems that argparse finds.
        if (unknown := self._find_unknown_option(argv)) is not None:
            self._refuse_unknown(unknown)
        found, rest = self.arguments.parse_known_args(argv)
        if rest:
            self._refuse_unknown(rest[0])
        return found

    def _refuse_unknown(self, unknown: str) -> NoReturn:
        word = unknown.split("=")[0]
        flags = [flag for flag in self.arguments.flags() if flag.startswith("--")]
        if word in self.elsewhere:
            raise BadInputError(
                f"outpace {self.command} has no option {word!r}. {self.elsewhere[word]}"
            )
        close = suggest(word, flags) if word.startswith("-") else _suggest_option(word, flags)
        kind = "option" if word.startswith("-") else "argument"
        raise BadInputError(
            f"outpace {self.command} has no {kind} {word!r}.{close} "
            f"See outpace {self.command} --help."
        )

    def _find_unknown_option(self, argv: list[str]) -> str | None:
        """Return the first word that can only be an unknown option; None if --help comes first."""
        known = set(self.arguments.flags())
        for word in argv:
            name = word.split("=")[0]
            if name in ("-h", "--help", "--"):
                return None
            # argparse treats numbers, and words with a blank, as values.
            is_value = name == "-" or " " in name or _NUMBER.fullmatch(word)
            if not name.startswith("-") or is_value or name in known:
                continue
            if name.startswith("--") or name[:2] not in known:
                return word
        return None


# As argparse's `_negative_number_matcher` in any version of Python, with an exponent.
_NUMBER = re.compile(r"-(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(e[-+]?\d+)?", re.I)

# The option that accepts a file, by its suffix, or a folder, by a file in it.
_TAKEN_BY = {
    ".toml": "--config",
    **dict.fromkeys((".jsonl", ".txt", ".parquet", ".csv", ".tsv", ".bin"), "--data"),
}
_FOLDERS = {"run.json": "--resume", "config.json": "--model"}


def _suggest_option(word: str, flags: list[str]) -> str:
    """Return ' Did you mean …?' with the option to put before a path ("--data x.txt"), or ''."""
    path = Path(word)
    taken = _TAKEN_BY.get(path.suffix.casefold(), "")
    for name, option in _FOLDERS.items():
        if path.is_dir() and (path / name).exists():
            taken = option
            break
    return f" Did you mean '{taken} {word}'?" if taken in flags else ""


class JoinedList(argparse.Action):
    """Argparse action that joins the values of a repeated option with commas."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given = getattr(namespace, self.dest, None)
        added = given is not None and given is not self.default
        setattr(namespace, self.dest, f"{given},{values}" if added else values)


class _Argparse(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith(("?", ".", ".)")) else "."
        raise BadInputError(f"{message}{end} See {self.prog} --help.")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        raise argparse.ArgumentError(
            action, f"{value!r} is not one of {', '.join(known)}.{suggest(str(value), known)}"
        )

    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]


class _Formatter(argparse.HelpFormatter):
    """Help formatter with a wider column for options, and lines of at most 100 characters."""

    def __init__(self, prog: str) -> None:
        width = min(100, shutil.get_terminal_size().columns)
        super().__init__(prog, max_help_position=34, width=width)


def whole_number(text: str) -> int:
    """Parse a whole number: '200', '1e6', '10M', '2B' or '10_000'. Raises ValueError."""
    word = text.strip().lower()
    factor = _SUFFIXES.get(word[-1:], 1)
    digits = word[:-1] if factor != 1 else word
    try:
        return int(digits) * factor
    except ValueError:
        number = float(digits) * factor
    if not number.is_integer():  # OverflowError is for int(inf); is_integer(inf) is False
        raise ValueError(f"{text!r} is not a whole number")
    return int(number)


def number_type(
    kind: type[int] | type[float], low: float | None = None, high: float = MOST
) -> Callable[[str], Any]:
    """Return an argparse type for numbers within inclusive bounds."""

    def convert(text: str) -> int | float:
        try:
            value = whole_number(text) if kind is int else float(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
        if math.isinf(value):
            raise argparse.ArgumentTypeError(f"{text} is not a finite number")
        if not (value <= high and (low is None or value >= low)):
            raise argparse.ArgumentTypeError(f"{text} is not {_format_bounds(low, high)}")
        return value

    return convert


_DURATION = re.compile(
    r"(?:(?P<d>[0-9.]+)\s*(?:d|days?))?\s*(?:(?P<h>[0-9.]+)\s*(?:h|hours?))?\s*"
    r"(?:(?P<m>[0-9.]+)\s*(?:m|min|minutes?))?\s*"
    r"(?:(?P<s>[0-9.]+)\s*(?:s|sec|seconds?))?\s*(?:(?P<ms>[0-9.]+)\s*ms)?"
)
_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}


def read_duration(text: str) -> float:
    """Parse a duration in seconds: '180', '3m', '1h30m', '90 s', '250ms'. Raises ValueError."""
    word = text.strip().lower()
    if re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]{1,2})?", word):
        return float(word)
    found = _DURATION.fullmatch(word)
    given = {} if found is None else {k: v for k, v in found.groupdict().items() if v}
    try:
        seconds = sum(float(count) * _SECONDS[unit] for unit, count in given.items())
    except ValueError:
        given = {}
    if not given:
        raise ValueError(f"{text!r} is not a duration. Write 180 (seconds), 3m, 1h30m or 250ms")
    return seconds


def duration_type(low: float) -> Callable[[str], float]:
    """Return an argparse type for durations of at least `low` seconds."""

    def convert(text: str) -> float:
        try:
            value = read_duration(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if not low <= value <= LONGEST_S:
            raise argparse.ArgumentTypeError(f"{text} is not {_format_bounds(low, LONGEST_S)} s")
        return value

    return convert


def byte_size(text: str) -> int:
    """Argparse type for sizes in bytes: 512GiB, 2TiB, 8e9."""
    try:
        return read_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _format_bounds(low: float | None, high: float) -> str:
    words = [f"at least {low:g}"] if low is not None else []
    return " and ".join([*words, f"at most {high:g}"])
