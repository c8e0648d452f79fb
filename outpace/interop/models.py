"""Models that `--model` can name: presets, directories, runs, spec files, functions."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outpace.catalog.models import PRESETS, named_model, preset, unknown_model, untrained_model
from outpace.interop.config import CONFIG_FILE, other_form, read_cached_spec, read_spec_with_notes
from outpace.interop.custom_model import CUSTOM_MODEL_FILE, read_custom_model
from outpace.interop.origin import TOKENIZER_FILES
from outpace.interop.peft import ADAPTER_CONFIG, adapter_notes, base_of
from outpace.interop.user_file import load_function
from outpace.interop.weight_files import has_weights
from outpace.records.base import read_object, read_toml, require_fetched
from outpace.records.checksums import require_small_files
from outpace.records.errors import BadInputError, excerpt, suggest
from outpace.records.model import ModelSpec
from outpace.records.model_families import FAMILIES
from outpace.records.run import resume_command

_RUN_FILE = "run.json"


@dataclass(frozen=True)
class OpenedModel:
    """The model that a reference names.

    A custom model has `build` instead of `spec`. `weights`, `tokenizer` and `adapter` are the
    directories that contain them, or None; the adapter belongs to the base model in `weights`.
    `folder` is the Hugging Face directory from which the spec was read, and `notes` explain how
    outpace interpreted its config.
    """

    kind: Literal["preset", "huggingface", "spec", "run", "own"]
    spec: ModelSpec | None
    weights: Path | None
    tokenizer: Path | None
    build: Callable[[], Any] | None
    name: str
    adapter: Path | None = None
    folder: Path | None = None
    notes: tuple[str, ...] = ()


def names_code(reference: str) -> bool:
    """Return whether a reference names a user's function, as in "file.py:function"."""
    return reference.rpartition(":")[0].endswith(".py")


def open_model(reference: str, cache_dir: Path | None = None) -> OpenedModel:
    """Open the model that `reference` names; `cache_dir` caches specs.

    References are resolved in this order: a preset ("./gpt2" is a directory), "file.py:function"
    (the only form that runs the user's code), a Hugging Face or run directory, a spec file (.toml,
    .json), and a preset with different capitalisation. Raises BadInputError if `reference` names no
    model, or one that outpace cannot read.
    """
    if reference in PRESETS:
        return _open_preset(reference)
    if names_code(reference):
        return OpenedModel("own", None, None, None, load_function(reference), reference)
    path = _to_path(reference)
    if path.is_dir():
        is_run = (path / _RUN_FILE).is_file()
        return _open_run_model(path, cache_dir) if is_run else _open_huggingface(path, cache_dir)
    if path.suffix in (".toml", ".json") and path.is_file():
        return OpenedModel("spec", read_spec(path), None, None, None, path.stem)
    if path.suffix == ".py" and path.is_file():
        raise BadInputError(
            f"{path} needs the name of a function that returns the model: --model {path}:build"
        )
    if path.is_file():
        raise BadInputError(
            f"{path} is neither a spec (.toml, .json) nor a Python file (file.py:build)"
        )
    name = named_model(reference)
    if name in PRESETS:
        return _open_preset(name)
    raise untrained_model(reference) or unknown_model(reference, PRESETS)


def _open_preset(name: str) -> OpenedModel:
    notes: tuple[str, ...] = ()
    if (Path(name) / CONFIG_FILE).is_file():
        notes = (
            f"--model {name} is the preset, which has no weights; the folder of this name is "
            f"--model ./{name}",
        )
    return OpenedModel("preset", preset(name), None, None, None, name, notes=notes)


def _to_path(reference: str) -> Path:
    try:
        path = Path(reference).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # name too long, or no home directory
        why = error.strerror if isinstance(error, OSError) else error
        raise BadInputError(f"the model {excerpt(reference)} cannot be looked up: {why}") from None
    return path


