"""The order of samples, a pure function of seed and position, so no state has to be saved.

A pass over n samples is a permutation: a Feistel network over the smallest power of four that is at
least n, with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA
2002, §4). Any element of the permutation can be computed independently and in constant memory.
"""

import numpy as np
from numpy.typing import NDArray

from outpace.records.errors import BadInputError

Index = NDArray[np.int64]
_ROUNDS = 6
_BLOCK_SIZES = (1_000, 10_000, 100_000)


def samples_at(seed: int, positions: Index, n_samples: int) -> Index:
    """Return the sample index in [0, n_samples) at each position since the start of training.

    With a global batch size of G, step s has the positions [s·G, s·G + G). Each block of
    `n_samples` positions is a pass over all samples, in a different order each time.
    """
    passes, places = np.divmod(positions, n_samples)
    numbers, of_numbers = np.unique(passes, return_inverse=True)
    keys = [_make_round_keys(seed, int(number)) for number in numbers]
    if len(keys) <= 1:
        return permute(places, n_samples, keys[0]) if keys else places
    return permute(places, n_samples, np.stack(keys, axis=1)[:, of_numbers])


def permute(indices: Index, size: int, key: NDArray[np.uint64]) -> Index:
    """Apply a keyed permutation of [0, size) to each of the `indices`.

    `key` has one number per round, (rounds,), or one per round and index, (rounds, indices).
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    values = indices.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    # The network permutes a range whose size is a power of four: repeat until all values are below
    # `size`.
    while outside.any():
        left, right = values[outside] >> np.uint64(half_bits), values[outside] & mask
        for round_key in key if key.ndim == 1 else key[:, outside]:
            left, right = right, left ^ (_mix_bits(right ^ round_key) & mask)
        values[outside] = (left << np.uint64(half_bits)) | right
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def _make_round_keys(seed: int, number: int) -> NDArray[np.uint64]:
    state = np.random.SeedSequence((seed, number)).generate_state(_ROUNDS, np.uint64)
    return state.astype(np.uint64)


def _mix_bits(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014, §4)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mixture_at(seed: int, positions: Index, counts: tuple[int, ...]) -> tuple[Index, Index]:
    """Return the source of each position, and how many samples of that source come before it.

    Every block of sum(counts) positions has exactly counts[k] samples of source k, in random order.
    """
    block_size = sum(counts)
    pattern = np.repeat(np.arange(len(counts)), counts)
    blocks, places = np.divmod(positions, block_size)
    source, rank = np.empty_like(positions), np.empty_like(positions)
    by_block = np.argsort(blocks, kind="stable")
    numbers, begins = np.unique(blocks[by_block], return_index=True)
    for number, chosen in zip(numbers, np.split(by_block, begins[1:]), strict=False):
        order = permute(
            np.arange(block_size), block_size, _make_round_keys(seed ^ 0x6D6978, int(number))
        )
        shuffled = pattern[order]
        ranks = np.empty(block_size, dtype=np.int64)
        for k, count in enumerate(counts):
            ranks[shuffled == k] = int(number) * count + np.arange(count)
        source[chosen], rank[chosen] = shuffled[places[chosen]], ranks[places[chosen]]
    return source, rank


def block_size_for(weights: tuple[float, ...]) -> int:
    """Return the smallest block size that gives each source of a mixture at least ten samples.

    Returns the largest block size if none does. Raises BadInputError for a source that would get
    less than one sample even then.
    """
    least = min(weights) / sum(weights)
    for size in _BLOCK_SIZES:
        if least * size >= 10:
            return size
    if least * _BLOCK_SIZES[-1] < 1:
        raise BadInputError(
            f"the weight {min(weights):g} is less than 1/{_BLOCK_SIZES[-1]} of the total "
            f"{sum(weights):g}, so its source would get no samples in a block; increase the weight "
            "or leave the source out"
        )
    return _BLOCK_SIZES[-1]


def block_counts(weights: tuple[float, ...], block_size: int) -> tuple[int, ...]:
    """Return integers proportional to `weights` that add up to `block_size` (largest remainder)."""
    shares = np.asarray(weights, dtype=float) / sum(weights) * block_size
    counts = np.floor(shares).astype(int)
    left = block_size - int(counts.sum())
    for k in np.argsort(counts - shares, kind="stable")[:left]:
        counts[k] += 1
    return tuple(int(count) for count in counts)
