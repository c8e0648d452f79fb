"""Attention in one turn of the ring, by kernels that return and accept a log-sum-exp.

In each turn, queries attend to the keys of one rank, and the softmax covers only these keys. The
outputs of several turns can be merged if the log-sum-exp of the scores in each turn is known. In
the backward, a kernel gets the output and the log-sum-exp over all turns, so it recomputes the
weights of the softmax over all keys.

Legend: B batch, S queries, T keys, H query heads, K key/value heads, G = H/K, C width of a head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outpace.nn.block import to_fp32

# Rows of the score matrix in memory at once.
_ROWS = 512
# FlashAttention's largest head width, and the lowest compute capability that it supports.
_WIDTHS = range(8, 257, 8)
_AMPERE = (8, 0)


class RingKernel(Protocol):
    """A kernel for one turn of ring attention.

    In each turn, a rank attends from its queries to the keys and values of another part of the
    sequence; `number` is the index of the turn. Queries are (B, H, S, C), keys and values (B, K, T,
    C), log-sum-exps (B, H, S) in nats.
    """

    def forward(
        self, number: int, q: Tensor, k: Tensor, v: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Return softmax(q·kᵀ/√C)·v and its log-sum-exp."""
        ...

    def backward(
        self, number: int, q: Tensor, k: Tensor, v: Tensor, causal: bool,
        grad: Tensor, out: Tensor, lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of q, k and v, given the output and log-sum-exp over all turns."""
        ...


@dataclass(frozen=True)
class Dropout:
    """Dropout masks for ring attention that depend only on the seed and the turn.

    The backward draws the same masks again. In each turn, a rank processes the keys of another part
    of the sequence.
    """

    rate: float
    seed: int

    def generator(self, turn: int, device: torch.device) -> torch.Generator | None:
        """Return the generator for one turn of ring attention; None without dropout."""
        if not self.rate:
            return None
        return torch.Generator(device).manual_seed(self.seed + turn)

    def mask(self, like: Tensor, generator: torch.Generator | None) -> Tensor | None:
        """Return a mask with 0 for dropped values and 1/(1 − rate) for the others."""
        if generator is None:
            return None
        drawn = torch.rand(like.shape, generator=generator, device=like.device, dtype=like.dtype)
        return (drawn >= self.rate).to(like.dtype) / (1 - self.rate)


def choose_ring_kernel(q_BHSC: Tensor, drops: Dropout, runs_on: str | None = None) -> RingKernel:
    """Return FlashAttention if it supports the tensors, otherwise matmuls with chunked scores.

    `runs_on`: the device type to choose for, if it differs from the queries' device.
    """
    device, capability = runs_on or q_BHSC.device.type, _AMPERE
    if q_BHSC.device.type == "cuda":
        capability = torch.cuda.get_device_capability(q_BHSC.device)
    flash = takes_flash(device, capability, q_BHSC.dtype, q_BHSC.shape[3], drops.rate)
    return Flash() if flash else Scores(drops)


def takes_flash(
    device: str, capability: tuple[int, int], dtype: torch.dtype, width: int, dropout: float
) -> bool:
    """Return whether to use FlashAttention.

    It needs 16-bit tensors with a supported head width on Ampere or newer GPUs, without dropout:
    with dropout, the generator state of each turn of ring attention would have to be kept.
    """
    low = dtype in (torch.bfloat16, torch.float16)
    new = device == "cuda" and capability >= _AMPERE
    return new and low and width in _WIDTHS and dropout == 0


class Flash:
    """FlashAttention's GPU kernels (Dao, arXiv 2307.08691), as torch operators."""

    def forward(
        self, number: int, q: Tensor, k: Tensor, v: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Compute `RingKernel.forward` for 16-bit operands; the log-sum-exp is in fp32."""
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention.default(
            q, k, v, 0.0, causal, False
        )
        return out, lse

    def backward(
        self, number: int, q: Tensor, k: Tensor, v: Tensor, causal: bool,
        grad: Tensor, out: Tensor, lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Compute `RingKernel.backward` with the flash kernel."""
        unused = q.new_zeros(2, dtype=torch.uint64)  # dropout's generator state, unused
        gradients: tuple[Tensor, Tensor, Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
                grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2],
                0.0, causal, unused, unused,
            )
        )  # fmt: skip
        return gradients


