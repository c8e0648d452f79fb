"""TensorBoard, Weights & Biases and MLflow, each an optional extra."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from outpace.records.errors import BadInputError
from outpace.records.measurement import Evaluation, Measurement, StepRecord
from outpace.records.run import RunRecord
from outpace.records.utilisation import Load
from outpace.train.callbacks import Callback
from outpace.train.run_dir import RunDir

# Figures of a step that are worth a curve.
_CURVES = (
    "loss", "lr", "grad_norm", "step_time_s", "data_s", "forward_s", "backward_s", "optimizer_s",
    "communication_s", "tokens_per_s", "samples_per_s", "model_flops_per_s", "mfu", "hfu",
    "peak_memory_bytes", "loss_scale", "skipped_steps",
)  # fmt: skip


class _Scalars(Callback):
    """Passes the figures of steps and evaluations on to `_write(name, value, step)`."""

    def _write(self, values: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def on_step(self, record: StepRecord) -> None:
        """Log the figures that are known."""
        figures = {name: getattr(record, name) for name in _CURVES}
        known = {f"train/{name}": value for name, value in figures.items() if value is not None}
        self._write(known, record.step)

    def on_load(self, load: Load, step: int) -> None:
        """Log how busy devices and cores are."""
        figures = {"cores": load.host.utilisation, "run_cores": load.host.run_cores}
        for device in load.devices:
            name = f"device_{device.index}"
            figures |= {name: device.utilisation, f"{name}_power_w": device.power_w}
        known = {f"utilisation/{name}": x for name, x in figures.items() if x is not None}
        self._write(known, step)

    def on_eval(self, evaluation: Evaluation, final: bool) -> None:
        """Log the held-out loss and a task's metrics."""
        figures = {"loss": evaluation.loss, "perplexity": evaluation.perplexity}
        named = {f"eval/{name}": value for name, value in {**figures, **evaluation.metrics}.items()}
        self._write(named, evaluation.step)


class TensorBoard(_Scalars):
    """Event files in the run's directory, read by `tensorboard --logdir DIR`."""

    def __init__(self, run_dir: RunDir, record: RunRecord) -> None:
        module = _import("torch.utils.tensorboard", "tensorboard", needs="tensorboard")
        self._writer = module.SummaryWriter(str(run_dir.path / "tensorboard"))
        self._writer.add_text("run.json", f"```\n{record.model_dump_json(indent=2)}\n```")

    def _write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class Wandb(_Scalars):
    """A Weights & Biases run; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, run_dir: RunDir, record: RunRecord) -> None:
        wandb = _import("wandb", "wandb")
        self._run = wandb.init(
            project="outpace",
            name=run_dir.path.name,
            dir=str(run_dir.path),
            config=record.model_dump(mode="json"),
        )

    def _write(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def on_end(self, measurement: Measurement) -> None:
        """Put the result into the run's summary."""
        self._run.summary.update(measurement.model_dump(mode="json"))

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow(_Scalars):
    """An MLflow run, at MLFLOW_TRACKING_URI or else in a SQLite file beside the metrics."""

    def __init__(self, run_dir: RunDir, record: RunRecord) -> None:
        self._mlflow = _import("mlflow", "mlflow")
        if not self._mlflow.environment_variables.MLFLOW_TRACKING_URI.get():
            self._mlflow.set_tracking_uri(f"sqlite:///{(run_dir.path / 'mlflow.db').resolve()}")
        self._mlflow.set_experiment("outpace")
        self._mlflow.start_run(run_name=run_dir.path.name)
        settings = record.settings.model_dump(mode="json")
        self._mlflow.log_params({key: str(value)[:500] for key, value in settings.items()})

    def _write(self, values: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics({k: float(v) for k, v in values.items()}, step=step)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


_LOGGERS: dict[str, Callable[[RunDir, RunRecord], Callback]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
}


def make_loggers(run_dir: RunDir, record: RunRecord) -> list[Callback]:
    """The loggers asked for. Raises BadInputError when one cannot begin (no login, no network)."""
    return [_begin(name, run_dir, record) for name in record.settings.log]


def _begin(name: str, run_dir: RunDir, record: RunRecord) -> Callback:
    try:
        return _LOGGERS[name](run_dir, record)
    except BadInputError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise BadInputError(f"--log {name} could not begin: {reason}") from None


def require_loggers(names: tuple[str, ...]) -> None:
    """Refuse loggers that are not installed, before anything is written."""
    modules = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
    for name in names:
        _import(modules[name], name)


def _import(module: str, extra: str, needs: str | None = None) -> Any:
    try:
        if needs is not None:
            import_module(needs)
        return import_module(module)
    except ImportError:
        raise BadInputError(
            f"--log {extra} needs the package {extra}: pip install 'outpace[{extra}]'"
        ) from None
