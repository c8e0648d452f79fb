"""Compiles ahead of time what timed sections train, several models in parallel.

A compiler takes 25 to 50 s of one core for each of these models (H200's host, 2026-11-27), so a
check of a few minutes cannot compile one after another. Each job is a separate process that trains
two steps and leaves the code in the compilers' caches, which all sections share.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu.check import Check, slug
from gpu.shapes import shape_of

LORA_RANK = 16
_HELD_SHARE = 0.9  # share of the device's memory for all jobs together
_LOOK_EVERY_S = 0.1
_GIB = 2**30


@dataclass(frozen=True)
class Job:
    """A job: its trainer, "outpace" or "hand loop"; `memory_gib` is the most that it needs."""

    trainer: str
    shape: str
    memory_gib: int
    lora_rank: int | None = None

    @property
    def name(self) -> str:
        """Return the name of the job's row."""
        lora = "" if self.lora_rank is None else f", LoRA {self.lora_rank}"
        return f"{self.shape}{lora}: {self.trainer}"


# The longest come first; those that failed before training delay nothing.
JOBS = (
    Job("outpace", "llama-3.2-1b", 34),
    Job("hand loop", "llama-3.2-1b", 38),
    Job("outpace", "gpt2", 11),
    Job("hand loop", "gpt2", 14),
    Job("outpace", "llama-3.2-1b", 24, LORA_RANK),
    Job("hand loop", "llama-3.2-1b", 40, LORA_RANK),
    Job("outpace", "gpt2 batch 4", 5),
    Job("hand loop", "gpt2 batch 4", 6),
    Job("outpace", "llama-3.2-1b batch 8", 52),
    Job("hand loop", "llama-3.2-1b batch 8", 60),
)


def fill_caches(check: Check) -> None:
    """Run the jobs, with as many in parallel as cores and memory allow."""
    waiting = list(JOBS[2:4] if check.small else JOBS)
    running: dict[Job, tuple[subprocess.Popen[bytes], float]] = {}
    room_gib = _room_gib(check)
    most = max(1, (os.cpu_count() or 2) // 2)
    try:
        while (waiting or running) and check.left_s() > 2:
            for job in list(waiting):
                held = sum(one.memory_gib for one in running)
                if len(running) < most and (not running or held + job.memory_gib <= room_gib):
                    running[job] = _start(check, job), time.monotonic()
                    waiting.remove(job)
            time.sleep(_LOOK_EVERY_S)
            for job in [one for one, (process, _) in running.items() if process.poll() is not None]:
                process, began_s = running.pop(job)
                _end_group(process)
                check.put(job.name, _row(check, job, process, time.monotonic() - began_s))
    finally:
        for process, _ in running.values():
            _end_group(process)
            process.wait()
    for job in [*running, *waiting]:
        check.put(job.name, {"left_out": "no time was left"})


def _room_gib(check: Check) -> float:
    if not check.cuda:
        return 1e9
    import torch

    return _HELD_SHARE * torch.cuda.mem_get_info()[1] / _GIB


def _start(check: Check, job: Job) -> "subprocess.Popen[bytes]":
    """Start a job that writes to a file: the compilers' workers would keep a pipe open."""
    words = [sys.executable, str(Path(sys.argv[0]).resolve()), "--fill-cache",
             json.dumps(asdict(job)), "--folder", str(check.folder), "--kept", str(check.kept),
             "--limit", str(check.left_s()), *(["--cpu"] if check.small else []),
             *(["--compile"] if check.small and check.inductor else [])]  # fmt: skip
    with _log(check, job).open("wb") as log:
        return subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)


def _row(
    check: Check, job: Job, process: "subprocess.Popen[bytes]", took_s: float
) -> dict[str, Any]:
    if process.returncode == 0:
        return {"took_s": round(took_s, 1)}
    text = _log(check, job).read_text(errors="replace")
    return {"failure": f"exit code {process.returncode}: {text.strip()[-500:]}"}


def _log(check: Check, job: Job) -> Path:
    return check.folder / f"cache-{slug(job.name)}.log"


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def fill_cache(check: Check, job: Job) -> None:
    """Train two steps with one job's trainer; this process does nothing else."""
    shape = shape_of(check, job.shape)
    if job.trainer == "hand loop":
        from gpu.hand_loop import HandLoop
        from outpace.probing.hardware.machine import usable_cores
        from outpace.training.threads import set_threads

        set_threads(None, usable_cores(), 1)  # compiled code depends on the number of threads
        HandLoop(check, shape, True, job.lora_rank).warm_up(2)
        return
    from gpu.training import train_shape

    adapters = {} if job.lora_rank is None else {"lora_rank": job.lora_rank}
    train_shape(check, f"cache {job.name}", shape, steps=2, compile=check.inductor, **adapters)
