"""Numbers, settings and timestamps in the logs of trainers."""

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import TypeGuard

_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
# A number, but not the beginning of something else ("1.2.3").
NUMBER = r"(\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?)(?!\.?\d)"
# Times, rates and memory outside this range are treated as damaged.
_LEAST, _MOST = 1e-12, 1e18
# Megatron's and DeepSpeed's settings. Name, dots and value; DeepSpeed has no dots after long names.
_SETTING = re.compile(r"\b(\w{1,80}) \.* (\S.*)")
# Messages about adapters from peft, unsloth and Megatron-Bridge.
_TRAINED_OF_ALL = re.compile(
    r"trainable param(?:eter)?s\s*[:=]\s*([\d,]+)\s*(?:\|\| all params:|/|of)\s*([\d,]+)",
    re.IGNORECASE,
)
_ADAPTER_ADDED = re.compile(r"\bAdding \w*lora to: ", re.IGNORECASE)
# Fraction of trained weights above which all count as trained; the rest are buffers, or counted
# differently.
_ALL = 0.98


def is_plausible(value: object) -> TypeGuard[float]:
    """Return whether a value is a number within the range that a log may contain."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return _LEAST < value < _MOST


def parse_number(text: str) -> float | None:
    """Parse a number; return None if it is not plausible in a log."""
    value = float(text.replace(",", ""))
    return value if value == 0 or _LEAST < value < _MOST else None


def steady_median(values: Sequence[float]) -> float | None:
    """Return the median of logged values except the first, which includes start-up."""
    return statistics.median(values[1:] if len(values) > 1 else values) if values else None


def find_numbers(pattern: str, lines: Iterable[str]) -> list[float]:
    """Return the numbers captured by a pattern with one group, at most one per line."""
    compiled = re.compile(pattern)
    found = (parse_number(match[1]) for line in lines if (match := compiled.search(line)))
    return [value for value in found if value is not None]


def last_number(pattern: str, lines: Iterable[str]) -> int | None:
    """Return the last number captured by a pattern with one group, truncated to an integer."""
    found = find_numbers(pattern, lines)
    return int(found[-1]) if found else None


def find_settings(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the settings in lines such as "zero_stage ........ 3", as names and values."""
    for line in lines:
        match = _SETTING.search(line)
        if match:
            yield match[1], match[2].rstrip()


def whole_settings(settings: Mapping[str, str], names: Mapping[str, str]) -> dict[str, int]:
    """Return the settings with integer values, under outpace's names."""
    return {
        name: int(settings[theirs])
        for theirs, name in names.items()
        if settings.get(theirs, "").isdecimal() and len(settings[theirs]) <= 15
    }


def trains_adapters(lines: Iterable[str]) -> bool:
    """Return whether the log shows that only some of the weights were trained."""
    for line in lines:
        if _ADAPTER_ADDED.search(line):
            return True
        match = _TRAINED_OF_ALL.search(line)
        if match:
            trained, total = (parse_number(text) for text in match.groups())
            if trained is not None and total is not None and trained < _ALL * total:
                return True
    return False


def clock_step_s(step: re.Pattern[str], lines: Iterable[str]) -> tuple[float, float] | None:
    """Return bounds of the step time, from the timestamps of lines with step numbers.

    `step` captures the step number. The bounds are based on medians over successive lines, since
    evaluations and checkpoints may fall between two lines. Returns None if fewer than two lines
    have a timestamp and a step number.
    """
    marks: list[tuple[int, float]] = []
    unit_s = 0.0
    for line in lines:
        time, number = _TIME.search(line), step.search(line)
        if time is None or number is None:
            continue
        fraction = time[2] or ""
        unit_s = max(unit_s, 10.0 ** -len(fraction))
        try:
            moment = datetime.fromisoformat(time[1].replace("T", " ")).replace(tzinfo=UTC)
        except ValueError:
            continue
        mark = int(number[1]), moment.timestamp() + float(f"0.{fraction or 0}")
        if marks and mark[0] == marks[-1][0]:
            continue  # another rank's line
        if marks and (mark[0] < marks[-1][0] or mark[1] < marks[-1][1]):
            marks.clear()  # the run was resumed, or the clock was set
        marks.append(mark)
    if len(marks) < 2 or marks[-1][1] - marks[0][1] <= 0:
        return None
    pairs = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(marks)]
    least, most = (
        statistics.median(max(0.0, seconds + error_s) / count for count, seconds in pairs)
        for error_s in (-unit_s, unit_s)
    )
    steps, total_s = marks[-1][0] - marks[0][0], marks[-1][1] - marks[0][1]
    return least, min(most, (total_s + unit_s) / steps)
