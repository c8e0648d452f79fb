"""Layers over stages: none lost, none empty, and no spread that is faster."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.planner.stages import balance, layers_per_stage
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec


def spec(layers: int, vocab: int) -> ModelSpec:
    values = {"family": "llama", "layers": layers, "hidden": 64, "heads": 4, "vocab": vocab}
    return ModelSpec.parse({**values, "ffn": 192, "max_positions": 64}, "test")


def slowest(counts: tuple[int, ...], head: float) -> float:
    return max(*counts[:-1], counts[-1] + head) if len(counts) > 1 else counts[0] + head


@given(st.integers(1, 9), st.integers(1, 5), st.floats(0, 6))
def test_no_spread_of_the_layers_has_a_faster_slowest_stage(layers, stages, head):
    if layers < stages:
        return
    found = balance(layers, stages, head)
    assert sum(found) == layers
    assert len(found) == stages
    assert min(found) >= 1
    all_spreads = itertools.product(range(1, layers + 1), repeat=stages)
    fastest = min(slowest(counts, head) for counts in all_spreads if sum(counts) == layers)
    assert slowest(found, head) == pytest.approx(fastest)


def test_equal_stages_are_equal_and_later_ones_get_what_is_left():
    assert balance(8, 4, 0.0) == (2, 2, 2, 2)
    assert balance(10, 4, 0.5) == (2, 3, 3, 2)


def test_a_large_vocabulary_takes_layers_from_the_last_stage():
    assert layers_per_stage(spec(8, vocab=64), 2) == (4, 4)
    assert layers_per_stage(spec(8, vocab=4096), 2) == (6, 2)
    assert layers_per_stage(spec(8, vocab=8192), 2) == (7, 1)


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(BadInputError, match="4 stages needs as many layers, but the model has 3"):
        layers_per_stage(spec(3, vocab=64), 4)
