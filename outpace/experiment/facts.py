"""What determined an arm's runs, and what of it differs between arms though nobody asked for it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from outpace.records.comparison import Arm, Experiment, Outcome
from outpace.records.run import RunRecord
from outpace.train.run_dir import RUN_FILE

# By what a run's record calls it: the settings that are asked for where it may differ.
_ASKED: Mapping[str, tuple[str, ...]] = {
    "outpace": (),
    "versions": (),
    "commit": (),
    "uncommitted changes": (),
    "processor": (),
    "devices": ("device",),
    "train data": (
        "data",
        "data_weights",
        "model",
        "tokenizer",
        "seq_len",
        "task",
        "eval_fraction",
    ),
    "tokenizer": ("tokenizer", "model", "data"),
    "parameters": ("model", "lora_rank"),
    "samples a step": ("global_batch",),
    "tokens a sample": ("seq_len", "model"),
    "steps": ("steps", "tokens", "epochs"),
    "seed": ("seed",),
}  # fmt: skip
# Settings that change the numbers that are trained; others change how they are computed.
NUMBERS = (
    "model", "init", "dropout", "data", "data_weights", "task", "tokenizer", "seq_len",
    "global_batch", "steps", "tokens", "epochs", "lr", "schedule", "warmup", "min_lr_ratio",
    "optimizer", "optimizer_in_backward", "weight_decay", "beta1", "beta2", "clip", "lora_rank",
    "lora_alpha", "lora_targets", "lora_dropout", "base", "precision", "seed",
    "compress_gradients", "powersgd_rank", "powersgd_start",
)  # fmt: skip


def facts_of(record: RunRecord) -> dict[str, str]:
    """By name, what a comparison has to hold still."""
    machine = record.machine
    return {
        "outpace": record.outpace,
        "versions": json.dumps(record.versions, sort_keys=True),
        "commit": str(record.commit),
        "uncommitted changes": str(record.uncommitted_changes),
        "processor": f"{machine.cpu}, {machine.host_cores} cores",
        "devices": ", ".join(device.name for device in machine.devices) or record.device,
        "train data": record.train_data,
        "tokenizer": str(record.tokenizer),
        "parameters": str(record.parameters),
        "samples a step": str(record.settings.global_batch),
        "tokens a sample": str(record.seq_len),
        "steps": str(record.total_steps),
        "seed": str(record.settings.seed),
    }


def read_facts(folder: Path, outcomes: Sequence[Outcome]) -> dict[str, dict[str, str]]:
    """Of each arm's first run that left a record."""
    found: dict[str, dict[str, str]] = {}
    for one in outcomes:
        path = folder / (one.run or "") / RUN_FILE
        if one.arm not in found and one.run is not None and path.is_file():
            found[one.arm] = facts_of(RunRecord.load(path))
    return found


def differing(experiment: Experiment, facts: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Sentences on what is not the same for all arms, and was not asked to differ."""
    told = []
    for name, asked in _ASKED.items():
        values = {arm: own[name] for arm, own in facts.items() if name in own}
        if len(set(values.values())) < 2 or _is_asked(experiment.arms, asked):
            continue
        shown = "; ".join(f"{arm}: {value}" for arm, value in values.items())
        told.append(f"{name} differs between arms, which nobody asked for ({shown})")
    return told


def _is_asked(arms: Sequence[Arm], names: Sequence[str]) -> bool:
    return any(len({repr(arm.settings.get(name)) for arm in arms}) > 1 for name in names)


def same_numbers(arms: Sequence[Arm]) -> bool:
    """Whether all arms train the same numbers, computed in other ways."""
    return not _is_asked(arms, NUMBERS)
