import math
from dataclasses import replace

import pytest

from outpace.planner.fit.cost import Cost
from outpace.planner.fit.proposals import change_plan, kinds_of_change, propose
from outpace.records.errors import BadInputError
from outpace.records.plan import Plan

SHRINKS = {"none": 1.0, "selective": 0.6, "attention": 0.3, "full": 0.2}


def predict(plan):
    """States of 400 bytes over dp_shard, activations of 100 a sample, logits of 10."""
    share = sum(SHRINKS[mode] for mode in plan.modes(4)) / 4
    logits = 0 if plan.loss == "chunked" else 10
    kinds = {
        "weights": 100 // plan.dp_shard,
        "optimizer state": 300 // plan.dp_shard,
        "activations": round(plan.micro_batch * (100 * share + logits)),
    }
    again = {"none": 0, "selective": 10, "attention": 80, "full": 100}[plan.modes(1)[0]]
    weights_read = 1000 // plan.micro_batch
    return Cost(sum(kinds.values()), 1000.0 + again + weights_read, by_kind=kinds)


def found(plan, limit, ask=predict, **options):
    kinds = kinds_of_change(plan, low_precision=False, separate_host=False)
    return propose(plan, limit, ask, kinds, **options)


def test_the_cheapest_of_each_kind_come_first():
    plan = Plan(micro_batch=16)
    proposals = found(plan, 1700)
    assert [dict(p.settings) for p in proposals[:2]] == [
        {"checkpointing": "selective"},
        {"micro_batch": 8},
    ]
    slowdowns = [p.slowdown for p in proposals]
    assert slowdowns == sorted(slowdowns)
    for proposal in proposals:
        cost = predict(change_plan(plan, proposal.settings))
        assert proposal.peak_memory_bytes == cost.peak_memory_bytes <= 1700
        assert math.isclose(1 + proposal.slowdown, cost.step_s / predict(plan).step_s)


def test_what_fits_is_proposed_without_times_and_what_has_one_comes_first():
    plan = Plan(micro_batch=16)
    known = found(plan, 1700)
    unknown = found(plan, 1700, lambda plan: replace(predict(plan), step_s=None))
    assert len(unknown) == 3 and {one.slowdown for one in unknown} == {None}
    assert all(one.peak_memory_bytes <= 1700 for one in unknown)

    def ask(plan):
        cost = predict(plan)
        return replace(cost, step_s=None) if plan.checkpointing == "selective" else cost

    assert dict(known[0].settings) == {"checkpointing": "selective"}
    mixed = found(plan, 1700, ask)
    assert dict(mixed[-1].settings) == {"checkpointing": "selective"}
    assert [one.slowdown is None for one in mixed] == [False, False, True]


def test_two_changes_together_where_one_is_not_enough():
    proposals = found(Plan(micro_batch=2), 430)
    assert proposals
    for proposal in proposals:
        assert {"micro_batch", "checkpointing"} <= set(proposal.settings)
        assert proposal.peak_memory_bytes <= 430


def test_the_optimizer_in_backward_keeps_its_one_micro_batch():
    kinds = kinds_of_change(
        Plan(micro_batch=4, optimizer_in_backward=True), low_precision=False, separate_host=False
    )
    assert not any("micro_batch" in change for kind in kinds for change in kind)


def test_nothing_is_proposed_where_nothing_fits():
    assert found(Plan(micro_batch=2), 50) == []


def test_states_are_split_over_the_ranks_there_are():
    plan = Plan(strategy="ddp", dp_replicate=4)
    (first, *_) = found(plan, 300)
    assert first.settings == {"strategy": "zero1"}
    zero = change_plan(plan, first.settings)
    assert (zero.dp_replicate, zero.dp_shard, zero.world_size) == (1, 4, 4)


def test_few_questions_are_asked_and_none_after_there_was_enough():
    asked = []

    def ask(plan):
        asked.append(plan)
        return predict(plan)

    found(Plan(micro_batch=64), 1700, ask)
    assert len(asked) <= 16
    asked.clear()
    assert found(Plan(micro_batch=64), 1700, ask, enough=lambda: True) == []
    assert len(asked) == 1


def test_a_change_that_cannot_be_is_left_out():
    def ask(plan):
        if plan.checkpointing != "none":
            raise BadInputError("no")
        return predict(plan)

    assert all("checkpointing" not in p.settings for p in found(Plan(micro_batch=16), 1700, ask))
    zb = Plan(strategy="zb", pp=2, pp_microbatches=4, micro_batch=16)
    with pytest.raises(BadInputError, match="splits the backward into parts"):
        change_plan(zb, {"checkpointing": "full"})
    assert all("checkpointing" not in p.settings for p in found(zb, 1700))


def test_what_takes_longest_is_proposed_last():
    def ask(plan):
        cost = predict(plan)
        return replace(cost, step_s=cost.step_s + 10_000 * (plan.checkpointing != "none"))

    (first, *_) = found(Plan(micro_batch=16), 1700, ask)
    assert "checkpointing" not in first.settings
