"""One rank of the ring's tests; rank 0 prints what they look at.

python tests/parallel/forked.py 3 tests/parallel/ring_ranks.py
"""

import json
import os

import torch
import torch.distributed as dist
from torch import nn

from outpace.jobs.ranks.process_groups import process_groups
from outpace.launch.launcher_env import ranks_from
from outpace.parallel import LayoutRequest, StepHooks, apply
from outpace.parallel.ring import ring_all_reduce
from outpace.records.plan import Plan
from outpace.training.collective_counter import CollectiveCounter

LENGTHS = (0, 1, 2, 3, 5, 7, 12, 1001)


class Uneven(nn.Module):
    """Two matrices of 1.2 MB, so that they take two buffers of 1 MiB; and what is not always used.

    `never` has no gradient on any rank, `sometimes` on rank 0 only, `early` in the first
    micro-batch only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ParameterDict(
            {
                "first": torch.randn(389, 397),
                "second": torch.randn(397, 389),
                "never": torch.randn(3),
                "sometimes": torch.randn(5),
                "early": torch.randn(2),
            }
        ).double()

    def forward(self, batch):
        x, rank, number = batch
        y = (x @ self.model["first"]).tanh() @ self.model["second"]
        loss = y.square().sum()
        if rank == 0:
            loss = loss + self.model["sometimes"].sum()
        if number == 0:
            loss = loss + self.model["early"].square().sum()
        return loss, torch.tensor(len(x))


def sums(rank: int, size: int, group) -> list[bool]:
    """Whether every length is added up right."""
    right = []
    for length in LENGTHS:
        buffer = (torch.arange(length, dtype=torch.float64) + 1) * (rank + 1)
        ring_all_reduce(buffer, group)
        ranks_sum = size * (size + 1) // 2
        right.append(bool((buffer == (torch.arange(length) + 1) * ranks_sum).all()))
    return right


def replicas(ranks) -> dict:
    """A step in two micro-batches against one process's, on every rank."""
    rank, size = ranks.rank, ranks.world_size
    torch.manual_seed(rank)  # so that they start unequal
    objective = Uneven()
    plan = Plan.parse({"strategy": "ring", "dp_replicate": size, "bucket_mib": 1}, "test")
    layout = apply(LayoutRequest(objective, plan, ranks, torch.device("cpu")))
    alone = Uneven()
    alone.load_state_dict(objective.state_dict())
    drawn = torch.Generator().manual_seed(9)
    inputs = [(torch.randn(2, 389, generator=drawn, dtype=torch.float64), of, number)
              for of in range(size) for number in range(2)]  # fmt: skip
    for batch in inputs:
        alone(batch)[0].backward()
    with CollectiveCounter() as wire:
        layout.gradients([batch for batch in inputs if batch[1] == rank], StepHooks())
    expected = {name: p.grad for name, p in alone.model.named_parameters()}
    worst = 0.0
    for name, parameter in layout.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None
        else:
            apart = (parameter.grad - expected[name]).abs().max() / expected[name].abs().max()
            worst = max(worst, float(apart))
    numbers = sum(p.numel() for p in objective.parameters()) + len(expected)
    sent = torch.tensor([wire.tally.bytes])
    dist.all_reduce(sent)
    return {
        "worst": worst,
        "without": [name for name, p in layout.named_parameters() if p.grad is None],
        "sent_by_all": int(sent),
        "formula": 2 * (size - 1) * numbers * 8,
        "sends": wire.tally.collectives["send"],
    }


def main() -> None:
    torch.set_num_threads(1)
    ranks = ranks_from(os.environ)
    with process_groups(ranks, torch.device("cpu"), 60.0) as groups:
        said = {"right": sums(ranks.rank, ranks.world_size, groups.control), **replicas(ranks)}
    if ranks.rank == 0:
        print(json.dumps(said))


if __name__ == "__main__":
    main()
