"""A command with all processes that it starts: its output, exit code and termination."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress

import psutil

from outpace.launch.parent_watch import child_environment

_STOP_S = 20.0  # time for a run to end when asked to
_REST_S = 2.0  # time for its children to end afterwards


class ProcessTree:
    """A running command and all its descendants."""

    def __init__(self, words: list[str], environment: Mapping[str, str]) -> None:
        # This is a file, since a full pipe blocks its writer, and a pipe held open by a stuck
        # process never ends.
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
        """Exit code; None while it runs."""
        return self._process.poll()

    def wait(self, until_s: float) -> int | None:
        """Return the exit code; None if it is still running at `until_s` of time.monotonic()."""
        while self.exit_code is None and time.monotonic() < until_s:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(max(min(until_s - time.monotonic(), 1.0), 0.0))
        return self.exit_code

    def pause(self) -> None:
        """Suspend the command and all its processes, until `unpause`."""
        self._send(signal.SIGSTOP)

    def unpause(self) -> None:
        """Continue after `pause`."""
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for one in self._descendants():
            with suppress(psutil.Error):
                one.send_signal(number)
        if self.exit_code is None:
            self._process.send_signal(number)

    def end(self) -> str:
        """End the process, if it is still running, and its descendants; return the output, once.

        Processes are first asked to end and then killed, one by one: a launcher's workers have
        their own sessions, so a signal to the process group would not reach them.
        """
        started: set[psutil.Process] = set()
        try:
            # Find them before anything ends, since the children of an ended process cannot be
            # found.
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
        """Return all descendants; none once the command has ended, since its PID may be reused."""
        if self.exit_code is None:
            with suppress(psutil.Error):
                return set(psutil.Process(self.pid).children(recursive=True))
        return set()
