"""Stages of a pipeline, which have copies of a user's module, switch its mode."""

import pytest
import torch
from torch import nn

import outpace
from outpace.experiment.module_verify import plan_for_module
from outpace.launch.forked_job import run_forked

pytestmark = pytest.mark.gloo


class AverageWeights(nn.Module):
    """Puts running averages in the place of its head's weights for an evaluation."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.head, self.kept = nn.Linear(4, 4), None
        self.register_buffer("average", torch.zeros(4, 4))

    def train(self, mode=True):
        with torch.no_grad():
            if not mode and self.kept is None:
                self.kept = self.head.weight.detach().clone()
                self.head.weight.copy_(self.average)
            elif mode and self.kept is not None:
                self.head.weight.copy_(self.kept)
                self.kept = None
        return super().train(mode)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def squares(module, batch):
    return module(batch).square().mean()


@pytest.mark.parametrize(("strategy", "said"), [("ddp", None), ("1f1b", "eval() changes the")])
def test_methods_that_write_to_parameters_are_refused_in_stages(tmp_path, strategy, said):
    def act(rank):
        torch.manual_seed(0)
        module = AverageWeights()
        model = outpace.parallelize(module, plan_for_module(strategy, 2, 8), loss=squares)
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
        before = float(model.forward_backward(model.share(batch)))
        assert float(model.evaluate(model.share(batch))) < before  # the averages are zeros
        assert float(model.forward_backward(model.share(batch))) == before

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    if said is None:
        assert [end.said for end in ends] == [None, None]
    else:
        assert any(end.refused and said in end.said and "head.weight" in end.said for end in ends)
