"""Readers for logs of trainers: step time, throughput, memory and layout.

Formats, with the code that writes them: torchtitan, `torchtitan/components/metrics.py` (`log`),
`distributed/parallel_dims.py` and `train.py`; Megatron-LM, `megatron/training/training.py`
(`training_log`) and `arguments.py` (`_print_args`), which Megatron-Bridge keeps; DeepSpeed,
`deepspeed/utils/timer.py` (`ThroughputTimer.stop`) and `runtime/config.py` (`print`); nanotron,
`src/nanotron/trainer.py` (`train_step_logs`) and `logging/base.py` (`human_format`); transformers,
`trainer_utils.speed_metrics` and trainer_state.json; outpace, run.json and metrics.jsonl.
"""

import json
import re
import statistics
from ast import literal_eval
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from outpace.interop.rounded_numbers import (
    Range,
    abbreviation_range,
    batch_of_epochs,
    rate_range,
    runtime_range,
)
from outpace.records.base import read_object
from outpace.records.errors import BadInputError, shorten
from outpace.records.measurement import WARMUP_STEPS, Measurement
from outpace.records.run import RunRecord
from outpace.records.training_log import LoggedRun

_MOST_BYTES = 2**30
_EVAL = re.compile(r"eval\w*_runtime$")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# A number, but not the beginning of something else ("1.2.3").
_NUMBER = r"(\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?)(?!\.?\d)"
# Times, rates and memory outside of this range are treated as damaged.
_LEAST, _MOST = 1e-12, 1e18
_GIB, _MIB = 2**30, 2**20
_STATE = "trainer_state.json"
_TRAINERS = "outpace, torchtitan, Megatron-LM, Megatron-Bridge, DeepSpeed, transformers, nanotron"


def read_log(path: Path) -> LoggedRun:
    """Read a log, or a run's folder. Raises BadInputError if it has no steps of a known trainer."""
    if path.is_dir():
        return _read_folder(path)
    if path.name in ("metrics.jsonl", "run.json"):
        return _read_outpace(path.parent)
    text = _read_text(path)
    if path.name == _STATE or (text.lstrip()[:1] == "{" and '"log_history"' in text):
        return _read_trainer_state(path)
    for lines, note in _starts(text.splitlines()):
        for reader in (_torchtitan, _nanotron, _megatron, _deepspeed, _trainer):
            found = reader(lines)
            if found is not None:
                notes = (*found.pop("notes", ()), *note)
                return LoggedRun.parse({**found, "log": _log_name(path), "notes": notes}, str(path))
    raise BadInputError(
        f"{path}: it contains no steps of a known trainer. Supported are logs of {_TRAINERS}; "
        "give the console's output, trainer_state.json, or the folder of a run."
    )


# What trainers print about a run before its first step, and about every step.
_SETTING = re.compile(
    r"device mesh with|local batch size \d+, global batch size|^\W*(?:\d+: *)?\w+ \.{4,} \S"
    r"|\[config\.py:\d+:print\]|Config\(general=|\*{5} Running training \*{5}"
)
_STEP = re.compile(
    r"step:\s*\d+\s+loss:|elapsed time per iteration|elapsed_time_per_iteration_ms"
    r"|CurrSamplesPerSec=|'learning_rate':"
)


