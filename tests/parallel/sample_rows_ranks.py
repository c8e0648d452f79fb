"""One rank of a pipeline whose loop has a table as long as a pass; rank 0 prints the refusal."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn

import outpace
from outpace.records.errors import BadInputError


def loss(module, batch):
    return module(batch["x"]).square().mean() * batch["table"].sum()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plan = outpace.Plan(strategy="gpipe", pp=2, pp_microbatches=2, micro_batch=2)
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    model = outpace.parallelize(module, plan, loss=loss)
    told = ""
    try:
        getattr(model, sys.argv[1])({"x": torch.ones(8, 2), "table": torch.ones(4)})
    except BadInputError as refusal:
        told = str(refusal)
    if dist.get_rank() == 0:
        print(json.dumps(told))


if __name__ == "__main__":
    main()
