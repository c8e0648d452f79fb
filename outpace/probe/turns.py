"""Parts of a probe that take turns, so that each is measured over all the time that a probe takes.

A machine is slower for minutes at a time. What is measured in one go does not see that, and states
intervals in which a repeat will not lie.
"""

from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")
# Yields where others may have their turn, and returns what it found in all of its own.
Turns = Generator[None, None, T]


def finished(turns: Turns[T]) -> T:
    """What they give, without letting others have a turn."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            found: T = end.value
            return found


def together(*parts: Turns[Any]) -> Turns[list[Any]]:
    """What each of them gives, in their order; in a turn of all of them each has one of its own."""
    found: list[Any] = [None] * len(parts)
    going = dict(enumerate(parts))
    while going:
        for number, part in list(going.items()):
            try:
                next(part)
            except StopIteration as end:
                found[number] = end.value
                del going[number]
        if going:
            yield
    return found
