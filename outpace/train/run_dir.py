"""The directory of a run: run.json, metrics.jsonl, result.json, checkpoints/, model/ and more."""

import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from outpace.records.base import explain
from outpace.records.errors import BadInputError
from outpace.records.measurement import Evaluation, Measurement, StepRecord
from outpace.records.run import Failure, RunRecord
from outpace.train.callbacks import Callback

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
EVALS_FILE = "evals.jsonl"
RESULT_FILE = "result.json"
FAILURE_FILE = "failure.json"
STANDSTILL_FILE = "standstill.json"
UTILISATION_FOLDER = "utilisation"
# Of a file by which several hosts are asked whether they see a folder, for some seconds.
TOKEN_PREFIX = ".outpace-"
# A run writes its metrics, a checkpoint and the model; below this it can write none of them.
_LEAST_FREE_BYTES = 16 << 20


class RunDir:
    """Paths of a run, and the rules by which a directory becomes one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.base = path / "base"  # random weights that adapters were trained beside

    @property
    def exists(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / RUN_FILE).is_file()

    def require_free(self) -> None:
        """Refuse a directory that already holds another run, or anything else."""
        if self.exists:
            raise BadInputError(
                f"{self.path} already holds a run. Use --resume to go on with it, or another --out."
            )
        if self.path.exists() and not self._is_empty():
            raise BadInputError(
                f"{self.path} is there and is not an empty directory. Use another --out."
            )

    def _is_empty(self) -> bool:
        return self.path.is_dir() and all(
            one.name.startswith(TOKEN_PREFIX) for one in self.path.iterdir()
        )

    def require_run(self) -> RunRecord:
        """The record of the run to resume. Raises BadInputError when there is none."""
        if not self.exists:
            raise BadInputError(
                f"{self.path} holds no run to resume (no {RUN_FILE}). Leave out --resume to start."
            )
        self._require_own_files()
        return RunRecord.load(self.path / RUN_FILE)

    def _require_own_files(self) -> None:
        """Refuse links out of the run, which may be anyone's: it writes and removes by names."""
        root = self.path.resolve()
        for folder, below, files in os.walk(self.path):
            for path in (Path(folder, name) for name in (*below, *files)):
                if path.is_symlink() and not _target(path).is_relative_to(root):
                    raise BadInputError(
                        f"{path} is a link out of the run, to {_target(path)}: to go on would "
                        "write or remove there. Put in its place what it leads to; a run on "
                        "another disk is a link as a whole."
                    )

    def begin(self, record: RunRecord) -> None:
        """Write run.json, the first file of a run; nothing is left behind when it can't be.

        A run that goes on has not ended: why it did is taken away.
        """
        try:
            created = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path).free
            if free < _LEAST_FREE_BYTES:
                if created:
                    self.path.rmdir()
                raise BadInputError(
                    f"the disk of {self.path} is full ({free / 2**20:.1f} MiB left). "
                    "Free some space or use another --out."
                )
            record.save(self.path / RUN_FILE)
            (self.path / FAILURE_FILE).unlink(missing_ok=True)
        except OSError as error:
            raise BadInputError(f"cannot write to {self.path}: {error.strerror}") from None

    @property
    def has_steps(self) -> bool:
        """Whether a step of the run was done."""
        metrics = self.path / METRICS_FILE
        return metrics.is_file() and metrics.stat().st_size > 0

    def discard_unbegun(self) -> None:
        """Remove the directory of a run that has not done a step."""
        if not self.has_steps:
            shutil.rmtree(self.path, ignore_errors=True)

    def end_early(self, reason: str) -> None:
        """Write down why the run ends before its last step."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        Failure(reason=reason, ended=now).save(self.path / FAILURE_FILE)

    def cut_metrics(self, step: int) -> None:
        """Drop what was logged after `step`: a resumed run does those steps again."""
        for name in (METRICS_FILE, EVALS_FILE):
            path = self.path / name
            if not path.is_file():
                continue
            kept_bytes = 0
            for line in path.read_bytes().splitlines(keepends=True):
                try:
                    if int(json.loads(line)["step"]) > step:
                        break
                except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                    break  # the last line of a killed run may be cut short
                kept_bytes += len(line)
            os.truncate(path, kept_bytes)

    def finished_at(self) -> int | None:
        """The step at which the run was finished last; None when it never was."""
        path = self.path / RESULT_FILE
        return Measurement.load(path).steps if path.is_file() else None

    def evaluation(self, step: int) -> Evaluation | None:
        """The evaluation that was logged at `step`, None when there is none."""
        path = self.path / EVALS_FILE
        for line in path.read_bytes().splitlines() if path.is_file() else ():
            try:
                found = Evaluation.model_validate_json(line)
            except ValidationError as error:
                raise BadInputError(explain(error, str(path), Evaluation.model_fields)) from None
            if found.step == step:
                return found
        return None


def _target(link: Path) -> Path:
    """Where a link leads; one that leads round and round, as far as it says itself."""
    try:
        return link.resolve()
    except (OSError, RuntimeError):
        return Path("/", link.readlink())


class MetricsWriter(Callback):
    """One JSON object a step, in metrics.jsonl; one an evaluation, in evals.jsonl."""

    def __init__(self, run_dir: RunDir) -> None:
        self._steps = (run_dir.path / METRICS_FILE).open("a", encoding="utf-8", buffering=1)
        self._evals = (run_dir.path / EVALS_FILE).open("a", encoding="utf-8", buffering=1)

    def on_step(self, record: StepRecord) -> None:
        """Append a line."""
        self._steps.write(record.model_dump_json() + "\n")

    def on_eval(self, evaluation: Evaluation, final: bool) -> None:
        """Append a line."""
        self._evals.write(evaluation.model_dump_json() + "\n")

    def close(self) -> None:
        """Close the files."""
        self._steps.close()
        self._evals.close()
