"""Counter of the bytes that torch's allocator has allocated, from its profiler events."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch


class Allocations:
    """Counter of allocations and frees in the context, by this thread and the backward's thread.

    `peak_bytes` is the maximum of live bytes, `left_bytes` the bytes live at the end. Both are
    relative to the start, so they decrease if memory from before the context is freed. Allocations
    inside kernels are included. torch's profiler does not report frees by other threads, so report
    these by `note_free`. A free that is not reported counts only when its address is allocated
    again.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.left_bytes = 0
        self._told: list[tuple[int, int, int]] = []
        self._profile = torch.profiler.profile(profile_memory=True, acc_events=True)

    def __enter__(self) -> Self:
        with _silence_stderr():
            self._profile.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _silence_stderr():
            self._profile.__exit__(kind, error, trace)
        tree = self._profile.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
        events = [event for event in _walk_events(tree) if event.name == "[memory]"]
        changes = [
            (event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
            for event in events
        ]
        live: dict[int, int] = {}
        for _, address, change_bytes in sorted([*changes, *self._told]):
            before = live.pop(address, None)
            if change_bytes > 0:
                live[address] = change_bytes
                self.left_bytes += change_bytes - (before or 0)
            elif change_bytes < 0:
                self.left_bytes += change_bytes
            elif before is not None:
                self.left_bytes -= before
            self.peak_bytes = max(self.peak_bytes, self.left_bytes)

    def note_free(self, address: int) -> None:
        """Record a free by a thread that torch's profiler does not cover."""
        self._told.append((time.time_ns(), address, 0))


@contextmanager
def _silence_stderr() -> Iterator[None]:
    """Suppress what the profiler library writes to file descriptor 2 (standard error)."""
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _walk_events(tree: Any) -> Iterator[Any]:
    waiting = list(tree)
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(event.children)
