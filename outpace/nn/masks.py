"""Who attends to whom: boolean masks, True where attention is allowed.

Legend: B batch, S queries, T keys (the last S of them are the queries' own).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Visibility:
    """What one layer's attention is given: a mask, or the causal flag, or neither.

    Where the flag alone says it all there is no mask, so that the fused kernel is used.
    """

    mask: Tensor | None = None
    is_causal: bool = False

    def of_queries(self, read_B: Tensor, keys: int) -> "Visibility":
        """What one query of each sample sees, at its place of `read_B`: a mask (B, 1, 1, T)."""
        if self.mask is not None:
            mask_BST = self.mask[:, 0].expand(len(read_B), -1, -1)
            return Visibility(at_places(mask_BST, read_B).unsqueeze(1))
        if not self.is_causal:
            return self
        seen_BT = torch.arange(keys, device=read_B.device) <= read_B.unsqueeze(1)
        return Visibility(seen_BT[:, None, None])


def visibility(
    queries: int,
    keys: int,
    causal: bool,
    window: int | None,
    documents_BS: Tensor | None,
    padding_mask_BS: Tensor | None,
    device: torch.device,
) -> Visibility:
    """The cheapest exact description of one layer's attention pattern.

    `window`: a token sees itself and the window − 1 before it (Mistral 7B, arXiv 2310.06825,
    §2; without `causal` as many after it). `documents_BS`: only within equal numbers.
    `padding_mask_BS`: True for real tokens; others are seen by none but themselves.
    """
    if window is not None and window >= keys:
        window = None
    if window is None and documents_BS is None and padding_mask_BS is None:
        if not causal or queries == 1:
            return Visibility()
        if queries == keys:
            return Visibility(is_causal=True)
    rows = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    columns = torch.arange(keys, device=device).unsqueeze(0)
    allowed = rows >= columns if causal else torch.ones_like(rows >= columns)
    if window is not None:
        allowed = allowed & ((rows - columns).abs() < window)
    mask_BST = allowed.unsqueeze(0)
    if documents_BS is not None:
        mask_BST = mask_BST & (documents_BS.unsqueeze(2) == documents_BS.unsqueeze(1))
    if padding_mask_BS is not None:
        # Seeing itself keeps a padded query's softmax defined; nobody reads its output.
        mask_BST = mask_BST & (padding_mask_BS.bool().unsqueeze(1) | (rows == columns))
    return Visibility(mask_BST.unsqueeze(1))


def at_places(x_BSX: Tensor, read_B: Tensor) -> Tensor:
    """Of each sample's rows that at its place of `read_B`, (B, 1, X)."""
    samples = torch.arange(len(read_B), device=read_B.device)
    return x_BSX[samples, read_B].unsqueeze(1)


def positions_in_documents(documents_BS: Tensor) -> Tensor:
    """Each token's distance from the start of its run of equal document numbers, (B, S)."""
    index_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    starts = torch.ones_like(documents_BS, dtype=torch.bool)
    starts[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return index_S - torch.where(starts, index_S, 0).cummax(dim=1).values
