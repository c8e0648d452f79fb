"""Cross-entropy over the vocabulary on a CPU in bf16; the gradient overwrites the logits.

torch's chunked operator multiplies in fp32 on CPUs, which takes several times as long as bf16 on
processors with bf16 units. With whole logits, autograd keeps fp32 copies and a gradient for each
copy (docs/development/log.md). Here matmuls are in 16 bits, as under autocast. The softmax of a few
rows at a time is computed in fp32, and its gradient then replaces their logits.

Legend: N tokens (B·S), D hidden width, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from outpace.nn.operators import operator

IGNORED = -100
BLOCK_BYTES = 2 << 20  # fp32 rows per block, which stay in cache between the passes over them
# Rows of the head per matmul: faster than one large matmul, because their bf16 copy stays in cache.
HEAD_ROWS = 2048


def _low_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the sum of −log softmax(hidden · weightᵀ + bias)[target] in fp32, and its gradient.

    `hidden` (N, D), `weight` (V, D), `bias` (V); `targets` (N), −100 for none. The gradient with
    respect to the logits is bf16, (N, V).
    """
    logits = _compute_logits(hidden, weight, bias)
    return gradient_in_place(logits, targets), logits


def _compute_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    operand = hidden.to(torch.bfloat16)
    logits = operand.new_empty((len(hidden), len(weight)))
    for block, rows in _bf16_head_blocks(weight):
        its = logits[:, block]
        if bias is None:
            torch.mm(operand, rows.T, out=its)
        else:
            torch.addmm(bias[block].to(rows.dtype), operand, rows.T, out=its)
        del rows  # free these rows before the next are cast
    return logits


def _bf16_head_blocks(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of `HEAD_ROWS` rows of the head (V, D), each with its rows cast to bf16."""
    for start in range(0, len(weight), HEAD_ROWS):
        block = slice(start, start + HEAD_ROWS)
        yield block, weight[block].to(torch.bfloat16)


def gradient_in_place(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of losses in fp32 or wider; overwrite `logits` (N, V) with the gradient."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    total = torch.zeros((), dtype=wide)
    counts = targets != IGNORED
    safe = targets.clamp(min=0).unsqueeze(1)
    rows = _softmax_rows(logits.shape[1])
    minus_one = torch.full((rows, 1), -1.0, dtype=wide)
    for start in range(0, logits.shape[0], rows):
        block = slice(start, start + rows)
        own, its, real = logits[block], safe[block], counts[block].unsqueeze(1)
        p = torch.softmax(own, -1, dtype=wide)
        # log Σ exp(logits) is the largest logit minus its log-probability.
        behind = own.amax(-1, keepdim=True).to(wide) - own.gather(1, its)
        total += ((behind - p.amax(-1, keepdim=True).log_()) * real).sum()
        grad = p.scatter_add_(1, its, minus_one[: len(its)])
        own.copy_(grad if bool(real.all()) else grad.mul_(real))
        del p, grad
    return total


def _fake_low_loss(
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
    """Compute the gradients of `hidden`, `weight` (if `trains`) and `bias`, in their dtypes.

    `loss_grad` scales the fp32 results within the matmuls. The contributions of the head's blocks
    to `hidden`'s gradient are rounded to bf16 and summed in fp32.
    """
    scale = loss_grad.item()
    hidden_grad = torch.zeros_like(hidden, dtype=torch.float32)
    operand, weight_grad = None, None
    if trains:
        operand, weight_grad = hidden.to(torch.bfloat16), torch.empty_like(weight)
    for block, rows in _bf16_head_blocks(weight):
        its_grad = logits_grad[:, block]
        hidden_grad += _scaled_matmul(its_grad, rows, scale)
        if operand is not None and weight_grad is not None:
            weight_grad[block] = _scaled_matmul(its_grad.T, operand, scale)
        del rows
    grads = [hidden_grad.to(hidden.dtype)]
    if weight_grad is not None:
        grads.append(weight_grad)
    if bias is not None:
        grads.append(logits_grad.sum(0, dtype=torch.float32).mul_(scale).to(bias.dtype))
    return grads


def _fake_low_loss_backward(
    loss_grad: Tensor,
    logits_grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    trains: bool,
) -> list[Tensor]:
    wanted = (hidden, weight if trains else None, bias)
    return [torch.empty_like(one) for one in wanted if one is not None]


def temporary_bytes(hidden: Tensor, weight: Tensor) -> int:
    """Return the peak of the bytes that the forward operator allocates and frees internally."""
    tokens, vocab = len(hidden), len(weight)
    rows = min(_softmax_rows(vocab), tokens)
    softmax = 2 * 4 * rows * vocab + 9 * tokens + 4 * _softmax_rows(vocab)
    return max(_bf16_copy_bytes(hidden) + _head_block_bytes(weight), softmax)


def backward_temporary_bytes(hidden: Tensor, weight: Tensor, trains: bool) -> int:
    """Return the peak of the bytes that the backward operator allocates and frees internally.

    `trains`: the head is trained, so its gradient is computed, too.
    """
    total = 4 * hidden.numel() * (hidden.dtype != torch.float32)
    matmul = 2 * hidden.numel()
    if trains:
        matmul = max(matmul, 2 * min(HEAD_ROWS, weight.shape[0]) * weight.shape[1])
    return total + _head_block_bytes(weight) + matmul + trains * _bf16_copy_bytes(hidden)


def _bf16_copy_bytes(hidden: Tensor) -> int:
    return 2 * hidden.numel() * (hidden.dtype != torch.bfloat16)


def _head_block_bytes(weight: Tensor) -> int:
    rows = min(HEAD_ROWS, weight.shape[0])
    return 2 * rows * weight.shape[1] * (weight.dtype != torch.bfloat16)


def _softmax_rows(vocab: int) -> int:
    return max(1, BLOCK_BYTES // (4 * vocab))


def _scaled_matmul(left: Tensor, right: Tensor, scale: float) -> Tensor:
    return torch.addmm(left.new_zeros(()), left, right, beta=0, alpha=scale)


def _save_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    hidden, weight, bias, _ = inputs
    ctx.save_for_backward(output[1], hidden, weight, bias)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate_low_loss(ctx: Any, loss_grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    *given, bias = ctx.saved_tensors
    _, trains, bias_trains, _ = ctx.needs_input_grad
    bias = bias if bias_trains else None
    grads = iter(low_loss_backward(loss_grad, *given, bias, trains))
    hidden_grad = next(grads)
    return hidden_grad, next(grads) if trains else None, next(grads, None), None


low_loss_backward = operator(_low_loss_backward, _fake_low_loss_backward)
low_loss = operator(_low_loss, _fake_low_loss, _save_for_backward, _differentiate_low_loss)
