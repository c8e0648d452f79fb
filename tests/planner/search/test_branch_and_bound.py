"""The search leaves nothing out: it finds what trying everything finds."""

import importlib
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from outpace.catalog.models import preset
from outpace.catalog.node_names import find_node
from outpace.catalog.outlines import OUTLINES
from outpace.planner.calibration.cluster import of_catalog
from outpace.planner.memory import peak
from outpace.planner.memory.setup import MemoryQuestion
from outpace.planner.model.outline import outline, parameters
from outpace.planner.search.acceptance import Acceptance
from outpace.planner.search.alternatives import find_alternatives
from outpace.planner.search.branch_and_bound import FAMILIES, family, fits, search
from outpace.planner.search.search_request import VARIED, SearchRequest
from outpace.planner.search.space import expand, layouts, memory_options, to_plan
from outpace.planner.step_time.estimate import estimate
from outpace.planner.step_time.setup import StepTimeQuestion

# Plainness may decide between plans that differ by so little.
ALIKE = 1.0011
GIB = 2**30
EXAMPLES = settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])


def of(name):
    return OUTLINES[name] if name in OUTLINES else outline(preset(name), name)


def asked(model, machine, nodes, batch, **values):
    cluster = of_catalog(find_node(machine), nodes)
    found = of(model)
    given = {"seq_len": min(2048, found.max_positions), "precision": "bf16", **values}
    wanted = SearchRequest(outline=found, global_batch=batch, world=cluster.devices,
                    per_node=cluster.fabric.per_node, **given)  # fmt: skip
    return StepTimeQuestion(found, wanted.seq_len, cluster.device, cluster.fabric), wanted


def by_formula(question, wanted):
    return lambda c: peak.reserved_bytes(
        MemoryQuestion(question.outline, wanted.seq_len, question.device.kind), c
    )


def least_by_formula(question, wanted):
    return lambda c: peak.least_bytes(
        MemoryQuestion(question.outline, wanted.seq_len, question.device.kind), c
    )


def zero_bound(c):
    """Return 0 for every plan: a lower bound of whatever plans need."""
    return np.zeros(len(c))


def by_hand(question, wanted):
    """Other bytes than the planner's, so that other plans are at the edge."""
    size = parameters(question.outline)

    def needs(c):
        shards = np.where(c.zero > 0, c.dp_shard, 1) * c.tp * c.pp
        lives = np.where(c.offload_optimizer > 0, 4, 16) * size / shards
        kept = c.modes @ np.array([34.0, 20.0, 10.0, 1.0])
        kept = np.where(c.offload_activations > 0, kept / 4, kept)
        return lives + c.micro_batch * wanted.seq_len * kept * question.outline.hidden

    return needs


def everything(question, wanted, needs):
    chosen = list(memory_options(wanted))
    plans = expand(layouts(wanted), chosen)
    return plans, estimate(question, plans).step_s, needs(plans)


def kinds(c):
    split = (c.tp > 1, c.cp > 1, c.pp > 1, c.ep > 1, c.dp_replicate > 1)
    return [*zip(family(c).tolist(), *(x.tolist() for x in split), c.zero.tolist(), strict=True)]


def brute(question, wanted, needs, limit):
    """The fastest time of every kind that fits; of families that do not, the fewest bytes."""
    plans, seconds, need = everything(question, wanted, needs)
    fastest, least = {}, {}
    for kind, took, size in zip(kinds(plans), seconds, need, strict=True):
        if size <= limit:
            fastest[kind] = min(fastest.get(kind, np.inf), took)
        least[kind[0]] = min(least.get(kind[0], np.inf), size)
    return fastest, least


def check(question, wanted, needs, limit, count, rounding=0.0, floors=zero_bound):
    found = search(question, wanted, needs, floors, limit, count)
    fastest, least = brute(question, wanted, needs, limit)
    seconds = found.times.step_s[found.ranked][:count]
    assert (needs(found.columns)[found.ranked] <= limit).all()
    # Beside them kinds without pipelines, which those that have to be simulated may hide.
    assert (found.columns.pp[found.ranked][count:] == 1).all()
    best = sorted(fastest.values())[:count]
    assert len(seconds) == len(best)
    # Rank by rank as fast as the fastest there is, but for what plainness decides.
    assert (seconds <= np.array(best) * ALIKE).all()
    assert (np.sort(seconds) >= np.array(best) * (1 - 1e-9)).all()
    fitting = {kind[0] for kind in fastest}
    for place, name in enumerate(FAMILIES):
        if place in fitting:
            took = float(found.times.step_s[found.best[name]])
            least_s = min(took for kind, took in fastest.items() if kind[0] == place)
            assert least_s * (1 - rounding) <= took <= least_s * ALIKE, name
        elif place in least:
            assert found.best[name] == -1
            # The last bit depends on which plans an array has beside it.
            assert math.isclose(found.needs[found.smallest[name]], least[place], rel_tol=1e-15), (
                name
            )
    return found


