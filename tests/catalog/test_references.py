"""The small trainings whose steps a probe times."""

import pytest

from outpace.catalog.references import references
from outpace.planner.plan_columns import of_plans

KINDS = ("cpu", "cuda")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_they_are_plans_for_so_many_ranks_whose_batch_divides(ranks, kind):
    found = references(ranks, kind)
    assert len(found) >= 7
    for one in found.values():
        assert one.plan.world_size == ranks
        assert one.spec.heads % one.plan.tp == 0 and one.spec.layers >= one.plan.pp
        (passes,) = of_plans([one.plan], one.global_batch, one.spec.layers).passes
        assert passes >= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_those_of_a_quick_probe_are_among_the_others(ranks, kind):
    quick, all_of_them = references(ranks, kind, quick=True), references(ranks, kind)
    assert quick.items() <= all_of_them.items() and len(quick) < len(all_of_them)
    assert {one.plan.strategy for one in quick.values()} == {
        one.plan.strategy for one in all_of_them.values()
    }