def _starts(lines: Sequence[str]) -> list[tuple[Sequence[str], tuple[str, ...]]]:
    """Return the lines of each start that has steps, the most useful first, with a note. A
    restarted job often appends to the same file, possibly with another layout. The last start with
    steps after the warm-up comes first, followed by the others, sorted by their number of steps.
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
        return _COLOURS.sub("", path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from None


def _read_folder(path: Path) -> LoggedRun:
    if (path / "run.json").is_file():
        return _read_outpace(path)
    states = sorted(path.glob(f"**/{_STATE}"), key=lambda one: one.stat().st_mtime)
    if states:
        return _read_trainer_state(states[-1])
    raise BadInputError(
        f"{path} holds neither run.json (outpace) nor trainer_state.json (transformers). Give the "
        "file with the console's output."
    )


def _number(text: str) -> float | None:
    """Parse a number; None for a value that no run can have."""
    value = float(text.replace(",", ""))
    return value if value == 0 or _LEAST < value < _MOST else None


def _steady_median(values: Sequence[float]) -> float | None:
    """Return the median of logged values without the first, which includes start-up."""
    return statistics.median(values[1:] if len(values) > 1 else values) if values else None


def _find_numbers(pattern: str, lines: Iterable[str]) -> list[float]:
    compiled = re.compile(pattern)
    found = (_number(match[1]) for line in lines if (match := compiled.search(line)))
    return [value for value in found if value is not None]


def _last(pattern: str, lines: Iterable[str]) -> int | None:
    found = _find_numbers(pattern, lines)
    return int(found[-1]) if found else None


def _read_outpace(path: Path) -> LoggedRun:
    record = RunRecord.load(path / "run.json")
    begin = record.last_untimed_step(_finished_result(path / "result.json", record))
    rows = []
    for line in _read_text(path / "metrics.jsonl").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the last line of a killed run
        if isinstance(row, dict) and _is_possible(row.get("step_time_s")):
            step = row.get("step")
            if not _is_possible(step) or step > begin:
                rows.append(row)
    steady = [row for row in rows if not record.is_warm_up(int(row.get("step") or 0))]
    if len(steady) <= WARMUP_STEPS:
        steady = rows
    if not steady:
        since = f" since it was resumed after step {begin:,}" if begin else ""
        raise BadInputError(f"{path}: the run has no steps yet{since}.")
    told = [row.get("peak_memory_bytes") for row in rows]
    memory = [int(value) for value in told if _is_possible(value)]
    settings = record.settings
    return LoggedRun(
        trainer="outpace", log=path.resolve().name, steps=len(steady),
        step_time_s=statistics.median(row["step_time_s"] for row in steady),
        peak_memory_bytes=max(memory, default=None), seq_len=record.seq_len,
        global_batch=settings.global_batch, world_size=record.plan.world_size, plan=record.plan,
        parameters=record.parameters,
        memory_kind="allocated" if record.device.startswith("cuda") else "resident",
    )  # fmt: skip


def _finished_result(path: Path, record: RunRecord) -> Measurement | None:
    """Return the result of a run that has completed all its steps, else None."""
    result = Measurement.load(path) if path.is_file() else None
    return result if result is not None and result.steps == record.total_steps else None


def _is_possible(value: object) -> TypeGuard[float]:
    """Return whether this is a number that a run can have."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return _LEAST < value < _MOST


def _clock_step_s(step: re.Pattern[str], lines: Iterable[str]) -> tuple[float, float] | None:
    """Return bounds of the step time, from the timestamps at the start of lines.

    `step` finds a step's number. Evaluations and checkpoints may occur between two lines, so both
    bounds are from the median pair. None without timestamps or with fewer than two steps.
    """
    marks: list[tuple[int, float]] = []
    unit_s = 0.0
    for line in lines:
        time, number = _TIME.search(line), step.search(line)
        if time is None or number is None:
            continue
        fraction = time[2] or ""
        unit_s = max(unit_s, 10.0 ** -len(fraction))
        try:
            moment = datetime.fromisoformat(time[1].replace("T", " ")).replace(tzinfo=UTC)
        except ValueError:
            continue
        mark = int(number[1]), moment.timestamp() + float(f"0.{fraction or 0}")
        if marks and (mark[0] <= marks[-1][0] or mark[1] < marks[-1][1]):
            marks.clear()  # the run was resumed, or the clock was set
        marks.append(mark)
    if len(marks) < 2 or marks[-1][1] - marks[0][1] <= 0:
        return None
    pairs = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(marks)]
    least, most = (
        statistics.median(max(0.0, seconds + error_s) / count for count, seconds in pairs)
        for error_s in (-unit_s, unit_s)
    )
    steps, total_s = marks[-1][0] - marks[0][0], marks[-1][1] - marks[0][1]
    return least, min(most, (total_s + unit_s) / steps)


