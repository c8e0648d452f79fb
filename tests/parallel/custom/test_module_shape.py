"""By which strategies a user's module cannot be cut is known without laying it out."""

import pytest
from torch import nn

from outpace.interop.custom_model import CustomModel
from outpace.jobs.planning import auto_plan
from outpace.parallel.custom.module_shape import find_refused_strategies
from outpace.probing.hardware.machine import identify
from outpace.records.settings import TrainSettings


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)


def test_a_module_without_layouts_or_blocks_enough_says_what_it_lacks():
    refused = find_refused_strategies(CustomModel(Net()), 2)
    assert "it has no tp_plan" in refused["tp"] and "has 4 stages" in refused["zbv"]
    assert "Use gpipe or 1f1b, which have one stage on each rank" in refused["zbv"]
    assert "gpipe" not in refused and "zero3" not in refused
    layouts = {"first": "colwise", "second": "rowwise"}
    whole = find_refused_strategies(CustomModel(Net(), layouts=layouts, blocks=["first"]), 2)
    assert "tp" not in whole and "has 2 stages" in whole["gpipe"]
    assert "Use zero3, or fewer ranks" in whole["gpipe"]


BUILD = """
import torch
from torch import nn

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.ones(4), torch.ones(1)

def squares(module, batch):
    return (module(batch[0]) - batch[1]).square().mean()

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), squares, Data()
"""


@pytest.mark.parametrize(("world", "allowed"), [(2, "gpipe"), (4, None)])
def test_the_planner_leaves_out_what_the_module_cannot(tmp_path, world, allowed):
    (tmp_path / "mine.py").write_text(BUILD)
    settings = TrainSettings(model=f"{tmp_path}/mine.py:build", global_batch=8)
    machine = identify(lambda *_: None).model_copy(update={"devices": ()})
    without = auto_plan.question(settings, {}, machine, world).wanted.without
    assert "tp" in without and "interleaved" in without
    assert ("gpipe" in without) is (allowed is None)
