"""Several trainings at once that take turns, so that what changes on a machine changes for all.

Each is stopped and goes on by signals (SIGSTOP, SIGCONT): nothing of a training knows of it. The
step in which one is stopped is not counted. All of them are in memory together.
"""

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outpace.experiment.arms import Failed, outcome, words_of
from outpace.experiment.processes import Running
from outpace.experiment.results import steps_of
from outpace.records.measurement import WARMUP_STEPS, Measurement
from outpace.records.python import PYTHON
from outpace.train.run_dir import METRICS_FILE

_LOOK_S = 0.02
_WAIT_S = 3600.0  # that an exchange may wait while others have their turns
# Where we are killed, what is stopped would be so for ever: reads until our end is closed.
_GUARD = """
import psutil, sys
started = [psutil.Process(int(pid)) for pid in sys.argv[1:] if psutil.pid_exists(int(pid))]
sys.stdin.read()
for one in started:
    try:
        those = [*one.children(recursive=True), one]
    except psutil.Error:
        continue
    for process in those:
        try:
            process.resume()
        except psutil.Error:
            pass
"""


@dataclass(frozen=True)
class Entrant:
    """A training: its settings but for the number of steps, its directory, its settings' file."""

    given: Mapping[str, Any]
    run: Path
    config: Path
    turn_steps: int  # counted, of each turn
    behind: int = 0  # steps after which a step's line is there: a GPU computes behind its host

    @property
    def left_out(self) -> int:
        """Of each turn, steps in which it was stopped."""
        return 1 + self.behind


@dataclass(frozen=True)
class Turned:
    """What it came to, and seconds of each counted step, by turn."""

    ended: Measurement | Failed
    turns: tuple[tuple[float, ...], ...]


def in_turn(entrants: Sequence[Entrant], turns: int, limit_s: float) -> list[Turned]:
    """Train all of them, one at a time once they are warm, in another order each turn.

    `limit_s`: for all of it. One that fails leaves the others to go on.
    """
    until_s = time.monotonic() + limit_s
    with ExitStack() as stack:
        started = [stack.enter_context(_started(one, turns)) for one in entrants]
        stack.enter_context(_guarded([one.running.pid for one in started]))
        _warm(started, until_s)
        for turn in range(turns):
            last = turn == turns - 1
            for place in range(len(started)):
                started[(turn + place) % len(started)].take_turn(last, until_s)
        return [one.ended(limit_s, until_s) for one in started]


def _warm(started: Sequence["_Started"], until_s: float) -> None:
    """Let all of them start together, each until it is warm."""
    left = list(started)
    while left and time.monotonic() < until_s:
        for one in left:
            if one.done() >= WARMUP_STEPS:
                one.running.pause()
        left = [one for one in left if one.running.exit_code is None and one.done() < WARMUP_STEPS]
        time.sleep(_LOOK_S)


@dataclass
class _Started:
    """An entrant that runs, is stopped, or has ended; and its turns, as places of its steps."""

    entrant: Entrant
    running: Running
    turns: list[tuple[int, int]] = field(default_factory=list)

    def take_turn(self, last: bool, until_s: float) -> None:
        """Let it go on for its steps and stop it again; the last time to its end."""
        if self.running.exit_code is not None:
            return
        begin = self.done() + self.entrant.left_out  # behind the steps in which it was stopped
        self.running.go_on()
        while self.running.exit_code is None and time.monotonic() < until_s:
            if not last and self.done() >= begin + self.entrant.turn_steps:
                self.running.pause()
                break
            time.sleep(_LOOK_S)
        self.turns.append((begin, self.done()))

    def done(self) -> int:
        """Steps, as its metrics have them."""
        path = self.entrant.run / METRICS_FILE
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    def ended(self, limit_s: float, until_s: float) -> Turned:
        """What it came to; it is ended here where it is not by itself."""
        code, run = self.running.wait(until_s), self.entrant.run
        found = outcome(run, code, self.running.end(), limit_s)
        took_s = [float(step["step_time_s"]) for step in steps_of(run)]
        return Turned(found, tuple(tuple(took_s[begin:end]) for begin, end in self.turns))


@contextmanager
def _started(entrant: Entrant, turns: int) -> Iterator[_Started]:
    """Nothing of it is left behind."""
    steps = WARMUP_STEPS + turns * (entrant.turn_steps + entrant.left_out)
    given = {**entrant.given, "steps": steps, "comm_timeout_s": _WAIT_S}
    running = Running(words_of(given, entrant.run, entrant.config), {})
    try:
        yield _Started(entrant, running)
    finally:
        running.end()


@contextmanager
def _guarded(pids: Sequence[int]) -> Iterator[None]:
    guard = subprocess.Popen(
        [*PYTHON, "-c", _GUARD, *map(str, pids)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()
