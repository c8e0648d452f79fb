"""Embedding and cross-entropy over a vocabulary whose rows are split over ranks.

Shoeybi et al., "Megatron-LM", arXiv 1909.08053, §3: each rank looks up the tokens in its rows, and
computes the logits of its rows. For the loss, ranks send only a few numbers per token: the largest
logit, the sum of exponentials and the target's logit.

On an accelerator, `nn.head_loss` computes the loss for this rank's rows: there is one copy of the
logits, in the dtype of the matmuls, and nothing waits for the device. Ranks then reduce the maximum
and the sum of exponentials of their log Σ exp(logits), and the target's logit.

Legend: N tokens (B·S), D hidden width, V vocabulary, P this rank's part of it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from outpace.nn.block import to_fp32
from outpace.nn.head_loss import Combine, whole_loss_sum
from outpace.nn.logits_functions import EAGER, LogitsFunctions
from outpace.nn.loss import IGNORED


def split_embedding(tokens: Tensor, weight_PD: Tensor, first_row: int) -> Tensor:
    """Look up tokens in this rank's rows of the embedding; return (…, D), zero for other tokens.

    The sum over ranks is the whole embedding. `first_row` is the index of this rank's first row in
    the vocabulary. DTensor's own embedding is not used: it creates a gradient with all rows on
    every rank.
    """
    rows = tokens - first_row
    elsewhere = (rows < 0) | (rows >= weight_PD.shape[0])
    found = F.embedding(rows.masked_fill(elsewhere, 0), weight_PD)
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)


def split_linear_loss_sum(
    hidden_ND: Tensor,
    weight_PD: Tensor,
    bias_P: Tensor | None,
    targets_N: Tensor,
    first_row: int,
    group: dist.ProcessGroup,
    dtype: torch.dtype | None = None,
    passes: LogitsFunctions | None = None,
) -> Tensor:
    """Compute `linear_loss_sum` from this rank's rows of the head. Collective over `group`.

    `hidden_ND` and `targets_N` must be the same on all ranks of the group, and the loss is too. The
    gradients of `hidden_ND` must be summed over the group. `passes` are the functions for the
    forward and backward of logits on an accelerator; None on a CPU. `dtype` is the matmuls' dtype
    on an accelerator (None: at least fp32).
    """
    if passes is not None:
        counts_N = targets_N != IGNORED
        rows_N = targets_N - first_row
        here_N = counts_N & (rows_N >= 0) & (rows_N < len(weight_PD))
        return whole_loss_sum(
            hidden_ND,
            weight_PD,
            bias_P,
            torch.where(here_N, rows_N, -1),
            counts_N,
            dtype or torch.promote_types(hidden_ND.dtype, torch.float32),
            passes if torch.is_grad_enabled() else EAGER,  # evaluation builds no graph
            _make_combine(group),
        )
    logits_NP = F.linear(hidden_ND, weight_PD, bias_P)
    loss_sum: Tensor = SplitCrossEntropySum.apply(  # type: ignore[no-untyped-call]
        logits_NP, targets_N, first_row, group
    )
    return loss_sum


def _make_combine(group: dist.ProcessGroup) -> Combine:
    """Return a function that combines the ranks' log Σ exp(logits) and targets' logits."""

    def combine(lse_N: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        largest_N = lse_N.clone()
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
        sums_2N = torch.stack(((lse_N - largest_N).exp(), target_N))
        dist.all_reduce(sums_2N, group=group)
        return largest_N + sums_2N[0].log(), sums_2N[1]

    return combine


class SplitCrossEntropySum(torch.autograd.Function):
    """Sum over targets of log Σ exp(logits) − logits[target] on a CPU, in fp32 or fp64."""

    @staticmethod
    def forward(
        ctx: Any, logits_NP: Tensor, targets_N: Tensor, first_row: int, group: dist.ProcessGroup
    ) -> Tensor:
        """Return the sum, after two all-reduces.

        The first finds the largest logits; the second sums exponentials and targets' logits.
        """
        scores_NP = to_fp32(logits_NP.detach())
        rows = scores_NP.shape[1]
        largest_N = scores_NP.amax(1)
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
        scores_NP = scores_NP - largest_N.unsqueeze(1)
        counts_N = targets_N != IGNORED
        here_N = counts_N & (targets_N >= first_row) & (targets_N < first_row + rows)
        (at,) = here_N.nonzero(as_tuple=True)
        column = targets_N[at] - first_row
        sums_2N = scores_NP.new_zeros(2, targets_N.shape[0])
        sums_2N[1, at] = scores_NP[at, column]
        exps_NP = scores_NP.exp_()
        sums_2N[0] = exps_NP.sum(1)
        dist.all_reduce(sums_2N, group=group)
        ctx.save_for_backward(exps_NP, sums_2N[0], counts_N, at, column)
        ctx.dtype = logits_NP.dtype
        return ((sums_2N[0].log() - sums_2N[1]) * counts_N).sum()

    @staticmethod
    def backward(ctx: Any, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return softmax − one-hot for positions with a target, without communication."""
        exps_NP, sums_N, counts_N, at, column = ctx.saved_tensors
        grad_NP = exps_NP * (counts_N * loss_grad / sums_N).unsqueeze(1)
        grad_NP[at, column] -= loss_grad
        return grad_NP.to(ctx.dtype), None, None, None
