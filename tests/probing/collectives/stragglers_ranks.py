"""One rank of the test of stragglers: prints whom rank 0 finds slow.

python tests/parallel/forked.py 4 tests/probing/collectives/stragglers_ranks.py RANK

The rank that is named is made slow.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from outpace.jobs.ranks.process_groups import process_groups
from outpace.launch.launcher_env import ranks_from
from outpace.probing.collectives.advice import pair_advice, rank_advice
from outpace.probing.collectives.buffers import Buffers
from outpace.probing.collectives.cases import AxisPlace, send_and_receive
from outpace.probing.collectives.groups import axes_of, nodes_of
from outpace.probing.collectives.pairwise import pair_figures, ranks_figures, work_of
from outpace.probing.collectives.stragglers import slow_links, slow_ranks
from outpace.probing.timing.interleave import run_turns
from outpace.probing.timing.measure import HostClock
from outpace.probing.timing.rank_clock import RanksClock

CPU = torch.device("cpu")
SLEEP_S = 0.1  # many times what others' work on a busy machine costs


def slowed(call):
    def slow():
        time.sleep(SLEEP_S)
        return call()

    return slow


def main() -> None:
    torch.set_num_threads(1)
    ranks = ranks_from(os.environ)
    is_slow = ranks.rank == int(sys.argv[1])
    with process_groups(ranks, CPU, 60.0) as groups:
        nodes = nodes_of([(rank, ranks.world_size) for rank in range(ranks.world_size)])
        place = AxisPlace(axes_of(nodes)[0], dist.group.WORLD, groups.control, ranks.rank, "gloo",
                      Buffers(CPU, ranks.rank))  # fmt: skip
        clock = RanksClock(HostClock(), groups.control)
        work = work_of(CPU)
        if is_slow:
            work = {what: one._replace(call=slowed(one.call)) for what, one in work.items()}
        figures = run_turns(ranks_figures(work, place, clock, 4, 0.5))

        def between(*where):
            call, check = send_and_receive(*where)
            return (slowed(call) if is_slow else call), check

        pairs = run_turns(pair_figures(nodes, place, (1 << 16,), clock, 4, 0.5, between))
    if ranks.rank != 0:
        return
    times = {pair: of[0].samples for pair, of in pairs.items()}
    found = slow_links(times)
    said = {
        "stragglers": [
            (one.who, one.times)
            for what in work
            for one in slow_ranks(
                {int(f.key.of["rank"]): f.samples for f in figures if f.key.what == what}
            )
        ],
        "slow links": {
            "ranks": [one.who for one in found.ranks],
            "links": [one.who for one in found.links],
        },
        "advice": [one.text for one in rank_advice(figures) + pair_advice(pairs, nodes)],
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
