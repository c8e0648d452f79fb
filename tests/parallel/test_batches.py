"""Batches of any form are cut by their samples, or refused."""

from dataclasses import dataclass

import pytest
import torch

from outpace.data.loader import pinned
from outpace.parallel.batches import cut, samples_in
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
    moved = pinned(batch)["pair"]
    assert moved.inner.y.tolist() == [1, 3, 5, 7] and batch["pair"].inner.y[0] == 0


def test_lists_of_samples_of_different_lengths_are_refused():
    ragged = {"inputs": [torch.zeros(n, 3) for n in (2, 3, 4)], "targets": torch.zeros(3)}
    with pytest.raises(BadInputError, match=r"different lengths .2, 3, 4, ….*pad the samples"):
        samples_in(ragged)
    fields = [torch.zeros(4, 3), torch.zeros(4, 2), torch.zeros(7, 5), torch.zeros(4)]
    assert samples_in(fields) == 4 and [len(one) for one in cut(fields, 2)[0]] == [2, 2, 7, 2]


def test_what_has_no_samples_is_said():
    with pytest.raises(BadInputError, match=r"a batch of type int has no tensor with samples"):
        samples_in(3)
