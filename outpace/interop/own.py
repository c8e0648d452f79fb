"""A person's own model: `file.py:build`, its loss, its weights on disk."""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from outpace.interop.folder import whole_folder
from outpace.interop.own_file import failure, load_function
from outpace.interop.weights import SINGLE
from outpace.nn.loss import IGNORED, LanguageModelObjective
from outpace.nn.transformer import Transformer
from outpace.records.errors import BadInputError, nearest

OWN_FILE = "model.json"


@dataclass(frozen=True)
class OwnModel:
    """A person's module and, if they want, its loss and data."""

    module: nn.Module
    loss: Callable[[nn.Module, Any], Any] | None = None
    dataset: Dataset[Any] | None = None
    eval_dataset: Dataset[Any] | None = None


_PARTS = tuple(field.name for field in fields(OwnModel))
_RETURNS = (
    "an nn.Module, (module, loss), (module, loss, dataset), (module, loss, dataset, eval_dataset) "
    "or a mapping with these names"
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
    if own.loss is not None and not callable(own.loss):
        raise BadInputError(
            f"{name}() gave a {type(own.loss).__name__} as the loss; it has to be a function "
            "loss(module, batch) that returns the mean loss, or (sum of losses, count)"
        )
    if isinstance(own.loss, nn.modules.loss._Loss):
        raise BadInputError(
            f"{name}() gave {type(own.loss).__name__} as the loss, which takes outputs and "
            "targets; give a function loss(module, batch) that calls it"
        )
    for part in ("dataset", "eval_dataset"):
        value = getattr(own, part)
        if value is not None and not (hasattr(value, "__getitem__") and hasattr(value, "__len__")):
            raise BadInputError(
                f"{name}() gave a {type(value).__name__} as the {part}; it has to be a "
                "torch Dataset with a length (__len__ and __getitem__)"
            )
    return own


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
    if isinstance(returned, tuple) and 1 <= len(returned) <= len(_PARTS):
        return OwnModel(*returned)
    raise BadInputError(f"{name}() returned a {type(returned).__name__}; it has to be {_RETURNS}")


class OwnObjective(nn.Module):
    """A person's module with its loss: what a strategy wraps. The module is `.model`.

    A loss of theirs is called as loss(module, batch) and returns (sum of losses, count), or one
    scalar: the mean over the micro-batch's samples, taken times the number of samples. Without
    one the module is given the batch's tokens (and whichever other entries of the batch its
    forward names) and may return
    - logits (B, S, V), or something with `.logits`: cross-entropy with the batch's targets;
    - a scalar, or something with `.loss`: the mean over the batch's targets (its samples, where
      it has none).
    """

    def __init__(self, own: OwnModel) -> None:
        super().__init__()
        self.model = own.module
        self.loss = own.loss
        self._vocab = _stated_vocab(own.module)
        forward = inspect.signature(own.module.forward).parameters
        self._accepts = frozenset(forward)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Sum of the losses (fp32, with gradient) and their number (int64), both scalars.

        Raises BadInputError where what the loss or the module returns is none of the above.
        """
        if self.loss is None and isinstance(self.model, Transformer):
            # It returns hidden states (B, S, D), which would pass for logits.
            scored: tuple[Tensor, Tensor] = LanguageModelObjective(self.model)(batch)
            return scored
        if self.loss is not None:
            given = self.loss(self.model, batch)
            if isinstance(given, tuple) and len(given) == 2:
                return _pair(_scalar(given[0], "the loss"), given[1])
            mean = _scalar(given, "the loss")
            return _pair(mean * _samples(batch), _samples(batch))
        output = self._call(batch)
        targets = batch.get("targets") if isinstance(batch, Mapping) else None
        logits = _logits(output)
        if logits is not None and targets is not None:
            self._check_width(logits)
            return _cross_entropy(logits, targets)
        loss = getattr(output, "loss", None)
        mean = _scalar(output if loss is None else loss, "the module's output")
        counted = batch.get("labels") if targets is None and isinstance(batch, Mapping) else targets
        count = _samples(batch) if counted is None else (counted != IGNORED).sum()
        return _pair(mean * count, count)

    def _check_width(self, logits: Tensor) -> None:
        """Refuse hidden states: cross-entropy would take them for scores of a few tokens."""
        if self._vocab is not None and logits.shape[-1] < self._vocab:
            raise BadInputError(
                f"the model returned {logits.shape[-1]} values per token, fewer than its "
                f"vocabulary of {self._vocab}, so these are no logits. Return logits (batch, "
                "sequence, vocabulary), or a loss function beside the module."
            )

    def _call(self, batch: Any) -> Any:
        """Give the module the batch in the way its forward takes it."""
        if isinstance(batch, Mapping):
            if "tokens" not in batch:
                return self.model(**batch)
            named = {k: v for k, v in batch.items() if k in self._accepts and k != "tokens"}
            if "input_ids" in self._accepts:
                return self.model(input_ids=batch["tokens"], **named)
            return self.model(batch["tokens"], **named)
        if isinstance(batch, Sequence):
            return self.model(*batch)
        return self.model(batch)


def _logits(output: Any) -> Tensor | None:
    """Scores (B, S, V) in what a module returned; the first of a tuple."""
    found = getattr(output, "logits", None)
    if found is None:
        found = output[0] if isinstance(output, tuple) and output else output
    return found if isinstance(found, Tensor) and found.dim() == 3 else None


def _cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if logits.shape[:2] != targets.shape:
        raise BadInputError(
            f"the model returned logits of shape {tuple(logits.shape)} for targets of shape "
            f"{tuple(targets.shape)}; they have to be (batch, sequence, vocabulary)"
        )
    flat = targets.flatten()
    total = F.cross_entropy(
        logits.flatten(0, 1).float(), flat, ignore_index=IGNORED, reduction="sum"
    )
    return total, (flat != IGNORED).sum()


def _scalar(value: Any, what: str) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.float().reshape(())
    seen = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else None
    raise BadInputError(
        f"{what} is {seen or 'a ' + type(value).__name__}; it has to be a scalar tensor"
        + ("" if what == "the loss" else ", logits (batch, sequence, vocabulary) for a batch with "
           "targets, or have .loss or .logits. Return a loss function beside the module.")
    )  # fmt: skip


def _pair(total: Tensor, count: Any) -> tuple[Tensor, Tensor]:
    number = torch.as_tensor(count, device=total.device)
    return total.float(), number.to(torch.int64).reshape(())


def _samples(batch: Any) -> int:
    """The length of the first tensor found in a batch."""
    for tensor in _tensors(batch):
        return int(tensor.shape[0]) if tensor.dim() else 1
    raise BadInputError(f"a batch of the data set has no tensor in it: {type(batch).__name__}")


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        for value in batch:
            yield from _tensors(value)


def _stated_vocab(module: nn.Module) -> int | None:
    """The vocabulary that a module says it has, None where it does not say."""
    if isinstance(module, Transformer):
        return module.spec.vocab
    size = getattr(getattr(module, "config", None), "vocab_size", None)
    return size if isinstance(size, int) else None


def own_vocab(module: nn.Module) -> int | None:
    """Rows of the token embedding: config.vocab_size, or the largest embedding there is."""
    stated = _stated_vocab(module)
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
        safetensors.torch.save_model(module, str(temporary / SINGLE))
        text = json.dumps(described, indent=2) + "\n"
        (temporary / OWN_FILE).write_text(text, encoding="utf-8")


def read_own(directory: Path) -> Callable[[], OwnModel]:
    """What builds the module that `write_own` wrote, with its weights. Raises BadInputError."""
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
    build = load_function(reference)

    def restored() -> OwnModel:
        own = build_own(build)
        try:
            safetensors.torch.load_model(own.module, str(directory / SINGLE))
        except (SafetensorError, OSError, RuntimeError) as error:
            raise BadInputError(
                f"the weights in {directory} do not fit what {reference} builds: {error}"
            ) from None
        return own

    return restored
