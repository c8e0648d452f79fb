"""One run of an arm in separate processes: a training run, or a user's command."""

import json
import math
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outpace.experiment.past_runs import mark_running, read_past_run
from outpace.experiment.processes import ProcessTree
from outpace.records.comparison import Arm, Experiment, Outcome
from outpace.records.errors import BadInputError
from outpace.records.interpreter import PYTHON
from outpace.records.measurement import WARMUP_STEPS, Measurement
from outpace.records.settings import TrainSettings
from outpace.training.run_dir import RESULT_FILE

# Settings that skip work whose result a comparison does not use.
_SHORT: Mapping[str, Any] = {"sample_tokens": 0, "eval_batches": 1, "measure_only": True}
_LEAST_LIMIT_S = 300.0  # minimum time limit of a run in a comparison
_TOLD = 2000  # maximum length of the output kept from a failed run


@dataclass(frozen=True)
class RunFailure:
    """A failed run: its exit code, None if it was stopped, and the reason for the user."""

    exit_code: int | None
    reason: str


def settings_of(experiment: Experiment, arm: Arm) -> TrainSettings:
    """Return the settings of an arm's training runs. Raises BadInputError if they are invalid."""
    where = f"arm {arm.name}"
    settings = TrainSettings.parse({**_SHORT, **experiment.common, **arm.settings}, where)
    if settings.steps is not None and settings.steps <= WARMUP_STEPS:
        raise BadInputError(f"{where}: {_explain_only_warm_up(settings.steps)}")
    return settings


def _explain_only_warm_up(steps: int) -> str:
    return (
        f"all {steps} steps would be warm-up, which is not measured. Use --steps "
        f"{WARMUP_STEPS + 1} or more; 30 give a clearer result."
    )


def run_training(experiment: Experiment, arm: Arm, number: int, folder: Path) -> Outcome:
    """Run a training once. The outcome's value is the median step time without warm-up."""
    where = Path("runs") / _run_name(experiment, arm, number)
    given = {**experiment.common, **arm.settings}
    config = folder / "configs" / f"{where.name}.toml"
    began_s = time.monotonic()
    found = train_once(given, folder / where, config, arm.environment, _hang_limit_s(experiment))
    value, failure = None, None
    if isinstance(found, RunFailure):
        failure = found.reason
    elif found.steps <= WARMUP_STEPS:
        failure = _explain_only_warm_up(found.steps)
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
) -> Measurement | RunFailure:
    """Run `outpace train` with the settings `given`, and return its result or its failure.

    The settings are written to `config`.
    """
    code, said = _run_process(training_command(given, run, config), environment, limit_s)
    return outcome(run, code, said, limit_s)


def training_command(given: Mapping[str, Any], run: Path, config: Path) -> list[str]:
    """Prepare a training run: delete `run` if it exists, and write the settings to `config`.

    Returns the command that trains. An interrupted run is deleted because it starts over.
    """
    if run.is_symlink():
        run.unlink()  # the link only, not its target
    elif run.exists():
        _require_not_training(run)
        shutil.rmtree(run)  # an interrupted run starts over
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(_format_toml({**_SHORT, **given, "out": str(run)}), encoding="utf-8")
    return [*PYTHON, "-m", "outpace", "train", "--config", str(config), "--json"]


def outcome(run: Path, code: int | None, said: str, limit_s: float) -> Measurement | RunFailure:
    """Return the result of a training run, or its failure if the exit code is not 0.

    A `code` of None means that the run was stopped at the time limit.
    """
    if code is None:
        return RunFailure(None, f"stopped at the limit of {limit_s:.0f} s")
    return (
        RunFailure(code, _explain_exit(said, code))
        if code != 0
        else Measurement.load(run / RESULT_FILE)
    )


def _require_not_training(run: Path) -> None:
    (past,) = mark_running([read_past_run(run)])
    if past.row.state == "going on":
        raise BadInputError(
            f"a process on this host is still training in {run}, left over from an earlier "
            "command that was killed, and would disturb the measurement. End it first."
        )


