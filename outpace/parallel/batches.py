"""Functions that split, copy and join batches of any structure."""

import copy
import pickle
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import (
    SUPPORTED_NODES,
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from outpace.parallel.layout import Batch
from outpace.records.errors import BadInputError

NEEDS_WHOLE = (
    "something in it has a fixed number of samples, or refers to other samples of the batch (by "
    "an index). Make it accept any part of a batch, or use mp, which does not split batches"
)
RUNS_WHOLE = f"it runs on the whole batch, but not on a micro-batch, so {NEEDS_WHOLE}"


class SampleList(list[Any]):
    """A list with one entry per sample; `cut` converts lists of samples to this type.

    When `cut` splits a part of such a list again, the type shows that it has an entry per sample,
    although any other short list may have that length.
    """


class SampleTuple(tuple[Any, ...]):
    """A tuple with one entry per sample; see `SampleList`."""


for _kind in (SampleList, SampleTuple):
    register_pytree_node(
        _kind, lambda one: (list(one), type(one)), lambda values, kind: kind(values)
    )


def samples_in(batch: Batch) -> int:
    """Return the number of samples in a batch: the length of its first tensor.

    Raises BadInputError if the batch has no such tensor or cannot be split by samples.
    """
    return length_of(_require_first_tensor(batch, _register_structure(batch)))


def length_of(value: Tensor | np.ndarray) -> int:
    """Return the length of the first dimension of an array or a (possibly nested) tensor."""
    return value.size(0) if isinstance(value, Tensor) else len(value)


def _require_first_tensor(batch: Batch, plain: Batch) -> Tensor:
    """Return the first tensor, whose length is the number of samples (see `samples_in`)."""
    leaves = tree_leaves(plain, is_leaf=lambda one: isinstance(one, PackedSequence))
    if any(isinstance(leaf, PackedSequence) for leaf in leaves):
        raise BadInputError(
            "a batch has a PackedSequence, whose first dimension runs over the steps of all "
            "samples, so it cannot be split by samples. Pass the padded tensor and the lengths, "
            "and pack them in the forward (torch.nn.utils.rnn.pack_padded_sequence)."
        )
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
    if first is None:
        raise BadInputError(
            f"a batch of type {type(batch).__name__} has no tensor with samples in it. Use "
            "tensors, or tuples, lists, dicts or dataclasses of tensors, with the samples along "
            "the first dimension."
        )
    _refuse_list_of_samples(plain)
    _refuse_ragged_list(plain, first)
    return first


def _refuse_list_of_samples(plain: Batch) -> None:
    """Raise BadInputError for a batch that is a list of at least three single samples.

    An entry looks like a sample if its tensors differ in length, if any of them is a scalar, or if
    it is a dict of vectors. A list whose entries are views of the whole batch is not refused.
    """
    if type(plain) is not list or len(plain) < 3:
        return
    if not all(isinstance(one, tuple | list | dict) for one in plain):
        return
    if all(map(_looks_like_sample, plain)):
        raise BadInputError(
            f"a batch is a list of {len(plain)} {type(plain[0]).__name__}s, each of which seems to "
            "be a sample, but batches are split along the first dimension of tensors. Collate the "
            "samples into tensors (torch.stack), and pad them if they differ in length."
        )


def _looks_like_sample(entry: Any) -> bool:
    tensors = tensors_in(entry)
    dimensions = {one.ndim for one in tensors}
    lengths = {length_of(one) for one in tensors if one.ndim}
    flat = isinstance(entry, dict) and dimensions == {1}
    return len(lengths) > 1 or 0 in dimensions or flat


def _refuse_ragged_list(plain: Any, first: Tensor) -> None:
    """Raise BadInputError for a list with one tensor per sample, if these differ in length.

    Only the list that contains `first`, the batch's first tensor, is refused. Any other list is
    split if it has one entry per sample. Otherwise, each part of the batch gets the whole list (for
    example, the values of several tables that come with offsets).
    """
    for part in tree_leaves(plain, is_leaf=lambda one: type(one) is list):
        if type(part) is list:
            if _is_list_of_samples(length_of(first), id(first), part):
                continue
            tensors = [one for one in part if isinstance(one, Tensor) and one.dim()]
            alike = len({(one.shape[1:], one.dtype) for one in tensors}) == 1
            lengths = [len(one) for one in tensors]
            holds_first = any(one is first for one in tensors)
            if alike and holds_first and len(tensors) > 2 and len(set(lengths)) > 1:
                raise BadInputError(
                    f"a batch has a list of {len(tensors)} tensors of different lengths "
                    f"({', '.join(map(str, lengths[:3]))}, …), one for each sample, but batches "
                    "are split along the first dimension of tensors. Pad the samples into one "
                    "tensor (torch.nn.utils.rnn.pad_sequence), and pass their lengths in another "
                    "tensor. Or put a tensor with an entry for each sample, such as its label, "
                    "before the list, which is then split by samples."
                )
            for one in part:
                if isinstance(one, list | dict | tuple):
                    _refuse_ragged_list(one, first)


def cut(batch: Batch, parts: int) -> list[Batch]:
    """Split a batch by samples into `parts` equal parts.

    Tensors and arrays are split if their first dimension equals the number of samples. Lists and
    tuples are split if they have one entry per sample: strings, records, lists or tensors, but not
    numbers. Each part gets all other values whole. Raises BadInputError for an object that contains
    samples but cannot be split.
    """
    flat = _flatten_batch(batch)
    size = flat.samples // parts
    if parts > 1:
        _refuse_objects_with_samples(flat)
    return [_slice_samples(flat, number * size, size) for number in range(parts)]


def take_first(batch: Batch, count: int) -> Batch:
    """Return a batch of the first `count` samples, split by the rules of `cut`."""
    return _slice_samples(_flatten_batch(batch), 0, count)


def leave_out_first(batch: Batch, count: int) -> Batch:
    """Return a batch without the first `count` samples, split by the rules of `cut`."""
    flat = _flatten_batch(batch)
    return _slice_samples(flat, count, flat.samples - count)


def copy_batch(batch: Batch, tensors: bool = True) -> Batch:
    """Copy a batch, so that a forward may change its tensors or pop entries.

    If `tensors` is False, copy only the structure and share the tensors.
    """

    def copy_leaf(leaf: Any) -> Any:
        if not tensors:
            return leaf
        if isinstance(leaf, Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return tree_map(copy_leaf, _register_structure(batch))


def pack(batch: Batch) -> bytes | None:
    """Pickle a batch, for other ranks to `unpack`. Returns None if it cannot be pickled.

    Tensors are copied first, because pickling a view would include its whole storage.
    """
    with suppress(Exception):
        return pickle.dumps(tree_map(_copy_to_cpu, _register_structure(batch)))
    return None


def unpack(packed: bytes, device: torch.device) -> Batch:
    """Return the batch that `pack` has pickled, with its tensors on `device`."""
    return move_batch(pickle.loads(packed), device)


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """Return a batch with its tensors detached and moved to `device`."""
    return tree_map(
        lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, batch
    )


def _copy_to_cpu(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf


class BatchCopies(Sequence[Batch]):
    """A sequence of batches that returns a new copy (`copy_batch`) on each access."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return map(copy_batch, self._batches)

    def __getitem__(self, index: Any) -> Any:
        found = self._batches[index]
        return BatchCopies(found) if isinstance(index, slice) else copy_batch(found)


def has_changed(batch: Batch, before: Batch) -> bool:
    """Return whether a batch differs from `before`, a shallow copy that was made of it earlier.

    Structures and the identities of leaves are compared, but not the values of tensors.
    """
    leaves, structure = tree_flatten(batch)
    old_leaves, old_structure = tree_flatten(before)
    return structure != old_structure or any(
        one is not old for one, old in zip(leaves, old_leaves, strict=True)
    )


class _FlatBatch(NamedTuple):
    """Leaves and structure of a batch, in which a list or tuple of samples is a single leaf."""

    leaves: list[Any]
    structure: TreeSpec
    samples: int


def _flatten_batch(batch: Batch) -> _FlatBatch:
    plain = _register_structure(batch)
    first = _require_first_tensor(batch, plain)
    # tree_flatten leaves a reference cycle around `is_leaf`, which therefore must not hold tensors.
    samples = length_of(first)
    flat = tree_flatten(plain, partial(_is_list_of_samples, samples, id(first)))
    return _FlatBatch(*flat, samples)


def splits_by_place(batch: Batch) -> tuple[int, dict[Any, tuple[Any, bool]]]:
    """Return the number of samples in a batch, and which of its values `cut` splits.

    The second result maps a value's place in the batch to the value, and whether `cut` splits it.
    Values are tensors, arrays, lists and tuples. Batches of the same structure have the same
    places. Nested tensors, which are always split, and tensors with one row are left out.
    """
    plain = _register_structure(batch)
    first = _require_first_tensor(batch, plain)
    samples = length_of(first)
    found: dict[Any, tuple[Any, bool]] = {}
    leaves, structure = tree_flatten(plain, partial(_is_list_without_first_tensor, id(first)))
    _record_splits(leaves, str(structure), samples, id(first), found)
    return samples, found


def _record_splits(
    leaves: list[Any],
    form: Any,
    samples: int,
    first_id: int,
    found: dict[Any, tuple[Any, bool]],
) -> None:
    """Record in `found` whether `cut` splits each leaf, by the leaf's place in the batch.

    A place is (`form`, number of the leaf), where `form` describes the structure around the leaves.
    Lists that are not split are searched too. This is no nested function, because a recursive one
    would be a reference cycle, which keeps the batch until garbage collection.
    """
    is_split = partial(_is_list_of_samples, samples, first_id)
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor | np.ndarray):
            if leaf.ndim and not _is_nested(leaf) and length_of(leaf) != 1:
                found[form, number] = leaf, _has_row_per_sample(leaf, samples)
        elif _is_list_or_tuple(leaf) and any(one is not None for one in leaf):
            found[form, number] = leaf, is_split(leaf)
            if not is_split(leaf):
                inner, structure = tree_flatten(leaf, is_split)
                _record_splits(inner, (form, number, str(structure)), samples, first_id, found)


def _is_nested(value: Tensor | np.ndarray) -> bool:
    return isinstance(value, Tensor) and value.is_nested


def _is_list_without_first_tensor(first_id: int, value: Any) -> bool:
    return _is_list_or_tuple(value) and all(id(one) != first_id for one in tree_leaves(value))


def _slice_samples(flat: _FlatBatch, begin: int, size: int) -> Batch:
    def slice_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_nested:
            parts = leaf.unbind()[begin : begin + size]
            return torch.nested.as_nested_tensor(parts, layout=leaf.layout)
        if _is_list_or_tuple(leaf):
            kind = SampleTuple if isinstance(leaf, tuple) else SampleList
            return kind(leaf[begin : begin + size])
        return leaf[begin : begin + size] if _has_row_per_sample(leaf, flat.samples) else leaf

    return tree_unflatten(map(slice_leaf, flat.leaves), flat.structure)


def _is_list_or_tuple(leaf: Any) -> bool:
    return type(leaf) in (list, tuple, SampleList, SampleTuple)


def _has_row_per_sample(value: Any, samples: int) -> bool:
    return isinstance(value, Tensor | np.ndarray) and value.ndim > 0 and length_of(value) == samples


def _is_list_of_samples(samples: int, first_id: int, value: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether a value is a list or tuple with one entry per sample.

    Some entries may be None. A list of numbers (sizes, strides) does not count, because its length
    may be a coincidence. A list of tensors that all have one row per sample (several views of the
    batch) does not count either, nor does a list that contains the batch's first tensor, whose id
    is `first_id`.
    """
    if type(value) in (SampleList, SampleTuple):
        return len(value) == samples
    if type(value) not in (list, tuple) or len(value) != samples:
        return False
    entries = [one for one in value if one is not None]
    if not entries or any(isinstance(one, int | float | complex | np.number) for one in entries):
        return False
    if len({type(one) for one in entries}) > 1:
        return False
    tensors = tensors_in(entries)
    if any(id(one) == first_id for one in tensors):
        return False
    if isinstance(entries[0], Tensor | np.ndarray):
        kinds = {(one.shape[1:], one.dtype) for one in tensors}
        if len(kinds) > 1 or (samples == 2 and isinstance(value, tuple)):
            return False  # such as the hidden and cell state of an LSTM
    return not tensors or not all(_has_row_per_sample(one, samples) for one in tensors)


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors and arrays in an entry of a batch."""
    return [one for one in tree_leaves(value) if isinstance(one, Tensor | np.ndarray)]


def _refuse_objects_with_samples(flat: _FlatBatch) -> None:
    for leaf in flat.leaves:
        if isinstance(leaf, Tensor | np.ndarray | Sequence) or not hasattr(leaf, "__dict__"):
            continue
        rows = [
            name for name, value in vars(leaf).items() if _has_row_per_sample(value, flat.samples)
        ]
        if rows:
            raise BadInputError(
                f"a batch has a {type(leaf).__name__} with a row for each of {flat.samples} "
                f"samples in {rows[0]!r}, but outpace splits only tensors, tuples, lists, dicts "
                f"and dataclasses. Make {type(leaf).__name__} a dataclass, or pass its tensors in "
                "a dict."
            )


def take_part(passes: Sequence[Batch], place: int, places: int) -> list[Batch] | None:
    """Take part `place` of `places` equal parts of each batch, and concatenate parts in pairs.

    Returns at least two batches: if there would be only one, its parts are halved first. Returns
    None if the samples do not divide evenly, or if parts cannot be concatenated.
    """
    if samples_in(passes[0]) % places:
        return None
    shares = [cut(batch, places)[place] for batch in passes]
    half = len(shares) // 2
    pairs: list[list[Batch]] = [
        list(pair) for pair in zip(shares[:half], shares[half:], strict=False)
    ]
    pairs += [[share] for share in shares[2 * half :]]
    if len(pairs) == 1:
        if samples_in(shares[0]) % 2:
            return None
        pairs = [list(halves) for halves in zip(*(cut(share, 2) for share in shares), strict=True)]
    joined = [one[0] if len(one) == 1 else concatenate(*one) for one in pairs]
    return None if any(part is None for part in joined) else joined


def explain_lengths(batch: Batch) -> str:
    """Explain how a batch is split if some tensors' lengths differ from the number of samples.

    Returns an empty string if there are no such tensors.
    """
    leaves, _, samples = _flatten_batch(batch)
    leaves = [one for one in leaves if isinstance(one, Tensor) and one.dim()]
    others = sorted({leaf.size(0) for leaf in leaves} - {samples})
    if not others:
        return ""
    return (
        f"a batch is split along the first dimension of tensors that have {samples} entries "
        f"there, like the first tensor; tensors with {', '.join(map(str, others))} entries stay "
        "whole in each part. Use tensors with an entry for each sample (pad samples of different "
        "sizes, such as graphs, and add masks), or use one process."
    )


def concatenate(one: Batch, other: Batch) -> Batch | None:
    """Concatenate the samples of two batches. Values that `cut` would not split come from `one`.

    Returns None if the structures, shapes or dtypes do not match.
    """
    leaves, structure, samples = _flatten_batch(one)
    others, structure_too, more = _flatten_batch(other)
    if structure != structure_too:
        return None
    joined = []
    for leaf, leaf_too in zip(leaves, others, strict=True):
        if isinstance(leaf, Tensor) and leaf.is_nested:
            parts = (*leaf.unbind(), *leaf_too.unbind())
            leaf = torch.nested.as_nested_tensor(parts, layout=leaf.layout)
        elif _is_list_or_tuple(leaf) or _is_list_or_tuple(leaf_too):
            kind = list if isinstance(leaf, list) else tuple
            if not (isinstance(leaf, kind) and isinstance(leaf_too, kind)):
                return None
            leaf = (SampleList if kind is list else SampleTuple)([*leaf, *leaf_too])
        elif isinstance(leaf, np.ndarray) and _has_row_per_sample(leaf, samples):
            if leaf_too.shape != (more, *leaf.shape[1:]) or leaf_too.dtype != leaf.dtype:
                return None
            leaf = np.concatenate((leaf, leaf_too))
        elif isinstance(leaf, Tensor) and _has_row_per_sample(leaf, samples):
            if leaf_too.shape != (more, *leaf.shape[1:]) or leaf_too.dtype != leaf.dtype:
                return None
            leaf = torch.cat((leaf, leaf_too))
        joined.append(leaf)
    return tree_unflatten(joined, structure)


def _register_structure(batch: Batch) -> Batch:
    """Register the classes in a batch as pytree nodes, and return the batch.

    Dataclasses and subclasses of dict and UserDict (transformers' BatchEncoding) are registered,
    for the whole process. Other mappings are replaced by dicts.
    """
    found = [leaf for leaf in tree_leaves(batch) if not isinstance(leaf, Tensor)]
    mappings = [leaf for leaf in found if isinstance(leaf, Mapping)]
    # Copies of other mappings may share entries.
    if any(not isinstance(one, dict | UserDict) for one in mappings):
        return _register_structure(
            tree_map(lambda one: dict(one) if isinstance(one, Mapping) else one, batch)
        )
    for one in mappings:
        _register_mapping(type(one))
    for leaf in found:
        if is_dataclass(leaf) and not isinstance(leaf, type):
            _register_dataclass(type(leaf))
            return _register_structure(batch)
    return _register_structure(batch) if mappings else batch


class _EmptyMapping:
    """A user's mapping without its values: an emptied copy of it, and its keys.

    `fill` rebuilds the mapping from values.
    """

    def __init__(self, one: Any) -> None:
        self.empty, self.keys = copy.copy(one), tuple(one)
        self.empty.clear()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _EmptyMapping):
            return NotImplemented
        return type(self.empty) is type(other.empty) and self.keys == other.keys

    def __hash__(self) -> int:
        return hash(self.keys)

    def fill(self, values: Iterable[Any]) -> Any:
        made = copy.copy(self.empty)
        for key, value in zip(self.keys, values, strict=True):
            made[key] = value
        return made


def _register_mapping(kind: type) -> None:
    if kind not in SUPPORTED_NODES:
        register_pytree_node(
            kind,
            lambda one: ([one[key] for key in one], _EmptyMapping(one)),
            lambda values, context: context.fill(values),
        )


def _register_dataclass(kind: type) -> None:
    names = [one.name for one in fields(kind)]

    def rebuild(values: Iterable[Any], _: Any) -> Any:
        made: Any = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    register_pytree_node(kind, lambda one: ([getattr(one, name) for name in names], None), rebuild)
