"""Facts about an arm's runs, such as versions and data, and unintended differences between arms."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from outpace.records.comparison import Arm, Comparison, Experiment, Outcome
from outpace.records.machine import Machine
from outpace.records.measurement import Measurement
from outpace.records.run import RUN_FILE, RunRecord
from outpace.records.utilisation import Load
from outpace.training.run_dir import RESULT_FILE

_DATA = ("data", "data_weights", "model", "tokenizer", "seq_len", "task", "eval_fraction")
# Compared facts by name, each with the settings that explain a difference if they are under test.
_ASKED: Mapping[str, tuple[str, ...]] = {
    "outpace": (),
    "versions": (),
    "commit": (),
    "uncommitted changes": (),
    "processor": (),
    "devices": ("device",),
    "variables": (),
    "processes": ("nproc", "plan"),
    "threads a process": ("threads", "nproc", "plan"),
    "train data": _DATA,
    "tokenizer": ("tokenizer", "model", "data"),
    "parameters": ("model", "lora_rank", "lora_targets"),
    "samples a step": ("global_batch",),
    "tokens a sample": ("seq_len", "model"),
    "steps": ("steps", "tokens", "epochs", "global_batch", *_DATA),
    "seed": ("seed",),
}
# Fields of a run's record, settings and plan that change losses and weights. All others only change
# how these are computed.
_OF_RECORD = (
    "parameters", "total_steps", "seq_len", "tokenizer", "train_data", "base_weights",
)  # fmt: skip
_OF_SETTINGS = (
    "init", "dropout", "data_weights", "eval_fraction", "task", "text_fields", "label_field",
    "text_field", "document_attention", "global_batch", "lr", "schedule", "warmup", "min_lr_ratio",
    "weight_decay", "beta1", "beta2", "clip", "seed",
)  # fmt: skip
_OF_PLAN = (
    "precision", "optimizer", "optimizer_in_backward", "compress_gradients", "powersgd_rank",
    "powersgd_start", "lora_rank", "lora_alpha", "lora_targets", "lora_dropout", "base",
)  # fmt: skip
# Fields that determine which rank draws which random numbers in which chunks. Dropout depends on
# them.
_OF_DRAWS = (
    "data_parallel", "cp", "tp", "pp", "micro_batch", "pp_microbatches", "compile",
)  # fmt: skip
_CLOCKS_APART = 0.03  # smallest relative difference between arms that is reported

# By arm and fact: the distinct values of its runs, in order.
Facts = Mapping[str, Mapping[str, Sequence[str]]]


def facts_of(record: RunRecord, asked: Sequence[str] = ()) -> dict[str, str]:
    """Return what a run depends on, by name: versions, machine, data, … (its "facts").

    The environment variables in `asked`, which the experiment sets, are left out.
    """
    variables = {k: v for k, v in record.environment.items() if k not in asked}
    return {
        "outpace": record.outpace,
        "versions": json.dumps(record.versions, sort_keys=True),
        "commit": str(record.commit),
        "uncommitted changes": record.changes or str(record.uncommitted_changes),
        **_machine_facts(record.machine, record.device),
        "variables": json.dumps(variables, sort_keys=True),
        "processes": str(record.plan.world_size),
        "threads a process": str(record.threads),
        "train data": record.train_data,
        "tokenizer": str(record.tokenizer),
        "parameters": str(record.parameters),
        "samples a step": str(record.settings.global_batch),
        "tokens a sample": str(record.seq_len),
        "steps": str(record.total_steps),
        "seed": str(record.settings.seed),
        # recorded, but not compared
        "load before": "unknown" if record.load_before is None else f"{record.load_before:.1f}",
    }


def _machine_facts(machine: Machine, device: str) -> dict[str, str]:
    return {
        "processor": f"{machine.cpu}, {machine.host_cores} cores",
        "devices": ", ".join(one.name for one in machine.devices) or device,
    }


def read_facts(experiment: Experiment, folder: Path, outcomes: Sequence[Outcome]) -> Facts:
    """Return the facts (see `facts_of`) of an experiment's runs, by arm and name.

    Runs without a run.json are left out.
    """
    asked = {name for arm in experiment.arms for name in arm.environment}
    found: dict[str, dict[str, list[str]]] = {}
    for name, run in dict.fromkeys((one.arm, one.run) for one in outcomes if one.run is not None):
        path = folder / run / RUN_FILE
        if not path.is_file():
            continue
        own = found.setdefault(name, {})
        facts = facts_of(RunRecord.load(path), sorted(asked)) | _clock_facts(folder / run)
        for fact, value in facts.items():
            if value not in own.setdefault(fact, []):
                own[fact].append(value)
    return found


def _clock_facts(run: Path) -> dict[str, str]:
    loads = _read_loads(run)
    found = {"clock of cores": _mean_hz([load.host.clock_hz for load in loads]),
             "clock of devices": _mean_device_hz(loads)}  # fmt: skip
    return {name: f"{hz / 1e9:.2f} GHz" for name, hz in found.items() if hz is not None}


def _read_loads(run: Path) -> tuple[Load, ...]:
    path = run / RESULT_FILE
    return Measurement.load(path).utilisation if path.is_file() else ()


def _mean_device_hz(loads: Sequence[Load]) -> float | None:
    used = [one for load in loads for one in load.devices if one.run_memory_bytes != 0]
    return _mean_hz([one.clock_hz for one in used])


def _mean_hz(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def describe_clocks(folder: Path, outcomes: Sequence[Outcome]) -> list[str]:
    """Return a sentence if the clock rates of devices differ clearly between arms."""
    seen: dict[str, list[float]] = {}
    for one in outcomes:
        hz = None if one.run is None else _mean_device_hz(_read_loads(folder / one.run))
        if hz is not None:
            seen.setdefault(one.arm, []).append(hz)
    medians = {arm: median(values) for arm, values in seen.items()}
    if not medians or max(medians.values()) < min(medians.values()) * (1 + _CLOCKS_APART):
        return []
    shown = "; ".join(f"{arm}: {hz / 1e9:.2f} GHz" for arm, hz in medians.items())
    return [f"mean clock rates of devices differ between arms ({shown})"]


def describe_facts(facts: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return an arm's facts as text, with arrows between values that differ between its runs."""
    return {name: " → ".join(values) for name, values in facts.items()}


