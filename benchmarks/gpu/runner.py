"""Runs sections one after another, each in a separate process that can be ended.

The parent imports torch, transformers and outpace once and never uses the GPU, so sections are
forked from it within milliseconds, and each starts with a separate CUDA context. A section that
hangs is ended, and one that crashes affects no other; rows that they have already written still
count.
"""

import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu.check import COMPILER_CACHES, Check, Section, failure
from gpu.telemetry import Telemetry
from outpace.records.base import write_atomic
from outpace.training.cuda_allocator import grow_segments

_FORK_REFUSED = 75  # exit code of a forked section that could not use the GPU
_FAILED = 70  # exit code of a section that raised an error
_OUT_OF_TIME = 124
_LOOK_EVERY_S = 0.05
_TRIAL = 10.0
_STACKS_S = 1.0  # time for a hanging section to write its stacks
_LOG_CHARACTERS = 2500


class Runner:
    """Runs sections within `limit_s`, and calls `save` as each one ends.

    `command` starts this program again for one section, if forking is not possible or (`fork` is
    False) not wanted.
    """

    def __init__(
        self,
        template: Check,
        limit_s: float,
        section_limit_s: float | None,
        save: Callable[[dict[str, Any]], None],
        command: Sequence[str],
        fork: bool,
    ) -> None:
        self._template, self._save = template, save
        self._end_s = time.monotonic() + limit_s
        self._section_limit_s = section_limit_s
        self._command, self._fork, self._loaded = command, fork, False
        self._telemetry = Telemetry(template.folder / "telemetry.csv")

    def run(self, sections: Sequence[Section]) -> None:
        """Run the sections in order, as long as time is left."""
        try:
            for section in sections:
                told = self._run(section)
                self._template.earlier[section.name] = told
                self._save(self._template.earlier)
                print(_shown(section.name, told), file=sys.stderr, flush=True)
        finally:
            self._telemetry.close()

    def _run(self, section: Section) -> dict[str, Any]:
        left_s = self._end_s - time.monotonic()
        if left_s < (1.0 if self._template.small else section.needs_s):
            return {"status": "left out", "reason": f"{max(left_s, 0):.0f} s were left"}
        # Shared cores are no reason to end a trial; only hanging sections are ended.
        own_s = section.limit_s * (_TRIAL if self._template.small else 1.0)
        limit_s = min(self._section_limit_s or own_s, left_s)
        check = self._check(section.name, limit_s)
        began_s = time.monotonic()
        code, host_s = self._start(section, check)
        told = {"status": _status(code), "took_s": round(time.monotonic() - began_s, 2),
                "host_s": host_s, "limit_s": round(limit_s, 1), "rows": _rows(check),
                "gpu": self._telemetry.since()}  # fmt: skip
        if code != 0:
            told["log"] = _log(check)
        return told

    def _check(self, name: str, limit_s: float) -> Check:
        check = replace(self._template, deadline_s=time.monotonic() + limit_s, rows={}).at(name)
        check.rows_file.parent.mkdir(exist_ok=True)
        check.rows_file.unlink(missing_ok=True)
        return check

    def _start(self, section: Section, check: Check) -> tuple[int, float]:
        """Return the section process's exit code, negative for a signal, and its core seconds."""
        if self._fork:
            if not self._loaded:
                _load_what_all_need()
                self._loaded = True
            code, host_s = _wait(_forked(section, check), check)
            if code != _FORK_REFUSED:
                return code, host_s
            self._fork = False  # an import has used the GPU, so no section can be forked
        write_atomic(check.folder / "earlier.json", json.dumps(check.earlier))
        with _log_file(check).open("ab") as log:
            process = subprocess.Popen(
                [*self._command, "--run-section", section.name, "--folder", str(check.folder),
                 "--kept", str(check.kept), "--limit", str(check.left_s())],
                start_new_session=True, stdout=log, stderr=log,
            )  # fmt: skip
        return _wait(process.pid, check)


def prepare(environ: MutableMapping[str, str], check: Check) -> None:
    """Prepare what all sections need, before any of them starts or CUDA is used.

    Compiled code of the hand loop and of outpace is kept in one folder, and memory on a GPU grows
    as it does for a user of the command.
    """
    for name in COMPILER_CACHES:
        environ.setdefault(name, str(check.folder / name.lower()))
    if check.cuda:
        grow_segments(environ)


def run_here(section: Section, check: Check) -> int:
    """Run a section in this process, which is its own; return the exit code."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        section.run(check)
    except Exception as error:
        check.put("failure", failure(error))
        return _FAILED
    return 0


def _load_what_all_need() -> None:
    """Import what all sections need, once. No module uses the GPU."""

    import outpace.jobs.train.job
    import outpace.reporting.data.prediction  # noqa: F401


def _forked(section: Section, check: Check) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = _FAILED
    try:
        os.setsid()
        with _log_file(check).open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        code = run_here(section, check) if _can_compute(check) else _FORK_REFUSED
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # files that the parent has open are not this process's to close


def _can_compute(check: Check) -> bool:
    if not check.cuda:
        return True
    import torch

    try:
        torch.cuda.init()
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        print(f"The GPU cannot be used in a forked process: {error}")
        return False
    return True


def _wait(pid: int, check: Check) -> tuple[int, float]:
    """Wait for a section's process, which leads a group, and end the whole group."""
    ended, status = 0, 0
    while not ended and check.left_s() > 0:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        time.sleep(0 if ended else _LOOK_EVERY_S)
    if not ended:
        os.kill(pid, signal.SIGUSR1)  # writes the stacks of its threads
        time.sleep(_STACKS_S)
        _end_group(pid)
        _, _, usage = os.wait4(pid, 0)
    _end_group(pid)
    code = os.waitstatus_to_exitcode(status) if ended else _OUT_OF_TIME
    return code, round(usage.ru_utime + usage.ru_stime, 2)


def _end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:  # on macOS, for a group whose leader has ended
        pass


def _status(code: int) -> str:
    if code == 0:
        return "done"
    if code == _FAILED:
        return "failed"
    if code == _OUT_OF_TIME:
        return "out of time"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _rows(check: Check) -> dict[str, Any]:
    if not check.rows_file.is_file():
        return {}
    rows: dict[str, Any] = json.loads(check.rows_file.read_text())
    return rows


def _log_file(check: Check) -> Path:
    return check.rows_file.with_suffix(".log")


def _log(check: Check) -> str:
    path = _log_file(check)
    if not path.is_file():
        return ""
    lines = path.read_text(errors="replace").splitlines()
    # Python lists all extension modules below the stacks of a crash.
    kept = "\n".join(line for line in lines if not line.startswith("Extension modules: "))
    return kept[-_LOG_CHARACTERS:]


def _shown(name: str, told: dict[str, Any]) -> str:
    width = min(shutil.get_terminal_size().columns, 400) if sys.stderr.isatty() else 400
    took = f" in {told['took_s']:.1f} s" if "took_s" in told else f" ({told['reason']})"
    lines = [f"{name}: {told['status']}{took}"]
    lines += [f"  {key}: {json.dumps(row)}"[:width] for key, row in told.get("rows", {}).items()]
    return "\n".join(lines)
