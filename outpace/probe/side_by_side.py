"""What each rank does by itself and with each other one, timed on all ranks at the same time."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from outpace.probe.axes import Axis, Nodes, Pair, pair_slots
from outpace.probe.collectives import Place, agreed, exchange
from outpace.probe.fit import fit_link
from outpace.probe.measure import WrongResultError, figure_of
from outpace.probe.ranks_clock import RanksClock, await_device
from outpace.records.figure import Figure, Key
from outpace.records.probed import LinkFit

# With fewer, noise might be so much more than it seems that hardly anyone could be named as slow.
_LEAST_ROUNDS, _MOST_ROUNDS = 12, 30
# In each round the seconds of a call, by rank.
Rounds = list[tuple[float, ...]]
ITEM_BYTES = 4
_LONGEST_S = 0.05
_TIMED = 0.9  # of the budget; the rest is for looking at the values again


def rounds_of(
    calls: Sequence[Callable[[], Any]], clock: RanksClock, budget_s: float
) -> list[Rounds]:
    """For each call its rounds, each with seconds by rank. Every rank makes the same calls.

    Rounds go through the calls forwards and backwards in turn. They end with the budget.
    """
    begin_s = clock.now()
    sample_s = min(_LONGEST_S, budget_s / (2 * _LEAST_ROUNDS * len(calls)))
    counts = []
    for call in calls:
        clock.seconds(call, 1)
        took_s, count = clock.seconds(call, 1), 1
        while took_s < sample_s / 2:
            count = max(2 * count, min(8 * count, int(count * sample_s / max(took_s, 1e-9))))
            took_s = clock.seconds(call, count)
        counts.append(count)
    found: list[Rounds] = [[] for _ in calls]
    for number in range(_MOST_ROUNDS):
        if number >= _LEAST_ROUNDS and clock.now() - begin_s > budget_s:
            break
        order = range(len(calls))
        for which in order if number % 2 == 0 else reversed(order):
            clock.seconds(calls[which], counts[which])
            found[which].append(tuple(own_s / counts[which] for own_s in clock.by_rank))
    return found


def work_of(device: torch.device) -> dict[str, Callable[[], Any]]:
    """A product of matrices and a copy in memory, large enough to be the device's own speed."""
    size, count = (4096, 1 << 28) if device.type == "cuda" else (512, 1 << 22)
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    source = torch.randn(count, device=device)
    out = torch.empty_like(source)
    return {"matrix products": lambda: torch.mm(a, b), "memory": lambda: out.copy_(source)}


def ranks_figures(
    work: dict[str, Callable[[], Any]], place: Place, clock: RanksClock, budget_s: float
) -> list[Figure]:
    """How long each rank takes for the same work, while all others do it too."""
    found = rounds_of(list(work.values()), clock, budget_s)
    return [
        figure_of(
            Key(kind="ranks", what=what, of={"rank": rank, "device": place.buffers.device.type}),
            "s",
            [(by_rank[rank],) for by_rank in rounds],
        )
        for what, rounds in zip(work, found, strict=True)
        for rank in range(place.control.size())
    ]


def by_round(figure: Figure) -> list[float]:
    """The median of each round."""
    return [median(samples) for samples in figure.rounds]


Exchange = Callable[[Place, int, int, int], tuple[Callable[[], Any], Callable[[Any], str | None]]]


def pair_figures(
    nodes: Nodes, place: Place, sizes: Sequence[int], clock: RanksClock, budget_s: float,
    between: Exchange = exchange,
) -> dict[Pair, list[Figure]]:  # fmt: skip
    """For each pair, figures of both sending to each other at the same time, by size.

    Raises WrongResultError where something else arrives than was sent, before all of it is timed
    or after.
    """
    slots = [(slot, size) for slot in pair_slots(nodes) for size in sizes]
    exchanges = [_exchanged(slot, size, place, between) for slot, size in slots]
    timed = rounds_of([call for call, _ in exchanges], clock, _TIMED * budget_s)
    for (slot, size), (call, check) in zip(slots, exchanges, strict=True):
        place.buffers.renew(size)
        _right(slot, call, check, place)
    place.buffers.renew()
    found: dict[Pair, list[Figure]] = {}
    for (slot, size), rounds in zip(slots, timed, strict=True):
        for pair in slot:
            found.setdefault(pair, []).append(_pair_figure(pair, size, rounds, place))
    return found


Check = Callable[[Any], str | None]


def _exchanged(
    slot: tuple[Pair, ...], size: int, place: Place, between: Exchange
) -> tuple[Callable[[], Any], Check]:
    """What this rank does while the pairs of a slot exchange; its first result is right."""
    own = next((pair for pair in slot if place.rank in pair), None)
    call: Callable[[], Any] = _nothing
    check: Check = _nothing_wrong
    if own is not None:
        other = own[1] if own[0] == place.rank else own[0]
        call, check = between(place, max(1, size // ITEM_BYTES), other, other)
    _right(slot, call, check, place)
    return call, check


def _right(slot: tuple[Pair, ...], call: Callable[[], Any], check: Check, place: Place) -> None:
    found = call()
    await_device(place.group, place.buffers.device)
    wrong = agreed(check(found), place.control)
    if wrong:
        raise WrongResultError(f"send/recv between the pairs {list(slot)}: {wrong}")


def _nothing_wrong(_: object) -> None:
    """What a rank finds of what it has no part in."""


def _nothing() -> None:
    """What a rank does while others exchange."""


def _pair_figure(pair: Pair, size: int, rounds: Rounds, place: Place) -> Figure:
    of: dict[str, str | int] = {
        "axis": f"pair {pair[0]}-{pair[1]}", "backend": place.backend,
        "device": place.buffers.device.type, "ranks": 2, "bytes": size,
    }  # fmt: skip
    both = [(max(by_rank[rank] for rank in pair),) for by_rank in rounds]
    return figure_of(Key(kind="send/recv", what="time", of=of), "s", both)


def pair_fits(figures: dict[Pair, list[Figure]]) -> list[LinkFit]:
    """Latency and bandwidth of each pair."""
    return [fit for of in figures.values() if (fit := fit_link(of)) is not None]


def everyone(world_size: int) -> Axis:
    """All ranks in one group."""
    return Axis("all", (tuple(range(world_size)),))