def describe_differences(experiment: Experiment, facts: Facts) -> list[str]:
    """Return a sentence for each unintended difference between runs, such as another version.

    Differences that follow from the settings of the arms are intended.
    """
    told = []
    for name, asked in _ASKED.items():
        values = {arm: own[name] for arm, own in facts.items() if name in own}
        changed = [arm for arm, seen in values.items() if len(seen) > 1]
        shown = "; ".join(f"{arm}: {' → '.join(seen)}" for arm, seen in values.items())
        if changed:
            told.append(f"{name} changed between runs of {' and '.join(changed)} ({shown})")
        elif len(set(map(tuple, values.values()))) > 1 and not _is_tested(experiment.arms, asked):
            told.append(f"{name} differs between arms unintentionally ({shown})")
    return told


def _is_tested(arms: Sequence[Arm], names: Sequence[str]) -> bool:
    return any(len({repr(arm.settings.get(name)) for arm in arms}) > 1 for name in names)


def numeric_differences(one: RunRecord, other: RunRecord) -> list[str]:
    """Return the names of fields that differ between two runs and affect losses and weights."""
    mine, its = _numeric_fields(one), _numeric_fields(other)
    return [name for name in mine if mine[name] != its[name]]


def _numeric_fields(record: RunRecord) -> dict[str, Any]:
    of = ((record, _OF_RECORD), (record.settings, _OF_SETTINGS), (record.plan, _OF_PLAN))
    found = {name: getattr(one, name) for one, names in of for name in names}
    return {
        "model": record.model or record.settings.model,
        "draws of dropout": _dropout_source(record), **found,
    }  # fmt: skip


def _dropout_source(record: RunRecord) -> tuple[Any, ...] | None:
    """Return the fields that determine dropout masks; None without dropout or for custom models."""
    plan = record.plan
    if not plan.lora_dropout and (record.model is None or not record.model.dropout):
        return None
    split = plan.tp > 1 and plan.sequence_parallel
    return (*(getattr(plan, name) for name in _OF_DRAWS), split)


def compare_with_stored(stored: Comparison, now: Comparison) -> list[str]:
    """Return sentences on whether a repeated comparison reproduced the stored one.

    They also say what has changed since then, such as the machine or versions.
    """
    lines = [f"compared with the stored result ({stored.started}, {stored.machine.cpu}):"]
    for name, new in now.verdicts().items():
        old = stored.verdicts().get(name)
        if old is None or None in (old.low, old.high, new.low, new.high):
            lines.append(f"{name}: too few rounds to say")
            continue
        assert old.low is not None and old.high is not None
        assert new.low is not None and new.high is not None
        apart = old.low > new.high or new.low > old.high
        lines.append(
            f"{name}: {new.slowdown:+.1%} ({new.low:+.1%} to {new.high:+.1%}) "
            f"{'differs from' if apart else 'agrees with'} "
            f"{old.slowdown:+.1%} ({old.low:+.1%} to {old.high:+.1%})"
        )
    return lines + _describe_changed_facts(stored, now)


def _describe_changed_facts(stored: Comparison, now: Comparison) -> list[str]:
    """Return a sentence for each property of the machine or of an arm's runs that has changed."""
    then = {arm.arm: arm.facts for arm in stored.arms}
    pairs = [(_machine_facts(stored.machine, "none"), _machine_facts(now.machine, "none"))]
    pairs += [(then[arm.arm], arm.facts) for arm in now.arms if arm.arm in then]
    told = [
        f"{name} was {old[name]} and is now {new[name]}"
        for old, new in pairs
        for name in _ASKED
        if name in old and name in new and old[name] != new[name]
    ]
    return list(dict.fromkeys(told))
