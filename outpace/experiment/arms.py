"""One run of an arm in processes of its own: a training of outpace's, or a person's command."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from outpace.experiment.past import read, with_going_on
from outpace.records.comparison import Arm, Experiment, Outcome
from outpace.records.errors import BadInputError
from outpace.records.measurement import WARMUP_STEPS, Measurement
from outpace.records.python import PYTHON
from outpace.records.settings import TrainSettings
from outpace.train.run_dir import RESULT_FILE

# What a comparison does not look at takes no time.
_SHORT: Mapping[str, Any] = {"sample_tokens": 0, "eval_batches": 1, "measure_only": True}
_LEAST_LIMIT_S = 300.0  # of a run in a comparison
_NO_LIMIT_S = 1e6
_STOP_S = 20.0  # for a run to end by itself when it is told to
_REST_S = 2.0  # for what it started, and its output, to end after it
_LOOK_S = 0.2
_TOLD = 2000  # characters of what a failed run said last


@dataclass(frozen=True)
class Failed:
    """Of a run: its exit code, None where it was stopped; and why, for a person."""

    exit_code: int | None
    words: str


def settings_of(experiment: Experiment, arm: Arm) -> TrainSettings:
    """What an arm's runs are told. Raises BadInputError."""
    where = f"arm {arm.name}"
    settings = TrainSettings.parse({**_SHORT, **experiment.common, **arm.settings}, where)
    if settings.steps is not None and settings.steps <= WARMUP_STEPS:
        raise BadInputError(f"{where}: {_only_warm_up(settings.steps)}")
    return settings


def _only_warm_up(steps: int) -> str:
    return (
        f"{steps} steps are warm-up only, of which nothing is measured. Use --steps "
        f"{WARMUP_STEPS + 1} or more; 30 tell more."
    )


def run_training(experiment: Experiment, arm: Arm, number: int, folder: Path) -> Outcome:
    """Train once; the outcome's value is the median step, warm-up left out."""
    where = Path("runs") / _label(experiment, arm, number)
    given = {**experiment.common, **arm.settings}
    config = folder / "configs" / f"{where.name}.toml"
    began_s = time.monotonic()
    found = train_once(given, folder / where, config, arm.environment, _limit_s(experiment))
    value, failure = None, None
    if isinstance(found, Failed):
        failure = found.words
    elif found.steps <= WARMUP_STEPS:
        failure = _only_warm_up(found.steps)
    else:
        value = found.step_time_s
    return Outcome(
        arm=arm.name, round=number, value=value, failure=failure, run=str(where),
        took_s=time.monotonic() - began_s,
    )  # fmt: skip


def train_once(
    given: Mapping[str, Any],
    run: Path,
    config: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    limit_s: float = math.inf,
) -> Measurement | Failed:
    """Train in processes of their own with settings by way of a file; or why it failed."""
    if run.is_symlink():
        run.unlink()  # and nothing of what it leads to
    elif run.exists():
        _require_left(run)
        shutil.rmtree(run)  # what was interrupted in it is begun anew
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(_toml({**_SHORT, **given, "out": str(run)}), encoding="utf-8")
    words = [*PYTHON, "-m", "outpace", "train", "--config", str(config), "--json"]
    code, said = _run(words, environment, limit_s)
    if code is None:
        return Failed(None, f"it was stopped after {limit_s:.0f} s")
    return Failed(code, _last(said, code)) if code != 0 else Measurement.load(run / RESULT_FILE)


def _require_left(run: Path) -> None:
    """Raises BadInputError where a process still trains there: it would be measured beside it."""
    (past,) = with_going_on([read(run)])
    if past.row.state == "going on":
        raise BadInputError(
            f"a process of this host still trains in {run}, from a time when this was ended by "
            "force. End it first."
        )


def run_command(experiment: Experiment, arm: Arm, number: int, folder: Path) -> Outcome:
    """Run a person's command once; the outcome's value is what the metric finds last."""
    assert arm.command is not None and experiment.metric is not None
    began_s, limit_s = time.monotonic(), _limit_s(experiment)
    code, said = _run(["sh", "-c", arm.command], arm.environment, limit_s)
    log = folder / "logs" / f"{_label(experiment, arm, number)}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(said, encoding="utf-8")
    found: float | str
    if code is None:
        found = f"it was stopped after {limit_s:.0f} s; a larger --budget gives it more"
    elif code != 0:
        found = _last(said, code)
    else:
        found = _figure(experiment.metric, said, log)
    value, failure = (None, found) if isinstance(found, str) else (found, None)
    return Outcome(
        arm=arm.name, round=number, value=value, failure=failure,
        run=str(log.relative_to(folder)), took_s=time.monotonic() - began_s,
    )  # fmt: skip


