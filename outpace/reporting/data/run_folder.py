"""Reader of a run's folder: its record, its steps, and all other results."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic_core import from_json

from outpace.experiment.past_runs import mark_running, read_past_run
from outpace.records.certificate import Certificate
from outpace.records.errors import BadInputError
from outpace.records.line_checksums import CHECKSUM, describe_changes
from outpace.records.measurement import WARMUP_STEPS, Evaluation, Measurement
from outpace.records.memory import MemoryUse
from outpace.records.past_run import State
from outpace.records.run import Failure, RunRecord, resume_command
from outpace.records.utilisation import Utilisation
from outpace.reporting.data.step_log import StepLog, read_steps
from outpace.training.run_dir import EVALS_FILE, METRICS_FILE, UTILISATION_FOLDER

_MEMORY_FILE, _CERTIFICATE_FILE = "memory.json", "certificate.json"


@dataclass(frozen=True)
class RunFolder:
    """The content of a run's folder.

    `measurement` is None until the run has reached its last step. `changed` has a sentence for each
    file that was changed since outpace wrote it.
    """

    path: Path
    record: RunRecord
    steps: StepLog
    state: State
    failure: Failure | None
    changed: tuple[str, ...]
    measurement: Measurement | None
    evaluations: tuple[Evaluation, ...]
    utilisation: tuple[Utilisation, ...]
    memory: MemoryUse | None
    certificate: Certificate | None

    @property
    def name(self) -> str:
        """Return the folder's name."""
        return self.path.resolve().name

    @property
    def last_untimed_step(self) -> int:
        """Return the step after which times and rates are taken.

        It is the step from which the run was resumed, or 0.
        """
        return self.record.last_untimed_step(self.measurement)

    @property
    def timed_steps(self) -> StepLog:
        """Return the steps after `last_untimed_step`, except warm-up steps after later resumes."""
        begun, steps = self.last_untimed_step, self.steps["step"]
        warm = [s > begun + WARMUP_STEPS and self.record.is_warm_up(int(s)) for s in steps]
        return self.steps.select((steps > begun) & ~np.array(warm, bool))

    @property
    def hosts(self) -> int:
        """Return the number of hosts with a utilisation log; 1 if there are no such logs."""
        return max(1, len({one.node for one in self.utilisation}))


def read_run(path: Path) -> RunFolder:
    """Read a run's folder. Raises BadInputError if a file is damaged."""
    memory, certificate = path / _MEMORY_FILE, path / _CERTIFICATE_FILE
    logs = [path / name for name in (METRICS_FILE, EVALS_FILE) if (path / name).is_file()]
    (past,) = mark_running([read_past_run(path)])
    if past.record is None or past.row.damage is not None:
        raise BadInputError(past.row.damage or f"{path} is damaged.")
    changed = [*past.row.changed, *filter(None, map(describe_changes, logs))]
    utilisation = tuple(
        Utilisation.load(one, changed.append)
        for one in sorted((path / UTILISATION_FOLDER).glob("host-*.json"))
    )
    return RunFolder(
        path=path,
        record=past.record,
        state=past.row.state,
        failure=past.failure,
        changed=tuple(changed),
        steps=read_steps(path / METRICS_FILE),
        measurement=past.result,
        evaluations=tuple(_read_evaluations(path / EVALS_FILE)),
        utilisation=utilisation,
        memory=MemoryUse.load(memory) if memory.is_file() else None,
        certificate=Certificate.load(certificate) if certificate.is_file() else None,
    )


def _read_evaluations(path: Path) -> Iterator[Evaluation]:
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            values = from_json(line)
        except ValueError:
            if number == len(lines):
                return  # a killed run may leave an incomplete last line
            values = None
        if not isinstance(values, dict):
            raise BadInputError(
                f"{path} is damaged: line {number} is not an evaluation. Remove that line, or "
                f"let {resume_command(path.parent)} move it aside; all others are kept."
            )
        values.pop(CHECKSUM, None)  # mismatches appear in `RunFolder.changed`
        yield Evaluation.parse(values, str(path))
