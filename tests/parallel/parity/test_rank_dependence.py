"""How much a loss changes with the rank is found, under whatever name code asks for it."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import get_rank, get_world_size

from outpace.interop.custom_model import CustomModel, CustomObjective, build_custom_model
from outpace.launch.forked_job import run_forked
from outpace.parallel.layout import StepHooks
from outpace.parallel.parity.names_in_use import NamesInUse
from outpace.parallel.parity.rank_dependence import compare_ranks, may_ask_for_rank

pytestmark = pytest.mark.gloo


def mean(module, batch):
    return module(batch).square().mean()


def doubled_on_rank_0(module, batch):
    return mean(module, batch) * (2 if dist.get_rank() == 0 else 1)


def by_an_imported_name(module, batch):
    return mean(module, batch) * (2 if get_rank() == 0 else 1)


def times_the_ranks(module, batch):
    return mean(module, batch) * get_world_size()


def times_the_ranks_of_a_group(module, batch):
    return mean(module, batch) * get_world_size(dist.group.WORLD)


def logged_on_rank_0(module, batch):
    value = mean(module, batch)
    if get_rank() == 0:
        module.logged = float(value)
    return value


LOSSES = {
    doubled_on_rank_0: 0.5, by_an_imported_name: 0.5, times_the_ranks: 0.5,
    times_the_ranks_of_a_group: 0.5, logged_on_rank_0: 0.0,
}  # fmt: skip


def test_what_depends_on_the_rank_is_found(tmp_path):
    """As another rank, or as one process, the loss is half of itself, or twice."""

    def act(rank):
        torch.manual_seed(0)
        found = {}
        for loss in LOSSES:
            model = CustomModel(nn.Linear(3, 2), loss)
            objective = CustomObjective(build_custom_model(lambda model=model: model))
            assert may_ask_for_rank(NamesInUse(objective, objective.loss))
            before = dist.get_rank(), dist.get_world_size()
            found[loss.__name__] = compare_ranks(
                objective, torch.ones(4, 3), StepHooks(), False, "ddp"
            )
            assert before == (get_rank(), get_world_size())
        (tmp_path / f"{rank.ranks.rank}.json").write_text(json.dumps(found))

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), [end.said for end in ends]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == pytest.approx({loss.__name__: apart for loss, apart in LOSSES.items()})
