"""A custom model, and what it says of its sizes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from outpace.nn.transformer import Transformer


@dataclass(frozen=True)
class CustomModel:
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


def stated_vocab(module: nn.Module) -> int | None:
    """The vocabulary that a module says it has, None where it does not say."""
    if isinstance(module, Transformer):
        return module.spec.vocab
    size = getattr(getattr(module, "config", None), "vocab_size", None)
    return size if isinstance(size, int) else None


def read_vocab(module: nn.Module) -> int | None:
    """Rows of the token embedding: config.vocab_size, or the largest embedding there is."""
    stated = stated_vocab(module)
    if stated is not None:
        return stated
    rows = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    return max(rows, default=None)


def read_positions(module: nn.Module) -> int | None:
    """The longest sequence that the module's config allows, None where it says nothing."""
    if isinstance(module, Transformer):
        return module.spec.max_positions
    config = getattr(module, "config", None)
    for name in ("max_position_embeddings", "n_positions", "block_size"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None
