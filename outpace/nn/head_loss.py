"""Loss over a large vocabulary on an accelerator: padded matmuls, and one copy of the logits.

The logits dominate the memory of the loss and, apart from matmuls, its time. Here they exist once,
in the dtype of the matmuls (16 bits in mixed precision), and are overwritten by their gradient.
There are two methods:

- whole: the forward computes all logits and reads them once, for log Σ exp; the backward overwrites
  them with their scaled gradient for its matmuls. This is as precise as autograd.
- chunked, at least `CHUNK_ROWS` rows at a time, if requested or if all logits take more than
  `WHOLE_BYTES`: the forward computes gradients chunk by chunk, and the backward scales them (as in
  Hsu et al., "Liger Kernel", arXiv 2410.10989, §3.2).

The vocabulary is padded to a multiple of `PADDED_TO`: cuBLAS's kernels for Hopper need rows of 16
bytes, and GPT-2's head of 50,257 took 5 to 6.4 times as long as one of 50,304 (H200, 2026-11-27).
The padding consists of zero rows in the copy of the head that matmuls read. It is never stored, and
its logits are ignored. cuBLAS sums the head's gradient in fp32, within one matmul, or by one
accumulating matmul per chunk.

`LogitsFunctions` read and write the logits, compiled by torch.compile (two kernels, static shapes)
or eager. Either way, cuBLAS computes the matmuls.

Legend: N tokens (B·S), D hidden width, V vocabulary (or this rank's shard of it), P = V padded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from outpace.nn.bf16_loss import IGNORED
from outpace.nn.logits_functions import EAGER, LogitsFunctions
from outpace.nn.torch_versions import add_wide_matmul

PADDED_TO = 64  # elements: 128 bytes in 16 bits, one cache line
# Logits up to this size are computed at once: 2³¹ values of 16 bits, the most that kernels with
# 32-bit indices support, or 16,384 tokens of Llama 3's vocabulary of 128,256. The limit is a
# constant, so that all ranks do the same.
WHOLE_BYTES = 4 * 2**30
# Larger logits are split into as few equal chunks as possible, of at most this many bytes.
CHUNK_BYTES = 2 * 2**30
# Rows per chunk if chunks are requested, and the minimum otherwise: with fewer, the head's gradient
# is read and written too often (4 times 4·V·D bytes at 16,384 tokens).
CHUNK_ROWS = 4096
# Combines local log-sum-exps and targets' logits (N) over all ranks.
Combine = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def padded_width(vocab: int) -> int:
    """Return the number of columns of the logits, including padding."""
    return -(-vocab // PADDED_TO) * PADDED_TO


def chunk_rows(rows: int, vocab: int, itemsize: int) -> int:
    """Return the rows per chunk: all, or equal chunks of at most `CHUNK_BYTES` of logits."""
    row_bytes = padded_width(vocab) * itemsize
    if rows * row_bytes <= WHOLE_BYTES:
        return max(rows, 1)
    most = max(CHUNK_ROWS, CHUNK_BYTES // row_bytes // PADDED_TO * PADDED_TO)
    chunks = -(-rows // most)
    return -(-rows // chunks // PADDED_TO) * PADDED_TO


def head_loss_sum(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    kind: str = "auto",
    dtype: torch.dtype | None = None,
    passes: LogitsFunctions = EAGER,
) -> Tensor:
    """Return the sum of −log softmax(hidden · weightᵀ + bias)[target], with gradient, in ≥ fp32.

    `dtype` is the dtype of matmuls and logits (None: fp32, or the operands' if wider). `kind`:
    "plain" computes all logits at once, "chunked" `CHUNK_ROWS` rows at a time, and "auto" decides
    by size.
    """
    dtype = dtype or torch.promote_types(hidden_ND.dtype, torch.float32)
    counts_N = targets_N != IGNORED
    columns_N = torch.where(counts_N, targets_N, -1)
    operands = hidden_ND, weight_VD, bias_V, columns_N, counts_N
    rows, whole = len(hidden_ND), kind == "plain"
    size = CHUNK_ROWS
    if kind == "auto":
        size = chunk_rows(rows, len(weight_VD), dtype.itemsize)
        whole = size >= rows and passes is not EAGER  # eager mode has a faster method for this
    wanted = (hidden_ND, weight_VD) if bias_V is None else (hidden_ND, weight_VD, bias_V)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        if not (torch.is_grad_enabled() and any(operand.requires_grad for operand in wanted)):
            return _loss_without_gradient(operands, rows if whole else size, dtype)
        if whole:
            return whole_loss_sum(*operands, dtype, passes)
        loss: Tensor = _ChunkedLoss.apply(*operands, size, dtype, passes)  # type: ignore[no-untyped-call]
    return loss


def whole_loss_sum(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    columns_N: Tensor,
    counts_N: Tensor,
    dtype: torch.dtype,
    passes: LogitsFunctions,
    combine: Combine | None = None,
) -> Tensor:
    """Return the sum of losses, computed from all logits at once.

    `columns_N` and `counts_N` are as in `LogitsFunctions`. `combine` combines the scores of all
    ranks, if the vocabulary is sharded.
    """
    with torch.autocast(hidden_ND.device.type, enabled=False):
        loss: Tensor = _WholeLoss.apply(  # type: ignore[no-untyped-call]
            hidden_ND, weight_VD, bias_V, columns_N, counts_N, dtype, passes, combine
        )
    return loss


@dataclass
class _KeptTensors:
    """Tensors that the loss keeps from forward to backward, each until its last use.

    `due`: operands (0 hidden states, 1 head, 2 bias) whose gradients have not yet been computed.
    `is_gradient`: the logits have been overwritten by their gradient.
    """

    logits: Tensor | None
    operand: Tensor
    head: Tensor | None
    lse: Tensor
    columns: Tensor
    counts: Tensor
    due: set[int]
    is_gradient: bool = False


class _WholeLoss(torch.autograd.Function):
    """The loss with all logits kept from forward to backward.

    The gradient of each operand can be computed once; schedules that split the backward compute
    them one after the other.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        columns: Tensor,
        counts: Tensor,
        dtype: torch.dtype,
        passes: LogitsFunctions,
        combine: Combine | None,
    ) -> Tensor:
        operand, head = hidden.detach().to(dtype), padded_head(weight, dtype)
        logits = _head_matmul(operand, head, bias)
        lse, own = passes.scores(logits, columns, len(weight))
        if combine is not None:
            lse, own = combine(lse, own)
        ctx.passes, ctx.vocab = passes, len(weight)
        ctx.dtypes = [None if one is None else one.dtype for one in (hidden, weight, bias)]
        due = {number for number in range(3) if ctx.needs_input_grad[number]}
        ctx.kept = _KeptTensors(logits if due else None, operand, head, lse, columns, counts, due)
        return ((lse - own) * counts).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
        asked = _requested_operands(ctx)
        if not asked <= ctx.kept.due:
            raise RuntimeError(
                "the loss on an accelerator supports a single backward, since the gradient "
                "overwrites the logits. Compute the loss again for a second backward."
            )
        with torch.autocast(loss_grad.device.type, enabled=False):
            return *_whole_gradients(ctx, ctx.kept, loss_grad, asked), *[None] * 5


