"""One run of an arm in processes of its own: a training of outpace's, or a person's command."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outpace.records.comparison import Arm, Experiment, Outcome
from outpace.records.errors import BadInputError
from outpace.records.measurement import Measurement
from outpace.records.settings import TrainSettings
from outpace.train.run_dir import RESULT_FILE

# What a comparison does not look at takes no time.
_SHORT: Mapping[str, Any] = {"sample_tokens": 0, "eval_batches": 1, "measure_only": True}
_STOP_S = 20.0  # for a run to end by itself when it is told to
_TOLD = 2000  # characters of what a failed run said last


def settings_of(experiment: Experiment, arm: Arm) -> TrainSettings:
    """What an arm's runs are told. Raises BadInputError."""
    return TrainSettings.parse({**_SHORT, **experiment.common, **arm.settings}, f"arm {arm.name}")


def run_training(experiment: Experiment, arm: Arm, number: int, folder: Path) -> Outcome:
    """Train once; the outcome's value is the median step, warm-up left out."""
    where = Path("runs") / f"{safe(arm.name)}-{number:03d}"
    given = {**experiment.common, **arm.settings}
    config = folder / "configs" / f"{where.name}.toml"
    measured = train_once(given, folder / where, config, arm.environment)
    outcome = Outcome(arm=arm.name, round=number, value=None, run=str(where))
    if isinstance(measured, str):
        return outcome.model_copy(update={"failure": measured})
    return outcome.model_copy(update={"value": measured.step_time_s})


def train_once(
    given: Mapping[str, Any],
    run: Path,
    config: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    limit_s: float | None = None,
) -> Measurement | str:
    """Train in processes of their own with settings by way of a file; or why it failed."""
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(_toml({**_SHORT, **given, "out": str(run)}), encoding="utf-8")
    words = [sys.executable, "-m", "outpace", "train", "--config", str(config), "--json"]
    code, said = _run(words, environment, limit_s)
    if code is None:
        return f"it was stopped after {limit_s:.0f} s"
    return _last(said, code) if code != 0 else Measurement.load(run / RESULT_FILE)


def run_command(experiment: Experiment, arm: Arm, number: int, folder: Path) -> Outcome:
    """Run a person's command once; the outcome's value is what the metric finds last."""
    assert arm.command is not None and experiment.metric is not None
    code, said = _run(["sh", "-c", arm.command], arm.environment)
    log = folder / "logs" / f"{safe(arm.name)}-{number:03d}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(said, encoding="utf-8")
    outcome = Outcome(arm=arm.name, round=number, value=None, run=str(log.relative_to(folder)))
    assert code is not None  # there is no limit of time
    if code != 0:
        return outcome.model_copy(update={"failure": _last(said, code)})
    found = re.findall(experiment.metric, said)
    try:
        value = float(found[-1])
    except (IndexError, ValueError, TypeError):
        seen = f"found {found[-1]!r}" if found else "was not found"
        told = f"the metric {experiment.metric!r} {seen} in its output ({log})"
        return outcome.model_copy(update={"failure": told})
    if value <= 0:
        return outcome.model_copy(update={"failure": f"its metric is {value:g}, not above 0"})
    return outcome.model_copy(update={"value": value})


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


def _run(
    words: list[str], environment: Mapping[str, str], limit_s: float | None = None
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
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return None, ""
    except BaseException:
        _end(process)
        raise
    return process.returncode, said


def _end(process: subprocess.Popen[str]) -> None:
    """Asked first, then at once, all that it started with it."""
    for how, wait_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        try:
            process.communicate(timeout=wait_s)
            return
        except subprocess.TimeoutExpired:
            continue


def _last(said: str, code: int) -> str:
    """What a run said last that is meant for a person."""
    lines = [line for line in said[-_TOLD:].splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("outpace: ")]
    words = (told or lines or ["it said nothing"])[-1].removeprefix("outpace: ")
    return f"exit code {code}: {words}"


def safe(name: str) -> str:
    """A file's name: no separators, and no longer than file systems take."""
    return re.sub(r"[^A-Za-z0-9._=+-]+", "_", name)[:80].lstrip(".") or "arm"


def _toml(values: Mapping[str, Any]) -> str:
    """Flat settings as TOML, which JSON's strings, numbers and lists are."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None]
    return "\n".join([*lines, ""])
