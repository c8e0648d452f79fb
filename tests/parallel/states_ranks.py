"""One rank of a run whose optimizer state is looked at; rank 0 prints what was found.

python tests/parallel/forked.py 2 tests/parallel/states_ranks.py \\
    save zero1 DIRECTORY        two steps, and a checkpoint of them
    load zero1 DIRECTORY        the checkpoint, against two steps of a single process
    few zero1 DIRECTORY         more ranks than parameters: saved, loaded, stepped
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from outpace.experiment.parity import Trial, _checkpoint_parts, _gather_state, reference
from outpace.experiment.verify import plan_for, tiny_spec
from outpace.jobs.ranks.process_groups import process_groups
from outpace.launch.launcher_env import ranks_from
from outpace.nn.mixed_precision import make_mixed
from outpace.parallel import Layout, LayoutRequest, StepHooks, apply
from outpace.records.plan import Plan
from outpace.training.checkpoint import Checkpointer, Progress
from outpace.training.step import Stepper
from outpace.training.synthetic import rank_micro_batches

CPU = torch.device("cpu")
TRIAL = Trial(tiny_spec([Plan()]), steps=2)


class Few(nn.Module):
    """Two parameters, one of them for each kind of weight decay."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(3, 2).double()

    def forward(self, batch):
        return self.model(batch).square().sum(), torch.tensor(len(batch))


def lay_out(objective, plan, ranks):
    layout = apply(LayoutRequest(objective, plan, ranks, CPU))
    return layout, TRIAL.optimizer(layout.named_parameters(), layout.make_optimizer)


def checkpointer(directory: Path, groups) -> Checkpointer:
    rank = groups.ranks.rank
    return Checkpointer(directory, 1, rank, groups.saving, lambda path: None, sys.exit)


def save(layout: Layout, optimizer, directory: Path, groups) -> None:
    progress = Progress(
        step=2, tokens=0, samples=0, loss_sum=0, skipped_steps=0, scaler=None, first_loss=None,
        world_size=groups.ranks.world_size,
    )  # fmt: skip
    keeper = checkpointer(directory, groups)
    keeper.save(*layout.checkpoint_state(optimizer), progress)
    assert keeper.wait_for_ranks()
    keeper.close()


def load(layout: Layout, optimizer, directory: Path, groups) -> None:
    keeper = checkpointer(directory, groups)
    keeper.load(directory / "step-2", *layout.checkpoint_state(optimizer))
    keeper.close()


def state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Of the moments; the counters of steps are not sharded by their size."""
    held = () if optimizer is None else optimizer.state.values()
    return sum(state[kind].nbytes for state in held for kind in ("exp_avg", "exp_avg_sq"))


def train(layout: Layout, optimizer, plan: Plan, groups) -> None:
    stepper = Stepper(
        layout=layout, optimizer=optimizer, mixed=make_mixed("fp64", CPU, True), plan=plan,
        clip=TRIAL.clip, device=CPU, control=groups.control, targets_known=False,
        expected_targets=TRIAL.global_batch * TRIAL.seq_len,
    )  # fmt: skip
    for step, batch in enumerate(TRIAL.batches(), 1):
        stepper.begin()
        stepper.run(
            step, TRIAL.lr, rank_micro_batches(batch, plan, groups.ranks.rank), lambda: False
        )


def worst(layout: Layout, optimizer, plan: Plan) -> dict[str, float]:
    """The largest difference of each kind from a single process's last step, relatively."""
    wanted = reference(TRIAL, plan).steps[-1]
    found = {}
    for kind, held in _gather_state(*_checkpoint_parts(layout, optimizer)).items():
        apart = [float((held[name] - wanted[kind][name]).abs().max()) for name in held]
        largest = max(float(tensor.abs().max()) for tensor in wanted[kind].values())
        found[kind] = max(apart, default=0.0) / largest
    return found


def few(strategy: str, directory: Path, groups) -> dict:
    """Steps a model of two parameters, goes on from its checkpoint, and compares the two."""
    ends = []
    plan = Plan.parse({"strategy": strategy, "dp_shard": groups.ranks.world_size}, "test")
    for first in (True, False):
        torch.manual_seed(0)
        layout, optimizer = lay_out(Few(), plan, groups.ranks)
        if not first:
            load(layout, optimizer, directory, groups)
        for step in range(3) if first else range(2, 3):
            layout.gradients([torch.full((1, 3), 1.0 + step).double()], StepHooks())
            optimizer.step()
            optimizer.zero_grad()
            if first and step == 1:
                save(layout, optimizer, directory, groups)
        ends.append([parameter.tolist() for parameter in layout.model.parameters()])
    held = layout.checkpoint_state(optimizer)[1]
    return {"same": ends[0] == ends[1], "held": len(held.state) if held else 0}


def main(what: str, strategy: str, directory: Path) -> None:
    torch.set_num_threads(1)
    ranks = ranks_from(os.environ)
    with process_groups(ranks, CPU, 60.0) as groups:
        if what == "few":
            said = few(strategy, directory, groups)
        else:
            plan = plan_for(strategy, ranks.world_size)
            layout, optimizer = lay_out(TRIAL.objective(plan), plan, ranks)
            if what == "save":
                train(layout, optimizer, plan, groups)
                save(layout, optimizer, directory, groups)
            else:
                load(layout, optimizer, directory, groups)
            bytes_here = state_bytes(layout.checkpoint_state(optimizer)[1])
            said = {"state_bytes": bytes_here, "worst": worst(layout, optimizer, plan)}
        heard: list = [None] * ranks.world_size
        dist.all_gather_object(heard, said, group=groups.control)
    if ranks.rank == 0:
        print(json.dumps(heard))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
