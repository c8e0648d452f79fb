"""Times of all ranks for the same work, and of transfers between all pairs of ranks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace.probing.collectives.cases import AxisPlace, first_fault, send_and_receive
from outpace.probing.collectives.groups import Nodes, Pair, pair_slots
from outpace.probing.compute.matmul import wrong_matmul
from outpace.probing.timing.interleave import Turns
from outpace.probing.timing.link_model import fit_link
from outpace.probing.timing.measure import Effort, WrongResultError, figure_of, in_rounds
from outpace.probing.timing.rank_clock import RanksClock, await_device
from outpace.records.figure import Figure, Key
from outpace.records.probe_results import LinkFit

# With fewer rounds, the noise is too uncertain to call any rank slow.
_LEAST_SAMPLES, _MOST_SAMPLES = 12, 30
# Samples by round. A sample holds the seconds per call of every rank.
Rounds = list[list[tuple[float, ...]]]
ITEM_BYTES = 4
_LONGEST_S = 0.05
_TIMED = 0.9  # share of the budget; the rest is for checking the values again


def by_rank(
    calls: Sequence[Callable[[], Any]], clock: RanksClock, rounds: int, budget_s: float
) -> Turns[list[Rounds]]:
    """Time calls in rounds of samples, recording every rank's seconds. All ranks must call this.

    Every other sample runs the calls in reverse order.
    """
    begin_s = clock.now_s()
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

    yield from in_rounds(visit, clock, effort, clock.now_s() - begin_s)
    return found


class RankWork(NamedTuple):
    """A call that all ranks make, and a check of its result."""

    call: Callable[[], Tensor]
    check: Callable[[Tensor], str | None]


def work_of(device: torch.device) -> dict[str, RankWork]:
    """Return a matmul and a memory copy that are large enough to show the speed of a device."""
    size, count = (4096, 1 << 28) if device.type == "cuda" else (512, 1 << 22)
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    source = torch.randn(count, device=device)
    out = torch.empty_like(source)
    return {
        "matmuls": RankWork(
            lambda: torch.mm(a, b), lambda found: wrong_matmul(found, a, b, "fp32")
        ),
        "memory": RankWork(
            lambda: out.copy_(source),
            lambda found: None if torch.equal(found, source) else "the copy is not equal",
        ),
    }


def ranks_figures(
    work: dict[str, RankWork], place: AxisPlace, clock: RanksClock, rounds: int, budget_s: float
) -> Turns[list[Figure]]:
    """Time the same work on all ranks at the same time, and return every rank's figures.

    Raises WrongResultError on all ranks if one of them computes a wrong result.
    """
    for what, (call, check) in work.items():
        if wrong := first_fault(check(call()), place.control):
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


TransferMaker = Callable[
    [AxisPlace, int, int, int], tuple[Callable[[], Any], Callable[[Any], str | None]]
]


def pair_figures(
    nodes: Nodes, place: AxisPlace, sizes: Sequence[int], clock: RanksClock, rounds: int,
    budget_s: float, between: TransferMaker = send_and_receive,
) -> Turns[dict[Pair, list[Figure]]]:  # fmt: skip
    """Time each pair of ranks while both send to each other, at each size.

    Raises WrongResultError if received data are wrong before or after timing.
    """
    slots = [(slot, size) for slot in pair_slots(nodes) for size in sizes]
    place.buffers.get(max(sizes) // ITEM_BYTES)  # once, since parts of it are sent
    slot_calls = [_slot_call(slot, size, place, between) for slot, size in slots]
    timed = yield from by_rank([call for call, _ in slot_calls], clock, rounds, _TIMED * budget_s)
    for (slot, size), (call, check) in zip(slots, slot_calls, strict=True):
        place.buffers.renew(size)
        _check_transfer(slot, call, check, place)
    place.buffers.renew()
    found: dict[Pair, list[Figure]] = {}
    for (slot, size), of in zip(slots, timed, strict=True):
        for pair in slot:
            found.setdefault(pair, []).append(_pair_figure(pair, size, of, place))
    return found


Check = Callable[[Any], str | None]


def _slot_call(
    slot: tuple[Pair, ...], size: int, place: AxisPlace, between: TransferMaker
) -> tuple[Callable[[], Any], Check]:
    """Return this rank's call for pairs that are timed together, and the check of its result.

    The result is checked on all ranks once, so all ranks must call this function. A rank in no pair
    gets a call that does nothing.
    """
    own = next((pair for pair in slot if place.rank in pair), None)
    call: Callable[[], Any] = _stay_idle
    check: Check = _nothing_wrong
    if own is not None:
        other = own[1] if own[0] == place.rank else own[0]
        call, check = between(place, max(1, size // ITEM_BYTES), other, other)
    _check_transfer(slot, call, check, place)
    return call, check


def _check_transfer(
    slot: tuple[Pair, ...], call: Callable[[], Any], check: Check, place: AxisPlace
) -> None:
    found = call()
    await_device(place.group, place.buffers.device)
    wrong = first_fault(check(found), place.control)
    if wrong:
        raise WrongResultError(f"send/recv between the pairs {list(slot)}: {wrong}")


def _nothing_wrong(_: object) -> None:
    """Report no error, for ranks that are in no pair of the slot."""


def _stay_idle() -> None:
    """Do nothing, for ranks that are in no pair of the slot."""


def _pair_figure(pair: Pair, size: int, rounds: Rounds, place: AxisPlace) -> Figure:
    of: dict[str, str | int] = {
        "axis": f"pair {pair[0]}-{pair[1]}", "backend": place.backend,
        "device": place.buffers.device.type, "ranks": 2, "bytes": size,
    }  # fmt: skip
    slower = [[max(seconds[rank] for rank in pair) for seconds in samples] for samples in rounds]
    return figure_of(Key(kind="send/recv", what="time", of=of), "s", slower)


def pair_fits(figures: dict[Pair, list[Figure]]) -> list[LinkFit]:
    """Return the latency and bandwidth fitted to each pair."""
    return [fit for of in figures.values() if (fit := fit_link(of)) is not None]
