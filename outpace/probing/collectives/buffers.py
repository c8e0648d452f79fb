"""Buffers for sending and receiving, and checks of received data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log10
from typing import Any

import torch
from torch import Tensor

from outpace.probing.timing.rank_clock import PreparedCall

ITEM_BYTES = 4  # fp32
# A prime number: chunks of an array then begin with different values, which reveals misplaced
# chunks.
_PERIOD = 65_521
_PERIODS_AT_ONCE = 16  # number of periods to compare at once
# Allowed error of fp32 sums in any order, relative to the sum of magnitudes.
_TOLERANCE = 1e-6
# Each repetition of a sum in place multiplies values by the number of ranks.
_DECADES = 30


def contribution(rank: int, draw: int = 0) -> Tensor:
    """Return the random data that a rank contributes to collectives: (65521,) fp32 values.

    Every number `draw` has different data. Longer arrays repeat these values.
    """
    seed = (0xC0DE + draw << 24) + rank
    return torch.randn(_PERIOD, generator=torch.Generator().manual_seed(seed))


@dataclass
class Buffers:
    """A rank's send data and receive buffer, which grow to the largest requested size.

    `source` has the data to send, `room` is the buffer to receive into, and `draw` counts how often
    the data have been replaced.
    """

    device: torch.device
    rank: int
    source: Tensor = field(init=False)
    room: Tensor = field(init=False)
    draw: int = field(default=0, init=False)
    _held: list[list[Any]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.grow(ITEM_BYTES)

    def grow(self, size: int) -> None:
        """Allocate `size` bytes of data and of receive buffer."""
        count = size // ITEM_BYTES
        own = contribution(self.rank, self.draw).to(self.device)
        self.source = own.repeat(-(-count // _PERIOD))[:count]
        self.room = torch.zeros_like(self.source)

    def add_dependents(self) -> list[Any]:
        """Return a new list, in which a caller keeps objects that refer to these buffers.

        `release_dependents` empties the list, so that memory of outgrown buffers is freed.
        """
        self._held.append([])
        return self._held[-1]

    def release_dependents(self) -> None:
        """Empty the lists returned by `add_dependents`.

        Objects in them may refer to buffers from before these grew, whose memory is then freed.
        """
        for held in self._held:
            held.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def renew(self, size: int | None = None) -> None:
        """Replace the send data in place, so that results received earlier become wrong.

        A check can thus tell whether a call has received new data. With `size`, only the first
        `size` bytes are replaced.
        """
        self.draw += 1
        own = contribution(self.rank, self.draw).to(self.device)
        for piece in self.source[: size and size // ITEM_BYTES].split(_PERIOD):
            piece.copy_(own[: len(piece)])

    def get(self, count: int) -> tuple[Tensor, Tensor]:
        """Return `count` elements of the data and of the receive buffer."""
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
    """Describe the first wrong element of a sum of the ranks' data; None if all are right.

    `found` should be the sum, from element `offset` on, for this `draw`.
    """
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
    """Return a prepared call of `reduce`, which sums over `ranks` ranks in place.

    Repeated sums of the same array would overflow, so each array is used for a limited number of
    calls. Arrays are filled before the calls, which is not timed.
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
