"""One rank of the test of synchronised statistics: unequal shares against the whole batch."""

import copy
import json

import torch
import torch.distributed as dist
from torch import nn

from outpace.parallel.batchnorm import synchronise


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for affine in (True, False):
        torch.manual_seed(0)
        alone = nn.BatchNorm1d(3, affine=affine).double()
        together = copy.deepcopy(alone)
        synchronise(together, dist.new_group())
        copy.deepcopy(together)  # a group cannot be copied, and need not be
        batch = torch.randn(7, 3, 4, dtype=torch.float64) + 1e3
        towards = torch.randn(7, 3, 4, dtype=torch.float64)
        mine = slice(0, 2) if rank == 0 else slice(2, 7)
        whole = batch.clone().requires_grad_()
        share = batch[mine].clone().requires_grad_()
        expected, found = alone(whole), together(share)
        (expected * towards).sum().backward()
        (found * towards[mine]).sum().backward()
        close = {"rtol": 1e-9, "atol": 1e-9}
        assert torch.allclose(found, expected[mine], **close)
        assert torch.allclose(share.grad, whole.grad[mine], **close)
        for p, q in zip(together.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(p.grad)
            assert torch.allclose(p.grad, q.grad, **close)
        for name, buffer in alone.named_buffers():
            assert torch.allclose(together.get_buffer(name), buffer, **close), name
    if rank == 0:
        print(json.dumps("equal"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
