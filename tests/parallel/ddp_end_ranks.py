"""One rank of two: makes a group and a DDP layout in it, trains a step and leaves, many times.

python tests/parallel/forked.py 2 tests/parallel/ddp_end_ranks.py TIMES
"""

import sys

import torch
import torch.distributed as dist

import outpace


def mean_loss(module, batch):
    return module(batch).square().mean()


def main() -> None:
    torch.set_num_threads(1)
    plan = outpace.Plan(strategy="ddp", dp_replicate=2, micro_batch=4)
    dist.init_process_group("gloo")
    rank, first = dist.get_rank(), dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    for number in range(int(sys.argv[1])):
        store = dist.PrefixStore(str(number), first)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        laid = outpace.parallelize(torch.nn.Linear(8, 1), plan, loss=mean_loss)
        laid.forward_backward(laid.share(torch.randn(8, 8)))
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()  # the group goes before the layout
        del laid
    if rank == 0:
        print('"left"')


if __name__ == "__main__":
    main()
