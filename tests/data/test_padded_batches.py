"""Batches of samples of different lengths."""

import numpy as np
import pytest

from outpace.data.padded_batches import (
    FILLER,
    IGNORED,
    PaddedDataset,
    concatenate_samples,
    shape_multiple,
)

LENGTHS = (3, 8, 9, 17, 1)


@pytest.fixture
def samples():
    made = [{"tokens": [n] * n, "targets": [n] * (n - 1) + [IGNORED]} for n in LENGTHS]
    return concatenate_samples(made, {"tokens": 0, "targets": IGNORED})


def test_a_gpu_has_few_lengths_and_a_compiler_fewer():
    """Each length is planned by cuDNN, for 0.1 to 1 s."""
    assert shape_multiple(1000, "cpu", compiled=False) == 8
    assert shape_multiple(1000, "cuda", compiled=False) == 64
    assert shape_multiple(1000, "cuda", compiled=True) % 64 == 0
    assert -(-1000 // shape_multiple(1000, "cuda", compiled=True)) <= 8


def test_a_batch_is_as_long_as_its_longest_sample_in_eights(samples):
    data = PaddedDataset(samples, 20, mask=True, last=True)
    assert data.__getitems__([0, 1])["tokens"].shape == (2, 8)
    batch = data.__getitems__([2, 0])
    assert batch["tokens"].shape == (2, 16)
    assert batch["tokens"][1].tolist() == [3] * 3 + [0] * 13
    assert batch["targets"][1].tolist() == [3] * 2 + [IGNORED] * 14
    assert batch["padding_mask"].sum(1).tolist() == [9, 3]
    assert batch["last"].tolist() == [8, 2]
    assert data.__getitems__([3])["tokens"].shape == (1, 20), "no longer than asked for"
    assert PaddedDataset(samples, 24, fixed=True).__getitems__([0])["tokens"].shape == (1, 24)


def test_what_is_held_out_comes_once_each_and_is_filled_up(samples):
    data = PaddedDataset(samples, 24, once_in=4)
    assert len(data) == 8
    keys = data.locate(7, np.arange(8))
    assert keys == [0, 1, 2, 3, 4, FILLER, FILLER, FILLER]
    counted = data.__getitems__(keys)["targets"] != IGNORED
    assert int(counted.sum()) == samples.targets == sum(LENGTHS) - len(LENGTHS)
    assert not counted[5:].any()


def test_labels_of_fillers_do_not_count():
    data = PaddedDataset(concatenate_samples([{"tokens": [1]}], {"tokens": 0}, [1]), 8, once_in=2)
    assert data.__getitems__(data.locate(0, np.arange(2)))["targets"].tolist() == [1, IGNORED]


@pytest.mark.parametrize("fixed", [False, True])
def test_work_is_what_batches_hold(samples, fixed):
    data = PaddedDataset(samples, 24, fixed)
    places = np.arange(40)
    work = data.sample_lengths(3, places, micro_batch=2)
    keys = data.locate(3, places)
    batches = [data.__getitems__(keys[i : i + 2])["tokens"] for i in range(0, 40, 2)]
    assert work.lengths.sum() == sum(LENGTHS) * 8
    assert work.padded.sum() == sum(batch.numel() for batch in batches)