def _requested_operands(ctx: Any) -> set[int]:
    """Return the operands (0 to 2) whose gradients the current backward computes.

    `ctx.needs_input_grad` does not list them, since it keeps its value from the forward.
    """
    operands = [number for number, dtype in enumerate(ctx.dtypes) if dtype is not None]
    nodes = zip(operands, ctx.next_functions, strict=False)
    return {number for number, (node, _) in nodes if node is not None and _will_execute(node)}


def _will_execute(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf requested through `torch.autograd.grad`
        return True


def _whole_gradients(
    ctx: Any, kept: _KeptTensors, loss_grad: Tensor, requested: set[int]
) -> list[Tensor | None]:
    logits = kept.logits
    assert logits is not None
    if not kept.is_gradient:
        scales = kept.counts.to(kept.lse.dtype) * loss_grad
        ctx.passes.gradient(logits, kept.lse, kept.columns, scales, ctx.vocab)
        kept.is_gradient = True
    of_hidden = of_weight = of_bias = None
    if 0 in requested:
        assert kept.head is not None
        of_hidden = torch.mm(logits, kept.head).to(ctx.dtypes[0])
        kept.head = None  # free it before the head's gradient is allocated
    if 1 in requested:
        of_weight = wide_matmul(logits.t(), kept.operand, ctx.dtypes[1])[: ctx.vocab]
    if 2 in requested:
        of_bias = logits.sum(0, dtype=kept.lse.dtype)[: ctx.vocab].to(ctx.dtypes[2])
    kept.due -= requested
    if not kept.due:
        kept.logits = None
    return [of_hidden, of_weight, of_bias]


class _ChunkedLoss(torch.autograd.Function):
    """The loss by chunks of rows. The forward computes gradients; the backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        columns: Tensor,
        counts: Tensor,
        rows: int,
        dtype: torch.dtype,
        passes: LogitsFunctions,
    ) -> Tensor:
        head, vocab = padded_head(weight, dtype), len(weight)
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.empty_like(hidden) if of_hidden else None
        weight_grad = bias_grad = None
        losses = []
        for start in range(0, max(len(hidden), 1), rows):
            part = slice(start, start + rows)
            operand = hidden[part].detach().to(dtype)
            logits = _head_matmul(operand, head, bias)
            losses.append(passes.loss_and_gradient(logits, columns[part], counts[part], vocab))
            if hidden_grad is not None:
                _matmul_into(hidden_grad[part], logits, head)
            if of_weight:
                weight_grad = _add_matmul(weight_grad, logits.t(), operand)
            if of_bias:
                added = logits.sum(0, dtype=losses[0].dtype)
                bias_grad = added if bias_grad is None else bias_grad.add_(added)
            del logits  # free them before the next chunk's
        ctx.grads = hidden_grad, weight_grad, bias_grad
        ctx.like = vocab, weight.dtype, None if bias is None else bias.dtype
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError(
                "the chunked loss supports one backward; use the plain loss for more"
            )
        hidden, weight, bias = [None if g is None else g.mul_(loss_grad) for g in ctx.grads]
        ctx.grads = None
        vocab, dtype, bias_dtype = ctx.like
        weight = None if weight is None else weight[:vocab].to(dtype)
        bias = None if bias is None else bias[:vocab].to(bias_dtype)
        return hidden, weight, bias, *[None] * 5


def _loss_without_gradient(
    operands: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor], rows: int, dtype: torch.dtype
) -> Tensor:
    """Compute the loss in chunks of `rows`, uncompiled, since evaluation has too many shapes."""
    hidden, weight, bias, columns, counts = operands
    head = padded_head(weight, dtype)
    loss = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=hidden.device)
    for start in range(0, len(hidden), max(rows, 1)):
        part = slice(start, start + rows)
        logits = _head_matmul(hidden[part].to(dtype), head, bias)
        lse, own = EAGER.scores(logits, columns[part], len(weight))
        del logits
        loss += ((lse - own) * counts[part]).sum()
    return loss


def padded_head(weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the head (P, D) in the matmuls' dtype, padded with rows of zeros."""
    vocab, width = weight_VD.shape
    rows = padded_width(vocab)
    if rows == vocab:
        return weight_VD.detach().to(dtype)
    head_PD = weight_VD.new_empty((rows, width), dtype=dtype)
    head_PD[:vocab] = weight_VD.detach()
    head_PD[vocab:] = 0
    return head_PD


def _head_matmul(operand_ND: Tensor, head_PD: Tensor, bias_V: Tensor | None) -> Tensor:
    if bias_V is None:
        return torch.mm(operand_ND, head_PD.t())
    bias_P = bias_V.new_zeros(len(head_PD), dtype=head_PD.dtype)
    bias_P[: len(bias_V)] = bias_V.detach()
    return torch.addmm(bias_P, operand_ND, head_PD.t())


def wide_matmul(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `left` @ `right` in `dtype`.

    If the operands have 16 bits and `dtype` is fp32, the sums are not rounded to 16 bits.
    """
    if dtype == left.dtype:
        return torch.mm(left, right)
    if dtype != torch.float32:
        return torch.mm(left, right).to(dtype)
    if not _has_fp32_output_matmul(left):
        return torch.mm(left.float(), right.float())
    return torch.mm(left, right, out_dtype=torch.float32)


def _add_matmul(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return `total` + `left` @ `right` in at least fp32, accumulated inside the matmul kernel."""
    wide = torch.promote_types(left.dtype, torch.float32)
    if total is None:
        return wide_matmul(left, right, wide)
    if left.dtype == wide:
        return total.addmm_(left, right)
    if not _has_fp32_output_matmul(left):
        return total.addmm_(left.float(), right.float())
    return add_wide_matmul(total, left, right)


def _has_fp32_output_matmul(operand: Tensor) -> bool:
    """Return whether 16-bit matmuls can return fp32: on CUDA, and in traces anywhere."""
    return operand.device.type == "cuda" or type(operand) is not Tensor


def _matmul_into(into: Tensor, left: Tensor, right: Tensor) -> None:
    if into.dtype == left.dtype:
        torch.mm(left, right, out=into)
    else:
        into.copy_(torch.mm(left, right))
