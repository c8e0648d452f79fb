"""Keys and values of the tokens seen so far, so that generation computes each token once."""

import torch
from torch import Tensor

from outpace.records.model import ModelSpec


class LayerCache:
    """One block's keys and values, (B, K, capacity, C) each, of which `length` are filled."""

    def __init__(self, batch: int, spec: ModelSpec, capacity: int, like: Tensor) -> None:
        shape = (batch, spec.kv_heads, capacity, spec.head_dim)
        self.keys = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.values = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.length = 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, K, S, C) and return all keys and values so far."""
        end = self.length + keys.shape[2]
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class KVCache:
    """The caches of all blocks. `capacity` is in tokens, at most the model's positions."""

    def __init__(self, spec: ModelSpec, batch: int, capacity: int, like: Tensor) -> None:
        self.capacity = min(capacity, spec.max_positions)
        self.layers = [LayerCache(batch, spec, self.capacity, like) for _ in range(spec.layers)]

    @property
    def length(self) -> int:
        """Tokens seen so far."""
        return self.layers[0].length