def _figure(metric: str, said: str, log: Path) -> float | str:
    """What the metric finds last; or in words why that cannot be compared."""
    found = re.findall(metric, said)
    try:
        value = float(found[-1])
    except (IndexError, ValueError, TypeError):
        seen = f"found {found[-1]!r}" if found else "was not found"
        return f"the metric {metric!r} {seen} in its output ({log})"
    if not 0 < value < float("inf"):
        return f"its metric is {value:g}; ratios need a number above 0 ({log})"
    return value


def check_metric(metric: str) -> None:
    """Raises BadInputError unless it is a regular expression with one group."""
    try:
        groups = re.compile(metric).groups
    except re.error as error:
        raise BadInputError(f"--metric {metric!r} is no regular expression: {error}.") from None
    if groups != 1:
        raise BadInputError(
            f"--metric {metric!r} has {groups} groups. Put one pair of parentheses around the "
            "number, as in 'step time: ([0-9.]+)'."
        )


def _limit_s(experiment: Experiment) -> float:
    """For one run: what hangs may not keep the others from running for ever."""
    return max(_LEAST_LIMIT_S, experiment.budget_s)


def _run(
    words: list[str], environment: Mapping[str, str], limit_s: float = math.inf
) -> tuple[int | None, str]:
    """Exit code and all that was said; None where it did not end within the limit.

    Nothing of it is left behind where we are stopped.
    """
    process = subprocess.Popen(
        words,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        # The system waits for at most 24 days.
        said, _ = process.communicate(timeout=None if limit_s > _NO_LIMIT_S else limit_s)
    except subprocess.TimeoutExpired as error:
        _end(process)
        return None, (error.output or b"").decode(errors="replace")
    except BaseException:
        _end(process)
        raise
    return process.returncode, said


def _end(process: subprocess.Popen[str]) -> None:
    """It and all that it started: asked first, then at once.

    Workers of a launcher have sessions of their own, so that a signal to the group does not reach
    them, and one that is stuck holds the output for ever.
    """
    started: set[psutil.Process] = set()
    try:
        # Before anything ends: nobody finds the children of who is gone.
        started = _started(process)
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGTERM)
        until_s = time.monotonic() + _STOP_S
        while process.poll() is None and time.monotonic() < until_s:
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_LOOK_S)
        psutil.wait_procs(started, timeout=_REST_S)
    finally:  # also where Ctrl-C is pressed again
        for one in started | _started(process):
            with suppress(psutil.Error):
                one.kill()
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_REST_S)
        psutil.wait_procs(started, timeout=_REST_S)
        process.poll()
        if process.stdout is not None:
            process.stdout.close()


def _started(process: subprocess.Popen[str]) -> set[psutil.Process]:
    """Children, and theirs."""
    with suppress(psutil.Error):
        return set(psutil.Process(process.pid).children(recursive=True))
    return set()


def _last(said: str, code: int) -> str:
    """What a run said last that is meant for a person."""
    lines = [line for line in said.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("outpace: ")]
    words = _error(lines, code) or (told or lines or ["it said nothing"])[-1]
    return f"exit code {code}: {words.removeprefix('outpace: ')[-_TOLD:]}"


def _error(lines: list[str], code: int) -> str | None:
    """The one that `--json` ends with: of a traceback the last line, else the first."""
    written = [line for line in lines if line.startswith('{"error"')]
    with suppress(ValueError, KeyError, TypeError, IndexError):
        told = str(json.loads(written[-1])["error"]).strip().splitlines()
        return told[-1 if code == 1 else 0]
    return None


def _label(experiment: Experiment, arm: Arm, number: int) -> str:
    """Of a run: its arm's place keeps names apart that are alike as files."""
    return f"{experiment.arms.index(arm)}-{safe(arm.name)}-{number:03d}"


def safe(name: str) -> str:
    """A file's name: no separators, and no longer than file systems take."""
    return re.sub(r"[^A-Za-z0-9._=+-]+", "_", name)[:80].lstrip(".") or "arm"


def _toml(values: Mapping[str, Any]) -> str:
    """Flat settings as TOML, which JSON's strings, numbers and lists are, without escapes."""
    known = {name: value for name, value in values.items() if value is not None}
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in known.items()]
    return "\n".join([*lines, ""])
