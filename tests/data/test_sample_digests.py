"""Samples of a user's data set, digested."""

import multiprocessing
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from outpace.data.sample_digests import (
    SampleDifference,
    SampleDigests,
    digest_of,
    digest_samples,
    find_difference,
)


class Augmented(Dataset):
    """Samples with random numbers of the usual functions, or of a generator of its own."""

    def __init__(self, offset=0.0, own=False, but=()):
        self.offset, self.but = offset, but
        self.own, self.reads = np.random.default_rng(0) if own else None, 0

    def __len__(self):
        return 50

    def __getitem__(self, index):
        self.reads += 1
        noise = torch.rand(3) + random.random() + np.random.rand()
        if self.own is not None:
            noise = noise + self.own.random()
        offset = 0.0 if index in self.but else self.offset
        return {"x": noise + index + offset, "name": f"/host{self.offset}/sample{index}"}


def test_augmentations_by_the_usual_functions_are_alike_on_ranks_and_do_not_hide_other_contents():
    before = torch.get_rng_state(), random.getstate()
    found = [digest_samples(Augmented(), 3), digest_samples(Augmented(), 3, workers=2)]
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert not found[0].unsteady and found[0].unread is None
    assert {0, 49} < set(found[0].digests) and None not in found[0].digests.values()
    assert find_difference(found) is None
    other = [*found, digest_samples(Augmented(offset=1.0), 3)]
    assert find_difference(other) == SampleDifference(2, 0, most=True)
    most = range(1, 50)
    few = [*found, digest_samples(Augmented(offset=1.0, but=most), 3)]
    assert find_difference(few) == SampleDifference(2, 0, most=False)
    assert find_difference([*few, other[2]]) == SampleDifference(3, 0, most=True)


def test_what_differs_from_read_to_read_is_told_and_not_compared():
    mine = digest_samples(Augmented(own=True), 0)
    assert set(mine.unsteady) == set(mine.digests)
    assert find_difference([mine, digest_samples(Augmented(own=True, offset=1.0), 0)]) is None


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_is_left_as_if_nobody_had_read(tmp_path, workers):
    """Its own generator, its counters and its place in a file would change what training reads."""
    path = tmp_path / "rows"
    path.write_bytes(b"".join(b"%06d\n" % row for row in range(5000)))

    class Filed(Augmented):
        def __init__(self):
            super().__init__(own=True)
            self.file, self.cache = path.open("rb", buffering=0), {}

        def __getitem__(self, index):
            self.cache[index] = int(self.file.read(7))
            return super().__getitem__(index)

    dataset = Filed()
    dataset.file.read(14)
    found = digest_samples(dataset, 3, workers)
    assert found.unread is None and None not in found.digests.values()
    assert (dataset.reads, dataset.cache, dataset.file.tell()) == (0, {}, 14)
    assert dataset.own.random() == np.random.default_rng(0).random()
    dataset.file.close()


def test_where_no_process_can_be_forked_nothing_is_read_and_that_is_said(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: "spawn")
    dataset = Augmented()
    found = digest_samples(dataset, 3)
    assert dataset.reads == 0 and set(found.digests.values()) == {None}
    assert "no process can be forked" in found.unread


def test_samples_that_cannot_be_read_or_digested_are_left_to_training():
    class Broken(Augmented):
        def __getitem__(self, index):
            raise KeyError(index)

    broken = digest_samples(Broken(), 0)
    assert set(broken.digests.values()) == {None} and not broken.unsteady
    assert "KeyError" in broken.unread
    assert find_difference([broken, digest_samples(Augmented(), 0)]) is None
    assert digest_of(lambda: 0) is None and digest_of({"x": None}) is None
    assert digest_samples([], 0) == SampleDigests({}, ())


class Image:
    """An image of a library that gives its pixels as an array."""

    def __init__(self, pixels):
        self.pixels = pixels

    def __array__(self, dtype=None, copy=None):
        return self.pixels


@dataclass
class Row:
    ids: object
    path: str = ""


class Graph:
    def __init__(self, x):
        self.x = x
        self.hook = lambda: self


NOISE = np.random.default_rng(1)
PIXELS = NOISE.integers(0, 256, (8, 8, 3), np.uint8)
DECODED = np.clip(PIXELS.astype(int) + NOISE.integers(-1, 2, PIXELS.shape), 0, 255).astype("u1")
SOUND = torch.tensor(NOISE.normal(size=4000), dtype=torch.float32)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (SOUND, torch.nextafter(SOUND, torch.ones(()) * 9)),
        (SOUND.bfloat16(), (SOUND * 1.001).bfloat16()),
        (0.9995, np.nextafter(0.9995, 1)),
        (torch.tensor([0.9995, 1.0005]), torch.tensor([0.9995, 1.0005]) * (1 + 1e-6)),
        (Image(PIXELS), Image(DECODED)),
        ((PIXELS, 3), (DECODED, 3)),
        ({"ids": [1, 2], "path": "/a/1.png"}, {"ids": [1, 2], "path": "/b/1.png"}),
        (Row([1, 2], "host a"), Row([1, 2], "host b")),
        ("/data/a/1.png", "/scratch/b/1.png"),
        (Path("/data/a/1.png"), Path("/scratch/b/1.png")),
        ({"b", "a", "c"}, {"c", "b", "a"}),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0])),
        (torch.zeros(0), torch.zeros(0)),
        (Graph(SOUND), Graph(SOUND.clone())),
    ],
)
def test_equal_data_of_two_hosts_resemble_each_other(mine, theirs):
    """Decoders round otherwise, folders have other names, and sets of strings another order."""
    assert digest_of(mine).resembles(digest_of(theirs))
    assert digest_of(theirs).resembles(digest_of(mine))


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (SOUND, SOUND.roll(1000)),
        (SOUND + 100, SOUND.flip(0) + 100),
        (torch.full((4,), 49.0), torch.full((4,), 50.0)),
        (Image(PIXELS), Image(NOISE.integers(0, 256, PIXELS.shape, np.uint8))),
        ((PIXELS, 3), (DECODED, 4)),
        (torch.arange(1000), torch.arange(1000) + (torch.arange(1000) == 999)),
        (2**60, 2**60 + 1),
        (np.uint8(200), np.uint8(201)),
        (True, False),
        ([1, 2], [1, 2, 3]),
        (torch.zeros(2, 1), torch.zeros(1, 2)),
        (np.array([1, {"a": 2}], object), np.array([1, {"a": 3}], object)),
        ("a text", "another text"),
        (["ab", "c"], ["a", "bc"]),
        ("/data/1.png", "/data/2.png"),
        (b"1", b"2"),
        ({"a", "b"}, {"a", "c"}),
        (Row([1, 2]), Row([1, 3])),
        (Graph(SOUND), Graph(SOUND.roll(1000))),
        (torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse()),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j])),
    ],
)
def test_other_data_do_not(mine, theirs):
    assert not digest_of(mine).resembles(digest_of(theirs))


def test_samples_are_read_where_forking_was_chosen(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: "fork")
    assert digest_samples(Augmented(), seed=0).unread is None
