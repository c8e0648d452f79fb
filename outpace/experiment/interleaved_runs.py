"""Training runs that take turns, so that drift of the machine affects all of them equally.

Signals suspend and continue each run (SIGSTOP, SIGCONT). Steps during which a run was suspended do
not count. All runs are in memory at the same time.
"""

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outpace.experiment.arms import RunFailure, outcome, training_command
from outpace.experiment.processes import ProcessTree
from outpace.experiment.results import steps_of
from outpace.records.interpreter import PYTHON
from outpace.records.measurement import WARMUP_STEPS, Measurement
from outpace.training.run_dir import METRICS_FILE

_POLL_S = 0.02
_WAIT_S = 3600.0  # collective timeout, which has to cover the turns of other runs
# Program that lets suspended runs continue if this process is killed, which closes its standard
# input. The runs then notice that their parent is gone, and end; otherwise, they would stay
# suspended forever.
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
class TurnTraining:
    """A training run that is to take turns with others.

    `given` has its settings except `steps`, `run` is its directory, and `config` the file for its
    settings.
    """

    given: Mapping[str, Any]
    run: Path
    config: Path
    turn_steps: int  # counted steps per turn
    behind: int = 0  # steps by which the log lags, since a GPU runs behind its host

    @property
    def skipped_steps(self) -> int:
        """Number of steps at the start of a turn that are not counted.

        Their times include the time for which the run was suspended.
        """
        return 1 + self.behind

    def steps(self, turns: int) -> int:
        """Return the number of steps for a run of `turns` turns.

        Each turn includes a spare step, since the run may be suspended late.
        """
        return WARMUP_STEPS + turns * (self.turn_steps + self.skipped_steps + 1)


@dataclass(frozen=True)
class TurnResult:
    """Result of a run that took turns.

    `turns` has the step times of each turn in seconds, without those of steps that do not count.
    """

    result: Measurement | RunFailure
    turns: tuple[tuple[float, ...], ...]


def train_in_turn(
    trainings: Sequence[TurnTraining], turns: int, limit_s: float
) -> list[TurnResult]:
    """Train several runs in turn, one at a time, after all have warmed up.

    The order of the runs rotates from one round of turns to the next. `limit_s` limits the total
    time. If a run fails, the others continue.
    """
    until_s = time.monotonic() + limit_s
    with ExitStack() as stack:
        started = [stack.enter_context(_start_run(one, turns)) for one in trainings]
        stack.enter_context(_resume_if_killed([one.running.pid for one in started]))
        _warm_up(started, until_s)
        for turn in range(turns):
            last = turn == turns - 1
            for place in range(len(started)):
                started[(turn + place) % len(started)].take_turn(last, until_s)
        return [one.finish(limit_s, until_s) for one in started]


def _warm_up(started: Sequence["_SuspendableRun"], until_s: float) -> None:
    """Wait until each run has warmed up, and suspend it then."""
    left = list(started)
    while left and time.monotonic() < until_s:
        for one in left:
            if one.steps_done() >= WARMUP_STEPS:
                one.running.pause()
        left = [
            one for one in left if one.running.exit_code is None and one.steps_done() < WARMUP_STEPS
        ]
        time.sleep(_POLL_S)


@dataclass
class _SuspendableRun:
    """A training run that can be suspended.

    `turns` has a range (begin, end) for each turn: the run's steps that count.
    """

    training: TurnTraining
    running: ProcessTree
    turns: list[tuple[int, int]] = field(default_factory=list)

    def take_turn(self, last: bool, until_s: float) -> None:
        """Let the run train for one turn, then suspend it.

        In its last turn, it is not suspended, but trains until it ends. Return at the time
        `until_s` in any case.
        """
        if self.running.exit_code is not None:
            return
        begin = self.steps_done() + self.training.skipped_steps
        self.running.unpause()
        while self.running.exit_code is None and time.monotonic() < until_s:
            if not last and self.steps_done() >= begin + self.training.turn_steps:
                self.running.pause()
                break
            time.sleep(_POLL_S)
        self.turns.append((begin, self.steps_done()))

    def steps_done(self) -> int:
        path = self.training.run / METRICS_FILE
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    def finish(self, limit_s: float, until_s: float) -> TurnResult:
        code, run = self.running.wait(until_s), self.training.run
        found = outcome(run, code, self.running.end(), limit_s)
        took_s = [float(step["step_time_s"]) for step in steps_of(run)]
        return TurnResult(found, tuple(tuple(took_s[begin:end]) for begin, end in self.turns))


@contextmanager
def _start_run(training: TurnTraining, turns: int) -> Iterator[_SuspendableRun]:
    """Start a training run; when the context ends, end all its processes."""
    given = {**training.given, "steps": training.steps(turns), "comm_timeout_s": _WAIT_S}
    running = ProcessTree(training_command(given, training.run, training.config), {})
    try:
        yield _SuspendableRun(training, running)
    finally:
        running.end()


@contextmanager
def _resume_if_killed(pids: Sequence[int]) -> Iterator[None]:
    guard = subprocess.Popen(
        [*PYTHON, "-c", _GUARD, *map(str, pids)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()
