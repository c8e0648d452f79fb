"""Each logger writes real files, with no network."""

import time

import pytest

from outpace.records.errors import BadInputError, InterruptedRunError
from outpace.records.machine import Machine
from outpace.records.measurement import Evaluation, StepRecord
from outpace.records.plan import Plan
from outpace.records.run import RunRecord
from outpace.records.settings import TrainSettings
from outpace.training.loggers import LoggerContext, make_loggers, require_loggers
from outpace.training.run_dir import RunDir


def record(*names):
    return RunRecord(
        outpace="0", command=("outpace", "train"), settings=TrainSettings(log=names), origins={},
        plan=Plan(), identity="", model=None, parameters=1, total_steps=2, seq_len=8,
        train_data="x", eval_data=None, versions={}, commit=None, uncommitted_changes=None,
        machine=Machine(host_cores=1, host_memory_bytes=1, cpu="x"), device="cpu", threads=1,
        started="2026-01-01",
    )  # fmt: skip


def step(number, loss):
    return StepRecord(
        step=number, tokens=8 * number, samples=number, loss=loss, lr=0.1, grad_norm=1.0,
        step_time_s=0.5, data_s=0, forward_s=0.2, backward_s=0.2, optimizer_s=0.1,
        communication_s=0, other_s=0, tokens_per_s=16, samples_per_s=2, model_flops_per_s=None,
        hardware_flops_per_s=None, mfu=None, peak_memory_bytes=100, loss_scale=None,
        skipped_steps=0,
    )  # fmt: skip


def begin(tmp_path, name, start_step=None, say=lambda sentence: None):
    (logger,) = make_loggers(LoggerContext(RunDir(tmp_path), record(name), start_step, say))
    return logger


def log(tmp_path, name, start_step=None, steps=((1, 3.5), (2, 2.5))):
    logger = begin(tmp_path, name, start_step)
    for number, loss in steps:
        logger.on_step(step(number, loss))
    logger.on_eval(Evaluation(step=2, loss=2.0, perplexity=7.4, tokens=8, tokens_per_s=1), True)
    logger.close()


def test_tensorboard_curves_can_be_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 3.5), (2, 2.5)]
    assert [e.value for e in events.Scalars("eval/loss")] == [2.0]
    assert "train/mfu" not in events.Tags()["scalars"]


def test_steps_that_are_done_again_are_one_curve_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log(tmp_path, "tensorboard", steps=((1, 3.5), (2, 9.0), (3, 9.0)))
    log(tmp_path, "tensorboard", start_step=1, steps=((2, 2.5),))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 3.5), (2, 2.5)]


@pytest.mark.parametrize(
    "name",
    ["tensorboard", *(pytest.param(one, marks=pytest.mark.slow) for one in ("wandb", "mlflow"))],
)
def test_a_logger_that_fails_ends_no_training(name, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    said, tried = [], []
    logger = begin(tmp_path, name, say=said.append)

    def fail(*_):
        tried.append(None)
        raise ConnectionError("the server is away")

    monkeypatch.setattr(logger, "_write", fail)
    for number in (1, 2):
        logger.on_step(step(number, 3.5))
    assert len(tried) == 1  # each try may take as long as the server is waited for
    monkeypatch.setattr(logger, "_quiet_until_s", 0.0)
    logger.on_step(step(3, 3.5))
    assert len(tried) == 2
    assert said == [
        f"--log {name} failed at step 1: the server is away. Training continues, and "
        "metrics.jsonl has all values"
    ]
    monkeypatch.setattr(logger, "_write", raising(InterruptedRunError("stopped")))
    monkeypatch.setattr(logger, "_quiet_until_s", 0.0)
    with pytest.raises(InterruptedRunError):  # a signal is no failure of the logger's
        logger.on_step(step(4, 3.5))
    logger.close()


def raising(error):
    def act(*_):
        raise error

    return act


@pytest.mark.slow
def test_an_mlflow_server_is_not_waited_for_as_long_as_ranks_wait_for_each_other(
    tmp_path, monkeypatch
):
    import mlflow

    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    begin(tmp_path, "mlflow").close()
    known = mlflow.environment_variables
    assert known.MLFLOW_HTTP_REQUEST_MAX_RETRIES.get() == 2
    assert known.MLFLOW_HTTP_REQUEST_TIMEOUT.get() == 10


def test_mlflow_curves_can_be_read_back(tmp_path):
    import mlflow

    log(tmp_path, "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'outpace'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.metrics["train/loss"] == 2.5
    assert run.data.params["global_batch"] == "16"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(1, 3.5), (2, 2.5)]


def test_wandb_writes_an_offline_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log(tmp_path, "wandb")
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (events,) = folder.glob("*.wandb")
    until_s = time.monotonic() + 600  # finish() does not wait for wandb's own process
    while b"eval/perplexity" not in (content := events.read_bytes()):
        assert time.monotonic() < until_s
        time.sleep(0.05)
    assert b"train/loss" in content


def test_a_resumed_run_is_the_same_one_in_wandb(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "wandb"
    log(tmp_path, "wandb")
    log(tmp_path, "wandb", start_step=2, steps=((3, 2.4),))
    names = [path.name for path in folder.glob("offline-run-*")]
    assert len({name.split("-")[3] for name in names}) == 1
    log(tmp_path, "wandb")  # begun anew
    names = [path.name for path in folder.glob("offline-run-*")]
    assert len({name.split("-")[3] for name in names}) == 2


def test_a_logger_that_is_not_installed_is_refused_with_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(BadInputError, match=r"pip install 'outpace\[wandb\]'"):
        require_loggers(("wandb",))
