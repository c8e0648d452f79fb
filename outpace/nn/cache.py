"""Cache of the keys and values of earlier tokens, so that generation computes each token once.

Legend: B batch, K key/value heads, S new tokens, T tokens so far, C head width.
"""

from torch import Tensor


class LayerCache:
    """Keys and values of one block: `length` tokens of at most `capacity`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._room: tuple[Tensor, Tensor] | None = None

    def extend(self, keys_BKSC: Tensor, values_BKSC: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all cached keys and values, (B, K, T, C) each."""
        if self._room is None:
            batch, heads, _, width = keys_BKSC.shape
            shape = (batch, heads, self.capacity, width)
            self._room = keys_BKSC.new_empty(shape), values_BKSC.new_empty(shape)
        keys, values = self._room
        start, self.length = self.length, self.length + keys_BKSC.shape[2]
        keys[:, :, start : self.length] = keys_BKSC
        values[:, :, start : self.length] = values_BKSC
        return keys[:, :, : self.length], values[:, :, : self.length]


class KVCache:
    """Key/value caches of all blocks."""

    def __init__(self, layers: int, capacity: int) -> None:
        self.layers = [LayerCache(capacity) for _ in range(layers)]

    @property
    def length(self) -> int:
        """Return the number of cached tokens."""
        return self.layers[0].length
