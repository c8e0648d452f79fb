"""Ring attention by any kernel is one process's attention: outputs and gradients, on each rank."""

import json
import os

import torch
import torch.distributed as dist
from torch.nn import functional as F

from outpace.jobs.ranks.process_groups import process_groups
from outpace.launch.launcher_env import ranks_from
from outpace.parallel.context import RingAttention, SequenceRing
from outpace.parallel.ring_kernels import Dropout, Scores

CPU = torch.device("cpu")


class FlashOnCpu:
    """torch's fused kernel for CPUs: what `Flash` is to a GPU, with the same operands."""

    def forward(self, number, q, k, v, causal):
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return operator(q, k, v, 0.0, causal)

    def backward(self, number, q, k, v, causal, grad, out, lse):
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return operator(grad, q, k, v, out, lse.contiguous(), 0.0, causal)


def worst(kernel, ring, causal, dtype, groups):
    """The largest relative error of the output and of the three gradients, of this rank's part."""
    draw = torch.Generator().manual_seed(0)
    length = 8 * 2 * ring.size
    whole = [torch.randn(2, heads, length, 16, generator=draw, dtype=torch.float64)
             for heads in (4, groups, groups, 4)]  # fmt: skip
    chunks = torch.arange(length).chunk(2 * ring.size)
    own = torch.cat((chunks[ring.rank], chunks[2 * ring.size - 1 - ring.rank]))
    q, k, v = (x.clone().requires_grad_() for x in whole[:3])
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    right = [out, *torch.autograd.grad(out, (q, k, v), whole[3])]
    q, k, v = (x[..., own, :].to(dtype).requires_grad_() for x in whole[:3])
    out = RingAttention.apply(q, k, v, ring, causal, kernel)
    made = [out, *torch.autograd.grad(out, (q, k, v), whole[3][..., own, :].to(dtype))]
    errors = []
    for mine, its in zip(made, right, strict=True):
        its = its[..., own, :]
        assert mine.dtype == dtype
        errors.append(((mine.double() - its).norm() / its.norm()).item())
    return max(errors)


def main() -> None:
    ranks = ranks_from(os.environ)
    with process_groups(ranks, CPU, 60.0):
        ring = SequenceRing(dist.group.WORLD, ranks.rank, ranks.world_size)
        found = {}
        for kernel in (FlashOnCpu(), Scores(Dropout(0.0, 0))):
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                each = [worst(kernel, ring, causal, dtype, groups)
                        for causal in (True, False) for groups in (4, 2)]  # fmt: skip
                largest = torch.tensor(max(each), dtype=torch.float64)
                dist.all_reduce(largest, dist.ReduceOp.MAX)
                found[f"{type(kernel).__name__} {dtype}"] = largest.item()
    if ranks.rank == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
