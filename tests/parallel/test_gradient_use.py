"""What a rank does not use is named, with the step from which it does not."""

import json
import warnings

import pytest
import torch
from torch import nn

import outpace
from outpace.experiment.module_verify import plan_for_module
from outpace.launch.forked_job import run_forked

pytestmark = pytest.mark.gloo


class Experts(nn.Module):
    """Which one is called says the sign of a sample's first entry."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        out = self.stem(x)
        for number, expert in enumerate(self.experts):
            at = ((x[:, 0] > 0) == bool(number)).nonzero()[:, 0]
            if len(at):
                out = out.index_add(0, at, expert(x[at]))
        return out


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_what_a_rank_does_not_use_is_named_from_its_step_on(tmp_path, strategy):
    def act(rank):
        plan = plan_for_module(strategy, 2, 4)
        model = outpace.parallelize(
            Experts(), plan, loss=lambda m, x: m(x).square().mean(), blocks=["experts.0"]
        )
        optimizer = model.make_optimizer(torch.optim.SGD, lr=0.1)
        both = torch.tensor([-1.0, 1.0, -1.0, 1.0]).view(4, 1).expand(4, 4)
        apart = both.sort(dim=0)[0]  # the first rank has all that are negative
        said = []
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always", UserWarning)
            for batch in (both, apart, apart):
                model.forward_backward(model.share(batch.contiguous()))
                optimizer.step()
        said = [str(one.message) for one in heard if "trained parameters" in str(one.message)]
        (tmp_path / f"{rank.ranks.rank}.json").write_text(json.dumps(said))

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), [end.said for end in ends]
    for rank, unused in enumerate(("experts.1", "experts.0")):
        [said] = json.loads((tmp_path / f"{rank}.json").read_text())
        assert said.startswith(
            f"from step 2 on, rank {rank} does not use all the trained parameters"
        )
        assert f"2 of 6 in that step: {unused}.weight, {unused}.bias" in said
