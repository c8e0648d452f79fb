"""Waits for the device in a step, idle time of the device, and the kernels that it runs."""

import json
import time
import warnings
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gpu.check import Check
from gpu.shapes import shape_of
from gpu.training import train_shape
from outpace.records.measurement import StepRecord
from outpace.training.callbacks import Callback

_WATCHED = range(5, 15)  # steps to watch
_PLACES = 20
_WAIT = "called a synchronizing CUDA operation"


class WatchWaits(Callback):
    """Makes torch warn of each wait of the host for the device during the watched steps."""

    def on_step(self, record: StepRecord) -> None:
        """Watch from the first of the steps to the last."""
        if record.step == _WATCHED.start:
            torch.cuda.set_sync_debug_mode("warn")
        if record.step == _WATCHED.stop:
            torch.cuda.set_sync_debug_mode("default")


class ReportTimes(Callback):
    """Records when each step is reported."""

    def __init__(self) -> None:
        self.reported_s: list[float] = []

    def on_step(self, record: StepRecord) -> None:
        """Record the time of the report."""
        self.reported_s.append(time.perf_counter())


def waits(check: Check) -> None:
    """Measure GPT-2, 16 × 1,024, compiled."""
    check.row("waits", 15.0, lambda: _waits(check))
    for workers in (0, 2):
        check.row(f"told over wall, workers {workers}", 8.0, partial(_told, check, workers))
    check.row("profile", 10.0, lambda: _profile(check))


def _train(check: Check, name: str, callbacks: list[Callback], **settings: Any) -> Any:
    shape = shape_of(check, "gpt2")
    return train_shape(check, name, shape, callbacks, compile=check.inductor, **settings)


def _waits(check: Check) -> dict[str, Any]:
    """Return torch's warnings by the line of Python that waited."""
    places: Counter[str] = Counter()

    def note(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if _WAIT in str(message):
            places[f"{'/'.join(Path(filename).parts[-3:])}:{lineno}"] += 1

    callbacks: list[Callback] = [WatchWaits()] if check.cuda else []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        _train(check, "waits", callbacks, steps=_WATCHED.stop + 3)
    a_step = sum(places.values()) / len(_WATCHED)
    return {"of_a_step": a_step if check.cuda else None, "steps": len(_WATCHED),
            "places": places.most_common(_PLACES)}  # fmt: skip


def _told(check: Check, workers: int) -> dict[str, Any]:
    """Compare reported step times with the wall-clock time between reports."""
    times = ReportTimes()
    steps = 12 if check.small else 60
    run = _train(check, f"told {workers}", [times], steps=steps, workers=workers)
    # The last steps' reports come sooner, because no further step is awaited.
    walls = [after - before for before, after in pairwise(times.reported_s)][5:-4]
    lines = run.lines[6:-4]
    return {
        "wall_s": median(walls),
        "told_s": median(line["step_time_s"] for line in lines),
        "told_over_wall": sum(line["step_time_s"] for line in lines) / sum(walls),
        "data_s": median(line["data_s"] for line in lines),
        "walls_s": walls,
    }


def _profile(check: Check) -> dict[str, Any]:
    """Profile some steps: how busy the device was, and with which kernels."""
    run = _train(check, "profile", [], steps=8, profile=True)
    trace = json.loads((run.path / "trace-rank0.json").read_text())["traceEvents"]
    return device_use(trace)


def device_use(trace: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the share of time in which a device is busy, and its kernels by their time."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    events = sorted(
        (one["ts"], one["ts"] + one["dur"], one["name"])
        for one in trace if one.get("cat") in kinds
    )  # fmt: skip
    steps = sum(one.get("name", "").startswith("ProfilerStep#") and one.get("ph") == "X"
                and one.get("cat") == "user_annotation" for one in trace)  # fmt: skip
    if not events:
        return {"busy_share": None, "steps": steps}
    busy, end = 0.0, events[0][0]
    took, count = Counter[str](), Counter[str]()
    for began, ended, name in events:
        busy += max(0.0, ended - max(began, end))
        end = max(end, ended)
        took[name[:90]] += ended - began
        count[name[:90]] += 1
    return {
        "busy_share": busy / (end - events[0][0]),
        "steps": steps,
        "device_events": len(events),
        "kernels": [[name, us / 1e6, count[name]] for name, us in took.most_common(30)],
    }
