"""Runs a training program and observes from outside what all have in common: lines and memory."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from outpace.experiment.processes import ProcessTree

_LOOK_S = 0.01  # time between checks for a step's line
_WEIGH_S = 0.25


@dataclass(frozen=True)
class Seen:
    """Observations of one run: when each step's line appeared after the command; loss; memory."""

    steps_s: tuple[float, ...]
    losses: tuple[float, ...]
    peak_bytes: int  # of all processes together
    rank_bytes: int  # of the largest process
    exit_code: int | None  # None: it was ended at its limit
    said: str


def watch(words: Sequence[str], log: Path, environment: Mapping[str, str], limit_s: float) -> Seen:
    """Run a command that appends a line with a `loss` to `log` for each step.

    Memory is the sum of each process's peak (VmHWM): what the machine must have. A run that exceeds
    the limit is ended with all that it started.
    """
    log.unlink(missing_ok=True)
    times: list[float] = []
    peaks: dict[int, int] = {}
    began_s = weighed_s = time.monotonic()
    running = ProcessTree(list(words), environment)
    try:
        while running.exit_code is None and time.monotonic() - began_s < limit_s:
            now_s = time.monotonic()
            times += [now_s - began_s] * (len(_lines(log)) - len(times))
            if now_s - weighed_s >= _WEIGH_S:
                weighed_s = now_s
                peaks |= _peaks(running.pid)
            time.sleep(_LOOK_S)
    finally:
        exit_code = running.exit_code
        said = running.end()
    lines = _lines(log)
    times += [time.monotonic() - began_s] * (len(lines) - len(times))
    losses = tuple(losses_of(log))
    total, largest = sum(peaks.values()), max(peaks.values(), default=0)
    return Seen(tuple(times), losses, total, largest, exit_code, said[-4000:])


def losses_of(log: Path) -> list[float]:
    """Return the loss of each step whose line is complete."""
    return [json.loads(line)["loss"] for line in _lines(log)]


def grown(words: Sequence[str], log: Path, every: int) -> Iterator[int]:
    """Yield resident bytes of a run's largest process, each time that `every` more lines appear.

    Raises RuntimeError if the command fails.
    """
    running = ProcessTree(list(words), {})
    seen, size, ends = 0, 0, 0
    while running.exit_code is None:
        now = log.stat().st_size if log.is_file() else 0
        if now > size:
            with log.open("rb") as file:
                file.seek(size)
                ends += file.read(now - size).count(b"\n")
            size = now
            if ends // every > seen:
                seen = ends // every
                yield max(_resident(running.pid))
        time.sleep(_LOOK_S)
    said = running.end()
    if running.exit_code != 0:
        raise RuntimeError(said[-2000:])


def _resident(pid: int) -> Iterator[int]:
    yield 0
    with suppress(psutil.Error):
        for one in _with_children(pid):
            yield one.memory_info().rss


def _with_children(pid: int) -> list[psutil.Process]:
    whole = psutil.Process(pid)
    return [whole, *whole.children(recursive=True)]


def _lines(log: Path) -> list[str]:
    """Return the complete lines."""
    text = log.read_text() if log.is_file() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def _peaks(pid: int) -> dict[int, int]:
    """Return the peak of the process and of each of its descendants."""
    found: dict[int, int] = {}
    with suppress(psutil.Error):
        for one in _with_children(pid):
            with suppress(OSError):
                for line in Path(f"/proc/{one.pid}/status").read_text().splitlines():
                    if line.startswith("VmHWM:"):
                        found[one.pid] = int(line.split()[1]) << 10
    return found
