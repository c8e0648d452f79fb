"""The space of plans: every row can be a plan, and comes back as the same row."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outpace.catalog.models import preset
from outpace.catalog.node_names import find_node
from outpace.catalog.outlines import OUTLINES
from outpace.planner.calibration.cluster import of_catalog
from outpace.planner.memory import peak
from outpace.planner.memory.setup import MemoryQuestion
from outpace.planner.model.outline import outline
from outpace.planner.plan_columns import STRATEGIES, PlanBatch, join_batches, of_plans
from outpace.planner.search.search_request import VARIED, SearchRequest
from outpace.planner.search.space import expand, expand_timed, layouts, memory_options, to_plan
from outpace.planner.step_time.estimate import estimate
from outpace.planner.step_time.setup import StepTimeQuestion
from outpace.records.plan import Plan

MODELS = ["outpace-tiny", "gpt2", "llama-3-8b", "mixtral-8x7b", "deepseek-v3", "bert-base"]
KEPT = [
    {}, {"compile": True}, {"sequence_parallel": False}, {"stage_split": "even"},
    {"optimizer_in_backward": True}, {"bucket_mib": 3}, {"loss": "chunked"}, {"tp": 2},
    {"pp": 2}, {"virtual_stages": 2}, {"pp_schedule": "gpipe"}, {"zero": 2}, {"ep": 2},
    {"checkpointing": "full", "checkpoint_every": 2}, {"checkpoint_every": 1},
    {"offload_optimizer": "disk"}, {"offload_activations": "cpu", "compile": True},
    {"strategy": "zero3"}, {"micro_batch": 3}, {"async_tp": True}, {"pp_microbatches": 12},
]  # fmt: skip


def of(name):
    return OUTLINES[name] if name in OUTLINES else outline(preset(name), name)


def wanted(model="gpt2", **values):
    given = {"seq_len": 2048, "global_batch": 16, "world": 8, "per_node": 8, "precision": "bf16",
             **values}  # fmt: skip
    return SearchRequest(outline=of(model), **given)


def plans(asked):
    columns = layouts(asked)
    chosen = list(memory_options(asked))
    return expand(columns, chosen) if chosen else columns.select(slice(0, 0))


def strategies(columns):
    return {STRATEGIES[place] for place in columns.strategy}


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.sampled_from(MODELS),
    world=st.sampled_from([1, 2, 3, 4, 6, 8, 16]),
    batch=st.sampled_from([1, 4, 6, 16, 48]),
    keep=st.sampled_from(KEPT),
    precision=st.sampled_from(["bf16", "fp32", "fp16", "fp16-master", "bf16-pure", "fp8"]),
    on_host=st.booleans(),
    trained=st.booleans(),
    names=st.sets(st.sampled_from([name for name in VARIED if name != "optimizer"]), max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_row_is_a_plan_and_comes_back(
    model, world, batch, keep, precision, on_host, trained, names, seed
):
    vary = {name: VARIED[name] for name in names if name not in keep}
    asked = wanted(model, world=world, per_node=min(world, 4), global_batch=batch, keep=keep,
                   precision=precision, on_host=on_host, trained=trained, vary=vary)  # fmt: skip
    found = plans(asked)
    chosen = np.random.default_rng(seed).permutation(len(found))[:25]
    rows = found.select(chosen)
    made = [to_plan(rows, place) for place in range(len(rows))]
    for plan in made:
        assert plan.world_size == world
        assert not trained or plan.training_obstacle is None, plan.training_obstacle
        for name, value in keep.items():
            had = plan.schedule if name == "pp_schedule" else getattr(plan, name)
            had = plan.stages_per_rank if name == "virtual_stages" else had
            if name == "zero" and plan.strategy != "3d":
                had = {"zero1": 1, "zero2": 2}.get(plan.strategy, 3)
            assert had == value, name
    if not made:
        return
    back = of_plans(made, batch, asked.outline.layers)
    assert (back.adapters == rows.adapters).all()
    for field in fields(PlanBatch):
        if field.name == "adapters":
            continue
        same = np.isclose(getattr(back, field.name), getattr(rows, field.name))
        assert same.all(), (field.name, made[int(np.argmin(same.reshape(len(made), -1).all(1)))])


@pytest.mark.parametrize("world", [2, 4, 8])
def test_no_row_is_there_twice_and_ranks_and_samples_are_shared_out(world):
    asked = wanted("mixtral-8x7b", world=world, per_node=2)
    found = plans(asked)
    assert (found.ranks + found.servers == world).all()
    each = found.micro_batch * found.microbatches * found.passes * found.data_parallel
    assert (each == asked.global_batch).all()
    rows = np.concatenate(
        [
            getattr(found, f.name).reshape(len(found), -1).astype(float)
            for f in fields(PlanBatch)
            if f.name != "adapters"
        ],
        axis=1,
    )
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_all_kinds_of_plans_are_there():
    found = plans(wanted("gpt3-175b", per_node=4, global_batch=7 * 8 * 2, seq_len=16384))
    assert strategies(found) == {*STRATEGIES} - {"single", "horovod", "tp", "dp"}  # in one node
    assert strategies(plans(wanted("gpt3-175b"))) >= {"tp", "3d", "dp"}
    assert strategies(plans(wanted(world=1))) == {"single"}
    assert set(found.zero) == {0, 1, 2, 3}
    assert set(plans(wanted("mixtral-8x7b")).ep) == {1, 2, 4, 8}
    assert found.stages_per_rank.max() == 8
    assert plans(wanted(world=2)).stages_per_rank.max() == 6


@pytest.mark.parametrize("name", VARIED)
def test_what_is_varied_has_all_its_values_and_nothing_else_does(name):
    column = {"stage_split": "even_stages", "optimizer_in_backward": "in_backward"}.get(name, name)
    values = np.unique(getattr(plans(wanted(vary={name: VARIED[name]})), column))
    assert len(values) == len(VARIED[name])
    assert len(np.unique(getattr(plans(wanted()), column))) == 1


def test_what_is_varied_makes_no_plan_twice():
    vary = {name: VARIED[name] for name in VARIED if name not in ("precision", "optimizer")}
    found = plans(wanted(world=4, global_batch=4, vary=vary))
    rows = np.concatenate(
        [
            getattr(found, f.name).reshape(len(found), -1).astype(float)
            for f in fields(PlanBatch)
            if f.name != "adapters"
        ],
        axis=1,
    )
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert not (found.async_tp & (found.tp == 1)).any()
    assert not (found.even_stages & (found.pp == 1)).any()


def test_naive_ways_are_left_out_where_nobody_asks():
    assert not strategies(plans(wanted(naive=False))) & {"dp", "ps", "ring", "mp"}


def test_hybrid_groups_fill_nodes_and_one_may_insist_on_others():
    asked = wanted(world=32, global_batch=64)
    groups = plans(replace(asked, keep={"strategy": "hsdp"}))
    assert set(groups.dp_shard) == {8, 16}
    for kept in ({"dp_shard": 4}, {"dp_replicate": 8}):
        smaller = plans(replace(asked, keep={"strategy": "hsdp", **kept}))
        assert set(smaller.dp_shard) == {4} and set(smaller.dp_replicate) == {8}
    # On one node, which a group would fill.
    alone = plans(replace(asked, world=8, per_node=8, keep={"strategy": "hsdp"}))
    assert set(alone.dp_shard) == {2, 4}
    assert "hsdp" not in strategies(plans(replace(asked, world=8, per_node=8)))


def test_tensor_parallel_divides_heads_and_stays_in_a_node():
    found = plans(wanted("llama-3-70b", world=16, global_batch=16))
    assert set(found.tp) == {1, 2, 4, 8}
    assert set(plans(wanted("llama-3-70b", most_tp=2)).tp) == {1, 2}
    assert set(plans(wanted("gpt2", world=8, global_batch=8)).tp) == {1, 2, 4}


@pytest.mark.parametrize("micro", [1, 3, 12, 96])
def test_a_micro_batch_that_is_insisted_on_is_tried(micro):
    found = plans(wanted(world=1, global_batch=96, keep={"micro_batch": micro}))
    assert set(found.micro_batch) == {micro}


def test_virtual_stages_that_are_insisted_on_are_tried():
    found = plans(wanted("gpt3-175b", world=2, keep={"virtual_stages": 12}))
    assert set(found.stages_per_rank) == {12}


def test_the_blocks_that_recompute_are_counted_where_their_number_is_odd():
    odd = of("gpt2").model_copy(update={
        "stacks": (of("gpt2").stacks[0].model_copy(update={"layers": 5}),)})  # fmt: skip
    asked = replace(wanted(world=1), outline=odd, keep={"checkpoint_every": 2})
    shares = np.unique(plans(asked).modes, axis=0)
    assert shares.tolist() == [[0.4, 0, 0, 0.6]]
    third = replace(asked, keep={"checkpoint_every": 3, "checkpointing": "selective"})
    found = plans(third)
    assert np.unique(found.modes, axis=0).tolist() == [[0.6, 0.4, 0, 0]]


def test_what_contradicts_itself_leaves_nothing():
    asked = wanted(keep={"checkpointing": "none", "checkpoint_every": 3})
    assert not list(memory_options(asked))
    assert len(plans(wanted(keep={"optimizer_in_backward": True, "precision": "fp16"}))) == 0
    assert len(plans(wanted(keep={"precision": "bf16-pure", "optimizer": "adamw-fused"}))) == 0


def test_layouts_pull_no_lever_even_where_one_is_insisted_on():
    bare = layouts(wanted(keep={"checkpointing": "full", "offload_optimizer": "cpu"}))
    assert len(bare) and (bare.modes[:, 0] == 1).all() and not bare.offload_optimizer.any()
    assert not bare.chunked_loss.any()


def test_plans_of_ones_own_have_columns():
    plan = Plan(strategy="3d", pp=2, tp=2, dp_shard=2, pp_microbatches=4, zero=1, loss="chunked",
                checkpoint_layers=("full", "none", "attention", "none"))  # fmt: skip
    row = of_plans([plan], 16, 4)
    assert row.modes.tolist() == [[0.5, 0, 0.25, 0.25]]
    assert (row.passes[0], row.zero[0], row.data_parallel[0], row.ranks[0]) == (2, 1, 2, 8)


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.sampled_from(MODELS),
    world=st.sampled_from([1, 8, 16]),
    keep=st.sampled_from(KEPT),
    vary=st.sampled_from([{}, {"optimizer": ("adamw-fused", "adamw-8bit")}]),
)
def test_options_are_combined_with_all_layouts_that_allow_them(model, world, keep, vary):
    """As if each were tried with each; and a chunked loss changes neither times nor floors."""
    asked = wanted(model, world=world, keep=keep, vary=vary)
    plain, chosen = layouts(asked), list(memory_options(asked))
    if not chosen or not len(plain):
        return
    one_by_one = join_batches([expand(plain.select([n]), chosen) for n in range(len(plain))])
    device = of_catalog(find_node("hgx-h100"), max(1, world // 8))
    question = StepTimeQuestion(asked.outline, asked.seq_len, device.device, device.fabric)

    def seconds(columns):
        return estimate(question, columns).step_s

    def floors(columns):
        return peak.least_bytes(MemoryQuestion(asked.outline, asked.seq_len), columns)

    together, took = expand_timed(plain, chosen, seconds)
    for found in (expand(plain, chosen), together):
        for field in fields(PlanBatch):
            mine, its = getattr(found, field.name), getattr(one_by_one, field.name)
            assert np.array_equal(mine, its), field.name
    assert np.array_equal(took, seconds(one_by_one))
    need = floors(one_by_one)
    limit = float(np.median(need)) if len(need) else 0.0
    able, took = expand_timed(plain, chosen, seconds, lambda c: floors(c) <= limit)
    assert np.array_equal(floors(able), need[need <= limit])
    assert np.array_equal(took, seconds(one_by_one)[need <= limit])
