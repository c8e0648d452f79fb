"""The settings of a run that is resumed, and what may not change on the way."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.catalog.models import PRESETS, named_model
from outpace.cli.options import RUN_FILE, flag, show
from outpace.experiment.past_runs import checkpoints
from outpace.records.base import read_object
from outpace.records.errors import BadInputError
from outpace.records.interpreter import PYTHON
from outpace.records.run import explain_removed_checkpoint
from outpace.records.settings import TrainSettings

# What determines the samples, their order, the model, or what of it is trained and with which
# state: another value would be another run. (Precisions and contents:
# see `jobs.train.run_record.claim`.)
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
# What may lie elsewhere by now: `claim` compares the contents.
_PATHS = ("model", "data", "eval_data", "tokenizer")
# Not of the run but of the moment.
_LEFT_OUT = ("resume", "out")


def settings_of(run: Path) -> dict[str, Any]:
    """The settings recorded in DIR/run.json. Raises BadInputError when there are none.

    The sequence length is the one that was used, also where it had been left to outpace.
    """
    path = run / RUN_FILE
    if not run.is_dir():
        raise BadInputError(
            f"--resume: there is no directory {run}. Give the folder of a run, which outpace train "
            f"names at its end (outpace runs lists them).{explain_removed_checkpoint(run)}"
        )
    if not path.exists():
        raise BadInputError(
            f"--resume: {run} holds no run ({RUN_FILE} is missing). {_name_run(run)}, or leave "
            "--resume out to start one there."
        )
    try:
        # `require_as_written` is for later, when it is known that this runs nobody's code.
        document = read_object(path, on_change=lambda _: None)
        recorded = {**document["settings"]}
    except (KeyError, TypeError):
        raise BadInputError(f"{path} is damaged: it holds no settings of a run") from None
    except BadInputError as error:
        raise BadInputError(
            f"the run's file is damaged: {error}.{_suggest_recovery(run)}"
        ) from None
    if recorded.get("seq_len") is None:
        recorded["seq_len"] = document.get("seq_len")
    parsed = TrainSettings.parse(recorded, str(path))
    return {name: value for name, value in parsed if name not in _LEFT_OUT}


def _name_run(folder: Path) -> str:
    """Return what to give instead of a folder that is no run, such as the run that it lies in."""
    around = next((one for one in [*folder.parents][:2] if (one / RUN_FILE).exists()), None)
    if around is None:
        return "Give --resume the folder of a run"
    return f"It lies in a run: give --resume {around}, from its newest checkpoint"


def _suggest_recovery(run: Path) -> str:
    """Return what is left of a run whose file cannot be read, and how to use it."""
    model, saved = run / "model", checkpoints(run)
    parts = [f" Bring {run / RUN_FILE} back from a copy: nothing can be resumed without it."]
    if (model / "config.json").is_file():
        parts.append(f"{model} is a model as it is: --model {model}.")
    if saved:
        parts.append(
            f"The weights of step {int(saved[0].name[5:])} are whole: {' '.join(PYTHON)} -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {saved[0]} weights.pt"
        )
    return " ".join(parts)


def require_inputs(settings: TrainSettings, origins: Mapping[str, str]) -> None:
    """Refuse to resume where what the run read is not where it was. Raises BadInputError."""
    for name in _PATHS:
        value = getattr(settings, name)
        if not settings.resume or origins.get(name) != RUN_FILE or value is None:
            continue
        for place in value if isinstance(value, tuple) else (value,):
            if _is_named(place) or _lies_there(place) or Path(f"{place}.bin").is_file():
                continue
            where = (
                "" if Path(place).is_absolute() else
                f" from the folder where it was started, and not in {Path.cwd()}"
            )  # fmt: skip
            raise BadInputError(
                f"--resume: the run read {flag(name)} {place}{where}. It is not there now: change "
                f"to that folder, or add {flag(name)} with its new place. Its content decides "
                "whether it is the same."
            )


def _is_named(place: str) -> bool:
    """Whether it is known by its name, or lives in a program: no file or folder."""
    return place == "stdlib" or named_model(place) in PRESETS or place.startswith("python:")


def require_as_written(run: Path) -> None:
    """Refuse a run.json that was changed since: its training would be another. BadInputError."""
    read_object(run / RUN_FILE)


def check_unchanged(asked: Mapping[str, Any], of_run: Mapping[str, Any], run: Path) -> None:
    """Refuse to change what makes the run what it is. Raises BadInputError naming the run's value.

    `asked` holds what the user gives now, on the command line or in a file.
    """
    for name in FIXED:
        if name in asked and _normal(name, asked[name]) != _normal(name, of_run.get(name)):
            if name in _PATHS and of_run.get(name) is not None and _lies_there(asked[name]):
                continue
            kept = of_run.get(name)
            was = "left to outpace" if kept is None else show(kept)
            raise BadInputError(
                f"{flag(name)} {show(asked[name])}: the run in {run} was started with "
                f"{flag(name)} {was}, and another value would make it another run. Leave "
                f"{flag(name)} out to resume, or start a new run with another --out."
            )


def _lies_there(value: Any) -> bool:
    """Whether all that is named is found: files, folders, patterns, a file's function, datasets."""
    if isinstance(value, (tuple, list)):
        return all(map(_lies_there, value))
    file = str(value).rpartition(":")[0]
    return (
        Path(value).exists()
        or (file.endswith(".py") and Path(file).is_file())
        or str(value).startswith("hf:")
        or any(sign in str(value) for sign in "*?[")
    )


def _normal(name: str, value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_normal(name, part) for part in value]
    return os.path.normpath(value) if name in _PATHS and isinstance(value, str) else value
