"""What a section is given, and what it leaves behind."""

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

# Where inductor and Triton keep what they compiled.
COMPILER_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_FRAMES = 5  # of a failure, from where it was raised


@dataclass
class Check:
    """The state of one section while it runs: its device, its folders, its results so far.

    `small`: tiny models, to try the program on a CPU. `inductor`: whether what is to be compiled is
    compiled; otherwise it runs eagerly. `folder`
    holds inputs and runs and is deleted at the end; `kept` holds what stays beside the results.
    `earlier` has the results of sections that have ended. `deadline_s` is by the monotonic clock.
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
        """Where the section's rows are kept."""
        return self.folder / "sections" / f"{slug(self.section)}.json"

    @property
    def cuda(self) -> bool:
        """Whether a GPU is used."""
        return self.device == "cuda"

    def at(self, section: str) -> "Check":
        """The same for a section."""
        return replace(self, section=slug(section))

    def left_s(self) -> float:
        """Seconds until the section has to end."""
        return self.deadline_s - time.monotonic()

    def put(self, name: str, value: Any) -> None:
        """Keep a row at once, so that nothing that comes later can lose it."""
        self.rows[name] = value
        self.rows_file.parent.mkdir(exist_ok=True)
        write_atomic(self.rows_file, json.dumps(self.rows))
        print(f"{name}: {json.dumps(value)}", flush=True)

    def row(self, name: str, needs_s: float, measure: Callable[[], Any]) -> Any:
        """Measure a row and keep it; keep why it failed, or that time does not suffice.

        Returns what was measured, or None.
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
        """Free memory and compiled code, and begin to watch the peak of memory anew."""
        import torch

        gc.collect()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


@dataclass(frozen=True)
class Section:
    """A part of the check that runs in a process of its own.

    It begins where at least `needs_s` are left and is ended after `limit_s`. `function` is named by
    its module in this package, so that only what runs is imported.
    """

    name: str
    limit_s: float
    function: str
    needs_s: float = 15.0

    def run(self, check: Check) -> None:
        """Measure, and put rows into `check`. Raises whatever a measurement raises."""
        module, _, name = self.function.partition(".")
        getattr(importlib.import_module(f"gpu.{module}"), name)(check)


def slug(name: str) -> str:
    """A name for a file or a folder."""
    return name.replace(" ", "-").replace(",", "")


def failure(error: BaseException) -> dict[str, Any]:
    """An exception as a row: what it says, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return {
        "failure": f"{type(error).__name__}: {str(error).strip()[:600]}",
        "at": [f"{'/'.join(Path(one.filename).parts[-3:])}:{one.lineno}" for one in frames],
    }


def measured(row: Any) -> bool:
    """Whether a row holds figures, rather than why there are none."""
    return isinstance(row, dict) and "failure" not in row and "left_out" not in row


def _leave_process_group() -> None:
    """A run that failed may have left one, in which the next could not begin."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