@EXAMPLES
@given(
    model=st.sampled_from(["gpt2", "llama-3-8b", "mixtral-8x7b", "t5-11b"]),
    machine=st.sampled_from(["hgx-h100", "4x-v100", "2x-titan-rtx-nv2", "l4"]),
    batch=st.sampled_from([8, 12, 32]),
    keep=st.sampled_from([
        {}, {"checkpointing": "full"}, {"offload_optimizer": "cpu"}, {"compile": True},
        {"offload_parameters": "cpu", "offload_activations": "cpu"}, {"micro_batch": 1},
    ]),
    share=st.floats(0.01, 1.5),
    count=st.sampled_from([1, 3, 10]),
    by=st.sampled_from([(by_hand, None), (by_formula, least_by_formula)]),
)  # fmt: skip
@example(  # with offloaded activations, what recomputes nothing needs the least
    model="mixtral-8x7b", machine="2x-titan-rtx-nv2", batch=8, keep={}, share=0.0625, count=1,
    by=(by_formula, least_by_formula),
)  # fmt: skip
def test_the_search_finds_what_trying_everything_finds(
    model, machine, batch, keep, share, count, by
):
    question, wanted = asked(model, machine, 1, batch, keep=keep)
    limit = share * question.device.memory_bytes
    needs, least = by
    floors = zero_bound if least is None else least(question, wanted)
    check(question, wanted, needs(question, wanted), limit, count, floors=floors)


def test_a_plan_fits_that_offloads_activations_in_place_of_recomputing_them():
    keep = {"strategy": "3d", "ep": 2, "offload_activations": "cpu"}
    question, wanted = asked("mixtral-8x7b", "2x-titan-rtx-nv2", 1, 8, keep=keep)
    needs, floors = by_formula(question, wanted), least_by_formula(question, wanted)
    plans, _, need = everything(question, wanted, needs)
    recomputed = need[plans.modes[:, 0] == 0].min()
    assert need.min() < recomputed
    assert fits(wanted, needs, floors, need.min())
    assert not fits(wanted, needs, floors, 0.999 * need.min())


@pytest.mark.parametrize("schedule", ["gpipe", "loopedbfs", "1f1b", "interleaved", "zb", "zbv"])
@pytest.mark.parametrize("gib", [20, 25, 27, 29, 31])
def test_nothing_is_lost_where_neither_the_smallest_nor_the_largest_micro_batch_fits(schedule, gib):
    """GPipe needs the least between: its borders' buffers and its passes pull both ways."""
    keep = {"tp": 2, "pp": 4, "dp_shard": 1, "pp_schedule": schedule}
    question, wanted = asked("llama-3-8b", "hgx-h100", 2, 32, keep=keep)
    # A plan's time differs in its last digit by those that are reckoned beside it.
    floors = least_by_formula(question, wanted)
    needs = by_formula(question, wanted)
    check(question, wanted, needs, gib * GIB, 10, rounding=1e-9, floors=floors)


@pytest.mark.parametrize("names", [*([one] for one in VARIED), [*VARIED]])
@pytest.mark.parametrize("share", [0.9, 3.0])
def test_what_is_varied_is_searched_as_if_everything_were_tried(names, share):
    vary = {name: VARIED[name] for name in names}
    question, wanted = asked("llama-3-8b", "2x-titan-rtx-nv2", 1, 4, vary=vary)
    plain = replace(wanted, vary={})
    limit = share * question.device.memory_bytes
    found = check(question, wanted, by_hand(question, wanted), limit, 5)
    without = search(question, plain, by_hand(question, plain), zero_bound, limit, 5)
    assert found.considered > without.considered
    assert len(found.ranked) >= len(without.ranked) > 0
    best = [float(one.times.step_s[one.ranked[0]]) for one in (found, without)]
    assert best[0] <= best[1] * ALIKE


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("share", [0.1, 0.3, 1.0])
def test_the_search_ends_as_soon_as_it_may_and_no_sooner(count, share, monkeypatch):
    """Layout by layer of the order: nothing is found by being looked at with a neighbour."""
    found = importlib.import_module("outpace.planner.search.branch_and_bound")
    monkeypatch.setattr(found, "_FIRST", 1)
    monkeypatch.setattr(found, "_BATCH", 1)
    monkeypatch.setattr(found, "_PIECE", 32)
    for model, machine, batch in (("llama-3-8b", "4x-v100", 12), ("gpt2", "4x-gtx-1080-ti", 32)):
        question, wanted = asked(model, machine, 1, batch)
        limit = share * question.device.memory_bytes * (1 if model == "gpt2" else 2)
        check(question, wanted, by_hand(question, wanted), limit, count)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "machine", "nodes", "batch"),
    [
        ("llama-3-8b", "hgx-h100", 2, 64),
        ("mixtral-8x7b", "dgx-a100", 2, 32),
        ("gpt2", "2x-titan-rtx", 1, 16),
        ("bert-base", "4x-gtx-1080-ti", 1, 64),
        ("deepseek-v2", "hgx-h200", 4, 64),
        ("t5-11b", "aws-p4d", 1, 24),
    ],
)
def test_on_real_machines(model, machine, nodes, batch):
    question, wanted = asked(model, machine, nodes, batch)
    limit = question.device.memory_bytes
    found = check(question, wanted, by_formula(question, wanted), limit, 8)
    assert len(found.ranked) and found.considered > 0


