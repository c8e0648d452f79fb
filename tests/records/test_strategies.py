"""The table of strategies: whole, and what it names is there."""

from importlib.util import find_spec
from typing import get_args

import pytest

from outpace.records.pipelines import SCHEDULES
from outpace.records.plan import Plan
from outpace.records.strategies import TRAITS, Strategy, strategies_that


def test_each_strategy_is_declared_once_in_the_order_of_its_names():
    assert tuple(TRAITS) == get_args(Strategy)
    assert set(SCHEDULES) == set(strategies_that(lambda traits: traits.module == "pipeline"))


@pytest.mark.parametrize("name", TRAITS)
def test_its_modules_lay_models_out(name):
    traits = TRAITS[name]
    for module in filter(None, (traits.module, traits.custom_module)):
        assert find_spec(f"outpace.parallel.{module}") is not None


def test_what_shards_parameters_gathers_them_and_no_rank_keeps_them_all():
    for traits in TRAITS.values():
        if traits.zero >= 2:
            assert traits.gathers and not traits.whole_model
        assert traits.zero == 0 or "dp_shard" in traits.axes


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(), "single"),
        (Plan(strategy="ddp", dp_replicate=2), "ddp 2"),
        (Plan(strategy="zero3", dp_shard=4), "zero3 4"),
        (Plan(strategy="hsdp", dp_replicate=2, dp_shard=4), "hsdp (dp_replicate 2 × dp_shard 4)"),
        # A product says which axes it splits, even if that is one.
        (Plan(strategy="3d", tp=2), "3d (tp 2)"),
        (Plan(strategy="ps", dp_replicate=3, servers=1), "ps (workers 3, servers 1)"),
    ],
)
def test_a_layout_is_said_with_the_axes_that_its_strategy_does_not_say(plan, words):
    assert plan.layout == words
