"""Readers of transformers' Trainer logs: the console, trainer_state.json, tables of results.

The formats are defined in transformers by `trainer_utils.speed_metrics`, `trainer.py` (the lines
after "Running training") and `trainer_pt_utils.py` (`log_metrics`). TRL, axolotl, LLaMA-Factory,
ms-swift and unsloth keep or extend them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.interop.log_lines import NUMBER, find_numbers, is_plausible, last_number, parse_number
from outpace.interop.rounded_numbers import Range, infer_batch_size, rate_range, runtime_range
from outpace.records.base import read_object
from outpace.records.errors import BadInputError, shorten
from outpace.records.training_log import LoggedRun

STATE = "trainer_state.json"
_EVAL = re.compile(r"eval\w*_runtime$")
_RATE = re.compile(r"""(['"])train_steps_per_second\1: ('?)""")
# A row of the table that log_metrics prints.
_ROW = re.compile(r"^[\s*]*((?:train|eval)_\w+|epoch)\s+=\s+(\d[\d:.,]*)\s*$")
# Largest relative rounding error at which a rate still gives a step time.
_MOST_ROUNDED = 0.02
_RESUMED = (
    "Trainer divides the time since its start by the number of all steps, so a step of a resumed "
    "run takes longer than this."
)


def read_trainer(lines: Sequence[str]) -> dict[str, Any] | None:
    """Return the last results that a Trainer printed, or None.

    Values are printed as numbers, and from version 5 on as strings.
    """
    lines = _join_results(lines)
    ends = _find_result_lines(lines)
    if not ends:
        return None
    last = lines[ends[-1]]
    rate = _find_value("train_steps_per_second", last)
    if not rate:
        return None
    printed = "'train_steps_per_second': '" in last
    told = _read_banner(lines)
    time = _find_value("train_runtime", last)
    counted = time and _find_step_count(lines, told, time, rate_range(rate, printed=printed))
    if not counted:
        _require_precise_rate(rate, printed=printed)
    steps = counted or (rate * time if time else 1)
    runtime = time or steps / rate
    epochs = _find_value("epoch", last)
    batch: int | None = told.get("global_batch")
    notes: tuple[str, ...] = ()
    if batch is None:
        samples = _find_value("train_samples_per_second", last)
        each = steps / max(1.0, epochs or 1.0)
        batch, notes = _batch_from_rates(samples, rate, each, printed=printed)
    inside = lines[ends[-2] + 1 if len(ends) > 1 else 0 : ends[-1]]
    evaluations = find_numbers(rf"""['"]eval\w*_runtime['"]: '?{NUMBER}""", inside)
    spent, evaluated = _subtract_evaluations(runtime, evaluations, "the console's output")
    skipped = told.get("resumed_after", 0)
    done = steps - skipped if 0 < skipped < steps else steps
    return {
        "trainer": "trainer",
        "steps": max(1, round(done)),
        "step_time_s": spent / done,
        "global_batch": batch,
        "micro_batch": told.get("micro_batch"),
        "trainable_parameters": told.get("trainable_parameters"),
        "checkpointing": told.get("checkpointing"),
        "notes": (*(() if skipped else (_RESUMED,)), *notes, *evaluated),
    }


def _find_value(name: str, line: str) -> float | None:
    """Return the last value with this name in a line; None if it is missing or 0."""
    found = re.findall(rf"""['"]{name}['"]: '?{NUMBER}""", line)
    return parse_number(found[-1]) or None if found else None


def _join_results(lines: Sequence[str]) -> Sequence[str]:
    """Put the results of a JSON file (such as all_results.json) or of a table on one line.

    A table is ignored if a line already contains results.
    """
    if any(_RATE.search(line) for line in lines):
        text = "\n".join(lines).strip()
        if text.startswith("{") and text.endswith("}") and text.count("{") == 1:
            return [text.replace("\n", " ")]
        return lines
    rows: dict[str, float] = {}
    for line in lines:
        match = _ROW.match(line)
        if match is not None:
            rows[match[1]] = _parse_table_value(match[2])
    if "train_steps_per_second" not in rows:
        return lines
    return [*lines, ", ".join(f"'{name}': {value}" for name, value in rows.items())]


def _parse_table_value(text: str) -> float:
    """Parse a number, or a time such as 1:02:03.45; return 0 for other text."""
    value = 0.0
    for part in text.replace(",", "").split(":"):
        try:
            value = value * 60 + float(part)
        except ValueError:
            return 0.0
    return value


def _find_result_lines(lines: Sequence[str]) -> list[int]:
    """Return the indices of lines with the results of a run, one line per run.

    A log may repeat the same results.
    """
    found: dict[tuple[float | None, ...], int] = {}
    names = ("train_runtime", "train_steps_per_second", "train_samples_per_second", "train_loss")
    for place, line in enumerate(lines):
        if _RATE.search(line):
            found.setdefault(tuple(_find_value(name, line) for name in names), place)
    return sorted(found.values())


def _read_banner(lines: Sequence[str]) -> dict[str, Any]:
    found = {
        name: last_number(rf"{words}\s*=\s*([\d,]+)", lines)
        for name, words in (
            ("global_batch", r"Total (?:train )?batch size(?: \([^)]*\))?"),
            ("micro_batch", r"(?:Instantaneous b|B)atch size per device"),
            ("total_steps", r"Total (?:optimization )?steps"),
            ("trainable_parameters", r"[Tt]rainable parameters"),
        )
    }
    found["resumed_after"] = last_number(r"Continuing training from global step (\d+)", lines)
    if any("DataParallel so batch size has been adjusted" in line for line in lines):
        found["micro_batch"] = None
    told: dict[str, Any] = {name: value for name, value in found.items() if value}
    if any("incompatible with gradient checkpointing" in line for line in lines):
        told["checkpointing"] = "full"
    return told


def _find_step_count(
    lines: Sequence[str], banner: Mapping[str, Any], runtime_s: float, rate: Range
) -> int | None:
    """Return the logged number of steps that agrees with the runtime and the rounded rate.

    Returns None if none agrees, or more than one.
    """
    named = {banner.get("total_steps")}
    counters = re.compile(r"\b(\d{1,9})/(\d{1,9})\b(?=['\" ]|$)|\bglobal_step=(\d{1,9})\b")
    for line in lines:
        for done, total, last in counters.findall(line[:2000]):
            if last or done == total:
                named.add(int(last or total))
    least, most = rate.low * runtime_s, rate.high * runtime_s
    fitting = [steps for steps in named if steps and least - 0.5 <= steps <= most + 0.5]
    return fitting[0] if len(fitting) == 1 else None


def _require_precise_rate(rate: float, *, printed: bool) -> None:
    within = rate_range(rate, printed=printed)
    if within.low > 0 and within.high / within.low <= (1 + _MOST_ROUNDED) ** 2:
        return
    slowest = f"{1 / within.low:,.0f}" if within.low > 0 else "any number of"
    raise BadInputError(
        f"train_steps_per_second is {rate:g}, rounded so much that a step took "
        f"{1 / within.high:,.0f} to {slowest} seconds, and the console does not say how many "
        "steps there were. Give trainer_state.json of the output folder instead."
    )


def _subtract_evaluations(
    runtime_s: float, evaluations_s: Sequence[float], where: str
) -> tuple[float, tuple[str, ...]]:
    """Return Trainer's runtime without evaluations, in seconds, with a note.

    Raises BadInputError if the evaluations took longer than the runtime.
    """
    if not evaluations_s:
        return runtime_s, ()
    total = sum(evaluations_s)
    count = f"{len(evaluations_s)} evaluation{'' if len(evaluations_s) == 1 else 's'}"
    if total >= runtime_s:
        raise BadInputError(
            f"{where}: {count} took {total:,.6g} s, but train_runtime, which includes them, is "
            f"{runtime_s:,.6g} s. Was the run resumed? Then train_runtime covers only its last "
            "part: give the log of a run that was not resumed."
        )
    note = (
        f"{count} took {total:,.6g} s of the {runtime_s:,.6g} s that Trainer timed "
        "(train_runtime), and is not counted in the step."
    )
    return runtime_s - total, (note,)


def _batch_from_rates(
    samples_per_s: float | None, steps_per_s: float, steps: float, *, printed: bool
) -> tuple[int | None, tuple[str, ...]]:
    """Return the number of samples per step, if the rates determine it, and a note.

    `steps` is the number of steps per epoch. `printed` rates have the digits that version 5 prints.
    """
    if samples_per_s is None:
        return None, ()
    total = rate_range(samples_per_s, printed=printed)
    return _batch_from_mean(total.divide(rate_range(steps_per_s, printed=printed)), steps)


def _batch_from_mean(
    mean: Range, steps: float, multiple_of: int = 1
) -> tuple[int | None, tuple[str, ...]]:
    """Return the batch size for a mean number of samples per step, with a note if it is uncertain.

    `steps` is the number of steps per epoch.
    """
    batch, certain = infer_batch_size(mean, steps, multiple_of)
    if batch is None or certain:
        return batch, ()
    return batch, (
        f"the batch of {batch} is the samples per step by Trainer's rates; if the last step of an "
        "epoch had fewer samples, pass the batch with --global-batch.",
    )


def read_trainer_state(path: Path) -> LoggedRun:
    """Read a trainer_state.json. Raises BadInputError if the run had not finished."""
    values = read_object(path)
    history = values.get("log_history")
    if not isinstance(history, list):
        raise BadInputError(f"{path} has no log_history, so it is not a trainer_state.json.")
    rows = [row for row in history if isinstance(row, dict)]
    ends = [place for place, row in enumerate(rows) if "train_runtime" in row]
    if not ends:
        raise BadInputError(
            f"{path}: the run was not finished when this file was written, and Trainer does not "
            "time single steps. Give the trainer_state.json of the output folder, which is "
            "written at "
            "the end, or the console's output."
        )
    last = rows[ends[-1]]
    runtime = _read_seconds(last, "train_runtime", path)
    steps = values.get("global_step")
    if not isinstance(steps, int) or not is_plausible(steps):
        raise BadInputError(
            f"{path}: global_step is {_format_json(steps)}; it must be a number of steps, 1 "
            "or more."
        )
    batch, rounded = _read_state_batch(values, last, runtime, steps)
    # The last time does not include the steps before a restart.
    before = rows[ends[-2]].get("step") if len(ends) > 1 else 0
    if isinstance(before, int) and 0 < before < steps:
        steps -= before
    inside = rows[ends[-2] + 1 if len(ends) > 1 else 0 : ends[-1]]
    evaluations = [
        _read_seconds(row, name, path) for row in inside for name in row if _EVAL.match(name)
    ]
    spent, notes = _subtract_evaluations(runtime, evaluations, str(path))
    return LoggedRun.parse(
        {
            "trainer": "trainer",
            "log": _folder_name(path.resolve().parent) if path.name == STATE else log_name(path),
            "steps": steps,
            "step_time_s": spent / steps,
            "global_batch": batch,
            "micro_batch": values.get("train_batch_size") or None,
            "notes": (*((_RESUMED,) if len(ends) == 1 else ()), *rounded, *notes),
        },
        str(path),
    )


def _read_state_batch(
    values: Mapping[str, object], last: Mapping[str, object], runtime_s: float, steps: float
) -> tuple[int | None, tuple[str, ...]]:
    samples, epochs = last.get("train_samples_per_second"), last.get("epoch")
    if not is_plausible(samples):
        return None, ()
    total = rate_range(samples).multiply(runtime_range(runtime_s))
    mean = total.divide(Range(steps, steps))
    each = values.get("train_batch_size")  # of one process, in one pass
    multiple = each if isinstance(each, int) and each > 0 else 1
    passes = epochs if is_plausible(epochs) and epochs > 1 else 1.0
    return _batch_from_mean(mean, steps / passes, multiple)


def read_trainer_rate(folder: Path) -> float | None:
    """Return the highest learning rate in the trainer_state.json next to a model, or None."""
    try:
        history = read_object(folder / STATE).get("log_history")
    except BadInputError:
        return None
    rows = [row for row in history if isinstance(row, dict)] if isinstance(history, list) else []
    return max(
        (rate for row in rows if is_plausible(rate := row.get("learning_rate"))), default=None
    )


def _read_seconds(row: Mapping[str, object], name: str, path: Path) -> float:
    value = row[name]
    if is_plausible(value):
        return value
    raise BadInputError(
        f"{path}: {name} in log_history is {_format_json(value)}; it must be a number of seconds "
        "above 0. If the file is damaged, give the console output instead."
    )


def _format_json(value: object) -> str:
    return shorten(json.dumps(value))


def log_name(path: Path) -> str:
    """Return a log's name with its folder, as in "run-7/console.log".

    Logs of different runs often have the same file name.
    """
    return f"{path.resolve().parent.name}/{path.name}"


def _folder_name(path: Path) -> str:
    """Return a folder's name, with its parent for a checkpoint, as in "out/checkpoint-40"."""
    inside = path.name.startswith("checkpoint-")
    return f"{path.parent.name}/{path.name}" if inside else path.name
