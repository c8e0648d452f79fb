"""The simplest and the leanest of plans about as fast: what trying everything finds."""

from dataclasses import replace

import numpy as np
import pytest

from outpace.catalog.models import preset
from outpace.catalog.node_names import find_node
from outpace.catalog.outlines import OUTLINES
from outpace.planner.calibration.cluster import of_catalog
from outpace.planner.memory import peak
from outpace.planner.memory.setup import MemoryQuestion
from outpace.planner.model.outline import outline
from outpace.planner.search.alternatives import find_alternatives
from outpace.planner.search.branch_and_bound import search
from outpace.planner.search.known_bytes import remember
from outpace.planner.search.plan_choice import (
    CROWDED,
    EQUAL,
    LEAN,
    ROOMIER,
    ROOMY,
    WIDE,
    PlanChoice,
    leanest,
    quickest,
    simplest,
    with_offloads,
)
from outpace.planner.search.plan_masks import untrained_mask
from outpace.planner.search.search_request import SearchRequest
from outpace.planner.search.space import expand, layouts, memory_options, to_plan
from outpace.planner.step_time.estimate import estimate
from outpace.planner.step_time.setup import StepTimeQuestion

PLACES = ("offload_activations", "offload_parameters", "offload_optimizer")


def asked(model, machine, nodes, batch, **values):
    cluster = of_catalog(find_node(machine), nodes)
    found = OUTLINES[model] if model in OUTLINES else outline(preset(model), model)
    given = {"seq_len": 1024, "precision": "bf16", **values}
    wanted = SearchRequest(outline=found, global_batch=batch, world=cluster.devices,
                    per_node=cluster.fabric.per_node, **given)  # fmt: skip
    question = StepTimeQuestion(found, wanted.seq_len, cluster.device, cluster.fabric)
    return question, wanted, float(cluster.device.memory_bytes)


def reckoners(question, wanted):
    def needs(c):
        return peak.reserved_bytes(
            MemoryQuestion(question.outline, wanted.seq_len, question.device.kind), c
        )

    def floors(c):
        return peak.least_bytes(
            MemoryQuestion(question.outline, wanted.seq_len, question.device.kind), c
        )

    return needs, floors


