"""Profiles of a run: a Chrome trace of a few steps, and torch's memory snapshot."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

# The trace skips the first steps, in which code is compiled (and on CUDA, graphs are captured), and
# the profiler warms up for another one. Then three steps are traced.
_SKIPPED, _SKIPPED_CUDA, _WARM, _SHOWN = 1, 2, 1, 3
_SNAPSHOT_EVENTS = 200_000


@contextmanager
def profiler(
    directory: Path, device: torch.device, rank: int, steps: int
) -> Iterator[Callable[[], None]]:
    """Write `trace-rank<r>.json`, which chrome://tracing and Perfetto open.

    Call the yielded function after each step. `steps` is the run's number of steps; a run that is
    too short to skip its first steps is traced completely.
    """
    skipped = _SKIPPED_CUDA if device.type == "cuda" else _SKIPPED
    short = steps < skipped + _WARM + _SHOWN
    wait, warm, shown = (0, 0, steps) if short else (skipped, _WARM, _SHOWN)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    path = directory / f"trace-rank{rank}.json"

    def write(finished: profile) -> None:
        finished.export_chrome_trace(str(path))

    with profile(
        activities=activities,
        schedule=schedule(wait=wait, warmup=warm, active=shown, repeat=1),
        on_trace_ready=write,
        record_shapes=True,
        acc_events=True,  # otherwise, torch 2.11 warns that events of other cycles are lost
    ) as running:
        yield running.step


@contextmanager
def memory_history(wanted: bool, directory: Path, rank: int) -> Iterator[None]:
    """If `wanted`, write `memory-rank<r>.pickle` for pytorch.org/memory_viz, even on failure."""
    if not wanted:
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_EVENTS)
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(str(directory / f"memory-rank{rank}.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