def _torchtitan(lines: Sequence[str]) -> dict[str, Any] | None:
    step = re.compile(
        rf"step:\s*(\d+)\s+loss:\s*\S+.*memory:\s*{_NUMBER}GiB\([^)]*\)\s+tps:\s*{_NUMBER}"
    )
    matches = [match for line in lines if (match := step.search(line))]
    told = [(_number(match[2]), _number(match[3])) for match in matches]
    found = [(gib, rate) for gib, rate in told if gib is not None and rate is not None]
    if not found:
        return None
    text = "\n".join(lines)
    batch = re.search(
        r"local batch size (\d+), global batch size (\d+), gradient accumulation steps \d+, "
        r"sequence length (\d+)", text
    )  # fmt: skip
    values = batch.groups() if batch else (None, None, None)
    return {
        "trainer": "torchtitan",
        "steps": max(1, len(found) - 1),
        "tokens_per_s_per_device": _steady_median([rate for _, rate in found]),
        "clock_step_s": _clock_step_s(re.compile(r"step:\s*(\d{1,15})\s"), lines),
        "peak_memory_bytes": int(max(gib for gib, _ in found) * _GIB),
        "memory_kind": "reserved",
        **dict(zip(("micro_batch", "global_batch", "seq_len"), values, strict=True)),
        **_torchtitan_mesh(text),
    }


def _torchtitan_mesh(text: str) -> dict[str, int]:
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    named = re.search(r"device mesh with parallelism: (.*)", text)
    if named is not None:
        pairs = re.findall(r"(\w+)=(\d{1,9})\b", named[1])
    else:
        older = re.search(r"Building \d+-D device mesh with (\[.*?\]), (\[.*?\])", text)
        if older is None:
            return {}
        try:
            pairs = list(zip(literal_eval(older[1]), literal_eval(older[2]), strict=True))
        except (ValueError, SyntaxError):
            return {}
    sizes = {name: int(size) for name, size in pairs if name in axes}
    world = 1
    for name, size in sizes.items():
        world *= size if name != "ep" else 1
    return {**sizes, "world_size": world}


# Megatron's arguments as _print_args writes them: "  seq_length ........ 4096".
_MEGATRON: Mapping[str, str] = {
    "seq_length": "seq_len",
    "global_batch_size": "global_batch",
    "micro_batch_size": "micro_batch",
    "world_size": "world_size",
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "expert_tp",
}


def _megatron(lines: Sequence[str]) -> dict[str, Any] | None:
    lines, grown = _of_the_last_batch(lines)
    times = _find_numbers(rf"elapsed time per iteration \(ms\):\s*{_NUMBER}", lines)
    if not times:
        return None
    found = dict(_find_settings(lines, _MEGATRON))
    batch = _last(r"global batch size:\s*(\d+)", lines)
    length = _last(r"actual seqlen:\s*(\d+)", lines)
    memory = _find_numbers(rf"max allocated:\s*{_NUMBER}", lines)
    options = _megatron_options(lines, found)
    return {
        "trainer": "megatron",
        "steps": max(1, len(times) - 1),
        "step_time_s": (_steady_median(times) or 0.0) / 1e3,
        "peak_memory_bytes": int(max(memory) * _MIB) if memory else None,
        "pp_schedules_all": True,
        **found,
        **({"global_batch": batch} if batch else {}),
        **({"seq_len": length} if length else {}),
        **options,
        "notes": (*options["notes"], *grown),
    }


def _of_the_last_batch(lines: Sequence[str]) -> tuple[Sequence[str], tuple[str, ...]]:
    """Leave out steps whose batch or length differs from the last step's, since Megatron may change
    them during a run (rampup_batch_size, step_batch_size_schedule, curriculum); return a note on
    them.
    """
    sizes = re.compile(r"global batch size:\s*(\d+)(?:.*actual seqlen:\s*(\d+))?")
    steps = {place: match for place, line in enumerate(lines) if (match := sizes.search(line))}
    if len({match.groups() for match in steps.values()}) <= 1:
        return lines, ()
    last = [*steps.values()][-1].groups()
    other = {place for place, match in steps.items() if match.groups() != last}
    batch, length = last
    note = (
        f"the batch or the length changed during the run: only the {len(steps) - len(other):,} "
        f"logged steps of {batch} sequences{f' of {length} tokens' if length else ''} are read."
    )
    return [line for place, line in enumerate(lines) if place not in other], (note,)


