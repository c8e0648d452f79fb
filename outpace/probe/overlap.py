"""How much of an all-reduce hides behind computing: each alone, and both at once, side by side."""

from collections.abc import Callable, Sequence
from itertools import chain
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outpace.probe.buffers import compare, summed
from outpace.probe.collectives import Place, check_again, checked
from outpace.probe.intervals import LEVEL, half_width
from outpace.probe.measure import Case, Clock, Effort, measure
from outpace.probe.ranks_clock import Prepared
from outpace.probe.turns import Turns
from outpace.records.figure import Figure, Key

# A share that a repeat may find this far away is no answer.
_CONCLUSIVE = 0.15
_LEAST_S = 1e-6


def hidden_share(compute_s: float, collective_s: float, both_s: float) -> float:
    """Of the shorter of the two, what the longer hides: 1 all, 0 nothing, below 0 it costs time."""
    return (compute_s + collective_s - both_s) / max(min(compute_s, collective_s), _LEAST_S)


def probe_overlap(place: Place, size: int, clock: Clock, effort: Effort) -> Turns[list[Figure]]:
    """Times of computing, of an all-reduce of `size` bytes, and of both; and the share hidden.

    Computing is as many products of matrices as take about as long as the all-reduce. Raises
    WrongResultError where what is reduced is wrong, before it is timed or after.
    """
    begun = _begun(place, size // 4)
    product = _product(place.buffers.device)

    def ended() -> Tensor:
        room: Tensor
        room, work = begun()
        work.wait()
        return room

    reduce = Prepared(ended, begun.prepare)
    collective_s = min(clock.seconds(reduce, 1) for _ in range(4))
    clock.seconds(product, 1)
    product_s = min(clock.seconds(product, 1) for _ in range(3))
    products = max(1, round(collective_s / max(product_s, _LEAST_S)))

    def compute() -> None:
        for _ in range(products):
            product()

    def while_computing() -> Tensor:
        room: Tensor
        room, work = begun()
        compute()
        work.wait()
        return room

    both = Prepared(while_computing, begun.prepare)

    def ready(call: Prepared) -> Prepared:
        call.prepare(1)  # what was summed before is no data to be checked
        return call

    buffers = place.buffers
    check = checked(place, lambda found: compare(found, place.members, 0, buffers.draw))

    def key(what: str) -> Key:
        of: dict[str, str | int] = {
            "axis": place.axis.name, "backend": place.backend, "ranks": place.axis.ranks,
            "device": place.buffers.device.type, "bytes": size,
        }  # fmt: skip
        return Key(kind="overlap", what=what, of=of)

    cases = [
        Case(key("computing"), "s", lambda: compute),
        Case(key("all-reduce"), "s", lambda: ready(reduce), check=check),
        Case(key("both"), "s", lambda: ready(both), check=check),
    ]
    found = yield from measure(cases, clock, effort)
    check_again(cases, place.buffers)
    return [*found, share_hidden(key("hidden share"), found)]


def share_hidden(key: Key, found: Sequence[Figure]) -> Figure:
    """How much hides, by rounds in which computing, the collective and both were timed in turn."""
    rounds = tuple(
        tuple(hidden_share(*times) for times in zip(*samples, strict=True))
        for samples in zip(*(figure.rounds for figure in found), strict=False)
    )
    shares = list(chain.from_iterable(rounds))
    middle, away = median(shares), half_width(shares)
    conclusive = away <= _CONCLUSIVE
    # Only now: noise that a limit cut off would seem less than it is.
    low, value, high = (min(1.0, max(0.0, middle + by)) for by in (-away, 0.0, away))
    return Figure(
        key=key, unit="ratio", value=value if conclusive else None, origin="measured", low=low,
        high=high, level=LEVEL, rounds=rounds,
        unstable=None if conclusive else f"a repeat may lie {100 * away:.0f} points away",
    )  # fmt: skip


def _begun(place: Place, count: int) -> Prepared:
    """Begins an all-reduce: its array, and what is to be waited for."""

    def begin(room: Tensor) -> tuple[Tensor, Any]:
        return room, dist.all_reduce(room, group=place.group, async_op=True)

    return summed(place.buffers, count, len(place.members), begin)


def _product(device: torch.device) -> Callable[[], Any]:
    size = 2048 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)
