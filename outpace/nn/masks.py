"""Attention masks: boolean, True where attention is allowed, or lists of blocks.

Legend: B batch, S queries, T keys (of which the last S are those of the queries), N blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from outpace.catalog.efficiency import FLEX_BLOCK as BLOCK

# Maps sample, head, query and key to True where the query sees the key; broadcasts.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Visibility:
    """Keys that a layer's queries see: by a mask, blocks or the causal flag; else all keys.

    If the flag alone suffices, there is no mask, so the fused kernel can be used. `blocks` are for
    FlexAttention, with (S / 128)² numbers instead of S².
    """

    mask: Tensor | None = None
    is_causal: bool = False
    blocks: BlockMask | None = None

    def of_queries(self, read_B: Tensor, keys: int) -> "Visibility":
        """Return the visibility for one query per sample, at position `read_B`."""
        if self.mask is not None:
            mask_BST = self.mask[:, 0].expand(len(read_B), -1, -1)
            return Visibility(at_places(mask_BST, read_B).unsqueeze(1))
        if self.blocks is not None:
            return Visibility(_dense_mask(self.blocks, read_B[:, None, None, None], keys))
        if not self.is_causal:
            return self
        seen_BT = torch.arange(keys, device=read_B.device) <= read_B.unsqueeze(1)
        return Visibility(seen_BT[:, None, None])

    def as_mask(self) -> "Visibility":
        """Return the same visibility with blocks converted to a mask (B, 1, S, T)."""
        if self.blocks is None:
            return self
        queries, keys = self.blocks.seq_lengths
        rows = torch.arange(queries, device=self.blocks.kv_indices.device)
        return Visibility(_dense_mask(self.blocks, rows[None, None, :, None], keys))


def _dense_mask(blocks: BlockMask, rows: Tensor, keys: int) -> Tensor:
    """Return the mask (B, 1, S, T) of the queries at `rows`, (B or 1, 1, S, 1)."""
    samples = torch.arange(blocks.kv_indices.shape[0], device=rows.device)[:, None, None, None]
    columns = torch.arange(keys, device=rows.device)
    mask: Tensor = blocks.mask_mod(samples, samples, rows, columns)
    return mask.expand(max(len(samples), len(rows)), 1, rows.shape[2], keys)


def visibility(
    queries: int,
    keys: int,
    causal: bool,
    window: int | None,
    documents_BS: Tensor | None,
    padding_mask_BS: Tensor | None,
    device: torch.device,
    by_blocks: bool = False,
) -> Visibility:
    """Return the cheapest exact description of one layer's attention pattern.

    `window`: a token sees itself and the window − 1 tokens before it (Mistral 7B, arXiv 2310.06825,
    §2), and without `causal` also that many after it. `documents_BS`: only tokens with equal
    numbers see each other. `padding_mask_BS`: True for real tokens; padding is visible only to
    itself. `by_blocks`: use blocks instead of a mask, if there is at least one whole block.
    """
    if window is not None and window >= keys:
        window = None
    if window is None and documents_BS is None and padding_mask_BS is None:
        if not causal or queries == 1:
            return Visibility()
        if queries == keys:
            return Visibility(is_causal=True)
    if by_blocks and queries == keys >= BLOCK:
        return Visibility(
            blocks=block_mask(keys, causal, window, documents_BS, padding_mask_BS, device)
        )
    rows = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    columns = torch.arange(keys, device=device).unsqueeze(0)
    allowed = rows >= columns if causal else torch.ones_like(rows >= columns)
    if window is not None:
        allowed = allowed & ((rows - columns).abs() < window)
    mask_BST = allowed.unsqueeze(0)
    if documents_BS is not None:
        mask_BST = mask_BST & (documents_BS.unsqueeze(2) == documents_BS.unsqueeze(1))
    if padding_mask_BS is not None:
        # A padded query sees itself, so that its softmax is defined; its output is not read.
        mask_BST = mask_BST & (padding_mask_BS.bool().unsqueeze(1) | (rows == columns))
    return Visibility(mask_BST.unsqueeze(1))


def block_mask(
    length: int,
    causal: bool,
    window: int | None,
    documents_BS: Tensor | None,
    padding_mask_BS: Tensor | None,
    device: torch.device,
) -> BlockMask:
    """Return the attention pattern as blocks for FlexAttention.

    Blocks are compared by the smallest and largest position and document number in each, instead of
    by S × S values.

    Fully visible blocks are listed separately from partial ones, for which FlexAttention calls the
    mask function. An invisible block may be listed as partial if document numbers fall and rise
    again, or if two rules hide different regions of it. This costs time, but the result is exact.
    """
    count = -(-length // BLOCK)
    first_N = torch.arange(count, device=device) * BLOCK
    last_N = first_N + BLOCK - 1
    # In a block, row minus column takes every integer from `low` to `high`.
    low_NN = first_N.unsqueeze(1) - last_N.unsqueeze(0)
    high_NN = last_N.unsqueeze(1) - first_N.unsqueeze(0)
    inside_N = last_N < length
    all_seen = (inside_N.unsqueeze(1) & inside_N.unsqueeze(0)).unsqueeze(0)
    any_seen = torch.ones_like(all_seen)
    if causal:
        any_seen, all_seen = any_seen & (high_NN >= 0), all_seen & (low_NN >= 0)
    if window is not None:
        any_seen = any_seen & (low_NN < window) & (high_NN > -window)
        all_seen = all_seen & (high_NN < window) & (low_NN > -window)
    if documents_BS is not None:
        low_BN, high_BN = _split_blocks(documents_BS, count, documents_BS[:, -1:]).aminmax(dim=-1)
        rows_low, rows_high = low_BN.unsqueeze(2), high_BN.unsqueeze(2)
        columns_low, columns_high = low_BN.unsqueeze(1), high_BN.unsqueeze(1)
        any_seen = any_seen & (rows_low <= columns_high) & (columns_low <= rows_high)
        all_seen = all_seen & (rows_low == columns_high) & (rows_high == columns_low)
    if padding_mask_BS is not None:
        padding_B1 = torch.zeros_like(padding_mask_BS[:, :1], dtype=torch.bool)
        real_BNX = _split_blocks(padding_mask_BS.bool(), count, padding_B1)
        own_NN = torch.eye(count, dtype=torch.bool, device=device)
        any_seen = any_seen & (real_BNX.any(-1).unsqueeze(1) | own_NN)
        all_seen = all_seen & real_BNX.all(-1).unsqueeze(1)
    partly, whole = any_seen & ~all_seen, any_seen & all_seen
    return BlockMask.from_kv_blocks(
        *_list_columns(partly.unsqueeze(1)),
        *_list_columns(whole.unsqueeze(1)),
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_function(causal, window, documents_BS, padding_mask_BS),
        seq_lengths=(length, length),
    )


def _split_blocks(x_BS: Tensor, count: int, filler_B1: Tensor) -> Tensor:
    """Split (B, S) into blocks (B, N, 128), the last one padded with `filler_B1`."""
    missing = count * BLOCK - x_BS.shape[1]
    filled = torch.cat((x_BS, filler_B1.expand(-1, missing)), dim=1) if missing else x_BS
    blocks: Tensor = filled.unflatten(1, (count, BLOCK))
    return blocks


def _list_columns(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of True columns per row, and the column numbers, True columns first."""
    order = seen.int().argsort(dim=-1, descending=True, stable=True)
    return seen.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _mask_function(
    causal: bool, window: int | None, documents_BS: Tensor | None, padding_mask_BS: Tensor | None
) -> MaskFunction:
    def sees(sample: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        allowed = row >= column if causal else (row >= 0) & (column >= 0)
        if window is not None:
            allowed = allowed & (row - column < window) & (column - row < window)
        if documents_BS is not None:
            allowed = allowed & (documents_BS[sample, row] == documents_BS[sample, column])
        if padding_mask_BS is not None:
            allowed = allowed & ((padding_mask_BS[sample, column] != 0) | (row == column))
        return allowed

    return sees


def at_places(x_BSX: Tensor, read_B: Tensor) -> Tensor:
    """Return the row of each sample at position `read_B`, (B, 1, X)."""
    samples = torch.arange(len(read_B), device=read_B.device)
    return x_BSX[samples, read_B].unsqueeze(1)


def positions_in_documents(documents_BS: Tensor) -> Tensor:
    """Return each token's distance from the start of its run of equal document numbers, (B, S)."""
    index_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    starts = torch.ones_like(documents_BS, dtype=torch.bool)
    starts[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return index_S - torch.where(starts, index_S, 0).cummax(dim=1).values
