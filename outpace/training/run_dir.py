"""The directory of a run, with run.json, metrics.jsonl, result.json, checkpoints/ and model/."""

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from outpace.records.base import TEMPORARY_PREFIX, Record, put_aside
from outpace.records.checksums import CHECKSUMS_FILE, added_names, folder_damage
from outpace.records.errors import BadInputError
from outpace.records.line_checksums import encode_line
from outpace.records.measurement import Evaluation, Measurement, StepRecord
from outpace.records.run import RUN_FILE, Failure, RunRecord
from outpace.training.callbacks import Callback
from outpace.training.run_log import RunLog, read_log

Loaded = TypeVar("Loaded", bound=Record)
METRICS_FILE = "metrics.jsonl"
EVALS_FILE = "evals.jsonl"
RESULT_FILE = "result.json"
FAILURE_FILE = "failure.json"
# An exported model has one of these files, depending on its type.
MODEL_FILES = ("config.json", "adapter_config.json", "model.json")
_EXPORTED_FOLDERS = {"additional_chat_templates"}  # of an exported tokenizer
STANDSTILL_FILE = "standstill.json"
STANDSTILL_PAGE = "standstill.html"
UTILISATION_FOLDER = "utilisation"
# wandb's folder, which has links to its logs; outpace does not touch it.
WANDB_FOLDER = "wandb"
# Prefix of temporary files that show whether hosts share a folder.
TOKEN_PREFIX = TEMPORARY_PREFIX
# With less free space than this, a run could not write metrics, a checkpoint or the model.
_LEAST_FREE_BYTES = 16 << 20


