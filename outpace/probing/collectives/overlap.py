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
    """Return the hidden fraction of the shorter time; negative if running both takes longer."""
    return (compute_s + collective_s - both_s) / max(min(compute_s, collective_s), _LEAST_S)


def probe_overlap(
    place: AxisPlace, sizes: Sequence[int], clock: Clock, effort: Effort
) -> Turns[list[list[Figure]]]:
    """Time computation, each collective at each size, and both together; return what is hidden.

    The computation consists of enough matmuls to take about as long as the collective. Raises
    WrongResultError if a result is wrong before or after timing.
    """
    matmul, right = _matmul(place.buffers.device)
    clock.seconds(matmul, 1)
    matmul_s = min(clock.seconds(matmul, 1) for _ in range(3))
    begun = [_BEGUN[name](place, place.count(size)) for name in OVERLAPPED for size in sizes]
    timed = _Matmul(matmul, right, matmul_s)
    cases = [case for one in begun for case in _cases(one, place, timed, clock)]
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
    """A collective that runs in the background of a computation."""

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
    """A matmul, a check of its result, and its duration."""

    call: Callable[[], Tensor]
    wrong: Callable[[Tensor], str | None]
    seconds: float


def _cases(one: _PendingCollective, place: AxisPlace, matmul: _Matmul, clock: Clock) -> list[Case]:
    """Return the cases for computation, the collective, and both together."""
    alone = _compute_meanwhile(one, compute_nothing)
    collective_s = min(clock.seconds(alone, 1) for _ in range(4))
    matmuls = max(1, round(collective_s / max(matmul.seconds, _LEAST_S)))

    def compute() -> Tensor:
        for _ in range(matmuls):
            found = matmul.call()
        return found

    both = _compute_meanwhile(one, compute)
    check = check_on_all(place, one.wrong)
    return [
        Case(
            one.key(place, "computing"),
            "s",
            lambda: compute,
            check=check_on_all(place, matmul.wrong),
        ),
        Case(one.key(place, one.collective), "s", lambda: _ready(alone), check=check),
        Case(one.key(place, "both"), "s", lambda: _ready(both), check=check),
    ]


def _compute_meanwhile(one: _PendingCollective, compute: Callable[[], Any]) -> PreparedCall:
    """Return a call that starts the collective, computes, and then waits for the collective."""

    def call() -> Tensor:
        room: Tensor
        room, work = one.begin()
        compute()
        work.wait()
        return room

    return PreparedCall(call, one.begin.prepare)


def _ready(call: PreparedCall) -> PreparedCall:
    call.prepare(1)  # earlier sums are not valid input for the check
    return call


def compute_nothing() -> None:
    """Do nothing, in place of the computation."""


def share_hidden(key: Key, found: Sequence[Figure]) -> Figure:
    """Return the hidden fraction from rounds of computation, collective, and both together."""
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


def _all_reduce(place: AxisPlace, count: int) -> _PendingCollective:
    buffers = place.buffers

    def begin(room: Tensor) -> tuple[Tensor, Any]:
        return room, dist.all_reduce(room, group=place.group, async_op=True)

    def find_error(found: Tensor) -> str | None:
        return compare(found, place.members, 0, buffers.draw)

    return _PendingCollective(
        "all-reduce", count, sum_in_place(buffers, count, len(place.members), begin), find_error
    )


def _all_gather(place: AxisPlace, count: int) -> _PendingCollective:
    part = count // len(place.members)

    def begin() -> tuple[Tensor, Any]:
        source, room = place.buffers.get(count)
        work = torch_versions.all_gather_single(
            room, source[:part], group=place.group, async_op=True
        )
        return room, work

    return _PendingCollective(
        "all-gather", count, _leave_data(begin), lambda found: parts_wrong(place, found, 0)
    )


def _reduce_scatter(place: AxisPlace, count: int) -> _PendingCollective:
    part = count // len(place.members)

    def begin() -> tuple[Tensor, Any]:
        source, room = place.buffers.get(count)
        out = room[:part]
        work = torch_versions.reduce_scatter_single(out, source, group=place.group, async_op=True)
        return out, work

    def find_error(found: Tensor) -> str | None:
        return compare(found, place.members, part * place.number, place.buffers.draw)

    return _PendingCollective("reduce-scatter", count, _leave_data(begin), find_error)


def _leave_data(begin: Callable[[], tuple[Tensor, Any]]) -> PreparedCall:
    """Return a call that needs no preparation because it does not change its data."""
    return PreparedCall(begin, lambda calls: None)


_BEGUN: dict[str, Callable[[AxisPlace, int], _PendingCollective]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
}


def _matmul(device: torch.device) -> tuple[Callable[[], Tensor], Callable[[Tensor], str | None]]:
    """Return a matmul and a check of its result."""
    size = 2048 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    out = torch.empty_like(a)

    def find_error(found: Tensor) -> str | None:
        said = wrong_matmul(found, a, b, "fp32")
        out.zero_()  # so that this result is not mistaken for the next one
        return said

    return lambda: torch.mm(a, b, out=out), find_error
