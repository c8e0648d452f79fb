"""Blocked attention on a CPU in 16 bits: the scores of one block at a time stay in cache.

torch's fused kernel for CPUs multiplies 16-bit tiles that are too small for the processor's matrix
units, and takes several times as long as batched matmuls (docs/development/log.md). Here each block
is a batched matmul, so only some of the scores exist at any time, and a causal block skips later
keys. As in the fused kernels, the backward recomputes the scores instead of keeping them (Dao et
al., arXiv 2205.14135, algorithm 4).

Legend: B batch, S queries, T keys, H query heads, K key/value heads, G = H/K queries per key, C
head width, R rows of a block.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.nn.operators import operator, pieces_to_run

ROWS = 128  # queries per block; a causal block skips the keys after its last query
# Bytes of scores per block, so that they stay in cache between the two matmuls.
SCORE_BYTES = 4 << 20


@dataclass(frozen=True)
class _Block:
    """A block of scores: slices of batch, heads and queries, and the number of visible keys."""

    entries: slice
    kv_heads: slice
    queries: slice
    keys: int

    def shape(self) -> tuple[int, ...]:
        """Return the number of samples, heads, queries and keys."""
        each = (self.entries, self.kv_heads, self.queries)
        return (*(one.stop - one.start for one in each), self.keys)


def _score_blocks(q: Tensor, k: Tensor, causal: bool) -> Iterator[_Block]:
    (batch, all_heads, queries, _), (_, kv_heads, keys, _) = q.shape, k.shape
    for start in range(0, queries, ROWS):
        end = min(start + ROWS, queries)
        seen = end if causal else keys
        a_head = (all_heads // kv_heads) * (end - start) * seen * q.element_size()
        heads = max(1, min(kv_heads, SCORE_BYTES // a_head))
        entries = max(1, SCORE_BYTES // (a_head * kv_heads))
        for entry in range(0, batch, entries):
            for head in range(0, kv_heads, heads):
                yield _Block(
                    slice(entry, min(entry + entries, batch)),
                    slice(head, min(head + heads, kv_heads)),
                    slice(start, end),
                    seen,
                )


class _BlockViews:
    """Attention within blocks: copies a block's rows into batches of matrices, and back."""

    def __init__(self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> None:
        self.kv_heads, self.group = k.shape[1], q.shape[1] // k.shape[1]
        self._scale = 1 / math.sqrt(q.shape[3])
        self._mask = None
        if mask is not None:
            self._mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -math.inf)
        rows = min(ROWS, q.shape[2])
        self._later = q.new_full((rows, rows), -math.inf).triu_(1) if causal else None
        self._none = q.new_zeros(())

    def query_rows(self, x: Tensor, block: _Block) -> Tensor:
        """Copy a block's rows of `x` (B, H, S, C) to (n, G·R, C)."""
        part = self._split_heads_by_group(x)[block.entries, block.kv_heads, :, block.queries]
        rows = self.group * (block.queries.stop - block.queries.start)
        return part.reshape(-1, rows, x.shape[3])

    def key_rows(self, x: Tensor, block: _Block) -> Tensor:
        """Return the block's visible keys of `x` (B, K, T, C) as (n, T of the block, C)."""
        part = x[block.entries, block.kv_heads, : block.keys]
        return part.reshape(-1, block.keys, x.shape[3])

    def write_query_rows(self, output: Tensor, block: _Block, rows: Tensor) -> None:
        place = self._split_heads_by_group(output)[block.entries, block.kv_heads, :, block.queries]
        place.copy_(rows.view(place.shape))

    def _split_heads_by_group(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], self.kv_heads, self.group, *x.shape[2:])

    def scaled_matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """Compute left · right / √C, for scores and for gradients through them."""
        return torch.baddbmm(self._none, left, right, beta=0, alpha=self._scale)

    def probabilities(self, q: Tensor, k: Tensor, block: _Block) -> Tensor:
        """Compute softmax(q · kᵀ / √C) over visible keys, (n, G·R, T of the block)."""
        scores = self.scaled_matmul(q, k.transpose(1, 2))
        rows = block.queries.stop - block.queries.start
        if self._later is not None:
            own = scores.view(-1, rows, block.keys)[:, :, block.queries]
            own.add_(self._later[:rows, :rows])
        if self._mask is not None:
            entries = block.entries if self._mask.shape[0] > 1 else slice(None)
            part = self._mask[entries, :, None, block.queries]  # (B or 1, 1, 1, R, T)
            shape = (-1, block.kv_heads.stop - block.kv_heads.start, self.group, rows, block.keys)
            scores.view(shape).add_(part)
        return torch.softmax(scores, -1)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Compute softmax(q · kᵀ / √C) · v, (B, H, S, C), from q (B, H, S, C) and k, v (B, K, T, C).

    `mask`: bool (B or 1, 1, S, T), True for a visible key. `causal`: queries do not see later keys;
    S must equal T. The result is laid out in memory as (B, S, H, C).
    """
    parts = _BlockViews(q, k, mask, causal)
    out = _empty_tokens_first(q)
    for block in pieces_to_run(q, _score_blocks(q, k, causal), _Block.shape):
        seen = parts.probabilities(parts.query_rows(q, block), parts.key_rows(k, block), block)
        parts.write_query_rows(out, block, torch.bmm(seen, parts.key_rows(v, block)))
    return out


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    return _empty_tokens_first(q)


def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `q`, `k` and `v`. Sums over blocks are in fp32."""
    parts = _BlockViews(q, k, mask, causal)
    several = q.shape[2] > ROWS
    q_grad = _empty_tokens_first(q)
    sums = [_empty_tokens_first(x) for x in (k, v)]
    if several:
        sums = [torch.zeros_like(x, dtype=torch.float32) for x in sums]
    for block in pieces_to_run(q, _score_blocks(q, k, causal), _Block.shape):
        queries, keys = parts.query_rows(q, block), parts.key_rows(k, block)
        seen = parts.probabilities(queries, keys, block)
        own = parts.query_rows(grad, block)
        v_part = torch.bmm(seen.transpose(1, 2), own)
        seen_grad = torch.bmm(own, parts.key_rows(v, block).transpose(1, 2))
        scores_grad = torch._softmax_backward_data(seen_grad, seen, -1, seen.dtype)
        parts.write_query_rows(q_grad, block, parts.scaled_matmul(scores_grad, keys))
        k_part = parts.scaled_matmul(scores_grad.transpose(1, 2), queries)
        for whole, part in zip(sums, (k_part, v_part), strict=True):
            place = whole[block.entries, block.kv_heads, : block.keys]
            (place.add_ if several else place.copy_)(part.view(place.shape))
    k_grad, v_grad = (one.to(q.dtype) for one in sums)
    return q_grad, k_grad, v_grad


def _fake_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_tokens_first(q), _empty_tokens_first(k), _empty_tokens_first(v)


def _empty_tokens_first(x: Tensor) -> Tensor:
    """Return an empty tensor like `x` (B, heads, length, C), laid out as (B, length, heads, C)."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


def _save_for_backward(ctx: Any, inputs: Any, output: Tensor) -> None:
    *operands, ctx.causal = inputs
    ctx.save_for_backward(*operands)


def _differentiate_attention(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, mask = ctx.saved_tensors
    return (*attention_backward(grad, q, k, v, mask, ctx.causal), None, None)


attention_backward = operator(_attention_backward, _fake_attention_backward)
attention = operator(_attention, _fake_attention, _save_for_backward, _differentiate_attention)
