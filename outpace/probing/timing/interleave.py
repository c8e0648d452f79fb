"""Interleaving of a probe's parts, so that each part is spread over the whole probe.

A machine may be slower for minutes at a time. A measurement without pauses would not notice, and
its interval would not contain the result of a repeat.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

T = TypeVar("T")
# Yields when other parts may have their turn, and returns the result of all its turns.
Turns = Generator[None, None, T]


def run_turns(turns: Turns[T]) -> T:
    """Run a measurement without pauses between its turns, and return its result."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            found: T = end.value
            return found


def interleave_turns(*parts: Turns[Any]) -> Turns[list[Any]]:
    """Run several measurements in turn, each until its next pause, until all have ended.

    Returns the results of all measurements. If one raises an error, the others are closed and
    release their resources.
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
    """Run each turn of a measurement in a context of its own, which is left during pauses."""
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
