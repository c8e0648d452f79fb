"""Custom models, and the vocabulary and sequence length that they support."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from outpace.nn.transformer import Transformer


@dataclass(frozen=True)
class CustomModel:
    """A user's module, optionally with its loss, its data and options for strategies.

    `blocks`, `layouts` and `sync_batchnorm` are described in `outpace.parallelize`. `optimizer`
    makes an optimizer from parameter groups, as torch.optim's classes do; `outpace verify` checks
    it.
    """

    module: nn.Module
    loss: Callable[[nn.Module, Any], Any] | None = None
    dataset: Dataset[Any] | None = None
    eval_dataset: Dataset[Any] | None = None
    blocks: Sequence[str] | Sequence[Sequence[str]] | None = None
    layouts: Mapping[str, str] | None = None
    sync_batchnorm: bool = False
    optimizer: Callable[..., Optimizer] | None = None


def stated_vocab(module: nn.Module) -> int | None:
    """Return the vocabulary size in a module's config or spec, or None."""
    if isinstance(module, Transformer):
        return module.spec.vocab
    size = getattr(getattr(module, "config", None), "vocab_size", None)
    return size if isinstance(size, int) else None


def read_vocab(module: nn.Module) -> int | None:
    """Return the vocabulary size that a module states, or else that of its largest embedding."""
    stated = stated_vocab(module)
    if stated is not None:
        return stated
    rows = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    return max(rows, default=None)


def read_positions(module: nn.Module) -> int | None:
    """Return the longest sequence that the module's config allows, or None if it sets no limit."""
    if isinstance(module, Transformer):
        return module.spec.max_positions
    config = getattr(module, "config", None)
    for name in ("max_position_embeddings", "n_positions", "block_size"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None
