"""Layers over stages: none lost, none empty, and no spread that is faster."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.planner.pipeline.stages import balance, even, layers_per_stage, spread_by_cost
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
    with pytest.raises(BadInputError, match="needs at least that many layers, but the model has 3"):
        layers_per_stage(spec(3, vocab=64), 4)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.data())
def test_unequal_blocks_are_cut_where_the_costliest_stage_is_cheapest(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    parts = spread_by_cost(costs, stages)
    assert [n for part in parts for n in part] == list(range(len(costs)))
    assert len(parts) == stages and all(parts)
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    cheapest = min(
        max(sum(costs[b:e]) for b, e in itertools.pairwise((0, *cut, len(costs)))) for cut in cuts
    )
    assert max(sum(costs[n] for n in part) for part in parts) == cheapest


@given(st.integers(1, 60), st.integers(1, 12))
def test_even_stages_differ_by_one_layer_at_most(layers, stages):
    counts = even(layers, stages)
    assert sum(counts) == layers and len(counts) == stages
    assert max(counts) - min(counts) <= 1 and list(counts) == sorted(counts, reverse=True)
