"""One rank of the test of Adafactor's stacks of spread tensors; rank 0 prints what it found.

python tests/parallel/forked.py 2 tests/optim/adafactor_ranks.py
"""

import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from outpace.jobs.ranks.process_groups import process_groups
from outpace.launch.launcher_env import ranks_from
from outpace.nn.dtensor import whole
from outpace.optim.adafactor import Adafactor

# One that is not spread evenly, and one of which a rank has nothing.
SHAPES = [(6, 10)] * 3 + [(5, 4)] * 2 + [(1, 8)] * 2 + [(7,)] * 3 + [(2, 3, 4)] * 2
PLACES = [Shard(0), Replicate()]


def main() -> None:
    ranks = ranks_from(os.environ)
    with process_groups(ranks, torch.device("cpu"), 60.0):
        mesh = init_device_mesh("cpu", (ranks.world_size,))
        torch.manual_seed(0)
        known = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]
        spread = [
            nn.Parameter(distribute_tensor(one.detach().clone(), mesh, [PLACES[number % 2]]))
            for number, one in enumerate(known)
        ]
        whole_ones = Adafactor(known, lr=0.02, weight_decay=0.1)
        stacked = Adafactor(spread, lr=0.02, weight_decay=0.1, together=True)
        for _ in range(3):
            for one, part in zip(known, spread, strict=True):
                one.grad = torch.randn_like(one)
                part.grad = distribute_tensor(one.grad.clone(), mesh, part.placements)
            whole_ones.step()
            sent = []
            real = dist.all_reduce
            dist.all_reduce = lambda *a, real=real, sent=sent, **k: (sent.append(1), real(*a, **k))
            stacked.step()
            dist.all_reduce = real
        apart = max(
            float((whole(part.detach()) - one.detach()).abs().max())
            for one, part in zip(known, spread, strict=True)
        )
        if ranks.rank == 0:
            print(json.dumps({"apart": apart, "all_reduces": len(sent)}))


main()