def run_command(experiment: Experiment, arm: Arm, number: int, folder: Path) -> Outcome:
    """Run a user's command once.

    The outcome's value is the last number that the experiment's metric, a regular expression, finds
    in the command's output.
    """
    assert arm.command is not None and experiment.metric is not None
    began_s, limit_s = time.monotonic(), _hang_limit_s(experiment)
    code, said = _run_process(["sh", "-c", arm.command], arm.environment, limit_s)
    log = folder / "logs" / f"{_run_name(experiment, arm, number)}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(said, encoding="utf-8")
    found: float | str
    if code is None:
        found = f"stopped after {limit_s:.0f} s; a larger --budget allows more"
    elif code != 0:
        found = _explain_exit(said, code)
    else:
        found = _read_metric(experiment.metric, said, log)
    value, failure = (None, found) if isinstance(found, str) else (found, None)
    return Outcome(
        arm=arm.name, round=number, value=value, failure=failure,
        run=str(log.relative_to(folder)), took_s=time.monotonic() - began_s,
    )  # fmt: skip


def _read_metric(metric: str, output: str, log: Path) -> float | str:
    """Return the metric's last value in the output; without a usable value, return the reason."""
    found = re.findall(metric, output)
    try:
        value = float(found[-1])
    except (IndexError, ValueError, TypeError):
        seen = f"found {found[-1]!r}" if found else "was not found"
        return f"the metric {metric!r} {seen} in its output ({log})"
    if not 0 < value < float("inf"):
        return f"its metric is {value:g}; ratios need a number above 0 ({log})"
    return value


def check_metric(metric: str) -> None:
    """Raise BadInputError unless the metric is a regular expression with one group."""
    try:
        groups = re.compile(metric).groups
    except re.error as error:
        raise BadInputError(f"--metric {metric!r} is not a regular expression: {error}.") from None
    if groups != 1:
        raise BadInputError(
            f"--metric {metric!r} has {groups} groups. Put one pair of parentheses around the "
            "number, as in 'step time: ([0-9.]+)'."
        )


def _hang_limit_s(experiment: Experiment) -> float:
    return max(_LEAST_LIMIT_S, experiment.budget_s)


def _run_process(
    words: list[str], environment: Mapping[str, str], limit_s: float = math.inf
) -> tuple[int | None, str]:
    """Run a command; return its exit code and its output.

    The code is None if the command was stopped at the limit. All its processes are ended, even if
    this process is interrupted.
    """
    running = ProcessTree(words, environment)
    try:
        code = running.wait(time.monotonic() + limit_s)
    finally:
        said = running.end()
    return code, said


def _explain_exit(output: str, code: int) -> str:
    """Return why a run failed: its last message for the user, else its last line of output."""
    lines = [line for line in output.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("outpace: ")]
    words = _json_error(lines, code) or (told or lines or ["no output"])[-1]
    return f"exit code {code}: {words.removeprefix('outpace: ')[-_TOLD:]}"


def _json_error(lines: list[str], code: int) -> str | None:
    """Return the first line of the error in `--json` output.

    If the exit code is 1, the error may be a traceback, so return its last line.
    """
    written = [line for line in lines if line.startswith('{"error"')]
    with suppress(ValueError, KeyError, TypeError, IndexError):
        told = str(json.loads(written[-1])["error"]).strip().splitlines()
        return told[-1 if code == 1 else 0]
    return None


def _run_name(experiment: Experiment, arm: Arm, number: int) -> str:
    """Return a run's file name; the arm's number keeps the names of different arms distinct."""
    return f"{experiment.arms.index(arm)}-{file_name(arm.name)}-{number + 1:03d}"


def file_name(name: str) -> str:
    """Return `name` as a valid file name: no separators, at most 80 characters."""
    return re.sub(r"[^A-Za-z0-9._=+-]+", "_", name)[:80].lstrip(".") or "arm"


def _format_toml(values: Mapping[str, Any]) -> str:
    """Return settings without nesting as TOML; their values as JSON are valid TOML."""
    known = {name: value for name, value in values.items() if value is not None}
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in known.items()]
    return "\n".join([*lines, ""])
