"""A command started by `outpace watch`, whose output does not disturb the live view."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, Self

from rich.text import Text

from outpace.records.errors import BadInputError
from outpace.reporting.terminal.console import Console

_CHUNK = 1 << 14


class Command:
    """A child process that runs a command; it is terminated at the end of the `with` block.

    In a terminal, lines that the command writes are printed above the live view, and `output` is
    its unfinished line (such as a progress bar). Otherwise, the command writes to the streams of
    this process; with `json`, all its output goes to standard error.
    """

    def __init__(self, command: list[str], console: Console, json: bool) -> None:
        self.output = ""
        self._console = console
        out: int | IO[Any] | None = sys.stderr if json else None
        errors: int | None = None
        if console.is_terminal:
            errors = subprocess.PIPE
            if json or sys.stdout.isatty():
                out = subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, stdout=out, stderr=errors)
        except OSError as error:
            raise BadInputError(f"cannot start {command[0]}: {error.strerror}") from None
        pipes = [pipe for pipe in (self._process.stdout, self._process.stderr) if pipe]
        self._readers = [
            threading.Thread(target=self._forward_output, args=(pipe,), daemon=True)
            for pipe in pipes
        ]

    @property
    def pid(self) -> int:
        """Return the process ID of the command."""
        return self._process.pid

    @property
    def exit_code(self) -> int:
        """Return the exit code as in a shell: 128 + number if a signal ended the process."""
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def __enter__(self) -> Self:
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        for reader in self._readers:
            reader.join(timeout=1)  # its children may still hold the pipe open

    def outlive(self, watch: Callable[[Callable[[float], bool]], None]) -> None:
        """Call `watch(wait)`, repeatedly if Ctrl-C interrupts it, until the command has ended.

        The terminal sends Ctrl-C to the command as well, which may need time to save.
        `wait(seconds)` returns whether the command has ended.
        """
        while self._process.poll() is None:
            with suppress(KeyboardInterrupt):
                watch(self._wait_for_end)
        for reader in self._readers:
            reader.join(timeout=1)

    def _wait_for_end(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.poll() is not None

    def _forward_output(self, pipe: IO[bytes]) -> None:
        left = b""
        while chunk := os.read(pipe.fileno(), _CHUNK):
            *lines, left = (left + chunk).split(b"\n")
            for line in lines:
                self._print_line(line)
            self.output = _visible_text(left)
        if left:
            self._print_line(left)
        self.output = ""

    def _print_line(self, line: bytes) -> None:
        self._console.print(Text.from_ansi(_visible_text(line)), soft_wrap=True)


def _visible_text(line: bytes) -> str:
    """Return what a terminal shows of a line that carriage returns overwrite."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
