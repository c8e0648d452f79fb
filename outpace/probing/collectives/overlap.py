"""Fraction of a collective that computation hides, from timing both separately and together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outpace.nn import torch_versions
from outpace.probing.collectives.buffers import ITEM_BYTES, compare, sum_in_place
from outpace.probing.collectives.cases import AxisPlace, check_again, check_on_all, parts_wrong
from outpace.probing.compute.matmul import wrong_matmul
from outpace.probing.timing.interleave import Turns
from outpace.probing.timing.intervals import LEVEL, half_width
from outpace.probing.timing.measure import Case, Clock, Effort, measure
from outpace.probing.timing.rank_clock import PreparedCall
from outpace.records.figure import Figure, Key

# A hidden fraction is not reported if a repeat may differ by more than this.
_CONCLUSIVE = 0.15
_LEAST_S = 1e-6
# Collectives that training overlaps: gradients of replicas, parameters and gradients of shards.
OVERLAPPED = ("all-reduce", "all-gather", "reduce-scatter")


def hidden_share(compute_s: float, collective_s: float, both_s: float) -> float:
    """Return the fraction of the shorter of two times that overlap hides.

    It is negative if running both together takes longer than one after the other.
    """
    return (compute_s + collective_s - both_s) / max(min(compute_s, collective_s), _LEAST_S)


def probe_overlap(
    place: AxisPlace, sizes: Sequence[int], clock: Clock, effort: Effort
) -> Turns[list[list[Figure]]]:
    """Measure how much of each collective's time overlaps with computation.

    Times matmuls alone, each collective alone at each size, and both together. The matmuls take
    about as long as the collective. Returns these three times and the hidden fraction as figures, a
    list for each collective and size. Raises WrongResultError if a result is wrong before or after
    timing.
    """
    matmul, right = _make_matmul(place.buffers.device)
    clock.seconds(matmul, 1)
    matmul_s = min(clock.seconds(matmul, 1) for _ in range(3))
    begun = [_BEGUN[name](place, place.count(size)) for name in OVERLAPPED for size in sizes]
    timed = _Matmul(matmul, right, matmul_s)
    cases = [case for one in begun for case in _overlap_cases(one, place, timed, clock)]
    place.buffers.release_dependents()
    found = yield from measure(cases, clock, effort)
    check_again(cases, place.buffers)
    each = [found[at : at + 3] for at in range(0, len(found), 3)]
    return [
        [*of, share_hidden(one.key(place, "hidden share"), of)]
        for one, of in zip(begun, each, strict=True)
    ]


@dataclass(frozen=True)
class _PendingCollective:
    """A collective that is started before a computation and awaited after it."""

    collective: str
    count: int
    begin: PreparedCall  # returns the result's tensor and a handle on which to wait
    wrong: Callable[[Tensor], str | None]

    def key(self, place: AxisPlace, what: str) -> Key:
        of: dict[str, str | int] = {
            "axis": place.axis.name, "backend": place.backend, "ranks": place.axis.ranks,
            "device": place.buffers.device.type, "bytes": self.count * ITEM_BYTES,
        }  # fmt: skip
        if what != self.collective:
            of["collective"] = self.collective
        return Key(kind="overlap", what=what, of=of)


@dataclass(frozen=True)
class _Matmul:
    call: Callable[[], Tensor]
    wrong: Callable[[Tensor], str | None]
    seconds: float


def _overlap_cases(
    pending: _PendingCollective, place: AxisPlace, matmul: _Matmul, clock: Clock
) -> list[Case]:
    alone = _overlap_with(pending, compute_nothing)
    collective_s = min(clock.seconds(alone, 1) for _ in range(4))
    matmuls = max(1, round(collective_s / max(matmul.seconds, _LEAST_S)))

    def compute() -> Tensor:
        for _ in range(matmuls):
            found = matmul.call()
        return found

    both = _overlap_with(pending, compute)
    check = check_on_all(place, pending.wrong)
    return [
        Case(
            pending.key(place, "computing"),
            "s",
            lambda: compute,
            check=check_on_all(place, matmul.wrong),
        ),
        Case(
            pending.key(place, pending.collective), "s", lambda: _prepare_once(alone), check=check
        ),
        Case(pending.key(place, "both"), "s", lambda: _prepare_once(both), check=check),
    ]


def _overlap_with(pending: _PendingCollective, compute: Callable[[], Any]) -> PreparedCall:
    def call() -> Tensor:
        room: Tensor
        room, work = pending.begin()
        compute()
        work.wait()
        return room

    return PreparedCall(call, pending.begin.prepare)


def _prepare_once(call: PreparedCall) -> PreparedCall:
    call.prepare(1)  # earlier sums are not valid input for the check
    return call


def compute_nothing() -> None:
    """Do nothing, in place of the computation."""


def share_hidden(key: Key, found: Sequence[Figure]) -> Figure:
    """Return the hidden fraction of a collective as a figure.

    `found` has the times of the computation alone, the collective alone, and both together.
    """
    rounds = tuple(
        tuple(hidden_share(*times) for times in zip(*samples, strict=True))
        for samples in zip(*(figure.rounds for figure in found), strict=False)
    )
    shares = list(chain.from_iterable(rounds))
    middle, away = median(shares), half_width(shares)
    conclusive = away <= _CONCLUSIVE
    # Clamp only the result: clamping each sample would hide some of the noise.
    low, value, high = (min(1.0, max(0.0, middle + by)) for by in (-away, 0.0, away))
    return Figure(
        key=key, unit="ratio", value=value if conclusive else None, origin="measured", low=low,
        high=high, level=LEVEL, rounds=rounds,
        unstable=None if conclusive else f"a repeat may differ by {100 * away:.0f} points",
    )  # fmt: skip


def _pending_all_reduce(place: AxisPlace, count: int) -> _PendingCollective:
    buffers = place.buffers

    def begin(room: Tensor) -> tuple[Tensor, Any]:
        return room, dist.all_reduce(room, group=place.group, async_op=True)

    def find_error(found: Tensor) -> str | None:
        return compare(found, place.members, 0, buffers.draw)

    return _PendingCollective(
        "all-reduce", count, sum_in_place(buffers, count, len(place.members), begin), find_error
    )


def _pending_all_gather(place: AxisPlace, count: int) -> _PendingCollective:
    part = count // len(place.members)

    def begin() -> tuple[Tensor, Any]:
        source, room = place.buffers.get(count)
        work = torch_versions.all_gather_single(
            room, source[:part], group=place.group, async_op=True
        )
        return room, work

    return _PendingCollective(
        "all-gather", count, _without_preparation(begin), lambda found: parts_wrong(place, found, 0)
    )


def _pending_reduce_scatter(place: AxisPlace, count: int) -> _PendingCollective:
    part = count // len(place.members)

    def begin() -> tuple[Tensor, Any]:
        source, room = place.buffers.get(count)
        out = room[:part]
        work = torch_versions.reduce_scatter_single(out, source, group=place.group, async_op=True)
        return out, work

    def find_error(found: Tensor) -> str | None:
        return compare(found, place.members, part * place.number, place.buffers.draw)

    return _PendingCollective("reduce-scatter", count, _without_preparation(begin), find_error)


def _without_preparation(begin: Callable[[], tuple[Tensor, Any]]) -> PreparedCall:
    """Return a call that needs no preparation because it does not change its data."""
    return PreparedCall(begin, lambda calls: None)


_BEGUN: dict[str, Callable[[AxisPlace, int], _PendingCollective]] = {
    "all-reduce": _pending_all_reduce,
    "all-gather": _pending_all_gather,
    "reduce-scatter": _pending_reduce_scatter,
}


def _make_matmul(
    device: torch.device,
) -> tuple[Callable[[], Tensor], Callable[[Tensor], str | None]]:
    size = 2048 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    out = torch.empty_like(a)

    def find_error(result: Tensor) -> str | None:
        error = wrong_matmul(result, a, b, "fp32")
        out.zero_()  # so that this result is not mistaken for the next one
        return error

    return lambda: torch.mm(a, b, out=out), find_error
