"""Cross-entropy over the vocabulary on a CPU in bf16: logits in 16 bits, their gradient in place.

torch's chunked operator multiplies in fp32 on CPUs, which takes several times as long where the
processor has units for bf16; with whole logits autograd makes them anew in fp32, and a gradient of
each (docs/log.md). Here the products are of 16 bits, as autocast has them, and softmax is in fp32
for some rows at a time, whose gradient then takes their logits' place.

Legend: N tokens (B·S), D hidden width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.nn.operators import operator

IGNORED = -100
BLOCK_BYTES = 2 << 20  # of rows in fp32: they stay in the cache from the first pass to the last
HEAD_ROWS = 4096  # of the head's gradient at a time: its products are faster, and cast in the cache


def _low_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """The sum of −log softmax(hidden · weightᵀ + bias)[target], fp32, and the logits' gradient.

    `hidden` (N, D), `weight` (V, D), `bias` (V); `targets` (N), −100 where none. The gradient is
    bf16, (N, V).
    """
    low = torch.bfloat16
    logits = F.linear(hidden.to(low), weight.to(low), None if bias is None else bias.to(low))
    return _gradient_in_place(logits, targets), logits


def _gradient_in_place(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss; `logits` become its gradient."""
    total = torch.zeros((), dtype=torch.float32)
    counts = targets != IGNORED
    safe = targets.clamp(min=0).unsqueeze(1)
    rows = _rows(logits.shape[1])
    minus_one = torch.full((rows, 1), -1.0)
    for start in range(0, logits.shape[0], rows):
        block = slice(start, start + rows)
        own, its, real = logits[block], safe[block], counts[block].unsqueeze(1)
        p = torch.softmax(own, -1, dtype=torch.float32)
        # log Σ exp(logits) is the largest logit less the logarithm of its probability.
        behind = own.amax(-1, keepdim=True).float() - own.gather(1, its)
        total += ((behind - p.amax(-1, keepdim=True).log_()) * real).sum()
        grad = p.scatter_add_(1, its, minus_one[: len(its)])
        own.copy_(grad if bool(real.all()) else grad.mul_(real))
    return total


def _made(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
) -> tuple[Tensor, Tensor]:
    logits = hidden.new_empty((hidden.shape[0], weight.shape[0]), dtype=torch.bfloat16)
    return hidden.new_empty((), dtype=torch.float32), logits


def _low_loss_backward(
    loss_grad: Tensor,
    logits_grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    trains: bool,
) -> list[Tensor]:
    """The gradients of `hidden`, where it `trains` of `weight`, and of `bias`, in their dtypes.

    `loss_grad` scales the products where they are still in fp32, so that nothing is rounded twice.
    """
    low, scale = torch.bfloat16, loss_grad.item()
    hidden_grad = _product(logits_grad, weight.to(low), scale).to(hidden.dtype)
    grads = [hidden_grad]
    if trains:
        operand, weight_grad = hidden.to(low), torch.empty_like(weight)
        for start in range(0, weight.shape[0], HEAD_ROWS):
            block = slice(start, start + HEAD_ROWS)
            weight_grad[block] = _product(logits_grad[:, block].T, operand, scale)
        grads.append(weight_grad)
    if bias is not None:
        grads.append(logits_grad.sum(0, dtype=torch.float32).mul_(scale).to(bias.dtype))
    return grads


def _made_backward(
    loss_grad: Tensor,
    logits_grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    trains: bool,
) -> list[Tensor]:
    wanted = (hidden, weight if trains else None, bias)
    return [torch.empty_like(one) for one in wanted if one is not None]


def bytes_within(hidden: Tensor, weight: Tensor) -> tuple[int, int]:
    """What the operator and its backward take and give back within themselves."""
    (tokens, width), vocab = hidden.shape, weight.shape[0]
    operand = 2 * hidden.numel() * (hidden.dtype != torch.bfloat16)
    copies = operand + 2 * weight.numel() * (weight.dtype != torch.bfloat16)
    rows = min(_rows(vocab), tokens)
    softmax = 2 * 4 * rows * vocab + 9 * tokens + 4 * _rows(vocab)
    return max(copies, softmax), operand + 2 * min(HEAD_ROWS, vocab) * width


def _rows(vocab: int) -> int:
    """Of logits whose softmax is made at a time."""
    return max(1, BLOCK_BYTES // (4 * vocab))


def _product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    return torch.addmm(left.new_zeros(()), left, right, beta=0, alpha=scale)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    hidden, weight, bias, _ = inputs
    ctx.save_for_backward(output[1], hidden, weight, bias)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, loss_grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    *given, bias = ctx.saved_tensors
    _, trains, bias_trains, _ = ctx.needs_input_grad
    bias = bias if bias_trains else None
    grads = iter(low_loss_backward(loss_grad, *given, bias, trains))
    hidden_grad = next(grads)
    return hidden_grad, next(grads) if trains else None, next(grads, None), None


low_loss_backward = operator(_low_loss_backward, _made_backward)
low_loss = operator(_low_loss, _made, _keep, _backward)
