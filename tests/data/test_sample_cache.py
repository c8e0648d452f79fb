"""Encoded samples are made once and read after; what is damaged is made again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.data.classify import EncodedSamples
from outpace.data.padded_batches import concatenate_samples
from outpace.data.sample_cache import load_or_encode


def _made(lengths, segments=False, labels=True):
    names = ("tokens", "segments") if segments else ("tokens",)
    samples = [{name: list(range(length)) for name in names} for length in lengths]
    numbers = list(range(len(lengths))) if labels else None
    return EncodedSamples(concatenate_samples(samples, dict.fromkeys(names, 3), numbers), 2)


def _same(one, other):
    assert one.cut == other.cut and one.samples.fill == other.samples.fill
    assert np.array_equal(one.samples.starts, other.samples.starts)
    assert one.samples.values.keys() == other.samples.values.keys()
    for name, values in one.samples.values.items():
        assert values.dtype == other.samples.values[name].dtype
        assert np.array_equal(values, other.samples.values[name])
    if one.samples.labels is None:
        assert other.samples.labels is None
    else:
        assert np.array_equal(one.samples.labels, other.samples.labels)


def _never():
    raise AssertionError("it is kept")


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), segments=st.booleans(),
    labels=st.booleans(),
)  # fmt: skip
def test_what_is_kept_is_what_was_made(tmp_path_factory, lengths, segments, labels):
    cache, made = tmp_path_factory.mktemp("cache"), _made(lengths, segments, labels)
    _same(load_or_encode(cache, "key", lambda: made), made)
    _same(load_or_encode(cache, "key", _never), made)


def test_another_key_is_something_else(tmp_path):
    load_or_encode(tmp_path, "key", lambda: _made([2]))
    with pytest.raises(AssertionError):
        load_or_encode(tmp_path, "another", _never)


def test_what_is_damaged_is_made_again(tmp_path):
    made = _made([3, 4])
    load_or_encode(tmp_path, "key", lambda: made)
    (path,) = (tmp_path / "encoded").iterdir()
    whole = path.read_bytes()
    for broken in (b"", whole[: len(whole) // 2], whole[:-60] + bytes(60),
                   whole.replace(b"starts", b"stands")):  # fmt: skip
        path.write_bytes(broken)
        other = _made([5])
        _same(load_or_encode(tmp_path, "key", lambda other=other: other), other)
        _same(load_or_encode(tmp_path, "key", _never), other)


def test_a_cache_that_cannot_be_written_keeps_nothing(tmp_path):
    (tmp_path / "file").touch()
    for length in (2, 3):
        made = _made([length])
        _same(load_or_encode(tmp_path / "file", "key", lambda made=made: made), made)
