"""Beginning again, from the last checkpoint, when a rank or a host was lost."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outpace.launch.local import WorkerError
from outpace.records.run import resume_command
from outpace.records.units import show_number


@dataclass
class Restarts:
    """Count of restarts, and how many a training may have.

    A user's mistake, a loss that is no number, memory that runs out and an end that was asked for
    would come again: they cause no restart. `say` tells the user; `out` is the run.
    """

    most: int
    out: Path | None
    say: Callable[[str], None]
    done: int = 0

    def count(self, error: WorkerError) -> None:
        """One more, because of `error`; raises it where there may be none."""
        if not error.lost or self.most == 0:
            raise error
        if self.done == self.most:
            way = "" if self.out is None else f" Resume with: {resume_command(self.out)}"
            times = show_number(self.done, "time")
            raise WorkerError(
                f"{error}\nIt has begun again {times}, which is all that --max-restarts "
                f"{self.most} allows.{way}",
                error.exit_code,
            )
        self.done += 1
        self.say(f"{_in_a_line(error)}. Resuming from the last checkpoint "
                 f"(restart {self.done} of {self.most})")  # fmt: skip


def _in_a_line(error: WorkerError) -> str:
    """Shorten a traceback to whose it was and what it ended with."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1].strip()}").rstrip(".")
