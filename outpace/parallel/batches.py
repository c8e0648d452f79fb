"""Batches of any form, cut by their samples."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

from outpace.parallel.api import Batch
from outpace.records.errors import BadInputError


def samples_in(batch: Batch) -> int:
    """The length of the first tensor in a batch. Raises BadInputError where there is none."""
    plain = _plain(batch)
    _refuse_ragged(plain)
    for leaf in tree_leaves(plain):
        if isinstance(leaf, Tensor) and leaf.dim():
            return int(leaf.shape[0])
    raise BadInputError(
        f"a batch of type {type(batch).__name__} has no tensor with samples in it. Use tensors, or "
        "tuples, lists, dicts or dataclasses of them, whose first dimension is the samples."
    )


def _refuse_ragged(plain: Any) -> None:
    """Raise BadInputError for a list of samples of different shapes, which cannot be cut."""
    for part in tree_leaves(plain, is_leaf=lambda one: type(one) is list):
        if type(part) is list:
            tensors = [one for one in part if isinstance(one, Tensor) and one.dim()]
            alike = len({(one.shape[1:], one.dtype) for one in tensors}) == 1
            lengths = [len(one) for one in tensors]
            if alike and len(tensors) > 2 and len(set(lengths)) > 1:
                raise BadInputError(
                    f"a batch has a list of {len(tensors)} tensors of different lengths "
                    f"({', '.join(map(str, lengths[:3]))}, …), one for each sample. Batches are "
                    "cut along the first dimension of tensors: pad the samples into one tensor "
                    "(torch.nn.utils.rnn.pad_sequence), and give their lengths beside it."
                )
            for one in part:
                if isinstance(one, list | dict | tuple):
                    _refuse_ragged(one)


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
    plain = dict(batch) if isinstance(batch, Mapping) else batch
    for leaf in tree_leaves(plain):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            _let_pytrees_know(type(leaf))
            return _plain(plain)
    return plain


def _let_pytrees_know(kind: type) -> None:
    """A dataclass is a structure of its fields from now on, for all of torch."""
    names = [one.name for one in fields(kind)]

    def join(values: Iterable[Any], _: Any) -> Any:
        made: Any = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    register_pytree_node(kind, lambda one: ([getattr(one, name) for name in names], None), join)
