"""Loggers for TensorBoard, Weights & Biases and MLflow, each an optional extra.

They log what metrics.jsonl has anyway, so their failures do not end a run.
"""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from outpace.records.errors import BadInputError, OutpaceError
from outpace.records.measurement import Evaluation, Measurement, StepRecord
from outpace.records.run import RunRecord
from outpace.records.utilisation import Load
from outpace.training.callbacks import Callback
from outpace.training.run_dir import WANDB_FOLDER, RunDir

# Fields of a step that are logged as curves.
_CURVES = (
    "loss", "lr", "grad_norm", "step_time_s", "data_s", "forward_s", "backward_s", "optimizer_s",
    "communication_s", "tokens_per_s", "samples_per_s", "model_flops_per_s", "mfu", "hfu",
    "peak_memory_bytes", "loss_scale", "skipped_steps",
)  # fmt: skip


# MLflow's defaults are 7 retries and 120 s, during which training would wait (MLflow, "Environment
# Variables").
_MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
_FIRST_PAUSE_S = 60.0
# Names of wandb's run folders.
_WANDB_RUN = re.compile(r"(?:offline-)?run-(?P<time>\d{8}_\d{6})-(?P<id>.+)")


@dataclass(frozen=True)
class LoggerContext:
    """Arguments that loggers need to start.

    `start_step`: the step from which a run resumes, None for a new run. `say` shows a message to
    the user.
    """

    run_dir: RunDir
    record: RunRecord
    start_step: int | None
    say: Callable[[str], None]


