"""Errors whose message is meant for the user.

Each says what was wrong, the value seen, what is allowed and what to do next. The command line
prints only the message, without a traceback, and exits with the error's `exit_code`.
"""

import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence

from outpace.records.aliases import format_setting, translate_alias

EXIT_BAD_INPUT = 2
EXIT_DIVERGED = 3
EXIT_OUT_OF_MEMORY = 4
EXIT_HANG = 5  # a rank was stopped, or never joined a collective
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: saved, run again with --resume
# Exit codes of a run that ran out of memory: reported by outpace, or killed by the system.
OUT_OF_MEMORY_CODES = (EXIT_OUT_OF_MEMORY, -9, 128 + 9)
# Longest line of a message to print in full, and what is printed of longer ones, which quote data.
_MOST_LETTERS, _FIRST_LETTERS, _LAST_LETTERS = 4000, 1000, 1000
# Limits for suggestions by spelling: difference in length, similarity, length of a short word.
_MOST_SLIPS, _LEAST_ALIKE, _FEW_LETTERS = 3, 0.75, 4
# A parameter count in a model's name, and the largest ratio of a suggested count to it.
_SIZE, _SIZE_RATIO = re.compile(r"(\d+(?:\.\d+)?)([bm])(?![a-z])"), 2.0
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all except tab and newline


class OutpaceError(Exception):
    """A failure whose message is meant for the user. `exit_code` is the command's exit status.

    `on_all_ranks`: rank 0 raises the same error and reports it. `answered`: the command has already
    printed its answer, so `--json` must not print a second document.
    """

    exit_code = 1
    on_all_ranks = False
    answered = False


class BadInputError(OutpaceError):
    """Invalid input from the user."""

    exit_code = EXIT_BAD_INPUT


class DivergedError(OutpaceError):
    """The loss became NaN or infinite."""

    exit_code = EXIT_DIVERGED


class OutOfMemoryError(OutpaceError):
    """A rank needs more memory than it may use; the message says what would fit."""

    exit_code = EXIT_OUT_OF_MEMORY


class InterruptedRunError(OutpaceError):
    """A signal stopped the run after it had finished its step and saved a checkpoint."""

    exit_code = EXIT_INTERRUPTED


def shorten(text: str, most: int = 200) -> str:
    """Truncate a text to `most` characters, with … at the end."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def error_summary(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def readable(message: str) -> str:
    """Shorten long lines of a message in the middle, where they quote data.

    The beginning says what was wrong, and the end what to do next.
    """
    return "\n".join(
        line if len(line) <= _MOST_LETTERS else f"{line[:_FIRST_LETTERS]} … {line[-_LAST_LETTERS:]}"
        for line in message.split("\n")
    )


def excerpt(value: object) -> str:
    """Return a value's `repr`, truncated if it is long."""
    try:
        return shorten(repr(value))
    except (RecursionError, ValueError):  # nested too deeply, or too many digits
        return f"a {type(value).__name__} that is too large to show"


_MOST_QUOTED = 40  # characters quoted of a text that is not JSON


def json_error(error: Exception) -> str:
    """Return why a JSON text cannot be parsed.

    Where Python advises programmers to raise one of its limits, the problem in the text is named
    instead.
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8: byte {error.object[error.start]:#04x} at position {error.start}"
    if not isinstance(error, json.JSONDecodeError):
        if "integer string conversion" in str(error):
            return f"it has a number with more than {sys.get_int_max_str_digits():,} digits"
        return str(error)
    begins = error.doc.strip()[:_MOST_QUOTED]
    return f"{error}; it begins with {begins!r}" if error.pos == 0 and begins else str(error)


def first_names(names: Sequence[str], most: int = 3) -> str:
    """List the first few names and count the others: "a, b, c and 40 more"."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def join_or(names: Iterable[object]) -> str:
    """Return alternatives for a sentence: "a", "a or b", "a, b or c"."""
    *first, last = map(str, names)
    return f"{', '.join(first)} or {last}" if first else last


def join_and(names: Iterable[object]) -> str:
    """Return a list for a sentence: "a", "a and b", "a, b and c"."""
    *first, last = map(str, names)
    return f"{', '.join(first)} and {last}" if first else last


def quote_names(names: Iterable[object], most: int = 24) -> str:
    """List names that come from data, each in quotes: "'a', 'b' and 40 more".

    Long names are truncated: in a broken file, a column name may be the whole content.
    """
    return first_names([excerpt(name) for name in names], most)


def nearest_of(word: str, choices: Iterable[str], count: int = 6) -> str:
    """List the choices most similar to `word` and count the others: "a, b, c and 40 more"."""
    known = list(choices)
    first = difflib.get_close_matches(word, known, n=count, cutoff=0.0)
    more = len(known) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "")


