"""The inputs and the results of a section."""

import gc
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outpace.records.base import write_atomic

# Folders in which inductor and Triton store compiled code.
COMPILER_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_FRAMES = 5  # number of frames of a failure, from where it was raised


@dataclass
class Check:
    """The state of a section while it runs: its device, its folders, and its results so far.

    `small`: tiny models, to try the program on a CPU. `inductor`: whether to compile; otherwise,
    everything runs eagerly. `folder` holds inputs and runs and is deleted at the end; `kept` holds
    files to keep next to the results. `earlier` has the results of sections that have ended.
    `deadline_s` is a time of the monotonic clock.
    """

    device: str
    small: bool
    inductor: bool
    folder: Path
    kept: Path
    deadline_s: float
    section: str = ""
    earlier: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)

    @property
    def rows_file(self) -> Path:
        """Return the file that keeps the section's rows."""
        return self.folder / "sections" / f"{slug(self.section)}.json"

    @property
    def cuda(self) -> bool:
        """Return whether a GPU is used."""
        return self.device == "cuda"

    def at(self, section: str) -> "Check":
        """Return the same state for another section."""
        return replace(self, section=slug(section))

    def left_s(self) -> float:
        """Return the seconds until the section has to end."""
        return self.deadline_s - time.monotonic()

    def put(self, name: str, value: Any) -> None:
        """Write a row immediately, so that nothing that happens later can lose it."""
        self.rows[name] = value
        self.rows_file.parent.mkdir(exist_ok=True)
        write_atomic(self.rows_file, json.dumps(self.rows))
        print(f"{name}: {json.dumps(value)}", flush=True)

    def row(self, name: str, needs_s: float, measure: Callable[[], Any]) -> Any:
        """Measure a row and keep it; otherwise keep the reason: it failed, or time is too short.

        Returns the measurement, or None.
        """
        if self.left_s() < (1.0 if self.small else needs_s):
            self.put(name, {"left_out": f"{self.left_s():.0f} s were left of {needs_s:.0f}"})
            return None
        try:
            value = measure()
        except Exception as error:
            self.put(name, failure(error))
            _leave_process_group()
            return None
        self.put(name, value)
        return value

    def clean(self) -> None:
        """Free memory and compiled code, and restart the measurement of peak memory."""
        import torch

        gc.collect()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


@dataclass(frozen=True)
class Section:
    """A part of the check that runs in a separate process.

    It starts if at least `needs_s` are left, and is ended after `limit_s`. `function` is given by
    its module in this package, so that only what runs is imported.
    """

    name: str
    limit_s: float
    function: str
    needs_s: float = 15.0

    def run(self, check: Check) -> None:
        """Measure, and write rows to `check`. Raises whatever a measurement raises."""
        module, _, name = self.function.partition(".")
        getattr(importlib.import_module(f"gpu.{module}"), name)(check)


def slug(name: str) -> str:
    """Return a name for a file or a folder."""
    return name.replace(" ", "-").replace(",", "")


def failure(error: BaseException) -> dict[str, Any]:
    """Return an exception as a row: its message, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return {
        "failure": f"{type(error).__name__}: {str(error).strip()[:600]}",
        "at": [f"{'/'.join(Path(one.filename).parts[-3:])}:{one.lineno}" for one in frames],
    }


def measured(row: Any) -> bool:
    """Return whether a row contains figures rather than a reason for their absence."""
    return isinstance(row, dict) and "failure" not in row and "left_out" not in row


def _leave_process_group() -> None:
    """Leave a process group that a failed run may have left, since the next could not start."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
