"""The accelerator's loss over a head of two ranks, against the whole one of a single process.

Started on each rank; prints the largest relative errors of loss and gradients, and what was called.
"""

import json
import os

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.jobs.ranks.process_groups import process_groups
from outpace.launch.launcher_env import ranks_from
from outpace.nn.logits_functions import EAGER
from outpace.nn.loss import linear_loss_sum
from outpace.parallel.vocabulary import split_linear_loss_sum

VOCAB, WIDTH, ROWS = 97, 24, 40


class Called(TorchDispatchMode):
    """Names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm()).item()


def main() -> None:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=draw).requires_grad_()
    whole, bias = torch.randn(VOCAB, WIDTH, generator=draw), torch.randn(VOCAB, generator=draw)
    targets = torch.randint(VOCAB, (ROWS,), generator=draw)
    targets[::3] = -100
    exact = [one.detach().double().requires_grad_() for one in (hidden, whole, bias)]
    loss = F.cross_entropy(F.linear(*exact), targets, reduction="sum")
    grads = torch.autograd.grad(2.5 * loss, exact)
    ranks = ranks_from(os.environ)
    own = slice(0, 49) if ranks.rank == 0 else slice(49, VOCAB)
    exact_parts = [whole.clone().requires_grad_(), bias.clone().requires_grad_()]
    found: dict[str, list[float]] = {}
    single: dict[str, list[float]] = {}
    with process_groups(ranks, torch.device("cpu"), 60.0):
        group = torch.distributed.group.WORLD
        for dtype in (None, torch.bfloat16):
            part = [whole[own].clone().requires_grad_(), bias[own].clone().requires_grad_()]
            with Called() as called:
                ours = split_linear_loss_sum(hidden, *part, targets, own.start, group, dtype, EAGER)
                mine = list(torch.autograd.grad(2.5 * ours, [hidden, *part]))
            torch.distributed.all_reduce(mine[0])
            pairs = [(ours, loss), (mine[0], grads[0]), (mine[1], grads[1][own]),
                     (mine[2], grads[2][own])]  # fmt: skip
            found[str(dtype)] = [error(one, other) for one, other in pairs]
            with torch.no_grad():
                silent = split_linear_loss_sum(
                    hidden, *part, targets, own.start, group, dtype, EAGER
                )
            one = linear_loss_sum(hidden, *exact_parts, targets, "plain", dtype, "cuda")
            alone = torch.autograd.grad(2.5 * one, [hidden, *exact_parts])
            single[str(dtype)] = [error(a, b) for a, b in zip(alone, grads, strict=True)]
            found[str(dtype)].append(error(silent, ours.detach().double()))
    if ranks.rank == 0:
        waits = sorted(called.names & {"aten::nonzero", "aten::_local_scalar_dense", "aten::item"})
        print(json.dumps({"errors": found, "single": single, "waits": waits}), flush=True)


if __name__ == "__main__":
    main()
