"""Expansion of SLURM's host lists, such as gpu[03-06,9],rack[0-1]node[1-4]."""

import re
from collections.abc import Iterator
from itertools import product

from outpace.records.errors import BadInputError

# Parts of a name: text, and numbers in brackets.
_PART = re.compile(r"([^,\[\]\s]+)|\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
# On machines whose hosts form a grid: a range from one corner of a box to the opposite one.
_BOX = re.compile(r"([0-9A-Z]+)x([0-9A-Z]+)")
_MOST_HOSTS = 1 << 20


def expand(text: str) -> Iterator[str]:
    """Yield the hosts of a list in the order of `scontrol show hostnames`.

    The last brackets vary fastest, and numbers are padded to the digits of the first number in
    their range. Raises BadInputError for malformed lists, and for some that SLURM allows (text
    after the last brackets, some boxes).
    """
    for name in _split_list(text):
        parts = list(_PART.finditer(name))
        if "".join(part[0] for part in parts) != name or not name:
            raise _invalid_list_error(text)
        choices = [
            (part[1],) if part[2] is None else _expand_numbers(part[2], text) for part in parts
        ]
        for chosen in product(*choices):
            yield "".join(chosen)


def _split_list(text: str) -> Iterator[str]:
    """Yield the parts of a list between commas and spaces outside of brackets."""
    begin = depth = 0
    text = text.strip()
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if (letter == "," or letter.isspace()) and depth == 0:
            yield text[begin:at]
            begin = at + 1
    yield text[begin:]


def _expand_numbers(inside: str, text: str) -> tuple[str, ...]:
    found: list[str] = []
    for part in inside.split(","):
        if (box := _BOX.fullmatch(part)) is not None:
            found += _expand_box(box[1], box[2], text)
            continue
        ends = _RANGE.fullmatch(part)
        if ends is None:
            raise _invalid_list_error(text)
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if not first <= last < first + _MOST_HOSTS:
            raise _invalid_list_error(text)
        found += [str(number).zfill(len(ends[1])) for number in range(first, last + 1)]
    return tuple(found)


def _expand_box(first: str, last: str, text: str) -> Iterator[str]:
    """Expand a box of hosts: "00" to "11" gives 00, 01, 10 and 11.

    Each character is one coordinate in base 36.
    """
    if len(first) != len(last):
        raise _invalid_list_error(text)
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    ranges = [
        digits[digits.index(low) : digits.index(high) + 1]
        for low, high in zip(first, last, strict=True)
    ]
    return map("".join, product(*ranges))


def _invalid_list_error(text: str) -> BadInputError:
    return BadInputError(
        f"environment: SLURM's list of hosts {text!r} is not of the form gpu[03-06,9],login. Set "
        "MASTER_ADDR to the host of rank 0."
    )