@dataclass(frozen=True)
class Scores:
    """Attention by matmuls in fp32 or fp64, for some rows of scores at a time; supports dropout."""

    drops: Dropout

    def forward(
        self, number: int, q: Tensor, k: Tensor, v: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Compute `RingKernel.forward` from the matrix of scores."""
        generator = self.drops.generator(number, q.device)
        return _attend(to_fp32(q), to_fp32(k), to_fp32(v), causal, self.drops, generator)

    def backward(
        self, number: int, q: Tensor, k: Tensor, v: Tensor, causal: bool,
        grad: Tensor, out: Tensor, lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Compute `RingKernel.backward` from the matrix of scores."""
        grad = to_fp32(grad)
        delta = (grad * to_fp32(out)).sum(-1)
        generator = self.drops.generator(number, q.device)
        operands = to_fp32(q), to_fp32(k), to_fp32(v)
        return _attend_backward(*operands, causal, self.drops, generator, grad, lse, delta)


def _attend(
    q_BHSC: Tensor,
    k_BKTC: Tensor,
    v_BKTC: Tensor,
    causal: bool,
    drops: Dropout,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Return softmax(q·kᵀ/√C)·v, (B, H, S, C), and the scores' log-sum-exp, (B, H, S)."""
    out, lse = torch.empty_like(q_BHSC), q_BHSC.new_empty(q_BHSC.shape[:-1])
    for rows, columns in _score_blocks(q_BHSC.shape[-2], causal):
        q = _stack_by_group(q_BHSC[..., rows, :], k_BKTC.shape[1])
        scores = _compute_scores(q, k_BKTC[..., columns, :], rows if causal else None)
        sums = scores.logsumexp(-1, keepdim=True)
        weights = (scores - sums).exp_()
        mask = drops.mask(weights, generator)
        weights = weights if mask is None else weights.mul_(mask)
        out[..., rows, :] = _unstack_to_heads(weights @ v_BKTC[..., columns, :], q_BHSC.shape[1])
        lse[..., rows] = _unstack_to_heads(sums, q_BHSC.shape[1]).squeeze(-1)
    return out, lse


def _attend_backward(
    q_BHSC: Tensor,
    k_BKTC: Tensor,
    v_BKTC: Tensor,
    causal: bool,
    drops: Dropout,
    generator: torch.Generator | None,
    grad_BHSC: Tensor,
    lse_BHS: Tensor,
    delta_BHS: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values (Dao et al., arXiv 2205.14135, algorithm 4).

    `lse_BHS` is the log-sum-exp over the keys of all turns. `delta_BHS` is the sum over C of the
    gradient times the output.
    """
    heads, groups = q_BHSC.shape[1], k_BKTC.shape[1]
    q_grad, k_grad, v_grad = (torch.zeros_like(x) for x in (q_BHSC, k_BKTC, v_BKTC))
    for rows, columns in _score_blocks(q_BHSC.shape[-2], causal):
        q, grad = (_stack_by_group(x[..., rows, :], groups) for x in (q_BHSC, grad_BHSC))
        lse, delta = (_stack_by_group(x[..., rows, None], groups) for x in (lse_BHS, delta_BHS))
        k, v = k_BKTC[..., columns, :], v_BKTC[..., columns, :]
        weights = (_compute_scores(q, k, rows if causal else None) - lse).exp_()
        mask = drops.mask(weights, generator)
        weights_grad = grad @ v.mT
        used = weights if mask is None else weights * mask
        v_grad[..., columns, :] += used.mT @ grad
        if mask is not None:
            weights_grad *= mask
        scores_grad = weights.mul_(weights_grad.sub_(delta)) * q.shape[-1] ** -0.5
        q_grad[..., rows, :] = _unstack_to_heads(scores_grad @ k, heads)
        k_grad[..., columns, :] += scores_grad.mT @ q
    return q_grad, k_grad, v_grad


def _score_blocks(length: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    for start in range(0, length, _ROWS):
        stop = min(start + _ROWS, length)
        yield slice(start, stop), slice(0, stop) if causal else slice(None)


def _compute_scores(q_BKRC: Tensor, k_BKTC: Tensor, rows: slice | None) -> Tensor:
    """Return the scores q·kᵀ/√C of queries that are stacked by key/value head.

    `rows`: the positions of the queries in each head, for a causal mask. The scores of keys after a
    query's position are then −∞.
    """
    scores: Tensor = (q_BKRC * q_BKRC.shape[-1] ** -0.5) @ k_BKTC.mT
    if rows is not None:
        at = torch.arange(rows.start, rows.stop, device=scores.device)
        behind = at.unsqueeze(1) < torch.arange(rows.stop, device=scores.device)
        scores.unflatten(2, (-1, len(at))).masked_fill_(behind, -torch.inf)
    return scores


def _stack_by_group(x_BHSC: Tensor, groups: int) -> Tensor:
    """Stack the queries that share a key/value head: (B, H, S, C) to (B, K, G·S, C)."""
    grouped: Tensor = x_BHSC.unflatten(1, (groups, -1))
    return grouped.flatten(2, 3)


def _unstack_to_heads(x_BKRC: Tensor, heads: int) -> Tensor:
    parted: Tensor = x_BKRC.unflatten(2, (heads // x_BKRC.shape[1], -1))
    return parted.flatten(1, 2)
