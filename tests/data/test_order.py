import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.data import order
from outpace.data.loader import _MicroBatchSampler
from outpace.data.order import block_counts, block_size_for, mixture_at, samples_at

law = settings(max_examples=50)
SEEDS = st.integers(0, 2**40)


@law
@given(SEEDS, st.integers(1, 700), st.integers(0, 5))
def test_each_pass_takes_every_sample_once(seed, size, number):
    positions = np.arange(number * size, (number + 1) * size)
    assert sorted(samples_at(seed, positions, size)) == list(range(size))


@law
@given(SEEDS, st.integers(20, 500), st.integers(1, 64), st.integers(0, 20))
def test_any_part_of_the_sequence_is_had_alone(seed, size, count, begin):
    whole = samples_at(seed, np.arange(begin + count), size)
    found = samples_at(seed, np.arange(begin, begin + count), size)
    np.testing.assert_array_equal(found, whole[begin:])


@law
@given(SEEDS, st.integers(50, 500))
def test_passes_and_seeds_have_orders_of_their_own(seed, size):
    first, second = samples_at(seed, np.arange(2 * size), size).reshape(2, size)
    other = samples_at(seed + 1, np.arange(size), size)
    assert (first != second).any() and (first != other).any()
    assert (first != np.arange(size)).any()


def test_far_positions_and_large_sets_are_no_different():
    found = samples_at(3, np.array([10**15, 10**15 + 1]), 10**12 + 7)
    assert ((found >= 0) & (found < 10**12 + 7)).all() and found[0] != found[1]


@law
@given(SEEDS, st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_a_block_of_a_mixture_has_its_shares_exactly(seed, weights):
    counts = block_counts(tuple(weights), 300)
    assert sum(counts) == 300
    shares = np.array(weights) / sum(weights) * 300
    assert (np.abs(counts - shares) < 1).all()
    source, rank = mixture_at(seed, np.arange(600), counts)
    np.testing.assert_array_equal(np.bincount(source[:300], minlength=len(counts)), counts)
    for k, count in enumerate(counts):
        assert rank[source == k].tolist() == list(range(2 * count))


@law
@given(st.lists(st.floats(1e-3, 1), min_size=1, max_size=6))
def test_no_source_of_a_mixture_is_left_out(weights):
    size = block_size_for(tuple(weights))
    counts = np.array(block_counts(tuple(weights), size))
    assert counts.min() >= 1
    np.testing.assert_allclose(counts / size, np.array(weights) / sum(weights), rtol=0.11)


def test_a_mixture_is_a_function_of_the_position():
    counts = block_counts((1, 3), 100)
    source, rank = mixture_at(5, np.arange(1000), counts)
    some = np.array([999, 3, 500, 100])
    part_source, part_rank = mixture_at(5, some, counts)
    assert part_source.tolist() == source[some].tolist()
    assert part_rank.tolist() == rank[some].tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17])
def test_small_sets_work(size):
    assert sorted(samples_at(0, np.arange(size), size)) == list(range(size))


def counted(monkeypatch):
    """The numbers of places that each call of `permute` maps."""
    calls, permute = [], order.permute

    def recorded(places, size, key):
        calls.append(len(places))
        return permute(places, size, key)

    monkeypatch.setattr(order, "permute", recorded)
    return calls


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_many_passes_are_permuted_at_once_and_as_each_alone(size, monkeypatch):
    """Each pass took a look at all positions: a step of a million samples took minutes."""
    positions = np.random.default_rng(0).permutation(3000)
    calls = counted(monkeypatch)
    found = samples_at(5, positions, size)
    assert calls == [3000]
    alone = [int(samples_at(5, positions[at : at + 1], size)[0]) for at in range(300)]
    assert found[:300].tolist() == alone


def test_a_loader_locates_no_more_steps_at_once_than_are_few_samples():
    calls = []

    class Counted:
        def __len__(self):
            return 10

        def locate(self, seed, positions):
            calls.append(len(positions))
            return positions.tolist()

    for batch, most in ((2**17, 2**17), (2**18, 2**18), (2**15, 2**17), (4, 32 * 4)):
        calls.clear()
        next(iter(_MicroBatchSampler(Counted(), 0, batch, batch, 0, 1, 0, 100)))
        assert calls == [most]
