"""Batches of any form are cut by their samples, or refused."""

import gc
import weakref
from collections import UserDict
from collections.abc import MutableMapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from outpace.data.loader import pin_batch
from outpace.parallel import batches
from outpace.parallel.batches import (
    BatchCopies,
    concatenate,
    copy_batch,
    cut,
    explain_lengths,
    has_changed,
    pack,
    samples_in,
    unpack,
)
from outpace.records.errors import BadInputError


@dataclass(frozen=True)
class Inner:
    y: torch.Tensor
    name: str = "all"


@dataclass
class Outer:
    x: torch.Tensor
    inner: Inner


def test_dataclasses_are_structures_of_their_fields(monkeypatch):
    batch = {"pair": Outer(torch.arange(4), Inner(torch.arange(4) * 2))}
    assert samples_in(batch) == 4
    _, second = cut(batch, 2)
    assert second["pair"].x.tolist() == [2, 3] and second["pair"].inner.name == "all"
    assert second["pair"].inner.y.tolist() == [4, 6]
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    moved = pin_batch(batch)["pair"]
    assert moved.inner.y.tolist() == [1, 3, 5, 7] and batch["pair"].inner.y[0] == 0


def test_parts_are_joined_again_where_they_can_be():
    batch = {"pair": Outer(torch.arange(4), Inner(torch.arange(8).view(4, 2))), "table": [5]}
    both = concatenate(*cut(batch, 2))
    assert torch.equal(both["pair"].x, batch["pair"].x) and both["table"] == [5]
    assert torch.equal(both["pair"].inner.y, batch["pair"].inner.y)
    assert concatenate(torch.zeros(2, 3), torch.zeros(2, 4)) is None
    assert concatenate([torch.zeros(2)], (torch.zeros(2),)) is None


def test_lists_of_samples_of_different_lengths_are_refused():
    ragged = {"inputs": [torch.zeros(n, 3) for n in (2, 3, 4)], "targets": torch.zeros(3)}
    with pytest.raises(BadInputError, match=r"different lengths .2, 3, 4, ….*Pad the samples"):
        samples_in(ragged)
    assert samples_in(dict(reversed(ragged.items()))) == 3  # as the message says
    tables = {"x": torch.zeros(4), "values": [torch.zeros(n) for n in (5, 6, 7)]}
    assert [len(one) for one in cut(tables, 2)[1]["values"]] == [5, 6, 7]
    fields = [torch.zeros(4, 3), torch.zeros(4, 2), torch.zeros(7, 5), torch.zeros(4)]
    assert samples_in(fields) == 4 and [len(one) for one in cut(fields, 2)[0]] == [2, 2, 7, 2]


