"""Weights of a custom model on disk, with a reference to the function that builds it."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from outpace.interop.atomic_folder import whole_folder
from outpace.interop.custom_model.build import build_custom_model
from outpace.interop.custom_model.model import CustomModel
from outpace.interop.user_file import load_function, require_named
from outpace.interop.weight_files import SINGLE
from outpace.interop.weights import require_numbers
from outpace.nn.extra_state import is_extra_state, pack, unpack
from outpace.records.checksums import require_readable
from outpace.records.errors import BadInputError

CUSTOM_MODEL_FILE = "model.json"
EXTRA_STATE_FILE = "extra_state.pt"  # results of get_extra_state, by name


def write_custom_model(
    directory: Path,
    module: nn.Module,
    reference: str,
    tokenizer_save: Callable[[Path], None] | None = None,
) -> None:
    """Write the weights (model.safetensors), the builder's name (model.json) and a tokenizer.

    Extra state of submodules (`get_extra_state`) goes to extra_state.pt. Tensors that share memory
    are written once. `reference` is 'file.py:function', whose path is made absolute, or another
    name. Raises BadInputError if the directory cannot be written.
    """
    file, _, function = reference.rpartition(":")
    if file.endswith(".py"):
        reference = f"{Path(file).expanduser().resolve()}:{function}"
    described = {
        "reference": reference,
        "class": f"{type(module).__module__}.{type(module).__qualname__}",
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
    }
    with whole_folder(directory, CUSTOM_MODEL_FILE) as temporary:
        _save_weights(module, temporary / SINGLE)
        extra = {n: value for n, value in module.state_dict().items() if is_extra_state(n)}
        if extra:
            torch.save(pack(extra), temporary / EXTRA_STATE_FILE)
        text = json.dumps(described, indent=2) + "\n"
        (temporary / CUSTOM_MODEL_FILE).write_text(text, encoding="utf-8")
        if tokenizer_save is not None:
            tokenizer_save(temporary)


def _save_weights(module: nn.Module, path: Path) -> None:
    try:
        safetensors.torch.save_model(module, str(path))
    except (RuntimeError, AttributeError):
        # Partly overlapping views, or state that is not a tensor: write each tensor separately.
        tensors = {
            name: value.detach().clone(memory_format=torch.contiguous_format)
            for name, value in module.state_dict().items()
            if isinstance(value, Tensor)
        }
        safetensors.torch.save_file(tensors, str(path), metadata={"format": "pt"})


def _load_weights(module: nn.Module, path: Path) -> None:
    require_readable(path)
    stored = safetensors.torch.load_file(str(path))
    for name, tensor in stored.items():
        require_numbers(tensor, f"{path}: {name}")
    extra = path.with_name(EXTRA_STATE_FILE)
    if extra.exists():
        require_readable(extra)
        stored |= unpack(torch.load(extra, weights_only=True), torch.device("cpu"))
    missing, unexpected = module.load_state_dict(stored, strict=False)
    tensors = {k: v for k, v in module.state_dict().items() if isinstance(v, Tensor)}
    # Tensors that share memory are stored once, under one of their names.
    loaded = {t.untyped_storage().data_ptr() for name, t in tensors.items() if name in stored}
    lacking = [
        name
        for name in missing
        if name in tensors and tensors[name].untyped_storage().data_ptr() not in loaded
    ]
    if lacking or unexpected:
        raise RuntimeError(f"missing {lacking}, unexpected {unexpected}")


def read_custom_model(directory: Path) -> Callable[[], CustomModel]:
    """Return a function that builds a saved module and loads its weights.

    `write_custom_model` saves such modules. Raises BadInputError if model.json cannot be read, or
    if the user has not yet named on this machine the code that builds the module.
    """
    path = directory / CUSTOM_MODEL_FILE
    try:
        reference = json.loads(path.read_text(encoding="utf-8"))["reference"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{path} cannot be read: {error!r}") from None
    if not reference.rpartition(":")[0].endswith(".py"):
        raise BadInputError(
            f"{directory} holds a model that was built in Python ({reference!r}), not by a file; "
            f"load {directory / SINGLE} into it with safetensors.torch.load_model"
        )
    require_named(reference, path)
    build = load_function(reference)

    def build_restored() -> CustomModel:
        custom = build_custom_model(build)
        try:
            _load_weights(custom.module, directory / SINGLE)
        except (SafetensorError, OSError, RuntimeError, pickle.UnpicklingError) as error:
            raise BadInputError(
                f"the weights in {directory} do not fit the module that {reference} builds: {error}"
            ) from None
        return custom

    return build_restored
