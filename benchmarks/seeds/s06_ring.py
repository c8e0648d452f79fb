"""Ring all-reduce: bytes that a rank sends, and time, by the number of ranks.

    python benchmarks/seeds/s06_ring.py            # records results/seeds_ring.json
    python benchmarks/seeds/s06_ring.py --quick    # small; records nothing

Each rank has a network namespace on one bridge, with a cable of 200 Mbit/s. A buffer is summed by
outpace's ring, and by one server to which all others send and from which they receive, in turn.
Without root or iproute2, the ranks share the host's own network, and times are those of copying.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from claims import FOUND, TRAINING, Claim, Experiment, job, run

RANKS, QUICK_RANKS = (2, 3, 4, 8), (2,)
VALUES, QUICK_VALUES = 2**20, 2**12
MBIT_PER_S = 200
REPEATS = 9

CLAIM = Claim(
    document=TRAINING,
    says="In a ring, each GPU communicates with two neighbours: a reduce-scatter and an "
    "all-gather, each of n − 1 steps with 1/n of the gradients. All GPUs together send "
    "about as much as with a server, but evenly, whereas a server's cost grows with the "
    "number of GPUs.",
    hardware=(
        "none; we assume nodes with one V100 each on 10 Gbit/s Ethernet, and GPT-2's gradients"
    ),
    figures={"each": "2(n − 1)/n · Ψ", "all": "2(n − 1) · Ψ"},
)


def predict(quick: bool) -> dict[str, Any]:
    """Predict the seconds to reduce GPT-2's gradients over the links, by ring and by server."""
    import numpy as np
    from predictions import model, step

    from outpace.catalog.node_names import find_node
    from outpace.planner.calibration.cluster import of_catalog
    from outpace.planner.hardware.networks import read_network
    from outpace.planner.model.outline import parameters

    machine, network = "v100-pcie-32-gb", "ethernet-10"
    gpt2 = model("gpt2")
    gradients = 4.0 * parameters(gpt2)
    found = {}
    for nodes in (2, 4, 8, 16, 64):
        fabric = of_catalog(find_node(machine), nodes, read_network(network)).fabric
        ring = fabric.sum_s(np.array([gradients]), np.array([nodes]), np.array([1]))
        plan = {"strategy": "ps", "dp_replicate": nodes, "servers": 1}
        server = step(gpt2, machine, plan, 1024, nodes, nodes=nodes + 1, network=network)
        found[str(nodes)] = {"ring_s": float(ring[0]), "server_s": server["parts_s"]["data_s"]}
    return {"gradient_bytes": gradients, "network": network, "nodes": found}


def measure(quick: bool) -> dict[str, Any]:
    """Run a job for each number of ranks."""
    from contests import torchrun
    from links import PROGRAMS_SHARE, network, start, why_not

    def apart(ranks: int, words: list[str]) -> None:
        with network(ranks, MBIT_PER_S) as hosts:
            start(hosts, words)

    lacking = why_not()
    how: Callable[[int, list[str]], None] = torchrun if lacking else apart
    return {
        "no_network": lacking,
        "mbit_per_s": MBIT_PER_S,
        "link_bytes_per_s": MBIT_PER_S * 1e6 / 8 * PROGRAMS_SHARE,
        "buffer_bytes": 4 * (QUICK_VALUES if quick else VALUES),
        "ranks": {str(n): job(__file__, n, quick, how) for n in (QUICK_RANKS if quick else RANKS)},
    }


def worker(out: Path, quick: bool) -> None:
    """Run one rank of a job: both ways in turn; the first time counts bytes and warms up."""
    import torch
    import torch.distributed as dist

    from outpace.jobs.ranks.process_groups import process_groups
    from outpace.launch.launcher_env import ranks_from
    from outpace.parallel.ring import ring_all_reduce
    from outpace.training.collective_counter import CollectiveCounter

    torch.set_num_threads(1)
    ranks = ranks_from(os.environ)
    assert ranks is not None
    ways = {"ring": ring_all_reduce, "server": serve}
    took: dict[str, list[float]] = {name: [] for name in ways}
    sent = {}
    with process_groups(ranks, torch.device("cpu"), 120.0) as groups:
        group: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
        for name, way in ways.items():
            buffer = torch.ones(QUICK_VALUES if quick else VALUES)
            with CollectiveCounter() as counted:
                way(buffer, group)
            assert bool((buffer == ranks.world_size).all()), name
            sent[name] = counted.tally.bytes
        for number in range(2 if quick else REPEATS):
            for name in ways if number % 2 == 0 else reversed(ways):
                dist.barrier(groups.control)
                began = time.perf_counter()
                ways[name](buffer, group)
                took[name].append(time.perf_counter() - began)
        said: list[Any] = [None] * ranks.world_size
        dist.all_gather_object(said, (sent, took), group=groups.control)
    if ranks.rank == 0:
        (out / FOUND).write_text(json.dumps(summed_up(said)))


def serve(buffer: Any, group: Any) -> None:
    """Send to rank 0, which sums and sends the sums back."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank:
        dist.send(buffer, 0, group)
        dist.recv(buffer, 0, group)
        return
    rooms = [torch.empty_like(buffer) for _ in range(1, size)]
    arriving = [dist.irecv(room, n, group) for n, room in enumerate(rooms, 1)]
    for work, room in zip(arriving, rooms, strict=True):
        work.wait()
        buffer += room
    for work in [dist.isend(buffer, n, group) for n in range(1, size)]:
        work.wait()


def summed_up(said: list[tuple[dict[str, int], dict[str, list[float]]]]) -> dict[str, Any]:
    """Summarise; a reduction ends when its slowest rank does."""
    found = {}
    for name in said[0][0]:
        sent = [own[name] for own, _ in said]
        seconds = [max(at) for at in zip(*(took[name] for _, took in said), strict=True)]
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        found[name] = {"busiest_bytes": max(sent), "all_bytes": sum(sent), "median_s": middle,
                       "quartiles_s": [low, high], "seconds": seconds}  # fmt: skip
    return found


EXPERIMENT = Experiment(
    "ring", (CLAIM,), predict, measure,
    instead="Network namespaces instead of separate machines, and a buffer instead of gradients.",
    worker=worker,
)  # fmt: skip

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
