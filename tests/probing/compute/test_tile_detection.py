"""Tiles and waves are found where they are, and not where there is only noise."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.probing.compute.registers import step_words
from outpace.probing.compute.tile_detection import (
    find_threads,
    find_tile,
    find_waves,
    next_multiple,
)

SIZES = list(range(258, 258 + 2 * 96, 2))


def stairs(sizes, tile, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    return [(10 + math.ceil(n / tile)) * rng.normal(1, noise or 1e-12) * 1e-6 for n in sizes]


@pytest.mark.parametrize("tile", [16, 24, 32, 48, 64])
@pytest.mark.parametrize("seed", range(3))
def test_the_width_of_steps_is_found(tile, seed):
    found = find_tile(SIZES, stairs(SIZES, tile, 0.003, seed))
    assert found is not None
    assert found.tile == tile
    assert found.explained > 0.5
    assert found.rise == pytest.approx(1 / (10 + math.ceil(SIZES[0] / tile)), rel=0.3)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), slope=st.floats(0, 0.01))
def test_a_straight_line_with_noise_has_no_steps(seed, slope):
    rng = np.random.default_rng(seed)
    seconds = [(1 + slope * n) * rng.normal(1, 0.02) for n in SIZES]
    assert find_tile(SIZES, seconds) is None


def test_waves_are_found_by_the_number_of_multiprocessors():
    columns = list(range(128, 128 * 200, 256))
    seconds = [math.ceil(math.ceil(2048 / 128) * math.ceil(n / 256) / 108) for n in columns]
    tile, explained = find_waves(columns, seconds, rows=2048, multiprocessors=108)
    assert tile == (128, 256)
    assert explained > 0.9
    straight = [float(n) for n in columns]
    assert find_waves(columns, straight, rows=2048, multiprocessors=108) is None


@pytest.mark.parametrize(("wide", "threads"), [(16, 2), (8, 4), (1, 8)])
def test_blocks_that_threads_divide_are_told_apart_from_tiles(wide, threads):
    """One thread takes a step at each block; all of them when a further one has one more."""
    rng = np.random.default_rng(0)
    sizes = range(513, 513 + 5 * wide * threads, max(1, wide // 2))

    def timed(divided_by):
        return [math.ceil(math.ceil(n / wide) / divided_by) * rng.normal(1, 0.002) for n in sizes]

    found = find_threads(sizes, timed(1), timed(threads), threads)
    assert found is not None
    assert found[0] == wide
    assert found[1] > 0.5
    # All the same tiles, and twice as fast at any size: nothing is left idle.
    assert find_threads(sizes, timed(1), [t / threads for t in timed(1)], threads) is None
    assert find_threads(sizes, timed(1), timed(1), 1) is None


@pytest.mark.parametrize(
    ("step", "bits", "dtype", "dim", "words"),
    [
        (16, 512, "fp32", "n", "16 = a 512-bit register of fp32"),
        (8, 256, "fp32", "m", "8 = a 256-bit register of fp32"),
        (48, 512, "fp32", "n", "48 = 3 times a 512-bit register of fp32"),
        (16, 512, "bf16", "n", "16 = a 512-bit register of fp32"),
        (32, 512, "bf16", "k", "32 = a 512-bit register of bf16"),
        (32, 8192, "bf16", "k", "32 = a 512-bit row of an AMX register of bf16"),
        (2, 512, "bf16", "k", "2 = 1/16 of a 512-bit register of bf16"),
        (6, 512, "fp32", "n", None),
    ],
)
def test_steps_are_said_in_registers(step, bits, dtype, dim, words):
    assert step_words(step, bits, dtype, dim) == words


def test_the_next_multiple_is_the_size_itself_where_it_is_one():
    assert next_multiple(50257, 64) == 50304
    assert next_multiple(50304, 64) == 50304