class RunDir:
    """Directory of a run: its paths, and how it is created and resumed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.base = path / "base"  # the base model, if adapters are trained on random weights

    @property
    def exists(self) -> bool:
        """Whether the directory has a run."""
        return (self.path / RUN_FILE).is_file()

    def require_free(self) -> None:
        """Raise BadInputError unless the directory is empty or missing."""
        if self.exists:
            raise BadInputError(
                f"{self.path} already holds a run. Use --resume to continue that run, or another "
                "--out."
            )
        if self.path.is_symlink() and not self.path.exists():
            raise BadInputError(
                f"{self.path} is a link to {_link_target(self.path)}, which does not exist. Create "
                "that directory, or use another --out."
            )
        if self.path.exists() and not self._is_empty():
            raise BadInputError(
                f"{self.path} exists and is not an empty directory. Use another --out."
            )

    def _is_empty(self) -> bool:
        return self.path.is_dir() and all(
            one.name.startswith(TOKEN_PREFIX) for one in self.path.iterdir()
        )

    def require_run(self) -> RunRecord:
        """Return the record of the run to resume.

        Raises BadInputError if there is none, or if it has links that lead out of the run.
        """
        if not self.exists:
            raise BadInputError(
                f"{self.path} holds no run to resume (no {RUN_FILE}). Leave out --resume to start "
                "a new one."
            )
        self._refuse_links()
        return RunRecord.load(self.path / RUN_FILE)

    def _refuse_links(self) -> None:
        """Raise BadInputError for links that lead out of the run, since resuming replaces files."""
        root = self.path.resolve()
        for folder, below, files in os.walk(self.path):
            for path in (Path(folder, name) for name in (*below, *files)):
                if path.is_symlink() and not _link_target(path).is_relative_to(root):
                    raise BadInputError(
                        f"{path} is a link that leads out of the run, to {_link_target(path)}: "
                        "resuming would write or remove files there. Replace the link with its "
                        "target. To keep a run on another disk, make the run's whole directory a "
                        "link."
                    )
            if Path(folder) == self.path and WANDB_FOLDER in below:
                below.remove(WANDB_FOLDER)

    def begin(self, record: RunRecord) -> None:
        """Write run.json, the first file of a run, and leave nothing behind if that fails.

        For a resumed run, also remove the records of why it ended.
        """
        created = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                self.require_room()
            except BadInputError:
                if created:
                    self.path.rmdir()
                raise
            record.save(self.path / RUN_FILE)
            for name in (FAILURE_FILE, STANDSTILL_FILE, STANDSTILL_PAGE):
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            if created:
                with suppress(OSError):  # not empty if another run has started there
                    self.path.rmdir()
            raise BadInputError(f"cannot write to {self.path}: {error.strerror}") from None

    def require_room(self) -> None:
        """Raise BadInputError if the disk has too little free space for a run."""
        free = shutil.disk_usage(self.path).free
        if free < _LEAST_FREE_BYTES:
            elsewhere = "" if self.exists else ", or use another --out"
            raise BadInputError(
                f"the disk of {self.path} has {free / 2**20:.1f} MiB left, but a run needs "
                f"{_LEAST_FREE_BYTES / 2**20:.0f} MiB to start. Free some space{elsewhere}."
            )

    @property
    def has_steps(self) -> bool:
        """Whether the run has completed a step."""
        metrics = self.path / METRICS_FILE
        return metrics.is_file() and metrics.stat().st_size > 0

    def discard_unbegun(self) -> None:
        """Remove the directory if the run has not completed a step."""
        if not self.has_steps:
            shutil.rmtree(self.path, ignore_errors=True)

    def end_early(self, reason: str, checkpoint_step: int | None = None) -> None:
        """Write failure.json: why the run ended early, and the step of its newest checkpoint."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        failure = Failure(reason=reason, ended=now, checkpoint_step=checkpoint_step)
        failure.save(self.path / FAILURE_FILE)

    def history(self) -> "History":
        """Return the results of the run so far. Raises BadInputError if they cannot be read."""
        measurement, damage = _load_record(self.path / RESULT_FILE, Measurement)
        failure, failure_damage = _load_record(self.path / FAILURE_FILE, Failure)
        return History(
            failure=failure,
            failure_damage=failure_damage,
            steps=read_log(self.path / METRICS_FILE, StepRecord),
            evaluations=read_log(self.path / EVALS_FILE, Evaluation),
            measurement=measurement,
            result_damage=damage,
            has_model=self.model.is_dir() and any(self.model.iterdir()),
        )

    def put_models_aside(self, say: Callable[[str], None]) -> None:
        """Rename models in the run's folder that exporting the model again would overwrite.

        Only a model that may be of use to the user is kept. It is damaged and may be repaired, or
        has files that this run did not write, or has no checksums: users delete these when they
        change a model on purpose.
        """
        for folder in (self.model, self.base):
            reason, kind = model_damage(folder), "damaged"
            if reason is None and (added := sorted({*added_names(folder)} - _EXPORTED_FOLDERS)):
                reason, kind = f"{folder} has no {CHECKSUMS_FILE}", "earlier"
                if (folder / CHECKSUMS_FILE).is_file():
                    reason = f"{folder} has files that this run did not write ({added[0]})"
            if reason is not None and os.path.lexists(folder):
                say(f"{reason}: {folder} is kept as {put_aside(folder, kind)}")

    def continue_from(
        self, step: int, total_steps: int, history: "History", say: Callable[[str], None]
    ) -> None:
        """Cut the logs after `step`, from which the run resumes.

        Later steps and evaluations are repeated. Unreadable files are kept under another name and
        reported through `say`.
        """
        self._remove_leftovers()
        self.require_room()  # before anything is cut
        again = step if step in (0, total_steps) else None  # evaluated again on resume
        done = history.steps.last_step
        if step == 0 and history.steps.lines:
            for log in (history.steps, history.evaluations):
                if os.path.lexists(log.path):
                    say(f"the earlier {log.path} is kept as {put_aside(log.path, 'earlier')}")
        else:
            if done < step:
                steps = f"step {step}" if done == step - 1 else f"steps {done + 1} to {step}"
                say(f"{history.steps.path} lacks {steps}, which the run had completed")
            elif done > step:
                steps = "1 step is" if done == step + 1 else f"{done - step} steps are"
                say(f"after step {step}, {steps} repeated")
            history.steps.cut(lambda one: one.step <= step, say)
            history.evaluations.cut(lambda one: one.step <= step and one.step != again, say)
        damages = ((RESULT_FILE, history.result_damage), (FAILURE_FILE, history.failure_damage))
        for name, damage in damages:
            if damage is not None:
                say(f"{damage}. It is kept as {put_aside(self.path / name)}.")

    def _remove_leftovers(self) -> None:
        """Remove incomplete files of a killed process; restore a model that it was replacing."""
        for path in self.path.glob(f"{TEMPORARY_PREFIX}*.tmp.old"):
            if not self.model.exists():
                path.rename(self.model)
        for path in self.path.glob(f"{TEMPORARY_PREFIX}*.tmp"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def evaluation(self, step: int) -> Evaluation | None:
        """Return the evaluation logged at `step`; None if there is none."""
        lines = read_log(self.path / EVALS_FILE, Evaluation).lines
        return next((line.record for line in lines if line.record.step == step), None)


@dataclass(frozen=True)
class History:
    """Results of a run so far, as read from its files.

    `measurement` (result.json) and `failure` (failure.json, why the run ended early) are None if
    the file is missing or cannot be read; `result_damage` and `failure_damage` then say why.
    """

    failure: Failure | None
    failure_damage: str | None
    steps: RunLog[StepRecord]
    evaluations: RunLog[Evaluation]
    measurement: Measurement | None
    result_damage: str | None
    has_model: bool

    @property
    def is_finished(self) -> bool:
        """Whether the run has reached its last step at some time."""
        return self.measurement is not None or self.result_damage is not None or self.has_model


def model_damage(folder: Path) -> str | None:
    """Return how an exported model is damaged; None if it is intact."""
    if not any((folder / name).is_file() for name in MODEL_FILES):
        return f"{folder} holds no complete model"
    return folder_damage(folder)


def _load_record(path: Path, kind: type[Loaded]) -> tuple[Loaded | None, str | None]:
    """Return the record in a file, or why it cannot be read; two None if the file is missing."""
    if not os.path.lexists(path):
        return None, None
    try:
        return kind.load(path), None
    except BadInputError as error:
        return None, str(error)


def _link_target(link: Path) -> Path:
    """Return the path that a link resolves to; for links in a circle, the next one."""
    try:
        return link.resolve()
    except (OSError, RuntimeError):
        return Path("/", link.readlink())


class MetricsWriter(Callback):
    """Writer of metrics.jsonl, a line per step, and evals.jsonl, a line per evaluation."""

    def __init__(self, run_dir: RunDir) -> None:
        with ExitStack() as opened:
            self._steps = opened.enter_context(_LineWriter(run_dir.path / METRICS_FILE))
            self._evals = opened.enter_context(_LineWriter(run_dir.path / EVALS_FILE))
            self._opened = opened.pop_all()

    def on_step(self, record: StepRecord) -> None:
        """Append a line. Raises OSError with the file's name."""
        self._steps.write(encode_line(record))

    def on_eval(self, evaluation: Evaluation, final: bool) -> None:
        """Append a line. Raises OSError with the file's name."""
        self._evals.write(encode_line(evaluation))

    def close(self) -> None:
        self._opened.close()


class _LineWriter(AbstractContextManager["_LineWriter"]):
    """Unbuffered writer that appends whole lines to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    def write(self, line: bytes) -> None:
        left = line
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def __exit__(self, *_: object) -> None:
        self._file.close()