class _ScalarLogger(Callback):
    """Base class of loggers; subclasses implement `_write(values, step)`.

    A failure (unreachable server, full disk) is reported once. Logging pauses after each failure,
    for twice as long each time.
    """

    _name = ""

    def __init__(self, logged: LoggerContext) -> None:
        self._say = logged.say
        self._pause_s = _FIRST_PAUSE_S
        self._quiet_until_s = 0.0
        self._failed = False

    def _write(self, values: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def _try_write(self, values: dict[str, float], step: int) -> None:
        if time.monotonic() < self._quiet_until_s:
            return
        try:
            self._write(values, step)
        except Exception as error:
            self._report_failure(error, f"at step {step}")

    def _report_failure(self, error: Exception, when: str) -> None:
        # Not a logger's failures: signals, and the death of a data worker, which torch may raise
        # anywhere.
        if isinstance(error, OutpaceError) or str(error).startswith("DataLoader worker"):
            raise error
        self._quiet_until_s = time.monotonic() + self._pause_s
        self._pause_s *= 2
        if not self._failed:
            self._failed = True
            self._say(
                f"--log {self._name} failed {when}: {_shorten_error(error)}. Training continues, "
                "and metrics.jsonl has all values"
            )

    def _try_at_end(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            self._report_failure(error, "at the end")

    def on_step(self, record: StepRecord) -> None:
        figures = {name: getattr(record, name) for name in _CURVES}
        known = {f"train/{name}": value for name, value in figures.items() if value is not None}
        self._try_write(known, record.step)

    def on_load(self, load: Load, step: int) -> None:
        figures = {"cores": load.host.utilisation, "run_cores": load.host.run_cores}
        for device in load.devices:
            name = f"device_{device.index}"
            figures |= {name: device.utilisation, f"{name}_power_w": device.power_w}
        known = {f"utilisation/{name}": x for name, x in figures.items() if x is not None}
        self._try_write(known, step)

    def on_eval(self, evaluation: Evaluation, final: bool) -> None:
        figures = {"loss": evaluation.loss, "perplexity": evaluation.perplexity}
        known = {**figures, **evaluation.metrics}
        named = {f"eval/{name}": value for name, value in known.items() if value is not None}
        self._try_write(named, evaluation.step)


class TensorBoard(_ScalarLogger):
    """Logger of event files in the run's directory, which `tensorboard --logdir DIR` reads.

    Steps that a resumed run repeats replace those logged before.
    """

    _name = "tensorboard"

    def __init__(self, logged: LoggerContext) -> None:
        super().__init__(logged)
        module = _import_logger("torch.utils.tensorboard", "tensorboard", needs="tensorboard")
        # Keep the evaluation at the step from which a run resumes; step 0 is evaluated again.
        again = logged.start_step + 1 if logged.start_step else logged.start_step
        folder = str(logged.run_dir.path / "tensorboard")
        self._writer = module.SummaryWriter(folder, purge_step=again)
        said = f"```\n{logged.record.model_dump_json(indent=2)}\n```"
        self._writer.add_text("run.json", said, again or 0)

    def _write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._try_at_end(self._writer.close)


class Wandb(_ScalarLogger):
    """Logger to a Weights & Biases run, which a resumed run continues.

    WANDB_MODE=offline keeps it on this machine.
    """

    _name = "wandb"

    def __init__(self, logged: LoggerContext) -> None:
        super().__init__(logged)
        wandb = _import_logger("wandb", "wandb")
        folder = logged.run_dir.path / WANDB_FOLDER
        begun = None if logged.start_step is None else _newest_wandb_id(folder)
        self._run = wandb.init(
            id=begun,
            resume=None if begun is None else "allow",
            project="outpace",
            name=logged.run_dir.path.name,
            dir=str(logged.run_dir.path),
            config=logged.record.model_dump(mode="json"),
        )

    def _write(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def on_end(self, measurement: Measurement) -> None:
        """Write the result to the run's summary."""
        values = measurement.model_dump(mode="json")
        self._try_at_end(lambda: self._run.summary.update(values))

    def close(self) -> None:
        self._try_at_end(self._run.finish)


def _newest_wandb_id(folder: Path) -> str | None:
    """Return the W&B ID in the name of the newest folder that wandb created for a run.

    Return None if there is no folder, or if WANDB_RUN_ID is set.
    """
    if os.environ.get("WANDB_RUN_ID"):
        return None
    found = [match for path in folder.glob("*run-*") if (match := _WANDB_RUN.fullmatch(path.name))]
    return max(found, key=lambda match: match["time"])["id"] if found else None


class MLflow(_ScalarLogger):
    """Logger to an MLflow run, at MLFLOW_TRACKING_URI or in a SQLite file in the run's folder."""

    _name = "mlflow"

    def __init__(self, logged: LoggerContext) -> None:
        super().__init__(logged)
        for variable, value in _MLFLOW_PATIENCE.items():
            os.environ.setdefault(variable, value)
        self._mlflow = _import_logger("mlflow", "mlflow")
        folder = logged.run_dir.path
        # MLflow keeps the address for this process and its children, so `close` resets it.
        self._sets_place = not self._mlflow.environment_variables.MLFLOW_TRACKING_URI.get()
        if self._sets_place:
            self._mlflow.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.db').resolve()}")
        self._mlflow.set_experiment("outpace")
        self._mlflow.start_run(run_name=folder.name)
        settings = logged.record.settings.model_dump(mode="json")
        self._mlflow.log_params({key: str(value)[:500] for key, value in settings.items()})

    def _write(self, values: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics({k: float(v) for k, v in values.items()}, step=step)

    def close(self) -> None:
        self._try_at_end(self._mlflow.end_run)
        if self._sets_place:
            self._mlflow.set_tracking_uri(None)


_LOGGERS: dict[str, Callable[[LoggerContext], Callback]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
}


def make_loggers(logged: LoggerContext) -> list[Callback]:
    """Return the requested loggers. Raises BadInputError if one cannot start (not logged in)."""
    return [_start_logger(name, logged) for name in logged.record.settings.log]


def _start_logger(name: str, logged: LoggerContext) -> Callback:
    try:
        return _LOGGERS[name](logged)
    except OutpaceError:
        raise
    except Exception as error:
        raise BadInputError(f"--log {name} could not start: {_shorten_error(error)}") from None


def _shorten_error(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def require_loggers(names: tuple[str, ...]) -> None:
    """Raise BadInputError if the package of a logger is not installed."""
    modules = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
    for name in names:
        _import_logger(modules[name], name)


def _import_logger(module: str, extra: str, needs: str | None = None) -> Any:
    try:
        if needs is not None:
            import_module(needs)
        return import_module(module)
    except ImportError:
        raise BadInputError(
            f"--log {extra} needs the package {extra}: pip install 'outpace[{extra}]'"
        ) from None