def test_what_has_no_samples_is_said():
    with pytest.raises(BadInputError, match=r"a batch of type int has no tensor with samples"):
        samples_in(3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_cut_by_samples_and_joined(layout):
    samples = [torch.full((2 + number, 3), float(number)) for number in range(4)]
    batch = torch.nested.nested_tensor(samples, layout=layout), torch.arange(4)
    assert samples_in(batch) == 4
    first, second = cut(batch, 2)
    assert [one.shape[0] for one in second[0].unbind()] == [4, 5] and second[1].tolist() == [2, 3]
    joined = concatenate(first, second)[0].unbind()
    assert all(map(torch.equal, joined, samples))


def test_tensors_of_other_lengths_than_samples_are_explained():
    graphs = {"nodes": torch.zeros(10, 3), "edges": torch.zeros(2, 12), "y": torch.zeros(4)}
    assert "that have 10 entries" in explain_lengths(graphs)
    assert "tensors with 2, 4 entries stay whole" in explain_lengths(graphs)
    alike = {"x": torch.zeros(4, 3), "y": torch.zeros(4), "rate": torch.tensor(0.1), "name": "a"}
    assert explain_lengths(alike) == ""


def test_lists_and_arrays_with_an_entry_for_each_sample_are_cut_and_joined():
    batch = {
        "x": torch.arange(4), "texts": ["a", "b", "c", "d"], "weights": np.arange(4.0),
        "records": [{"boxes": torch.zeros(n, 4), "id": n} for n in range(4)],
        "names": ["cat", "dog"], "size": (4, 4), "strides": [1, 2, 4, 8],
        "crops": [torch.zeros(4, 2) for _ in range(4)],
    }  # fmt: skip
    first, second = cut(batch, 2)
    assert second["texts"] == ["c", "d"] and second["weights"].tolist() == [2, 3]
    assert [one["id"] for one in second["records"]] == [2, 3]
    assert second["records"][1]["boxes"].shape == (3, 4)
    # What is not of samples is whole in each part, and a list of tensors may hold several views.
    assert second["names"] == ["cat", "dog"] and second["size"] == (4, 4)
    assert second["strides"] == [1, 2, 4, 8]
    assert [one.shape for one in second["crops"]] == [(2, 2)] * 4
    del first["names"], second["names"]
    joined = concatenate(first, second)
    assert joined["texts"] == batch["texts"] and joined["weights"].tolist() == [0, 1, 2, 3]
    assert [one["id"] for one in joined["records"]] == [0, 1, 2, 3]


def test_tuples_and_lists_of_lists_hold_samples_as_lists_of_texts_do():
    """As `zip(*samples)` collates them; a list of numbers may have as many by chance."""
    batch = {
        "x": torch.arange(4), "names": ("a", "b", None, "d"), "tags": [[1, 2], [3], [], [4, 4]],
        "boxes": tuple(torch.full((n, 4), float(n)) for n in (1, 4, 2, 2)), "size": (4, 3, 2, 1),
        "labels": [torch.tensor(n) for n in range(4)], "objects": [object() for _ in range(4)],
        "views": [(torch.zeros(4, 2), torch.zeros(4))] * 4, "kinds": ["cat", 1, "dog", 2.0],
    }  # fmt: skip
    first, second = cut(batch, 2)
    assert second["names"] == (None, "d") and second["tags"] == [[], [4, 4]]
    assert [one.shape for one in first["boxes"]] == [(1, 4), (4, 4)]
    assert [int(one) for one in second["labels"]] == [2, 3] and len(first["objects"]) == 2
    assert second["size"] == (4, 3, 2, 1) and len(second["kinds"]) == 4
    assert [one.shape for one, _ in second["views"]] == [(2, 2)] * 4
    joined = concatenate(first, second)
    assert joined["names"] == batch["names"] and joined["tags"] == batch["tags"]
    assert isinstance(joined["names"], tuple) and isinstance(joined["tags"], list)
    # What a list holds is known from the first cut on: these boxes have a row for each sample.
    assert [len(one) for one in second["boxes"]] == [2, 2]
    _, last = cut(unpack(pack(copy_batch(second)), torch.device("cpu")), 2)
    assert [one.shape for one in last["boxes"]] == [(2, 4)] and last["names"] == ("d",)


def test_a_list_of_samples_of_different_lengths_is_cut_beside_a_tensor():
    batch = {"x": torch.zeros(3, 2), "boxes": [torch.zeros(n, 4) for n in (2, 3, 5)]}
    assert [len(one["boxes"][0]) for one in cut(batch, 3)] == [2, 3, 5]
    assert explain_lengths(batch) == ""


class Instances:
    def __init__(self, boxes):
        self.boxes = boxes


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ([(torch.zeros(4, 6), torch.zeros(6))] * 3, "list of 3 tuples, each of which seems"),
        ([(torch.zeros(4, 6), torch.tensor(1))] * 8, "list of 8 tuples, each of which seems"),
        ([{"ids": torch.zeros(6), "labels": torch.zeros(6)}] * 8, "list of 8 dicts, each of which"),
        ([{"image": torch.zeros(3, 8), "boxes": torch.zeros(n, 4)} for n in (1, 2, 4)], "3 dicts"),
        (
            (torch.zeros(4), torch.nn.utils.rnn.pack_sequence([torch.zeros(2)] * 4)),
            "a PackedSequence, whose first dimension",
        ),
        ({"x": torch.zeros(4), "y": Instances(torch.zeros(4, 2))}, "a Instances with a row"),
    ],
)
def test_batches_with_samples_that_cannot_be_cut_are_refused(batch, words):
    with pytest.raises(BadInputError, match=words):
        cut(batch, 2)


class Encoding(UserDict):
    """Entries that are attributes, too, as of transformers' BatchEncoding."""

    def __getattr__(self, name):
        return self.data[name]


class Fields(dict):
    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("kind", [Encoding, Fields])
def test_mappings_keep_their_class_wherever_they_are(kind):
    batch = kind({"x": torch.arange(4), "inner": kind({"y": torch.arange(4) * 2, "rate": 0.5})})
    _, second = cut(batch, 2)
    assert type(second) is kind and second.x.tolist() == [2, 3]
    assert type(second.inner) is kind and second.inner.y.tolist() == [4, 6]
    assert second.inner.rate == 0.5 and batch.inner.y.tolist() == [0, 2, 4, 6]
    both = concatenate(*cut((batch, torch.zeros(4)), 2))
    assert both[0].x.tolist() == [0, 1, 2, 3]


