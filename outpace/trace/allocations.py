"""Bytes that torch's allocator has given out, from its own events."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch


class Allocations:
    """Counts what is allocated and freed while it is entered, by this thread and by backward.

    `peak_bytes`: the most that lived at one time. `left_bytes`: what still lives at the end. What
    had been there before counts for nothing, unless it is freed. What kernels take for themselves
    counts too.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.left_bytes = 0
        self._profile = torch.profiler.profile(profile_memory=True)

    def __enter__(self) -> Self:
        with _quiet():
            self._profile.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _quiet():
            self._profile.__exit__(kind, error, trace)
        tree = self._profile.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
        changes = [event for event in _events(tree) if event.name == "[memory]"]
        for event in sorted(changes, key=lambda event: event.start_time_ns):
            self.left_bytes += event.extra_fields.alloc_size
            self.peak_bytes = max(self.peak_bytes, self.left_bytes)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the profiler's library writes to the descriptor of standard error by itself."""
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _events(tree: Any) -> Iterator[Any]:
    waiting = list(tree)
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(event.children)
