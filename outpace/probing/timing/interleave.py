"""Interleaving of a probe's parts, so that each is measured over the whole time of the probe.

A machine may be slower for minutes at a time. A measurement without pauses would miss that, and its
intervals would not contain a repeat.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

T = TypeVar("T")
# Yields when others may have their turn, and returns the result of all its own turns.
Turns = Generator[None, None, T]


def run_turns(turns: Turns[T]) -> T:
    """Run all turns without interleaving, and return their result."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            found: T = end.value
            return found


def interleave_turns(*parts: Turns[Any]) -> Turns[list[Any]]:
    """Interleave several parts, a turn of each in every turn of the whole; return the results.

    If one raises an error, the others end too, and release what they hold.
    """
    found: list[Any] = [None] * len(parts)
    going = dict(enumerate(parts))
    try:
        while going:
            for number, part in list(going.items()):
                try:
                    next(part)
                except StopIteration as end:
                    found[number] = end.value
                    del going[number]
            if going:
                yield
    finally:
        for part in going.values():
            part.close()
    return found


def wrap_turns(turns: Turns[T], within: Callable[[], AbstractContextManager[Any]]) -> Turns[T]:
    """Yield the same turns, each within a context."""
    try:
        while True:
            with within():
                try:
                    next(turns)
                except StopIteration as end:
                    found: T = end.value
                    return found
            yield
    finally:
        turns.close()
