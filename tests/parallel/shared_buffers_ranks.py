"""One rank of the test of what buffers are sent: prints their names by strategy.

python tests/parallel/forked.py 2 tests/parallel/shared_buffers_ranks.py
"""

import json

import torch
import torch.distributed as dist
from torch import nn
from zoo.data_parallel import running_averages_in_the_forward

import outpace


def main():
    dist.init_process_group("gloo")
    found = {}
    for strategy, axis in (("ddp", "dp_replicate"), ("zero3", "dp_shard")):
        module, loss, draw = running_averages_in_the_forward(3)
        module = nn.Sequential(module[0])
        plan = outpace.Plan(strategy=strategy, micro_batch=4, **{axis: 2})
        laid = outpace.parallelize(module, plan, loss=loss, blocks=["0"])
        batch = draw(torch.Generator().manual_seed(5), 8)
        for _ in range(2):
            laid.forward_backward(laid.share(batch))
        found[strategy] = sorted(laid.layout.buffers._shared)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()
