"""Batches of any form, cut by their samples."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from outpace.parallel.api import Batch
from outpace.records.errors import BadInputError


def samples_in(batch: Batch) -> int:
    """The length of the first tensor in a batch. Raises BadInputError where there is none."""
    for leaf in tree_leaves(_plain(batch)):
        if isinstance(leaf, Tensor) and leaf.dim():
            return int(leaf.shape[0])
    raise BadInputError(f"a batch has no tensor with samples in it: {type(batch).__name__}")


def cut(batch: Batch, parts: int) -> list[Batch]:
    """Equal parts of a batch: every tensor that has its samples is cut, the rest is in each.

    A tensor is taken to have samples if its first dimension is the batch's number of them.
    """
    samples, plain = samples_in(batch), _plain(batch)
    size = samples // parts

    def part(begin: int) -> Batch:
        def of(leaf: Any) -> Any:
            has_samples = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == samples
            return leaf[begin : begin + size] if has_samples else leaf

        return tree_map(of, plain)

    return [part(number * size) for number in range(parts)]


def _plain(batch: Batch) -> Batch:
    """Mappings of other classes (transformers' BatchEncoding) as what pytrees know."""
    return dict(batch) if isinstance(batch, Mapping) else batch
