"""Readers of training logs: step time, throughput, memory and layout.

pretraining_logs.py reads the console output of pretraining frameworks, and
transformers_trainer_logs.py the logs of transformers' Trainer. run.json and metrics.jsonl of
outpace are read here.
"""

import codecs
import json
import re
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from outpace.interop.log_lines import is_plausible, trains_adapters
from outpace.interop.pretraining_logs import (
    read_deepspeed,
    read_megatron,
    read_nanotron,
    read_torchtitan,
)
from outpace.interop.transformers_trainer_logs import (
    STATE,
    log_name,
    read_trainer,
    read_trainer_state,
)
from outpace.records.errors import BadInputError
from outpace.records.measurement import WARMUP_STEPS, Measurement
from outpace.records.run import RunRecord
from outpace.records.training_log import LoggedRun

_MOST_BYTES = 2**30
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LONGEST_LINE = 20_000  # of text that no trainer prints about a step
_TRAINERS = "outpace, torchtitan, Megatron-LM, Megatron-Bridge, DeepSpeed, transformers, nanotron"
_READERS = (read_torchtitan, read_nanotron, read_megatron, read_deepspeed, read_trainer)


def read_log(path: Path) -> LoggedRun:
    """Read a log or a run directory. Raises BadInputError if it has no steps of a known trainer."""
    if path.is_dir():
        return _read_run_folder(path)
    if path.name in ("metrics.jsonl", "run.json"):
        return _read_outpace_run(path.parent)
    text = _read_text(path)
    if path.name == STATE or (text.lstrip()[:1] == "{" and '"log_history"' in text):
        return read_trainer_state(path)
    whole = [line[:_LONGEST_LINE] for line in text.splitlines()]
    for lines, note in _split_restarts(whole):
        for reader in _READERS:
            found = reader(lines)
            if found is not None:
                found |= {
                    "log": log_name(path),
                    "notes": (*found.get("notes", ()), *note),
                    "adapters": trains_adapters(whole),
                }
                return LoggedRun.parse(found, str(path))
    raise BadInputError(
        f"{path}: it contains no steps of a known trainer. Supported are logs of {_TRAINERS}; "
        "give the console's output, trainer_state.json, or the folder of a run."
    )


# Lines that trainers print before the first step, and for every step.
_SETTING = re.compile(
    r"device mesh with|local batch size \d+, global batch size|tokens per DP rank"
    r"|\b\w{1,80} \.{4,} \S|\[config\.py:\d+:print\]|Config\(general="
    r"|\*{5} Running training \*{5}"
)
_STEP = re.compile(
    r"step:\s*\d+\s+loss:|elapsed time per iteration|time_per_iteration_ms"
    r"|SamplesPerSec=|'learning_rate':"
)


def _split_restarts(lines: Sequence[str]) -> list[tuple[Sequence[str], tuple[str, ...]]]:
    """Split a log where the job restarted; return lines and notes of each part that logged steps.

    A restarted job often appends to the same file, possibly with another layout. The last part that
    has steps after the warm-up comes first; the others follow by number of steps.
    """
    begins, counts, setting = [0], [0], None
    for place, line in enumerate(lines):
        if _STEP.search(line):
            if setting is not None:
                begins.append(setting)
                counts.append(0)
                setting = None
            counts[-1] += 1
        elif counts[-1] and setting is None and _SETTING.search(line):
            setting = place
    if len(begins) == 1:
        return [(lines, ())]
    bounds = list(pairwise([*begins, len(lines)]))
    enough = 2 * WARMUP_STEPS + 1
    order = sorted(range(len(begins)), key=lambda at: (min(counts[at], enough), at), reverse=True)
    return [
        (
            lines[slice(*bounds[at])],
            (f"the log has {len(begins)} starts of a run: only start {at + 1} is read.",),
        )
        for at in order
    ]


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise BadInputError(
                f"{path} is larger than {_MOST_BYTES // 2**20} MiB. Give the part with a few "
                "hundred steps and the lines before the first step."
            )
        data = path.read_bytes()
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from None
    # PowerShell redirects to UTF-16.
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return _COLOURS.sub("", data.decode("utf-16" if wide else "utf-8-sig", errors="replace"))


def _read_run_folder(path: Path) -> LoggedRun:
    if (path / "run.json").is_file():
        return _read_outpace_run(path)
    states = sorted(path.glob(f"**/{STATE}"), key=lambda one: one.stat().st_mtime)
    if states:
        return read_trainer_state(states[-1])
    raise BadInputError(
        f"{path} holds neither run.json (outpace) nor trainer_state.json (transformers). Pass "
        "the file with the console output."
    )


def _read_outpace_run(path: Path) -> LoggedRun:
    record = RunRecord.load(path / "run.json")
    begin = record.last_untimed_step(_load_finished_result(path / "result.json", record))
    rows = []
    for line in _read_text(path / "metrics.jsonl").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the last line of a killed run
        if isinstance(row, dict) and is_plausible(row.get("step_time_s")):
            step = row.get("step")
            if not is_plausible(step) or step > begin:
                rows.append(row)
    steady = [row for row in rows if not record.is_warm_up(int(row.get("step") or 0))]
    if len(steady) <= WARMUP_STEPS:
        steady = rows
    if not steady:
        since = f" since it was resumed after step {begin:,}" if begin else ""
        raise BadInputError(f"{path}: the run has no steps yet{since}.")
    told = [row.get("peak_memory_bytes") for row in rows]
    memory = [int(value) for value in told if is_plausible(value)]
    settings = record.settings
    return LoggedRun(
        trainer="outpace", log=path.resolve().name, steps=len(steady),
        step_time_s=statistics.median(row["step_time_s"] for row in steady),
        peak_memory_bytes=max(memory, default=None), seq_len=record.seq_len,
        global_batch=settings.global_batch, world_size=record.plan.world_size, plan=record.plan,
        parameters=record.parameters,
        memory_kind="allocated" if record.device.startswith("cuda") else "resident",
    )  # fmt: skip


def _load_finished_result(path: Path, record: RunRecord) -> Measurement | None:
    result = Measurement.load(path) if path.is_file() else None
    return result if result is not None and result.steps == record.total_steps else None
