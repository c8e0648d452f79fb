"""Prints what holds of dropout under a strategy, beside one process.

python tests/parallel/forked.py 2 tests/experiment/dropout.py tp whole

"whole": without sequence parallelism.
"""

import json
import os
import sys

import torch
import torch.distributed as dist

from outpace.experiment.parity import Trial
from outpace.experiment.verify import plan_for, tiny_spec
from outpace.jobs.ranks.process_groups import process_groups
from outpace.launch.launcher_env import ranks_from
from outpace.nn.model_options import apply_checkpointing
from outpace.parallel import LayoutRequest, StepHooks, apply
from outpace.records.ranks import Ranks
from outpace.training.guards import seed_step
from outpace.training.synthetic import rank_micro_batches

DRAWS = 64
CPU = torch.device("cpu")


class Dropping:
    """A trial's model with dropout under a plan; `loss(draw)` does a step's passes."""

    def __init__(self, trial, plan, ranks, checkpointing="none"):
        self.plan, self.rank = plan, ranks.rank
        objective = trial.objective(plan)
        apply_checkpointing(objective.model, checkpointing)
        self.layout = apply(LayoutRequest(objective, plan, ranks, CPU))
        self.batches = rank_micro_batches(trial.batches()[0], plan, ranks.rank)
        self.masks = []
        for name, module in self.layout.model.named_modules():
            if name == "blocks.0.dropout":
                module.register_forward_hook(lambda _m, _a, out: self.masks.append(out == 0))

    def step(self, draw):
        """(2,) this rank's totals and the norm of all gradients."""
        self.masks.clear()
        for _, parameter in self.layout.named_parameters():
            parameter.grad = None
        seed_step(0, draw, self.plan.random_rank(self.rank), CPU)
        totals = self.layout.gradients(self.batches, StepHooks(scale=lambda loss: loss * 1e-2))
        return totals, float(self.layout.total_norm())

    def loss(self, draw):
        """The mean over the global batch."""
        totals, _ = self.step(draw)
        if self.plan.world_size > 1:
            dist.all_reduce(totals)
        return float(totals[0] / totals[1])


def say_all(value):
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, value)
    return said


def laws(strategy, whole, ranks):
    plan = plan_for(strategy, ranks.world_size)
    spec = tiny_spec([plan]).model_copy(update={"dropout": 0.2, "layers": 2})
    trial = Trial(spec)
    plan = plan.model_copy(update={"sequence_parallel": not whole})
    first = Dropping(trial, plan, ranks)
    numbers = first.step(1)
    masks = say_all(first.masks[0] if first.masks else None)
    again = Dropping(trial, plan, ranks).step(1)
    recomputed = Dropping(trial, plan, ranks, "full").step(1)
    losses = torch.tensor([first.loss(draw) for draw in range(2, DRAWS + 2)])
    alone = Dropping(trial, plan_for("single", 1), Ranks())
    expected = torch.tensor([alone.loss(draw) for draw in range(2, DRAWS + 2)])
    error = ((losses.var() + expected.var()) / DRAWS).sqrt()
    return {
        "same_again": bool((numbers[0] == again[0]).all()) and numbers[1] == again[1],
        "recomputed_apart": abs(recomputed[1] / numbers[1] - 1),
        "other_draws": len({*losses.tolist()}) == DRAWS,
        "off_by_standard_errors": float((losses.mean() - expected.mean()).abs() / error),
        "masks_alike": None if None in masks else bool((masks[0] == masks[1]).all()),
    }


def main() -> None:
    torch.set_num_threads(1)
    ranks = ranks_from(os.environ)
    with process_groups(ranks, CPU, 60.0):
        said = say_all(laws(sys.argv[1], "whole" in sys.argv[2:], ranks))
    if ranks.rank == 0:
        print(json.dumps(said))


if __name__ == "__main__":
    main()
