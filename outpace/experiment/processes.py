"""Commands together with all the processes that they start."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress

import psutil

from outpace.launch.parent_watch import child_environment

_STOP_S = 20.0  # time for a command to end after SIGTERM
_REST_S = 2.0  # time for its children to end afterwards


class ProcessTree:
    """A command and all its descendants."""

    def __init__(self, words: list[str], environment: Mapping[str, str]) -> None:
        # A file rather than a pipe: a full pipe blocks its writer, and reading a pipe never ends
        # while a stuck process holds it open.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        self._process = subprocess.Popen(
            words,
            env={**child_environment(), **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process ID of the first process."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the first process; None while it runs."""
        return self._process.poll()

    def wait(self, until_s: float) -> int | None:
        """Wait for the exit code and return it; None if still running at time `until_s`.

        `until_s` is a time of time.monotonic().
        """
        while self.exit_code is None and time.monotonic() < until_s:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(max(min(until_s - time.monotonic(), 1.0), 0.0))
        return self.exit_code

    def pause(self) -> None:
        """Suspend all processes until `unpause`."""
        self._send_signal(signal.SIGSTOP)

    def unpause(self) -> None:
        """Let all processes continue after `pause`."""
        self._send_signal(signal.SIGCONT)

    def _send_signal(self, number: signal.Signals) -> None:
        for one in self._descendants():
            with suppress(psutil.Error):
                one.send_signal(number)
        if self.exit_code is None:
            self._process.send_signal(number)

    def end(self) -> str:
        """End all processes that are still running; return the output on the first call.

        The command gets SIGTERM first. What remains is killed one by one, because a launcher's
        workers have their own sessions, which a signal to the process group does not reach.
        """
        started: set[psutil.Process] = set()
        try:
            # The children of a process that has ended cannot be found any more.
            started = self._descendants()
            if self.exit_code is None:
                self.unpause()  # a suspended process does not handle signals
                with suppress(OSError):
                    os.killpg(self.pid, signal.SIGTERM)
                self.wait(time.monotonic() + _STOP_S)
            psutil.wait_procs(started, timeout=_REST_S)
        finally:  # even if Ctrl-C is pressed again
            for one in started | self._descendants():
                with suppress(psutil.Error):
                    one.kill()
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            psutil.wait_procs(started, timeout=_REST_S)
            self.wait(time.monotonic() + _REST_S)
        return self._read_output()

    def _read_output(self) -> str:
        if self._output.closed:
            return ""
        with self._output as output:
            output.seek(0)
            return output.read().decode(errors="replace")

    def _descendants(self) -> set[psutil.Process]:
        """Return all descendants; none if the command has ended, since its PID may be reused."""
        if self.exit_code is None:
            with suppress(psutil.Error):
                return set(psutil.Process(self.pid).children(recursive=True))
        return set()