def _megatron_options(lines: Iterable[str], found: Mapping[str, int]) -> dict[str, Any]:
    """Read sharding, experts and recomputation from Megatron's arguments."""
    words = re.compile(r"(\w+) \.{2,} (\w+)\s*$")
    said = {match[1]: match[2] for line in lines if (match := words.search(line))}
    options: dict[str, Any] = {}
    notes = []
    sharded = said.get("use_distributed_optimizer")
    if sharded in ("True", "False"):
        options["zero"] = int(sharded == "True")
    if found.get("ep", 1) > 1 and not options.get("zero"):
        options["zero"] = 1
        notes.append(
            "Megatron kept whole optimizer states while it divided experts over ranks; the plan "
            "shards them (ZeRO-1), which needs less memory."
        )
    if found.get("expert_tp", found.get("tp", 1)) != found.get("tp", 1):
        notes.append(
            f"Megatron split experts over {found['expert_tp']} tensor-parallel ranks and other "
            f"layers over {found.get('tp', 1)}; the plan splits both in the same way, or does not "
            "split experts if ep includes the ranks of tp."
        )
    granularity = said.get("recompute_granularity")
    if granularity == "full":
        options["checkpointing"] = "full"
        if said.get("recompute_method") == "block":
            notes.append(
                f"the first {said.get('recompute_num_layers')} blocks of each stage were "
                "recomputed; the plan recomputes all. Use --layout checkpoint_every=K for every "
                "K-th."
            )
    elif granularity == "selective":
        notes.append(
            "Megatron recomputed some modules (recompute_granularity selective), which matches no "
            "mode of outpace; the plan recomputes none. Use --layout checkpointing=selective "
            "or attention."
        )
    return {**options, "notes": tuple(notes)}


