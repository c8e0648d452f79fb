"""Restarts from the last checkpoint when a rank or a host is lost."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outpace.launch.local import WorkerError
from outpace.records.run import resume_command
from outpace.records.units import show_number


@dataclass
class Restarts:
    """Counter of a run's restarts, of which at most `most` are allowed.

    There is no restart after a failure that would recur: an invalid setting, a NaN loss, an
    out-of-memory error, a requested stop. `say` informs the user; `out` is the run's directory.
    """

    most: int
    out: Path | None
    say: Callable[[str], None]
    done: int = 0

    def count(self, error: WorkerError) -> None:
        """Count the restart after `error`, and tell the user.

        Raises `error` if it would recur or no restarts are allowed, and WorkerError if all allowed
        restarts are used up.
        """
        if not error.lost or self.most == 0:
            raise error
        if self.done == self.most:
            way = "" if self.out is None else f" Resume with: {resume_command(self.out)}"
            times = show_number(self.done, "time")
            raise WorkerError(
                f"{error}\nThe run has restarted {times}, the limit set by --max-restarts "
                f"{self.most}.{way}",
                error.exit_code,
            )
        self.done += 1
        self.say(f"{_format_one_line(error)}. Resuming from the last checkpoint "
                 f"(restart {self.done} of {self.most})")  # fmt: skip


def _format_one_line(error: WorkerError) -> str:
    """Return an error's message as one line; of a traceback, only the first and the last line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1].strip()}").rstrip(".")
