"""A run's folder, read: what it was made of, its steps, and whatever else it recorded."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic_core import from_json

from outpace.experiment.past import read, with_going_on
from outpace.records.certificate import Certificate
from outpace.records.errors import BadInputError
from outpace.records.lines import CHECKSUM, describe_changes
from outpace.records.measurement import Evaluation, Measurement
from outpace.records.memory import MemoryUse
from outpace.records.past import State
from outpace.records.run import Failure, RunRecord, resume_command
from outpace.records.utilisation import Utilisation
from outpace.report.steps import Steps, read_steps
from outpace.train.run_dir import EVALS_FILE, METRICS_FILE, UTILISATION_FOLDER

_MEMORY_FILE, _CERTIFICATE_FILE = "memory.json", "certificate.json"


@dataclass(frozen=True)
class Run:
    """What a run left. `measurement` is None where it has not reached its last step.

    `changed`: sentences on files that are not as they were written.
    """

    path: Path
    record: RunRecord
    steps: Steps
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
        """Of its folder."""
        return self.path.resolve().name

    @property
    def hosts(self) -> int:
        """That it ran on, as far as they recorded how busy they were."""
        return max(1, len({one.node for one in self.utilisation}))


def read_run(path: Path) -> Run:
    """Read a run's folder. Raises BadInputError where a file is damaged."""
    memory, certificate = path / _MEMORY_FILE, path / _CERTIFICATE_FILE
    logs = [path / name for name in (METRICS_FILE, EVALS_FILE) if (path / name).is_file()]
    (past,) = with_going_on([read(path)])
    if past.record is None or past.row.damage is not None:
        raise BadInputError(past.row.damage or f"{path} is damaged.")
    return Run(
        path=path,
        record=past.record,
        state=past.row.state,
        failure=past.failure,
        changed=(*past.row.changed, *filter(None, map(describe_changes, logs))),
        steps=read_steps(path / METRICS_FILE),
        measurement=past.result,
        evaluations=tuple(_evaluations(path / EVALS_FILE)),
        utilisation=tuple(
            Utilisation.load(one) for one in sorted((path / UTILISATION_FOLDER).glob("host-*.json"))
        ),
        memory=MemoryUse.load(memory) if memory.is_file() else None,
        certificate=Certificate.load(certificate) if certificate.is_file() else None,
    )


def _evaluations(path: Path) -> Iterator[Evaluation]:
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            values = from_json(line)
        except ValueError:
            if number == len(lines):
                return  # the last line of a killed run may be cut short
            values = None
        if not isinstance(values, dict):
            raise BadInputError(
                f"{path} is damaged: line {number} is no evaluation. Remove that line, or have it "
                f"put aside: {resume_command(path.parent)} keeps all others."
            )
        values.pop(CHECKSUM, None)  # what does not fit it is said in `Run.changed`
        yield Evaluation.parse(values, str(path))