def _find_settings(lines: Iterable[str], names: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Find settings printed as a name, dots and a value; DeepSpeed has no dots after long names."""
    pattern = re.compile(r"(\w+) \.* (\d{1,15})\s*$")
    for line in lines:
        match = pattern.search(line)
        if match and match[1] in names:
            yield names[match[1]], int(match[2])


_DEEPSPEED: Mapping[str, str] = {
    "train_batch_size": "global_batch",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "world_size": "world_size",
}


def _deepspeed(lines: Sequence[str]) -> dict[str, Any] | None:
    rates = _find_numbers(rf"CurrSamplesPerSec={_NUMBER}", lines)
    if not rates:
        return None
    most = max(_find_numbers(rf"MaxMemAllocated={_NUMBER}GB", lines), default=0.0)
    found = dict(_find_settings(lines, _DEEPSPEED))
    # A pipeline's stages are printed as "stage=3 layers=7" when a model is built.
    stage = _last(r'(?:"stage": |stage=(?:<ZeroStageEnum\.\w+: )?)(\d)\b(?! layers=)', lines)
    return {
        "trainer": "deepspeed",
        "steps": max(1, len(rates) - 1),
        "samples_per_s": _steady_median(rates),
        "clock_step_s": _deepspeed_clock_s(lines),
        "peak_memory_bytes": int(most * _GIB) or None,
        **({} if stage is None else {"zero": stage}),
        **{name: value for name, value in found.items() if value},
    }


def _deepspeed_clock_s(lines: Sequence[str]) -> tuple[float, float] | None:
    """Return bounds of the step time by the lines' timestamps. Before version 0.8, DeepSpeed
    counted micro-batches, and its rate is for one micro-batch, often without the optimizer.
    """
    if (clock := _clock_step_s(re.compile(r"global_step=(\d{1,15}),"), lines)) is not None:
        return clock
    micro = _clock_step_s(re.compile(r"\b\d+/(\d{1,15}), (?:\w+)?SamplesPerSec="), lines)
    passes = dict(_find_settings(lines, {"gradient_accumulation_steps": "passes"})).get("passes")
    return None if micro is None or not passes else (micro[0] * passes, micro[1] * passes)


def _nanotron(lines: Sequence[str]) -> dict[str, Any] | None:
    human = rf"{_NUMBER}([KMGBT]?)"
    times = _read_abbreviated(rf"elapsed_time_per_iteration_ms: {human}", lines)
    if not times:
        return None
    total = _read_abbreviated(rf"tokens_per_sec: {human}", lines)
    each = _read_abbreviated(rf"tokens_per_sec_per_gpu: {human}", lines)
    batch = _read_abbreviated(rf"global_batch_size: {human}", lines)
    found: dict[str, Any] = {}
    if total and each:
        found["world_size"] = _world_size(total, each)
    if batch:
        found["global_batch"] = batch[-1].only_whole_number()
    sizes = "\n".join(lines)
    for name in ("tp", "pp"):
        match = re.search(rf"\b{name}=(\d{{1,9}})\b", sizes)
        if match:
            found[name] = int(match[1])
    return {
        "trainer": "nanotron",
        "steps": max(1, len(times) - 1),
        "step_time_s": (_steady_median([_middle(time) for time in times]) or 0.0) / 1e3,
        "tokens_per_s_per_device": _steady_median([_middle(value) for value in each]) or None,
        **found,
    }


def _world_size(total: Sequence[Range], each: Sequence[Range]) -> int | None:
    """Return the number of devices, from total rates and rates per device; None if several fit.

    The two rates in a line are rounded, so their quotient alone may give a wrong number.
    """
    quotients = [one.divide(part) for one, part in zip(total, each, strict=False) if part.low > 0]
    if not quotients:
        return None
    low, high = max(one.low for one in quotients), min(one.high for one in quotients)
    return Range(low, high).only_whole_number() if low <= high else None


def _middle(number: Range) -> float:
    return (number.low + number.high) / 2


def _read_abbreviated(pattern: str, lines: Iterable[str]) -> list[Range]:
    """Read numbers in nanotron's form: 1.05M."""
    compiled = re.compile(pattern)
    matches = [match for line in lines if (match := compiled.search(line))]
    found = [(_number(match[1]), match[2]) for match in matches]
    return [abbreviation_range(value, suffix) for value, suffix in found if value is not None]


_RESUMED = (
    "Trainer divides the time since its start by the number of all steps, so a step of a resumed "
    "run takes longer than this."
)


def _trainer(lines: Sequence[str]) -> dict[str, Any] | None:
    """Return the last values that a Trainer printed: numbers, or in version 5 strings."""
    value = rf"'?{_NUMBER}'?"
    ends = [place for place, line in enumerate(lines) if "'train_steps_per_second'" in line]
    rate = _find_numbers(rf"'train_steps_per_second': {value}", lines)
    if not rate or not rate[-1]:
        return None
    samples = _find_numbers(rf"'train_samples_per_second': {value}", lines)
    time = [one for one in _find_numbers(rf"'train_runtime': {value}", lines) if one > 0]
    steps = rate[-1] * time[-1] if time else 1
    epochs = _find_numbers(rf"'train_steps_per_second'.*'epoch': {value}", lines)
    batch, rounded = _batch(
        samples[-1] if samples else None,
        rate[-1],
        steps / max(1.0, epochs[-1] if epochs else 1.0),
        printed="'train_steps_per_second': '" in lines[ends[-1]],
    )
    inside = lines[ends[-2] + 1 if len(ends) > 1 else 0 : ends[-1]]
    evaluations = _find_numbers(rf"'eval\w*_runtime': {value}", inside)
    runtime = time[-1] if time else steps / rate[-1]
    spent, notes = _subtract_evaluations(runtime, evaluations, "the console's output")
    return {
        "trainer": "trainer",
        "steps": max(1, round(steps)),
        "step_time_s": spent / steps,
        "global_batch": batch,
        "notes": (_RESUMED, *rounded, *notes),
    }


def _subtract_evaluations(
    runtime_s: float, evaluations_s: Sequence[float], where: str
) -> tuple[float, tuple[str, ...]]:
    """Return the Trainer's runtime in seconds, without evaluations, and a note."""
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


def _batch(
    samples_per_s: float | None, steps_per_s: float, steps: float, *, printed: bool
) -> tuple[int | None, tuple[str, ...]]:
    """Return the samples per step, if the two rates determine it, and a note. `steps`: number in an
    epoch; `printed`: rates are rounded as version 5 prints them.
    """
    if samples_per_s is None:
        return None, ()
    total = rate_range(samples_per_s, printed=printed)
    return _noted_batch(total.divide(rate_range(steps_per_s, printed=printed)), steps)


def _noted_batch(
    mean: Range, steps: float, multiple_of: int = 1
) -> tuple[int | None, tuple[str, ...]]:
    """Return the batch that fits a mean, and a note if others fit as well."""
    batch, certain = batch_of_epochs(mean, steps, multiple_of)
    if batch is None or certain:
        return batch, ()
    return batch, (
        f"the batch of {batch} is the samples per step by Trainer's rates; if the last step of an "
        "epoch had fewer samples, pass the batch with --global-batch.",
    )


def _read_trainer_state(path: Path) -> LoggedRun:
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
    runtime = _seconds(last, "train_runtime", path)
    steps = values.get("global_step")
    if not isinstance(steps, int) or not _is_possible(steps):
        raise BadInputError(
            f"{path}: global_step is {_show_value(steps)}; it must be a number of steps, 1 or more."
        )
    batch, rounded = _state_batch(values, last, runtime, steps)
    # The last time does not include the steps before a restart.
    before = rows[ends[-2]].get("step") if len(ends) > 1 else 0
    if isinstance(before, int) and 0 < before < steps:
        steps -= before
    inside = rows[ends[-2] + 1 if len(ends) > 1 else 0 : ends[-1]]
    evaluations = [_seconds(row, name, path) for row in inside for name in row if _EVAL.match(name)]
    spent, notes = _subtract_evaluations(runtime, evaluations, str(path))
    return LoggedRun.parse(
        {
            "trainer": "trainer",
            "log": _folder_name(path.resolve().parent) if path.name == _STATE else _log_name(path),
            "steps": steps,
            "step_time_s": spent / steps,
            "global_batch": batch,
            "micro_batch": values.get("train_batch_size") or None,
            "notes": (*((_RESUMED,) if len(ends) == 1 else ()), *rounded, *notes),
        },
        str(path),
    )


def _state_batch(
    values: Mapping[str, object], last: Mapping[str, object], runtime_s: float, steps: float
) -> tuple[int | None, tuple[str, ...]]:
    """Return the samples per step of a trainer_state.json, and a note."""
    samples, epochs = last.get("train_samples_per_second"), last.get("epoch")
    if not _is_possible(samples):
        return None, ()
    total = rate_range(samples).multiply(runtime_range(runtime_s))
    mean = total.divide(Range(steps, steps))
    each = values.get("train_batch_size")  # of one process, in one pass
    multiple = each if isinstance(each, int) and each > 0 else 1
    passes = epochs if _is_possible(epochs) and epochs > 1 else 1.0
    return _noted_batch(mean, steps / passes, multiple)


def read_trainer_rate(folder: Path) -> float | None:
    """Return the highest learning rate in the Trainer's log next to a model; None without a log."""
    try:
        history = read_object(folder / _STATE).get("log_history")
    except BadInputError:
        return None
    rows = [row for row in history if isinstance(row, dict)] if isinstance(history, list) else []
    return max(
        (rate for row in rows if _is_possible(rate := row.get("learning_rate"))), default=None
    )


def _seconds(row: Mapping[str, object], name: str, path: Path) -> float:
    """Return a time from a row of log_history. Raises BadInputError if it is not a time."""
    value = row[name]
    if _is_possible(value):
        return value
    raise BadInputError(
        f"{path}: {name} in log_history is {_show_value(value)}; it must be a number of seconds "
        "above 0. If the file is damaged, give the console output instead."
    )


def _show_value(value: object) -> str:
    """Format the value as JSON."""
    return shorten(json.dumps(value))


def _log_name(path: Path) -> str:
    """Name a log with its folder ("run-7/console.log"), since logs of all runs share a name."""
    return f"{path.resolve().parent.name}/{path.name}"


def _folder_name(path: Path) -> str:
    """Name a folder with its parent: "out/checkpoint-40", since runs share checkpoint names."""
    inside = path.name.startswith("checkpoint-")
    return f"{path.parent.name}/{path.name}" if inside else path.name
