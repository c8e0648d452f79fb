"""Settings of a resumed run, and which of them may not change."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.catalog.models import PRESETS, named_model
from outpace.cli.options import RUN_FILE, as_words, flag
from outpace.experiment.past_runs import checkpoints
from outpace.records.base import read_object
from outpace.records.errors import BadInputError
from outpace.records.interpreter import PYTHON
from outpace.records.run import explain_removed_checkpoint, suggest_runs
from outpace.records.settings import TrainSettings

# Settings that determine the samples, their order, the model, its trained parameters or the
# optimizer's state. With another value, it would be another run. (`jobs.train.run_record.claim`
# checks precisions and contents.)
FIXED = (
    "model",
    "init",
    "dropout",
    "data",
    "data_weights",
    "eval_data",
    "eval_fraction",
    "task",
    "text_fields",
    "label_field",
    "text_field",
    "tokenizer",
    "document_attention",
    "seq_len",
    "global_batch",
    "optimizer",
    "beta1",
    "beta2",
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "lora_dropout",
    "base",
    "seed",
)
# Inputs whose path may change, because `claim` compares their contents.
_PATHS = ("model", "data", "eval_data", "tokenizer")
# Settings of a single start, not of the run.
_LEFT_OUT = ("resume", "out")


def settings_of(run: Path) -> dict[str, Any]:
    """Return the settings in a run's run.json, with the sequence length that was used.

    Raises BadInputError if there are none.
    """
    path = run / RUN_FILE
    if not run.is_dir():
        raise BadInputError(
            f"--resume: there is no directory {run}. Give the folder of a run, which "
            "`outpace train` prints at the end (`outpace runs` lists all runs)."
            f"{suggest_runs(run)}{explain_removed_checkpoint(run)}"
        )
    if not path.exists():
        raise BadInputError(
            f"--resume: {run} holds no run ({RUN_FILE} is missing). {_suggest_run(run)}."
        )
    try:
        # `require_as_written` checks for changes later, once it is clear that no untrusted code
        # runs.
        document = read_object(path, on_change=lambda _: None)
        recorded = {**document["settings"]}
    except (KeyError, TypeError):
        raise BadInputError(f"{path} is damaged: it has no settings") from None
    except BadInputError as error:
        raise BadInputError(
            f"the run's file is damaged: {error}.{_suggest_recovery(run)}"
        ) from None
    if recorded.get("seq_len") is None:
        recorded["seq_len"] = document.get("seq_len")
    parsed = TrainSettings.parse(recorded, str(path))
    return {name: value for name, value in parsed if name not in _LEFT_OUT}


def _suggest_run(folder: Path) -> str:
    enclosing = next((one for one in [*folder.parents][:2] if (one / RUN_FILE).exists()), None)
    if enclosing is None:
        start = (
            f"restore {folder / RUN_FILE}, or start a run with another --out"
            if any(folder.iterdir())
            else "leave --resume out to start one there"
        )
        return f"Give --resume the folder of a run, or {start}"
    return f"It is inside a run: give --resume {enclosing}, which starts from the newest checkpoint"


def _suggest_recovery(run: Path) -> str:
    model, saved = run / "model", checkpoints(run)
    parts = [f" Restore {run / RUN_FILE} from a copy: nothing can be resumed without it."]
    if (model / "config.json").is_file():
        parts.append(f"{model} is a complete model: --model {model}.")
    if saved:
        parts.append(
            f"The weights of step {int(saved[0].name[5:])} are intact: {' '.join(PYTHON)} -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {saved[0]} weights.pt"
        )
    return " ".join(parts)


def require_inputs(settings: TrainSettings, origins: Mapping[str, str]) -> None:
    """Refuse to resume a run if its model, tokenizer or data no longer exist at their paths."""
    for name in _PATHS:
        value = getattr(settings, name)
        if not settings.resume or origins.get(name) != RUN_FILE or value is None:
            continue
        for place in value if isinstance(value, tuple) else (value,):
            if _is_named(place) or _input_exists(place) or Path(f"{place}.bin").is_file():
                continue
            if Path(place).is_absolute():
                lost, remedy = "no longer exists", "Add"
            else:
                lost = f"does not exist in {Path.cwd()}"
                remedy = "Change to the folder in which the run was started, or add"
            raise BadInputError(
                f"--resume: the run read {flag(name)} {place}, which {lost}. {remedy} "
                f"{flag(name)} with the new path; the content must be the same."
            )


def _is_named(place: str) -> bool:
    """Return whether an input is a preset, 'stdlib' or a Python object, rather than a path."""
    return place == "stdlib" or named_model(place) in PRESETS or place.startswith("python:")


def require_as_written(run: Path) -> None:
    """Raise BadInputError if run.json was edited, because training would then differ."""
    read_object(run / RUN_FILE)


def check_unchanged(asked: Mapping[str, Any], of_run: Mapping[str, Any], run: Path) -> None:
    """Refuse to change settings that define the run. Raises BadInputError with the run's value.

    `asked` has the settings that the user gives now, on the command line or in a file.
    """
    for name in FIXED:
        if name in asked and _normalise(name, asked[name]) != _normalise(name, of_run.get(name)):
            if name in _PATHS and of_run.get(name) is not None and _input_exists(asked[name]):
                continue
            kept = of_run.get(name)
            was = "chosen by outpace" if kept is None else as_words(kept)
            raise BadInputError(
                f"{flag(name)} {as_words(asked[name])}: the run in {run} was started with "
                f"{flag(name)} {was}, and a different value would make it a different run. Leave "
                f"{flag(name)} out to resume, or start a new run with another --out."
            )


def _input_exists(value: Any) -> bool:
    """Return whether an input of a run still exists: a path, or the file in FILE.py:FUNCTION.

    Of several inputs, all must exist. Glob patterns and data sets of the Hub (hf:) are assumed to
    exist.
    """
    if isinstance(value, (tuple, list)):
        return all(map(_input_exists, value))
    file = str(value).rpartition(":")[0]
    return (
        Path(value).exists()
        or (file.endswith(".py") and Path(file).is_file())
        or str(value).startswith("hf:")
        or any(sign in str(value) for sign in "*?[")
    )


def _normalise(name: str, value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_normalise(name, part) for part in value]
    return os.path.normpath(value) if name in _PATHS and isinstance(value, str) else value
