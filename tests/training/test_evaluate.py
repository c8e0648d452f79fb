"""An evaluation leaves the model as it found it."""

import torch
from torch import nn

from outpace.interop.custom_model import CustomModel, CustomObjective
from outpace.nn.mixed import make_mixed
from outpace.parallel import Layout
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