def suggest(
    word: str, choices: Iterable[str], form: Callable[[str, str], str] = format_setting
) -> str:
    """Return ' Did you mean …?' with the choices that `word` may stand for, or '' without any.

    Looks for another tool's name for a choice (`aliases`), then for a typo or the beginning of a
    choice. Choices that only share some letters are not suggested. `form` formats a choice that
    comes with a value.
    """
    known = list(dict.fromkeys(choices))
    names, remark = translate_alias(word, known, form)
    names = names or similar_names(word, known)
    if not names:
        return ""
    question = f" Did you mean {join_or(map(repr, names[:3]))}?"
    return f"{question} ({remark[0].upper()}{remark[1:]}.)" if remark else question


def similar_names(word: str, known: Iterable[str]) -> list[str]:
    """Return up to three names that begin with `word` or differ by a typo, most similar first."""
    mine = word.strip("-").replace("_", "-").casefold()
    names = {name: name.strip("-").replace("_", "-").casefold() for name in known}
    ratio = {
        name: difflib.SequenceMatcher(None, mine, other, autojunk=False).ratio()
        for name, other in names.items()
        if abs(len(mine) - len(other)) <= _MOST_SLIPS or other.startswith(f"{mine}-")
    }
    close = [
        name
        for name, share in ratio.items()
        if share >= _LEAST_ALIKE
        or names[name].startswith(f"{mine}-")
        or _differs_by_one_letter(mine, names[name])
    ]
    return sorted(close, key=lambda name: -ratio[name])[:3]


def _differs_by_one_letter(one: str, other: str) -> bool:
    """Return whether words of equal length differ in one letter.

    Words of few letters must, in addition, consist of the same letters.
    """
    alike = len(one) > _FEW_LETTERS or {*one} == {*other}
    return alike and len(one) == len(other) and sum(map(str.__ne__, one, other)) == 1


def nearest_model(word: str, names: Iterable[str]) -> str:
    """Return ' Did you mean …?' with models that `word` may stand for, or '' if there are none.

    Suggests other spellings of the same family, generation and size; else similar sizes of the same
    family and generation; else all models that have a given part ("405b", "llama-3.1"). Mixtral is
    not a typo for Mistral, nor Llama 4 for Llama 3, so neither is suggested for the other.
    """
    known = list(names)
    by_family: dict[str, list[str]] = {}
    for name in known:
        by_family.setdefault(_first_letters(name), []).append(name)
    close = difflib.get_close_matches(_first_letters(word), by_family, n=1, cutoff=0.6)
    alike = [name for family in close for name in by_family[family] if _same_numbers(name, word)]
    alike = alike or _nearest_sizes(word, by_family.get(_first_letters(word), []))
    begin = word.casefold() if len(word) > 2 else None
    alike = alike or [name for name in known if _split_name(word) <= _split_name(name)
                      or (begin is not None and name.startswith(begin))]  # fmt: skip
    if not alike:
        return ""
    shown = [*map(repr, alike[:3]), *([f"{len(alike) - 3} more"] if len(alike) > 3 else [])]
    return f" Did you mean {join_or(shown)}?"


def _split_name(name: str) -> set[str]:
    """Split a model's name at dashes, underscores and blanks. "405" alone becomes "405b"."""
    parts = re.split(r"[-_\s]+", name.casefold().strip())
    return {f"{parts[0]}b"} if len(parts) == 1 and parts[0].isdigit() else set(parts)


def _nearest_sizes(word: str, family: Iterable[str]) -> list[str]:
    frame, size = _split_size(word)
    ratios = {
        name: max(size, other) / min(size, other)
        for name in family
        for other_frame, other in [_split_size(name)]
        if other_frame == frame and size and other
    }
    return sorted((name for name in ratios if ratios[name] <= _SIZE_RATIO), key=ratios.__getitem__)


def _split_size(name: str) -> tuple[str, float]:
    """Split a model's name into the rest and its size in billions of parameters, 0 if none."""
    found = _SIZE.findall(name.lower())
    if len(found) != 1:
        return name, 0.0
    number, unit = found[0]
    frame = re.sub(r"[^a-z0-9.]", "", _SIZE.sub("", name.lower()))
    return frame, float(number) * (1e-3 if unit == "m" else 1.0)


def _same_numbers(one: str, other: str) -> bool:
    """Return whether the numbers in two names agree within 1 %, as BLOOM's 175B and 176B do."""
    mine, theirs = (list(map(int, re.findall(r"\d{1,6}", name))) for name in (one, other))
    return len(mine) == len(theirs) and all(
        abs(a - b) <= max(a, b) / 100 for a, b in zip(mine, theirs, strict=True)
    )


def _first_letters(name: str) -> str:
    """Return the letters with which a model's name begins: "llama-3-8b" -> "llama"."""
    return re.split(r"[^a-z]", name.lower().lstrip("./"), maxsplit=1)[0]


def escape_controls(text: str) -> str:
    """Replace control characters in a text for a terminal with U+FFFD."""
    return _CONTROL.sub("\ufffd", text)