def words_asked(plan, need, limit):
    """What a plan asks of who runs it, by a plan's own settings."""
    offloads = [getattr(plan, name) for name in PLACES]
    exotic = plan.pp > 1 and plan.schedule not in ("gpipe", "1f1b")
    sharded = plan.dp_shard > 1 and plan.strategy not in ("single", "ddp")
    return (
        sharded + (plan.strategy == "hsdp")
        + 2 * ((plan.tp > 1) + (plan.cp > 1) + (plan.pp > 1) + exotic)
        + 3 * (plan.strategy in ("dp", "ps", "ring", "mp"))
        + 3 * (plan.training_obstacle is not None)
        + sum({"none": 0, "cpu": 5, "disk": 6}[place] for place in offloads)
        + (plan.checkpointing != "none") + (plan.loss == "chunked")
        + 2 * (need > ROOMY * limit)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "machine", "batch"),
    [
        ("gpt2-medium", "hgx-a100", 64),
        ("gpt2-xl", "4xrtx-3090", 16),
        ("gpt2-xl", "4xrtx-3090", 32),
        ("gpt2-xl", "rtx-4090", 8),
    ],
)
def test_the_simplest_and_the_leanest_are_those_of_trying_everything(model, machine, batch):
    question, wanted, limit = asked(model, machine, 1, batch)
    needs, floors = reckoners(question, wanted)
    first = search(question, wanted, needs, lambda c: np.zeros(len(c)), limit)
    found = find_alternatives(question, wanted, first, needs, floors, limit)
    least = float(found.times.step_s[found.fastest])

    plans = expand(layouts(wanted), list(memory_options(wanted)))
    took, need = estimate(question, plans).step_s, needs(plans)
    fits = need <= limit
    offloads = sum(getattr(found.columns, name)[found.fastest] for name in PLACES) > 0
    stays = sum(getattr(plans, name) for name in PLACES) == 0
    own, own_s = found.simplest, float(found.times.step_s[found.simplest])
    able = fits & ~untrained_mask(plans)  # outpace is the trainer
    assert own_s <= found.simple_s <= LEAN * took[able].min()
    # What offloads or fills memory is recommended only where nothing else is about as fast.
    mine = to_plan(found.columns, own)
    own_stays = all(getattr(mine, name) == "none" for name in PLACES)
    assert found.needs[own] <= CROWDED * limit
    near = able & (took <= LEAN * took[able].min())
    assert own_stays or not (near & stays).any()
    assert found.needs[own] <= ROOMY * limit or not (near & stays & (need <= ROOMY * limit)).any()
    # No plan of its set that is as fast is simpler, or as simple with more memory free.
    like = near & (took <= found.simple_s)
    like &= stays if own_stays else True
    like &= (need <= ROOMY * limit) if found.needs[own] <= ROOMY * limit else True
    cost = words_asked(mine, found.needs[own], limit)
    costs = {int(i): words_asked(to_plan(plans, int(i)), need[i], limit)
             for i in np.flatnonzero(like)}  # fmt: skip
    assert min(costs.values()) == cost
    rivals = [i for i, one in costs.items() if one == cost]
    assert max(found.needs[own], limit / 2) == max(min(need[rivals]), limit / 2)

    # Nothing that may stand for it needs less.
    allowed = fits & (stays | offloads)
    lean, lean_s = found.needs[found.leanest], float(found.times.step_s[found.leanest])
    if found.roomier:
        roomy = allowed & (need <= ROOMY * limit)
        assert lean <= ROOMY * limit and LEAN * least < lean_s <= ROOMIER * least
        assert lean_s == took[roomy].min()
    else:
        assert lean == need[allowed & (took <= LEAN * least)].min() and lean_s <= LEAN * least


def test_what_crowds_memory_gives_way_to_what_leaves_it_free_within_a_third_more_time():
    """At two sizes of memory for each rule, by trying everything."""
    lora = {"seq_len": 2048, "keep": {"lora_rank": 16}, "vary": {"compile": (False, True)}}
    question, wanted, _ = asked("llama-3.1-8b", "rtx-4090", 1, 4, **lora)
    needs, floors = reckoners(question, wanted)
    plans = expand(layouts(wanted), list(memory_options(wanted)))
    took, need = estimate(question, plans).step_s, needs(plans)
    rules = ((ROOMY, LEAN), (CROWDED, LEAN), (ROOMY, WIDE), (1.0, LEAN))
    sizes = {rule: [] for rule in rules}
    for size in (np.unique(need)[1:] / np.array([[0.999], [0.98], [0.96]])).flat:
        least = took[need <= size].min()
        for rule in rules:
            near = (need <= rule[0] * size) & (took <= rule[1] * least)
            if near.any():
                sizes[rule].append((size, min(EQUAL * took[near].min(), rule[1] * least)))
                break
    for rule, some in sizes.items():
        assert some, rule
        for size, most_s in some[:: max(1, len(some) - 1)]:
            first = search(question, wanted, needs, floors, size)
            found = find_alternatives(question, wanted, first, needs, floors, size)
            assert found.needs[found.simplest] <= rule[0] * size, rule
            assert found.times.step_s[found.simplest] <= most_s * (1 + 1e-12), rule


@pytest.mark.parametrize(
    ("plain", "most", "device", "chosen"),
    [(85, 90, 100, "none"), (85, 90, 90, "full"), (95, 97, 100, "full"), (49, 90, 100, "none")],
)
def test_free_memory_is_a_share_of_the_device_whatever_plans_may_take(plain, most, device, chosen):
    """Recomputation, which leaves more, is worth it above 90 % of the device's memory alone."""
    _, wanted, _ = asked("gpt2", "4xrtx-3090", 1, 16)

    def needs(c):
        return np.where(c.modes[:, 0] < 1, 40.0, float(plain))

    options = [
        one
        for one in with_offloads(list(memory_options(wanted)), 0)
        if not one["chunked_loss"] and max(one["modes"][0], one["modes"][3]) == 1
    ]
    choice = PlanChoice(
        layouts(wanted), options, lambda c: np.ones(len(c)), needs, needs, float(most)
    )
    found = simplest(choice, 1.0, float(device), False)
    assert to_plan(found, 0).checkpointing == chosen