class Bag(MutableMapping):
    """Entries in a dict of its own, which a copy of it shares."""

    def __init__(self, entries):
        self._entries = entries

    def __getitem__(self, key):
        return self._entries[key]

    def __setitem__(self, key, value):
        self._entries[key] = value

    def __delitem__(self, key):
        del self._entries[key]

    def __iter__(self):
        return iter(self._entries)

    def __len__(self):
        return len(self._entries)


def test_mappings_of_other_classes_become_dicts_and_stay_as_they_are():
    batch = Bag({"x": torch.arange(4), "inner": Bag({"y": torch.arange(4)})})
    first, second = cut(batch, 2)
    assert first["x"].tolist() == [0, 1] and second["inner"]["y"].tolist() == [2, 3]
    assert type(second) is type(second["inner"]) is dict
    copied = copy_batch(batch, tensors=False)
    del copied["x"]
    assert batch["x"].tolist() == [0, 1, 2, 3] and batch["inner"]["y"].tolist() == [0, 1, 2, 3]


def test_a_forward_may_change_its_copy_of_a_batch():
    batch = {"x": torch.ones(2), "weights": np.ones(2), "y": torch.ones(2, requires_grad=True)}
    copied = copy_batch(batch)
    copied["x"] -= 1
    copied["weights"] -= 1
    assert copied.pop("y").requires_grad and "y" in batch
    assert batch["x"].tolist() == [1, 1] and batch["weights"].tolist() == [1, 1]
    assert copy_batch(batch, tensors=False)["x"] is batch["x"]


def test_copies_of_several_batches_are_made_and_freed_one_by_one():
    given = [{"x": torch.ones(2)} for _ in range(3)]
    copies, held = BatchCopies(given), []
    for copied in copies:
        copied["x"] -= 1
        held.append(weakref.ref(copied["x"]))
        del copied
        assert held[-1]() is None
    assert len(copies) == len(held) == 3 and len(copies[1:]) == 2
    assert all(batch["x"].tolist() == [1, 1] for batch in given)


@pytest.mark.parametrize("kind", [dict, Encoding, Fields])
def test_entries_that_were_taken_added_or_set_are_seen(kind):
    def change(act):
        batch = kind({"x": torch.ones(2), "inner": kind({"y": torch.ones(2)})})
        given = copy_batch(batch)
        before = copy_batch(given, tensors=False)
        act(given)
        return has_changed(given, before)

    assert not change(lambda batch: batch["x"].sub_(1))
    assert change(lambda batch: batch.pop("x"))
    assert change(lambda batch: batch["inner"].pop("y"))
    assert change(lambda batch: batch.update(z=torch.ones(2)))
    assert change(lambda batch: batch["inner"].update(y=torch.ones(2)))


@pytest.mark.parametrize("other", [None, "ab", torch.zeros(2)])
@pytest.mark.parametrize("names", [["a", "b"], ("a", "b")])
def test_samples_with_names_are_not_joined_with_samples_without(names, other):
    named, unnamed = ({"x": torch.arange(2), "names": one} for one in (names, other))
    assert concatenate(named, unnamed) is None and concatenate(unnamed, named) is None


def test_entries_of_lists_are_examined_once_however_many_parts_are_cut(monkeypatch):
    """512 records in 64 micro-batches took half a second in each step."""
    batch = {"x": torch.arange(64), "records": [{"id": number} for number in range(64)]}
    counts, examine = [], batches.tensors_in
    monkeypatch.setattr(batches, "tensors_in", lambda one: counts.append(1) or examine(one))
    cut(batch, 2)
    few = len(counts)
    assert cut(batch, 64)[63]["records"] == [{"id": 63}]
    assert few > 0 and len(counts) == 2 * few


def test_only_the_samples_of_a_view_are_sent_to_other_ranks():
    """Pickling a view would send all of the memory behind it."""
    tensors, array = torch.randn(1_000, 1_000), np.zeros((1_000, 1_000))
    batch = {"x": tensors[:2], "y": array[:2], "names": ["a", "b"]}
    packed = pack(batch)
    assert len(packed) < 30_000
    found = unpack(packed, torch.device("cpu"))
    assert torch.equal(found["x"], batch["x"]) and found["names"] == ["a", "b"]
    assert found["y"].shape == (2, 1_000)


def test_a_batch_of_a_class_that_cannot_be_sent_is_not():
    assert pack({"x": torch.ones(2), "act": lambda: None}) is None


def test_a_batch_that_was_cut_is_freed_at_once():
    """A cycle would keep it until Python's next collection, beside the next batch."""
    gc.disable()
    try:
        batch = {"x": torch.ones(8, 3), "names": ["a"] * 8, "y": torch.zeros(8)}
        first = weakref.ref(batch["x"])
        parts = cut(batch, 2)
        assert len(parts) == 2
        del batch, parts
        assert first() is None
    finally:
        gc.enable()
