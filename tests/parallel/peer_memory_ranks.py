"""One rank of the tests of exchanges through each other's memory; rank 0 prints what it found.

python tests/parallel/forked.py 3 tests/parallel/peer_memory_ranks.py
"""

import json
import os
import platform
import time
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from outpace.jobs.ranks.process_groups import process_groups
from outpace.launch.launcher_env import ranks_from
from outpace.parallel.peer_memory import peer_memory_group
from outpace.training.collective_counter import CollectiveCounter

# The last is of several chunks.
LENGTHS = (0, 1, 2, 3, 5, 1001, 2**20 + 1)
LIMIT_S = 2.0  # also of the group's own exchanges, on a busy machine


def drawn(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank)).to(dtype)


def sums(near, ranks, dtype: torch.dtype) -> dict:
    """Of every length: how far from the sum in float64, and whether all ranks have the same."""
    worst, same = 0.0, True
    for length in LENGTHS:
        buffer = drawn(ranks.rank, length, dtype)
        near.all_reduce(buffer, 0.5)
        everyone = range(ranks.world_size)
        exact = sum(drawn(rank, length, dtype).double() for rank in everyone) / 2
        if length:
            worst = max(worst, ((buffer.double() - exact).norm() / exact.norm()).item())
        others = [torch.empty_like(buffer) for _ in everyone]
        dist.all_gather(others, buffer)
        same &= all(torch.equal(buffer, other) for other in others)
    return {"worst": worst, "same": same}


def halves(near, ranks, dtype: torch.dtype) -> dict:
    """The reduce-scatter and the all-gather alone: how far from the sum, and whether all is there.

    The first gathered part lies in the buffer that is filled, as `fully_shard` has it, or does not.
    """
    worst, whole, everyone = 0.0, True, range(ranks.world_size)
    for length in LENGTHS:
        buffers = [drawn(rank, length * ranks.world_size, dtype) for rank in everyone]
        part = torch.empty(length, dtype=dtype)
        near.reduce_scatter(part, buffers[ranks.rank].clone(), 0.5)
        exact = (sum(one.double() for one in buffers) / 2).tensor_split(ranks.world_size)[
            ranks.rank
        ]
        if length:
            worst = max(worst, ((part.double() - exact).norm() / exact.norm()).item())
        for lies_inside in (True, False):
            gathered = torch.zeros(length * ranks.world_size, dtype=dtype)
            own = (
                gathered.tensor_split(ranks.world_size)[ranks.rank] if lies_inside else part.clone()
            )
            own.copy_(drawn(ranks.rank, length, dtype))
            near.all_gather(gathered, own)
            whole &= torch.equal(gathered, torch.cat([drawn(r, length, dtype) for r in everyone]))
    return {"worst": worst, "whole": whole}


def late(ranks) -> str:
    """What ranks say that wait for one that does not come, and that one, when it does come."""
    near = peer_memory_group(dist.new_group(timeout=timedelta(seconds=LIMIT_S)))
    if ranks.rank == ranks.world_size - 1:
        time.sleep(2 * LIMIT_S)
    try:
        near.all_reduce(torch.ones(5))
    except dist.DistError as error:
        return str(error)
    return "nothing"


def elsewhere(ranks) -> bool:
    """Whether none does it where one of them cannot."""
    machine = "another" if ranks.rank == 1 else platform.machine()
    with mock.patch("platform.machine", return_value=machine):
        return peer_memory_group(dist.group.WORLD) is None


def counted(ranks) -> dict:
    """Of each exchange of six numbers, or of six for each rank, how many bytes were sent."""
    group, six = dist.group.WORLD.group_name, torch.ones(6)
    all_ = torch.ones(6 * ranks.world_size)
    found = {}
    for name, given in (("all_reduce", [six]), ("all_gather", [all_, six]),
                        ("reduce_scatter", [six, all_])):  # fmt: skip
        with CollectiveCounter() as wire:
            getattr(torch.ops.outpace, f"{name}_directly")(*given, group)
        assert wire.tally.collectives == {name: 1}
        found[name] = wire.tally.bytes
    return found


def main() -> None:
    torch.set_num_threads(1)
    ranks = ranks_from(os.environ)
    with process_groups(ranks, torch.device("cpu"), 60.0) as groups:
        near = peer_memory_group(dist.group.WORLD)
        said: list = [None] * ranks.world_size
        own = {"there": near is not None}
        if near is not None:
            own |= {str(dtype): sums(near, ranks, dtype)
                    for dtype in (torch.float32, torch.float64, torch.bfloat16)}  # fmt: skip
            own |= {f"halves, {dtype}": halves(near, ranks, dtype)
                    for dtype in (torch.float32, torch.bfloat16)}  # fmt: skip
            own |= {"late": late(ranks), "elsewhere": elsewhere(ranks)}
            own["counted"] = counted(ranks)
        dist.all_gather_object(said, own, group=groups.control)
    if ranks.rank == 0:
        print(json.dumps(said))


if __name__ == "__main__":
    main()
