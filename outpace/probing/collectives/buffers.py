"""Data that ranks send, their receive buffers, and checks of the received data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log10
from typing import Any

import torch
from torch import Tensor

from outpace.probing.timing.rank_clock import PreparedCall

ITEM_BYTES = 4  # fp32
# A prime number, so that chunks of an array begin with different values and a misplaced chunk is
# detected.
_PERIOD = 65_521
_PERIODS_AT_ONCE = 16  # number of values to compare
# Allowed error of fp32 sums in any order, as a share of the sum of magnitudes.
_TOLERANCE = 1e-6
# Repeated sums in place multiply values by the number of ranks each time.
_DECADES = 30


def contribution(rank: int, draw: int = 0) -> Tensor:
    """Return a rank's data for a `draw`, to be repeated as needed: (65521,) random fp32 values."""
    seed = (0xC0DE + draw << 24) + rank
    return torch.randn(_PERIOD, generator=torch.Generator().manual_seed(seed))


@dataclass
class Buffers:
    """A rank's data and its receive buffer; both grow to the largest requested size."""

    device: torch.device
    rank: int
    source: Tensor = field(init=False)
    room: Tensor = field(init=False)
    draw: int = field(default=0, init=False)
    _held: list[list[Any]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.grow(ITEM_BYTES)

    def grow(self, size: int) -> None:
        """Provide `size` bytes of data and of buffer."""
        count = size // ITEM_BYTES
        own = contribution(self.rank, self.draw).to(self.device)
        self.source = own.repeat(-(-count // _PERIOD))[:count]
        self.room = torch.zeros_like(self.source)

    def add_dependents(self) -> list[Any]:
        """Return a list for objects that use the buffers; `release_dependents` will empty it."""
        self._held.append([])
        return self._held[-1]

    def release_dependents(self) -> None:
        """Release the objects held by cases that were created before the buffers grew."""
        for held in self._held:
            held.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def renew(self, size: int | None = None) -> None:
        """Replace the data in place, so that previously received values are now wrong.

        With `size`, only the first `size` bytes are replaced; the rest is from an earlier draw.
        """
        self.draw += 1
        own = contribution(self.rank, self.draw).to(self.device)
        for piece in self.source[: size and size // ITEM_BYTES].split(_PERIOD):
            piece.copy_(own[: len(piece)])

    def get(self, count: int) -> tuple[Tensor, Tensor]:
        """Return `count` elements of the data, and of the receive buffer."""
        return self.source_of(count), self.room_of(count)

    def source_of(self, count: int) -> Tensor:
        """Return `count` elements of the data."""
        if count > self.source.numel():
            self.grow(count * ITEM_BYTES)
        return self.source[:count]

    def room_of(self, count: int) -> Tensor:
        """Return `count` elements to receive into."""
        if count > self.room.numel():
            self.grow(count * ITEM_BYTES)
        return self.room[:count]


def compare(found: Tensor, ranks: Sequence[int], offset: int, draw: int = 0) -> str | None:
    """Describe the error in a sum of ranks' data, from element `offset` on; None if correct."""
    wanted, size = (torch.zeros(_PERIOD, dtype=torch.float64) for _ in range(2))
    for rank in ranks:
        part = contribution(rank, draw).double().roll(-(offset % _PERIOD))
        wanted += part
        size += part.abs()
    allowed = _TOLERANCE * size if len(ranks) > 1 else torch.zeros_like(size)
    periods = min(_PERIODS_AT_ONCE, -(-found.numel() // _PERIOD))
    wanted, allowed = (one.to(found.device).repeat(periods) for one in (wanted, allowed))
    for start in range(0, found.numel(), len(wanted)):
        piece = found[start : start + len(wanted)].double()
        # Written so that NaN counts as wrong.
        wrong = ~((piece - wanted[: len(piece)]).abs() <= allowed[: len(piece)])
        if wrong.any():
            at = int(wrong.nonzero()[0])
            return (
                f"element {start + at} of {found.numel()} is {piece[at].item():.7g} instead of "
                f"{wanted[at].item():.7g}"
            )
    return None


def sum_in_place(
    buffers: Buffers, count: int, ranks: int, reduce: Callable[[Tensor], Any]
) -> PreparedCall:
    """Return calls of `reduce` that sum in place, each array only until the sums might overflow.

    Before the calls, enough arrays are filled with the data, which is not timed.
    """
    every = max(1, int(_DECADES / log10(max(2, ranks))))
    todo: list[Tensor] = []

    def prepare(calls: int) -> None:
        arrays = -(-calls // every)
        rows = buffers.room_of(arrays * count).view(arrays, count)
        rows.copy_(buffers.source_of(count))
        todo[:] = [row for row in rows for _ in range(every)]

    def call() -> Any:
        if not todo:
            prepare(1)
        return reduce(todo.pop())

    return PreparedCall(call, prepare)
