"""A person's own model: `file.py:build`, and its weights on disk."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import Dataset

from outpace.interop.folder import whole_folder
from outpace.interop.lazy_parameters import give_shapes
from outpace.interop.own_file import failure, load_function, require_named
from outpace.interop.weights import SINGLE, require_numbers
from outpace.nn.transformer import Transformer
from outpace.records.checksums import require_readable
from outpace.records.errors import BadInputError, nearest

OWN_FILE = "model.json"


@dataclass(frozen=True)
class OwnModel:
    """A user's module and, if they want, its loss and data, and how strategies cut it.

    `blocks`, `layouts` and `sync_batchnorm` are as `outpace.parallelize` takes them.
    """

    module: nn.Module
    loss: Callable[[nn.Module, Any], Any] | None = None
    dataset: Dataset[Any] | None = None
    eval_dataset: Dataset[Any] | None = None
    blocks: Sequence[str] | Sequence[Sequence[str]] | None = None
    layouts: Mapping[str, str] | None = None
    sync_batchnorm: bool = False


_PARTS = tuple(field.name for field in fields(OwnModel))
_IN_ORDER = _PARTS[:4]
_RETURNS = (
    "an nn.Module, (module, loss), (module, loss, dataset), (module, loss, dataset, eval_dataset) "
    f"or a mapping with some of the keys {', '.join(_PARTS)}"
)


def build_own(build: Callable[[], Any]) -> OwnModel:
    """Call a person's function and sort what it returns.

    That may be an nn.Module, a tuple (module, loss, dataset, eval_dataset) or the beginning of
    one, a mapping with these keys, or an OwnModel. Raises BadInputError, with the file and line
    where the function failed.
    """
    name = getattr(build, "__name__", "build")
    try:
        returned = build()
    except BadInputError:
        raise
    except (Exception, SystemExit) as error:
        code = getattr(build, "__code__", None)
        raise BadInputError(
            f"{name}() failed at {failure(error, getattr(code, 'co_filename', None))}"
        ) from None
    own = _sorted(returned, name)
    if not isinstance(own.module, nn.Module):
        raise BadInputError(
            f"{name}() gave a {type(own.module).__name__} as the module; it has to be an nn.Module"
        )
    _check_trainable(own, name)
    _check_loss(own.loss, name)
    _check_cuts(own, name)
    for part in ("dataset", "eval_dataset"):
        value = getattr(own, part)
        if value is not None and not (hasattr(value, "__getitem__") and hasattr(value, "__len__")):
            raise BadInputError(
                f"{name}() gave a {type(value).__name__} as the {part}; it has to be a "
                "torch Dataset with a length (__len__ and __getitem__)"
            )
    give_shapes(own, name)
    return own


def _check_trainable(own: OwnModel, name: str) -> None:
    if not any(parameter.requires_grad for parameter in own.module.parameters()):
        raise BadInputError(
            f"{name}() gave a {type(own.module).__name__} without a parameter that requires "
            "gradients, so there is nothing to train"
        )
    if isinstance(own.loss, nn.Module):
        inside = {id(parameter) for parameter in own.module.parameters()}
        if any(id(parameter) not in inside for parameter in own.loss.parameters()):
            raise BadInputError(
                f"{name}() gave a {type(own.loss).__name__} as the loss, with parameters that the "
                "module does not have, and only the module's are trained; put them into the module"
            )


def _check_loss(loss: Any, name: str) -> None:
    if loss is not None and not callable(loss):
        raise BadInputError(
            f"{name}() gave a {type(loss).__name__} as the loss; it has to be a function "
            "loss(module, batch) that returns the mean loss, or (sum of losses, count)"
        )
    if isinstance(loss, nn.modules.loss._Loss):
        raise BadInputError(
            f"{name}() gave {type(loss).__name__} as the loss, which takes outputs and "
            "targets; give a function loss(module, batch) that calls it"
        )


def _check_cuts(own: OwnModel, name: str) -> None:
    """Refuse `blocks`, `layouts` or `sync_batchnorm` of another kind than parallelize takes."""
    blocks, layouts, sync = own.blocks, own.layouts, own.sync_batchnorm
    parts = [] if blocks is None or isinstance(blocks, str) else list(blocks)
    flat = [one for part in parts for one in ([part] if isinstance(part, str) else part)]
    if isinstance(blocks, str) or not all(isinstance(one, str) for one in flat):
        raise BadInputError(
            f"{name}() gave {blocks!r} as blocks; they are a list of names of the module's parts, "
            "or a list of such lists, one for each stage of a pipeline"
        )
    if layouts is not None and not isinstance(layouts, Mapping):
        raise BadInputError(
            f"{name}() gave a {type(layouts).__name__} as layouts; they are a mapping of patterns "
            'of names to layouts, such as {"layers.*.q": "colwise", "layers.*.o": "rowwise"}'
        )
    if not isinstance(sync, bool):
        raise BadInputError(f"{name}() gave {sync!r} as sync_batchnorm; it is True or False")


def _sorted(returned: Any, name: str) -> OwnModel:
    if isinstance(returned, OwnModel):
        return returned
    if isinstance(returned, nn.Module):
        return OwnModel(returned)
    if isinstance(returned, Mapping):
        unknown = [str(key) for key in returned if key not in _PARTS]
        if unknown:
            raise BadInputError(
                f"{name}() returned the unknown key {unknown[0]!r}."
                f"{nearest(unknown[0], _PARTS)} Keys: {', '.join(_PARTS)}"
            )
        if "module" not in returned:
            raise BadInputError(f"{name}() returned a mapping without 'module'")
        return OwnModel(**returned)
    if isinstance(returned, tuple) and 1 <= len(returned) <= len(_IN_ORDER):
        return OwnModel(*returned)
    raise BadInputError(f"{name}() returned a {type(returned).__name__}; it has to be {_RETURNS}")


def stated_vocab(module: nn.Module) -> int | None:
    """The vocabulary that a module says it has, None where it does not say."""
    if isinstance(module, Transformer):
        return module.spec.vocab
    size = getattr(getattr(module, "config", None), "vocab_size", None)
    return size if isinstance(size, int) else None


def own_vocab(module: nn.Module) -> int | None:
    """Rows of the token embedding: config.vocab_size, or the largest embedding there is."""
    stated = stated_vocab(module)
    if stated is not None:
        return stated
    rows = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    return max(rows, default=None)


def own_positions(module: nn.Module) -> int | None:
    """The longest sequence that the module's config allows, None where it says nothing."""
    if isinstance(module, Transformer):
        return module.spec.max_positions
    config = getattr(module, "config", None)
    for name in ("max_position_embeddings", "n_positions", "block_size"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


def write_own(directory: Path, module: nn.Module, reference: str) -> None:
    """Write the weights (model.safetensors) and what builds the module (model.json).

    Shared tensors are written once. `reference` is 'file.py:function' or another name; a file's
    path is made absolute. Raises BadInputError when the file system refuses.
    """
    file, _, function = reference.rpartition(":")
    if file.endswith(".py"):
        reference = f"{Path(file).expanduser().resolve()}:{function}"
    described = {
        "reference": reference,
        "class": f"{type(module).__module__}.{type(module).__qualname__}",
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
    }
    with whole_folder(directory, OWN_FILE) as temporary:
        _save_weights(module, temporary / SINGLE)
        text = json.dumps(described, indent=2) + "\n"
        (temporary / OWN_FILE).write_text(text, encoding="utf-8")


def _save_weights(module: nn.Module, path: Path) -> None:
    try:
        safetensors.torch.save_model(module, str(path))
    except (RuntimeError, AttributeError):
        # Views that overlap in part, or state that is no tensor: each tensor for itself, then.
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
    missing, unexpected = module.load_state_dict(stored, strict=False)
    tensors = {k: v for k, v in module.state_dict().items() if isinstance(v, Tensor)}
    # Tensors that share memory were written once, under one of their names.
    loaded = {t.untyped_storage().data_ptr() for name, t in tensors.items() if name in stored}
    lacking = [
        name
        for name in missing
        if name in tensors and tensors[name].untyped_storage().data_ptr() not in loaded
    ]
    if lacking or unexpected:
        raise RuntimeError(f"missing {lacking}, unexpected {unexpected}")


def read_own(directory: Path) -> Callable[[], OwnModel]:
    """What builds the module that `write_own` wrote, with its weights.

    Raises BadInputError, also for code that no person has named.
    """
    path = directory / OWN_FILE
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

    def restored() -> OwnModel:
        own = build_own(build)
        try:
            _load_weights(own.module, directory / SINGLE)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise BadInputError(
                f"the weights in {directory} do not fit what {reference} builds: {error}"
            ) from None
        return own

    return restored
