"""Models that are laid out without memory, and filled part by part."""

import json
from pathlib import Path

import pytest

from outpace.experiment.verify import plan_for, tiny_spec
from outpace.parallel.deferred_init import fills_later
from outpace.records.plan import Plan
from outpace.records.strategies import strategies_that

RANKS = Path(__file__).with_name("deferred_init_ranks.py")


@pytest.mark.slow
@pytest.mark.gloo
def test_parts_filled_later_are_those_of_a_whole_model(on_ranks, runnable):
    spread = strategies_that(lambda traits: not traits.whole_model)
    plans = [plan_for(strategy, 4, "fp32") for strategy in runnable(sorted(spread))]
    plans += [plan.model_copy(update={"lora_rank": 2}) for plan in plans]
    spec = tiny_spec(plans)
    said = json.dumps([plan.model_dump(mode="json") for plan in plans])
    assert on_ranks(4, RANKS, spec.model_dump_json(), said) == "same"


def test_what_needs_values_before_is_built_whole():
    assert fills_later(Plan(strategy="zero3", dp_shard=2))
    assert not fills_later(Plan(strategy="ddp", dp_replicate=2))
    assert fills_later(Plan(strategy="zero3", dp_shard=2, lora_rank=2))
    assert not fills_later(Plan(strategy="zero3", dp_shard=2, lora_rank=2, base="nf4"))
    assert not fills_later(Plan(strategy="zero3", dp_shard=2, offload_parameters="disk"))