def test_bytes_are_reckoned_of_few_plans_and_none_needs_less_than_its_floor():
    """Of thousands of plans, in few calls: what can be the leanest, by a bound, comes first."""
    question, wanted, _ = asked("llama-3.1-8b", "hgx-h100", 2, 64)
    needs, floors = reckoners(question, wanted)
    plain, chosen = layouts(wanted), with_offloads(list(memory_options(wanted)), 0)
    counts = {"seconds": [], "needs": []}

    def seconds(c):
        counts["seconds"].append(len(c))
        return estimate(question, c).step_s

    def counted(c):
        counts["needs"].append(len(c))
        return needs(c)

    choice = PlanChoice(plain, chosen, seconds, counted, floors, np.inf)
    found = leanest(choice, np.inf)
    plans = expand(plain, chosen)
    need = needs(plans)
    assert needs(found)[0] == need.min()
    assert (floors(plans) <= need).all()
    # A loss in chunks takes as long as the whole one: of the two, one is looked at.
    assert sum(counts["seconds"]) == len(plans) - plans.chunked_loss.sum()
    assert len(counts["seconds"]) <= 1 + len(plain) / 1000
    assert sum(counts["needs"]) < 0.8 * len(plans)


def test_plans_whose_floor_does_not_fit_take_no_estimate_of_seconds():
    question, wanted, _ = asked("llama-3.1-8b", "hgx-h100", 2, 64)
    needs, floors = reckoners(question, wanted)
    plain, chosen = layouts(wanted), list(memory_options(wanted))
    timed = []

    def seconds(c):
        timed.append(len(c))
        return estimate(question, c).step_s

    choice = PlanChoice(plain, chosen, seconds, needs, floors, 1.0)
    assert quickest(choice, np.zeros(len(plain)), 1e9) is None
    assert sum(timed) == 0


@pytest.mark.parametrize(
    ("model", "nodes", "vary"),
    [
        ("gpt2-xl", 1, {"stage_split": ("cost", "even"), "async_tp": (False, True)}),
        ("mixtral-8x7b", 2, {}),
    ],
)
def test_the_mask_of_what_outpace_does_not_train_is_what_a_plan_says_of_itself(model, nodes, vary):
    _, wanted, _ = asked(model, "hgx-h100", nodes, 64, vary=vary)
    plain = layouts(wanted)
    rows = np.random.default_rng(0).permutation(len(plain))[:400]
    some = plain.select(rows)
    mask = untrained_mask(some)
    own = [to_plan(some, i).training_obstacle is not None for i in range(len(some))]
    assert mask.tolist() == own
    assert {True, False} == set(own)


def test_no_plan_is_reckoned_twice_in_an_answer():
    """Alternatives are chosen among plans whose bytes the search has estimated."""
    question, wanted, limit = asked("llama-3.1-8b", "hgx-h100", 2, 64)
    needs, floors = reckoners(question, wanted)
    seen = []

    def counted(columns):
        seen.extend(to_plan(columns, place).model_dump_json() for place in range(len(columns)))
        return needs(columns)

    found = search(question, wanted, counted, floors, limit)
    before = len(seen)
    again = find_alternatives(question, wanted, found, counted, floors, limit)
    assert len(seen) == len(set(seen)) and before > 100
    plain = find_alternatives(question, wanted, replace(found, known={}), needs, floors, limit)
    assert (again.simplest, again.leanest) == (plain.simplest, plain.leanest)
    assert np.array_equal(again.needs, plain.needs)
    assert len(remember(counted, {})(found.columns.select([]))) == 0
