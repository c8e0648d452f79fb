"""An evaluation leaves the model as it found it."""

import pytest
import torch
from torch import nn

from outpace.interop.custom_model import CustomModel, CustomObjective
from outpace.nn.evaluation_mode import evaluation_mode
from outpace.nn.mixed_precision import make_mixed
from outpace.parallel import Layout
from outpace.records.errors import BadInputError
from outpace.training.evaluate import evaluate

CPU = torch.device("cpu")


class RecordingLayout(Layout):
    freed = 0

    def free_gathered(self):
        self.freed += 1


def test_parts_that_a_user_put_in_evaluation_mode_stay_in_it():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    module.train()[1].eval()  # a frozen BatchNorm
    own = CustomModel(module, lambda module, batch: module(batch).square().mean())
    layout = RecordingLayout(CustomObjective(own))
    mixed = make_mixed("fp32", CPU, True, True, False)
    batches = [[torch.randn(4, 3)], [torch.randn(4, 3)]]
    evaluate(layout, batches, step=1, mixed=mixed, device=CPU, group=None)
    assert [part.training for part in module] == [True, False, True]
    assert layout.objective.training and layout.freed == 1


class MergingLinear(nn.Linear):
    """Adds an adapter to its weight in evaluation mode, as loralib does, and counts the changes."""

    def __init__(self):
        super().__init__(3, 3)
        nn.init.constant_(self.weight, 0.25)  # exact when the adapter is added and taken away
        self.adapter, self.merged, self.changes = nn.Parameter(torch.ones(3, 3)), False, []

    def train(self, mode=True):
        if mode == self.merged:
            with torch.no_grad():
                self.weight += -self.adapter if mode else self.adapter
            self.merged = not mode
            self.changes.append(mode)
        return super().train(mode)


def test_methods_that_switch_modes_run_both_times():
    module = nn.Sequential(MergingLinear(), MergingLinear())
    module[1].eval()  # which a user keeps merged in training
    before = [part.weight.detach().clone() for part in module]
    with evaluation_mode(module):
        merged = before[0] + module[0].adapter
        assert torch.allclose(module[0].weight, merged) and torch.equal(module[1].weight, before[1])
    assert torch.allclose(module[0].weight, before[0]) and module[0].training
    assert torch.allclose(module[1].weight, before[1]) and not module[1].training
    assert module[0].changes == [False, True] and module[1].merged


class Unswitchable(nn.Linear):
    def eval(self):
        raise AttributeError("'NoneType' object has no attribute 'data'")


def test_a_mode_that_cannot_be_entered_is_refused():
    module = Unswitchable(2, 2)
    refused = pytest.raises(BadInputError, match=r"eval\(\) failed with AttributeError: 'None")
    with refused, evaluation_mode(module):
        pass
    assert module.training