def _open_huggingface(path: Path, cache_dir: Path | None) -> OpenedModel:
    require_fetched(path)
    if (path / CUSTOM_MODEL_FILE).is_file():
        return OpenedModel("own", None, None, None, read_custom_model(path), path.name)
    if (path / ADAPTER_CONFIG).is_file():
        if has_weights(path):
            raise BadInputError(
                f"{path} holds a whole model and an adapter ({ADAPTER_CONFIG}), so it is "
                "ambiguous: transformers would add the adapter to the base that it names. Move the "
                "files of one of them into a separate folder."
            )
        return _open_adapter("huggingface", path, path.name)  # this may have a config.json
    if not (path / CONFIG_FILE).is_file():
        raise BadInputError(
            f"{path} is neither a Hugging Face model (no {CONFIG_FILE}) nor a run (no {_RUN_FILE})"
            f"{other_form(path)}"
        )
    require_small_files(path)
    weights = path if has_weights(path) else None
    read = read_cached_spec(path, cache_dir)
    return OpenedModel(
        "huggingface", read.spec, weights, _find_tokenizer(path), None, path.name, folder=path,
        notes=read.notes,
    )  # fmt: skip


def _open_run_model(path: Path, cache_dir: Path | None) -> OpenedModel:
    model = path / "model"
    if (model / CUSTOM_MODEL_FILE).is_file():
        return OpenedModel(
            "run", None, model, _find_tokenizer(model), read_custom_model(model), path.name
        )
    if (model / ADAPTER_CONFIG).is_file():
        return _open_adapter("run", model, path.name)
    if not (model / CONFIG_FILE).is_file() or not has_weights(model):
        require_small_files(model)
        raise BadInputError(
            f"the run {path} holds no finished model (in {model}), which is written when the run "
            "reaches its last step. To write it from the newest checkpoint, resume: "
            + resume_command(path)
            + _advise_newest_step(path)
        )
    require_small_files(model)
    read = read_cached_spec(model, cache_dir)
    return OpenedModel(
        "run", read.spec, model, _find_tokenizer(model), None, path.name, folder=model,
        notes=read.notes,
    )  # fmt: skip


def _advise_newest_step(path: Path) -> str:
    names = (one.name[5:] for one in (path / "checkpoints").glob("step-*"))
    steps = [int(name) for name in names if name.isdecimal()]
    if not steps:
        return ""
    return f". Add --steps {max(steps)}, the newest checkpoint's step, to train no further steps."


def _open_adapter(kind: Literal["huggingface", "run"], path: Path, name: str) -> OpenedModel:
    base = base_of(path)
    tokenizer = _find_tokenizer(path) or _find_tokenizer(base)
    read = read_spec_with_notes(base)
    return OpenedModel(
        kind, read.spec, base, tokenizer, None, name, path, folder=base,
        notes=(*read.notes, *adapter_notes(path)),
    )  # fmt: skip


def _find_tokenizer(directory: Path) -> Path | None:
    there = any((directory / name).is_file() for name in TOKENIZER_FILES)
    return directory if there else None


def read_spec(path: Path) -> ModelSpec:
    """Return the ModelSpec in a TOML or JSON file.

    Raises BadInputError for invalid values and for unknown keys, suggesting the nearest valid key.
    """
    values = read_toml(path) if path.suffix == ".toml" else read_object(path)
    if "model_type" in values or "architectures" in values:
        raise BadInputError(
            f"{path} is a Hugging Face config; name its directory: --model {path.parent}"
        )
    if values.get("family") not in FAMILIES:
        said, close = "family is missing", ""
        if "family" in values:
            said = f"unknown family {excerpt(values['family'])}"
            close = suggest(str(values["family"]), FAMILIES)
        raise BadInputError(f"{path}: {said}; families: {', '.join(FAMILIES)}.{close}")
    return ModelSpec.parse(values, str(path))
