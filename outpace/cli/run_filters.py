"""Conditions on past runs for --where: 'strategy=ddp', 'final_loss<2.5'."""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.cli import options
from outpace.cli.parser import whole_number
from outpace.experiment.past_runs import PastRunFolder, field_names, field_owner
from outpace.records.errors import BadInputError, suggest
from outpace.records.past_run import PastRun
from outpace.records.units import read_bytes

_FORM = re.compile(r"\s*([A-Za-z][\w-]*)\s*(<=|>=|!=|==?|<|>)\s*(.*?)\s*", re.DOTALL)
_ORDERS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True)
class Condition:
    """Comparison of a run's field with the value `wanted`; None stands for an unknown value."""

    name: str
    sign: str
    wanted: Any

    def is_met(self, run: PastRunFolder) -> bool:
        """Return whether a run meets the condition. Unknown values are neither < nor >."""
        value = run.value(self.name)
        if isinstance(value, Path):
            value = str(value)
        if self.sign in _ORDERS:
            alike = isinstance(value, str) == isinstance(self.wanted, str)
            return value is not None and alike and _ORDERS[self.sign](value, self.wanted)
        equal = self.wanted in value if isinstance(value, tuple) else value == self.wanted
        return bool(equal) == (self.sign == "=")


def condition_of(word: str) -> Condition:
    """Parse a condition. Raises BadInputError if it has another form."""
    found = _FORM.fullmatch(word)
    if found is None:
        raise BadInputError(
            f"--where {word!r} is not a condition. Write a name, one of = != < <= > >= and a "
            "value, in quotes: --where strategy=ddp 'final_loss<2.5'. Put folders before "
            "--where."
        )
    name = field_of(found[1], f"--where {word}")
    sign = "=" if found[2] == "==" else found[2]
    return Condition(name, sign, _parse_value(name, sign, found[3], f"--where {word}"))


def field_of(word: str, where: str) -> str:
    """Return the field of runs that a word names. Raises BadInputError with similar names."""
    name = word.replace("-", "_")
    if field_owner(name) is None:
        raise BadInputError(
            f"{where}: runs have no field {word!r}.{suggest(name, field_names())} The fields "
            f"are {', '.join(PastRun.model_fields)}, everything in result.json and the plan, "
            "and the settings of outpace train --help."
        )
    return name


def _parse_value(name: str, sign: str, text: str, where: str) -> Any:
    """Convert a value to the field's type; 'none' becomes None. Raises BadInputError."""
    owner = field_owner(name)
    assert owner is not None
    expected = options.shape(owner.model_fields[name].annotation)
    is_number = expected.kind in (int, float)
    if sign in _ORDERS:
        if expected.many or not (is_number or (expected.kind is str and not expected.choices)):
            raise BadInputError(f"{where}: {name} cannot be ordered. Use = or !=")
        return _parse_number(name, text, where) if is_number else text
    if text in (*expected.choices, *expected.words):
        return text
    if text == "none":
        return None
    if is_number:
        return _parse_number(name, text, where)
    allowed = tuple(options.BOOLEANS) if expected.kind is bool else expected.choices
    text = text.lower() if expected.kind is bool else text
    if allowed and text not in allowed:
        raise BadInputError(
            f"{where}: {name} is one of {', '.join(allowed)}, or none.{suggest(text, allowed)}"
        )
    return options.BOOLEANS[text] if expected.kind is bool else text


def _parse_number(name: str, text: str, where: str) -> float:
    is_size = name.endswith("_bytes")
    try:
        return read_bytes(text) if is_size else _read_number(text)
    except (ValueError, OverflowError):
        example = ", such as 900MiB" if is_size else ""
        raise BadInputError(
            f"{where}: {name} must be a number{example}; {text!r} is not a number"
        ) from None


def _read_number(text: str) -> float:
    """Parse a number such as 0.4, 1e-3 or 10M. Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        return whole_number(text)
