"""Collectives as cases to time, with inputs and expected results.

As in nccl-tests, bytes are the size of the whole array, which a rank has after an all-gather and
before a reduce-scatter or an all-to-all. In send/recv, each rank sends to the next rank and
receives from the previous one. The data are random, but every rank can compute the data of the
others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from outpace.nn import torch_versions
from outpace.parallel.rank_objects import gather_objects
from outpace.probing.collectives.buffers import ITEM_BYTES, Buffers, compare, sum_in_place
from outpace.probing.collectives.groups import Axis
from outpace.probing.timing.measure import Case, WrongResultError
from outpace.probing.timing.rank_clock import RanksClock, await_device
from outpace.records.figure import Key

# 4 B to 4 GiB, in larger steps where only latency matters.
FULL_BYTES = tuple(4**power for power in (1, 4, 6, *range(8, 17)))
QUICK_BYTES = (4, *(4**power for power in (6, 8, 10, 11, 12, 13, 14)))  # to 256 MiB
_LEAST_SIZES = 3  # minimum number of sizes to fit latency and bandwidth


@dataclass(frozen=True)
class AxisPlace:
    """A rank's position on an axis, with its process groups and buffers."""

    axis: Axis
    group: dist.ProcessGroup
    control: dist.ProcessGroup
    rank: int
    backend: str
    buffers: Buffers

    @property
    def members(self) -> tuple[int, ...]:
        """Return the ranks of this rank's group, or () if it is in no group of the axis."""
        return self.axis.group_of(self.rank)

    @property
    def number(self) -> int:
        """Return the index of this rank in its group."""
        return self.members.index(self.rank)

    def count(self, size: int) -> int:
        """Return the number of elements in about `size` bytes that divides among the ranks."""
        share = self.axis.ranks
        return max(1, size // ITEM_BYTES // share) * share


Made = tuple[Callable[[], Tensor], Callable[[Tensor], str | None]]


def case(collective: str, place: AxisPlace, size: int) -> Case:
    """Return a benchmark case of a collective of about `size` bytes.

    All groups of an axis run the collective at the same time. The case's check has the same result
    on all ranks: if one rank finds an error, all ranks report it.
    """
    splits = collective in ("all-gather", "reduce-scatter", "all-to-all")
    count = place.count(size) if splits else max(1, size // ITEM_BYTES)
    make = _MAKERS[collective]
    held: list[Made] = place.buffers.add_dependents()

    def make_call() -> Callable[[], Any]:
        if not place.members:
            return lambda: None
        held[:] = [make(place, count)]
        return held[0][0]

    check = check_on_all(place, lambda found: held[0][1](found))  # noqa: PLW0108  (not held yet)
    return Case(_case_key(collective, place, count * ITEM_BYTES), "s", make_call, check=check)


def check_on_all(
    place: AxisPlace, wrong: Callable[[Any], str | None]
) -> Callable[[Any], str | None]:
    """Return a check that runs `wrong` on each rank and gives all ranks the same result."""

    def check(found: Any) -> str | None:
        if not place.members:
            return first_fault(None, place.control)
        await_device(place.group, place.buffers.device)
        return first_fault(wrong(found), place.control)

    return check


def _case_key(collective: str, place: AxisPlace, size: int) -> Key:
    of = {
        "axis": place.axis.name, "backend": place.backend, "device": place.buffers.device.type,
        "ranks": place.axis.ranks, "bytes": size,
    }  # fmt: skip
    return Key(kind=collective, what="time", of=of)


def first_fault(wrong: str | None, control: dist.ProcessGroup) -> str | None:
    """Return the error of the lowest rank that found one, or None if no rank did.

    The result is the same on all ranks, so all of them must call this function.
    """
    said = enumerate(gather_objects(wrong, control))
    return next((f"rank {rank}: {text}" for rank, text in said if text), None)


def check_again(cases: Sequence[Case], buffers: Buffers) -> None:
    """Call each case once more with new data, and check the result.

    Raises WrongResultError on all ranks if a value is wrong.
    """
    for one in cases:
        buffers.renew(int(one.key.of["bytes"]))  # so that the previous case's results are wrong
        wrong = one.check(one.make()()) if one.check else None
        if wrong:
            raise WrongResultError(f"{one.key}: the result is wrong after the timing: {wrong}")
    buffers.renew()


def _prepare_all_reduce(place: AxisPlace, count: int) -> Made:
    def reduce(room: Tensor) -> Tensor:
        dist.all_reduce(room, group=place.group)
        return room

    call = sum_in_place(place.buffers, count, len(place.members), reduce)
    return call, lambda found: compare(found, place.members, 0, place.buffers.draw)


def parts_wrong(place: AxisPlace, found: Tensor, offset: int) -> str | None:
    """Describe the first wrong element of data gathered from all ranks; None if all are right.

    `found` has an equal chunk of each rank's data, from element `offset` on.
    """
    for piece, rank in zip(found.chunk(len(place.members)), place.members, strict=True):
        if wrong := compare(piece, [rank], offset, place.buffers.draw):
            return wrong
    return None


def _prepare_all_gather(place: AxisPlace, count: int) -> Made:
    source, room = place.buffers.get(count)
    part = source[: count // len(place.members)]

    def call() -> Tensor:
        torch_versions.all_gather_single(room, part, group=place.group)
        return room

    return call, lambda found: parts_wrong(place, found, 0)


def _prepare_reduce_scatter(place: AxisPlace, count: int) -> Made:
    source, room = place.buffers.get(count)
    part = count // len(place.members)
    out = room[:part]

    def call() -> Tensor:
        torch_versions.reduce_scatter_single(out, source, group=place.group)
        return out

    return call, lambda found: compare(
        found, place.members, part * place.number, place.buffers.draw
    )


def _prepare_all_to_all(place: AxisPlace, count: int) -> Made:
    source, room = place.buffers.get(count)
    offset = count // len(place.members) * place.number

    def call() -> Tensor:
        dist.all_to_all_single(room, source, group=place.group)
        return room

    return call, lambda found: parts_wrong(place, found, offset)


def _prepare_broadcast(place: AxisPlace, count: int) -> Made:
    source, room = place.buffers.get(count)
    root = place.members[0]
    room.copy_(source)

    def call() -> Tensor:
        dist.broadcast(room, root, group=place.group)
        return room

    return call, lambda found: compare(found, [root], 0, place.buffers.draw)


def _prepare_send_recv(place: AxisPlace, count: int) -> Made:
    before = place.members[place.number - 1]
    after = place.members[(place.number + 1) % len(place.members)]
    return send_and_receive(place, count, after, before)


def send_and_receive(place: AxisPlace, count: int, after: int, before: int) -> Made:
    """Return a call that sends to rank `after` and receives from rank `before`, and its check."""
    source, room = place.buffers.get(count)

    def call() -> Tensor:
        # Post the receive first, before sent data fills the connection.
        todo = [
            dist.P2POp(dist.irecv, room, before, group=place.group),
            dist.P2POp(dist.isend, source, after, group=place.group),
        ]
        for work in dist.batch_isend_irecv(todo):
            work.wait()
        return room

    return call, lambda found: compare(found, [before], 0, place.buffers.draw)


_MAKERS: dict[str, Callable[[AxisPlace, int], Made]] = {
    "all-reduce": _prepare_all_reduce,
    "all-gather": _prepare_all_gather,
    "reduce-scatter": _prepare_reduce_scatter,
    "all-to-all": _prepare_all_to_all,
    "broadcast": _prepare_broadcast,
    "send/recv": _prepare_send_recv,
}


@dataclass(frozen=True)
class SizeLimits:
    """Limits on the size of arrays: bytes, and the duration of one call."""

    most_bytes: int
    longest_s: float


def cases_by_size(
    collective: str, place: AxisPlace, sizes: Sequence[int], limits: SizeLimits, clock: RanksClock
) -> list[Case]:
    """Return cases from small to large, until one call takes too long.

    Each case is called when it is created. All ranks get the same cases.
    """
    cases: list[Case] = []
    took_s = 0.0
    for size in sizes:
        if size > limits.most_bytes:
            break
        one = case(collective, place, size)
        if cases and one.key == cases[-1].key:
            continue  # too small to divide
        call = one.make()
        clock.seconds(call, 1)
        took_s = clock.seconds(call, 1)
        if took_s <= limits.longest_s or len(cases) < _LEAST_SIZES:
            cases.append(one)
        # The next case is at least four times as large.
        if took_s > limits.longest_s / 2 and len(cases) >= _LEAST_SIZES:
            break
    return cases
