"""Plants one fault after another in a layout and prints what the verifier says of each.

python tests/parallel/forked.py 2 tests/experiment/faults.py ddp fp64
"""

import json
import os
import sys

import torch
from torch import nn

from outpace.experiment.parity import Trial
from outpace.experiment.verify import plan_for, tiny_spec, verify
from outpace.jobs.ranks.process_groups import process_groups
from outpace.launch.launcher_env import ranks_from
from outpace.parallel import Layout
from outpace.parallel.dp import DataParallel
from outpace.parallel.layout import ShardedLayout
from outpace.parallel.pipeline import PipelineLayout
from outpace.parallel.ps import Role
from outpace.parallel.tensors import local

# Of the last block, which in a pipeline of two ranks is on rank 1.
STALE = "blocks.4.mlp.up.weight"


def scaled_by_world_size(layout: Layout) -> None:
    """As where a sum is taken for a mean."""
    layout.averages = layout.averages * 2


def one_gradient_doubled(layout: Layout) -> None:
    parameter, whole_step = dict(layout.named_parameters()).get(STALE), layout.gradients

    def doubled(batches, given):
        totals = whole_step(batches, given)
        if parameter is not None and parameter.grad is not None:
            local(parameter.grad).mul_(2)
        return totals

    layout.gradients = doubled


def norm_counts_replicas_twice(layout: Layout) -> None:
    """Adds up the squares of all that ranks hold, as is right where each holds something else."""
    counted = layout.total_norm

    def all_added() -> torch.Tensor:
        norm = counted()  # its exchanges must go on
        gradients = layout.local_gradients()
        square = torch.nn.utils.get_total_norm(gradients).square() if gradients else norm * 0
        torch.distributed.all_reduce(square)
        return square.sqrt()

    def doubled() -> torch.Tensor:
        return counted() * 2**0.5

    apart = isinstance(layout, (DataParallel, Role)) or type(layout) is ShardedLayout
    layout.total_norm = doubled if apart else all_added


def untied_embedding(layout: Layout) -> None:
    if isinstance(layout, PipelineLayout):
        layout._sum_tied_gradients = lambda: None
        return
    model = layout.model
    tied = model.embed.tokens.weight
    model.head = nn.Linear(tied.shape[1], tied.shape[0], bias=False, dtype=tied.dtype)
    model.head.weight = nn.Parameter(tied.detach().clone())


def skipped_micro_batch(layout: Layout) -> None:
    all_of_them = layout.gradients
    layout.gradients = lambda batches, given: all_of_them(batches[1:], given)


def stale_all_gather(layout: Layout) -> None:
    """One rank goes on with a gathered parameter of the first step."""
    name, _, part = STALE.rpartition(".")
    kept = []

    def stale(module, _arguments):
        weight = getattr(module, part)
        kept.append(weight.detach().clone())
        with torch.no_grad():
            weight.copy_(kept[0])

    if torch.distributed.get_rank() == 1 and STALE in dict(layout.named_parameters()):
        layout.model.get_submodule(name).register_forward_pre_hook(stale)


def gone(layout: Layout) -> None:
    """A parameter that no rank trains."""
    named = layout.named_parameters
    layout.named_parameters = lambda: (pair for pair in named() if pair[0] != STALE)


FAULTS = [
    scaled_by_world_size,
    one_gradient_doubled,
    norm_counts_replicas_twice,
    untied_embedding,
    skipped_micro_batch,
    stale_all_gather,
    gone,
]


def faults_for(strategy: str) -> list:
    # fully_shard refuses tied weights that are apart; a server that sees no forward gathers none.
    left_out = {
        "zero3": [untied_embedding],
        "ps": [untied_embedding, stale_all_gather],
    }
    return [fault for fault in FAULTS if fault not in left_out.get(strategy, [])]


def main() -> None:
    torch.set_num_threads(1)
    strategy, precision = sys.argv[1:]
    ranks = ranks_from(os.environ)
    plan = plan_for(strategy, ranks.world_size, precision)
    trial = Trial(tiny_spec([plan]))
    said = {}
    with process_groups(ranks, torch.device("cpu"), 60.0) as groups:
        for fault in faults_for(strategy):
            (verdict,) = verify([plan], trial, groups, fault).verdicts
            said[fault.__name__] = {"passed": verdict.passed, "reason": verdict.reason}
    if ranks.rank == 0:
        print(json.dumps(said))


if __name__ == "__main__":
    main()
