"""What each rank does by itself and with each other one, timed on all ranks at the same time."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace.probe.axes import Axis, Nodes, Pair, pair_slots
from outpace.probe.collectives import Place, agreed, exchange
from outpace.probe.fit import fit_link
from outpace.probe.matmul import wrong_product
from outpace.probe.measure import Effort, WrongResultError, figure_of, in_rounds
from outpace.probe.ranks_clock import RanksClock, await_device
from outpace.probe.turns import Turns
from outpace.records.figure import Figure, Key
from outpace.records.probed import LinkFit

# With fewer, noise might be so much more than it seems that hardly anyone could be named as slow.
_LEAST_SAMPLES, _MOST_SAMPLES = 12, 30
# In each round samples, of each the seconds of a call by rank.
Rounds = list[list[tuple[float, ...]]]
ITEM_BYTES = 4
_LONGEST_S = 0.05
_TIMED = 0.9  # of the budget; the rest is for looking at the values again


def by_rank(
    calls: Sequence[Callable[[], Any]], clock: RanksClock, rounds: int, budget_s: float
) -> Turns[list[Rounds]]:
    """For each call its rounds of samples, each with seconds by rank. All ranks make these calls.

    Samples go through the calls forwards and backwards in turn.
    """
    begin_s = clock.now()
    effort = Effort(
        budget_s, rounds, least_rounds=_LEAST_SAMPLES,
        least_samples=-(-_LEAST_SAMPLES // rounds), most_samples=-(-_MOST_SAMPLES // rounds),
    )  # fmt: skip
    sample_s = min(_LONGEST_S, budget_s / (2 * _LEAST_SAMPLES * len(calls)))
    counts = []
    for call in calls:
        clock.seconds(call, 1)
        took_s, count = clock.seconds(call, 1), 1
        while took_s < sample_s / 2:
            count = max(2 * count, min(8 * count, int(count * sample_s / max(took_s, 1e-9))))
            took_s = clock.seconds(call, count)
        counts.append(count)
    found: list[Rounds] = [[] for _ in calls]
    order = list(range(len(calls)))

    def visit(begins: bool) -> None:
        for of in found if begins else ():
            of.append([])
        for which in order:
            clock.seconds(calls[which], counts[which])
            found[which][-1].append(tuple(own_s / counts[which] for own_s in clock.by_rank))
        order.reverse()

    yield from in_rounds(visit, clock, effort, clock.now() - begin_s)
    return found


class Work(NamedTuple):
    """What each rank does, and what is wrong with what that gave."""

    call: Callable[[], Tensor]
    check: Callable[[Tensor], str | None]


def work_of(device: torch.device) -> dict[str, Work]:
    """A product of matrices and a copy in memory, large enough to be the device's own speed."""
    size, count = (4096, 1 << 28) if device.type == "cuda" else (512, 1 << 22)
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    source = torch.randn(count, device=device)
    out = torch.empty_like(source)
    return {
        "matrix products": Work(
            lambda: torch.mm(a, b), lambda found: wrong_product(found, a, b, "fp32")
        ),
        "memory": Work(
            lambda: out.copy_(source),
            lambda found: None if torch.equal(found, source) else "the copy is not equal",
        ),
    }


def ranks_figures(
    work: dict[str, Work], place: Place, clock: RanksClock, rounds: int, budget_s: float
) -> Turns[list[Figure]]:
    """How long each rank takes for the same work, while all others do it too.

    Raises WrongResultError on all ranks where one computes something wrong.
    """
    for what, (call, check) in work.items():
        if wrong := agreed(check(call()), place.control):
            raise WrongResultError(f"{what} of each rank: {wrong}")
    calls = [one.call for one in work.values()]
    found = yield from by_rank(calls, clock, rounds, budget_s)
    device = place.buffers.device.type
    return [
        figure_of(
            Key(kind="ranks", what=what, of={"rank": rank, "device": device}), "s",
            [[seconds[rank] for seconds in samples] for samples in of],
        )
        for what, of in zip(work, found, strict=True)
        for rank in range(place.control.size())
    ]  # fmt: skip


Exchange = Callable[[Place, int, int, int], tuple[Callable[[], Any], Callable[[Any], str | None]]]


def pair_figures(
    nodes: Nodes, place: Place, sizes: Sequence[int], clock: RanksClock, rounds: int,
    budget_s: float, between: Exchange = exchange,
) -> Turns[dict[Pair, list[Figure]]]:  # fmt: skip
    """For each pair, figures of both sending to each other at the same time, by size.

    Raises WrongResultError where something else arrives than was sent, before all of it is timed
    or after.
    """
    slots = [(slot, size) for slot in pair_slots(nodes) for size in sizes]
    place.buffers.take(max(sizes) // ITEM_BYTES)  # once: what is exchanged holds parts of them
    exchanges = [_exchanged(slot, size, place, between) for slot, size in slots]
    timed = yield from by_rank([call for call, _ in exchanges], clock, rounds, _TIMED * budget_s)
    for (slot, size), (call, check) in zip(slots, exchanges, strict=True):
        place.buffers.renew(size)
        _right(slot, call, check, place)
    place.buffers.renew()
    found: dict[Pair, list[Figure]] = {}
    for (slot, size), of in zip(slots, timed, strict=True):
        for pair in slot:
            found.setdefault(pair, []).append(_pair_figure(pair, size, of, place))
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
    slower = [[max(seconds[rank] for rank in pair) for seconds in samples] for samples in rounds]
    return figure_of(Key(kind="send/recv", what="time", of=of), "s", slower)


def pair_fits(figures: dict[Pair, list[Figure]]) -> list[LinkFit]:
    """Latency and bandwidth of each pair."""
    return [fit for of in figures.values() if (fit := fit_link(of)) is not None]


def everyone(world_size: int) -> Axis:
    """All ranks in one group."""
    return Axis("all", (tuple(range(world_size)),))
