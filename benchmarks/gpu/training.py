"""A run of `outpace train` in this process, by its Python API."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.check import Check, slug
from gpu.shapes import Shape, little, tokens_file
from outpace.jobs.train.context import RunContext
from outpace.jobs.train.job import train
from outpace.records.machine import Machine
from outpace.records.measurement import Measurement
from outpace.records.settings import TrainSettings
from outpace.reporting.data.prediction import predict
from outpace.reporting.data.run_folder import read_run
from outpace.training.callbacks import Callback


@dataclass(frozen=True)
class Trained:
    """A completed run. `peak_bytes` does not include what the GPU held before it started."""

    path: Path
    measurement: Measurement
    lines: list[dict[str, Any]]
    took_s: float
    before_bytes: int
    peak_bytes: int | None
    reserved_bytes: int | None

    @property
    def losses(self) -> list[float]:
        """Return the loss of every step."""
        return [line["loss"] for line in self.lines]


def train_shape(
    check: Check, name: str, shape: Shape, callbacks: Sequence[Callback] = (), **changes: Any
) -> Trained:
    """Train a shape from random weights on random tokens."""
    defaults = {"model": shape.model, "data": (tokens_file(check, shape.vocab),),
                "seq_len": shape.seq_len, "global_batch": shape.batch}  # fmt: skip
    return train_run(check, name, callbacks, **{**defaults, **changes})


def train_little(
    check: Check, name: str, callbacks: Sequence[Callback] = (), **changes: Any
) -> Trained:
    """Train a model that takes a GPU no time."""
    seq_len = 64 if check.small else 256
    defaults = {"model": little(check), "data": (tokens_file(check, 1024),),
                "seq_len": seq_len, "global_batch": 8, "steps": 6}  # fmt: skip
    return train_run(check, name, callbacks, **{**defaults, **changes})


def train_run(
    check: Check, name: str, callbacks: Sequence[Callback] = (), **changes: Any
) -> Trained:
    """Train with these settings, by default without evaluations, samples and checkpoints."""
    import torch

    out = run_folder(check, name)
    settings = TrainSettings(
        **{"eval_batches": 0, "sample_tokens": 0, "device": check.device, "dropout": 0.0,
           "init": "random", "measure_only": True, "out": out, "seed": 1,
           "cache_dir": check.folder / "cache", **changes}
    )  # fmt: skip
    before_bytes = 0
    if check.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
    began_s = time.perf_counter()
    measurement = train(settings, RunContext(command=["gpu_check"], callbacks=list(callbacks)))
    took_s = time.perf_counter() - began_s
    return Trained(
        path=out,
        measurement=measurement,
        lines=[json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()],
        took_s=took_s,
        before_bytes=before_bytes,
        peak_bytes=torch.cuda.max_memory_allocated() - before_bytes if check.cuda else None,
        reserved_bytes=torch.cuda.max_memory_reserved() if check.cuda else None,
    )


def run_folder(check: Check, name: str) -> Path:
    """Return the folder of a section's run, which exists as long as the call lasts."""
    return check.folder / "runs" / check.section / slug(name)


def planned(path: Path) -> dict[str, Any]:
    """Return the plan with which a run trained, from its record."""
    plan: dict[str, Any] = read_run(path).record.plan.model_dump(mode="json")
    return plan


def predicted(path: Path, machine: Machine | None = None) -> dict[str, Any]:
    """Predict a run's step by a probe, or by the catalog's rates of its GPU."""
    said = predict(read_run(path).record, 1, machine)
    if isinstance(said, str):
        return {"not_predicted": said}
    estimate = said.planned.estimate
    return {"basis": said.basis, "step_time_s": estimate.step_time_s, "low_s": estimate.low_s,
            "high_s": estimate.high_s, "level": estimate.level,
            "peak_memory_bytes": estimate.peak_memory_bytes}  # fmt: skip