@pytest.mark.parametrize("model", ["gpt2", "llama-3-8b", "mixtral-8x7b", "t5-11b"])
def test_the_bytes_of_a_plan_are_the_same_whatever_is_beside_it(model):
    question, wanted = asked(model, "hgx-h100", 1, 16)
    needs = by_formula(question, wanted)
    plans = expand(layouts(wanted), list(memory_options(wanted)))
    together = needs(plans)
    for place in np.random.default_rng(0).permutation(len(plans))[:40]:
        assert needs(plans.select([place]))[0] == pytest.approx(together[place], rel=1e-12)


@pytest.mark.slow
@EXAMPLES
@given(
    model=st.sampled_from(["gpt2", "llama-3-8b", "mixtral-8x7b"]),
    less=st.floats(0.02, 2),
    more=st.floats(1, 8),
)
def test_more_memory_never_makes_a_plan_infeasible_or_the_best_slower(model, less, more):
    question, wanted = asked(model, "dgx-a100", 1, 16)
    needs = by_formula(question, wanted)
    limits = less * 80 * GIB, less * more * 80 * GIB
    few, many = (search(question, wanted, needs, zero_bound, limit, 5) for limit in limits)
    if not len(few.ranked):
        return
    assert len(many.ranked) >= len(few.ranked)
    best = [float(one.times.step_s[one.ranked[0]]) for one in (few, many)]
    assert best[1] <= best[0] * ALIKE


def test_equally_fast_plans_are_ranked_by_how_plain_they_are():
    question, wanted = asked("gpt2", "l4", 1, 1)
    found = search(question, wanted, by_formula(question, wanted), zero_bound, 24 * GIB, 1)
    first = found.columns.select(found.ranked)
    assert first.modes.tolist() == [[1, 0, 0, 0]] and not first.chunked_loss[0]


def test_nothing_is_found_where_nothing_can_be():
    question, wanted = asked("gpt2", "hgx-h100", 1, 8)
    impossible = replace(wanted, keep={"checkpointing": "none", "checkpoint_every": 2})
    for other in (impossible, replace(wanted, global_batch=3, keep={"strategy": "ddp"})):
        found = search(question, other, by_formula(question, other), zero_bound, 80 * GIB, 5)
        assert not len(found.ranked) and not found.smallest


@pytest.mark.parametrize("name", ["plain shards", "pipelines", "nothing"])
def test_of_what_is_accepted_the_fastest_is_found(name):
    """As by asking about every plan that fits, fastest first."""
    question, wanted = asked("outpace-tiny", "4x-v100", 1, 16)
    needs = by_formula(question, wanted)
    takes = {
        "plain shards": lambda plan: plan.strategy in ("zero2", "zero3") and plan.loss == "auto",
        "pipelines": lambda plan: plan.pp > 1 and plan.checkpointing in ("none", "full"),
        "nothing": lambda plan: False,
    }[name]
    everything = expand(layouts(wanted), list(memory_options(wanted)))
    everything = everything.select(needs(everything) <= GIB)
    seconds = estimate(question, everything).step_s
    each = (place for place in np.argsort(seconds) if takes(to_plan(everything, int(place))))
    best = next(each, None)
    accepts = Acceptance("a trainer", lambda plan, batch: "" if takes(plan) else "Not this one.")
    restricted = replace(wanted, accepts=accepts)
    found = search(question, restricted, needs, zero_bound, GIB, 3)
    if best is None:
        assert not len(found.ranked)
        return
    assert all(takes(to_plan(found.columns, int(place))) for place in found.ranked)
    assert found.times.step_s[found.fastest] <= seconds[best] * ALIKE
    found = find_alternatives(question, restricted, found, needs, zero_bound, GIB)
    for place in (found.simplest, found.leanest):
        assert takes(to_plan(found.columns, place))
