"""Prints for how many seconds each process group of a strategy waits, of the run's 60.

python tests/parallel/forked.py 4 tests/parallel/timeouts_ranks.py STRATEGY
"""

import json
import os
import sys

import torch
from torch.distributed.distributed_c10d import _world

from outpace.experiment.parity import Trial
from outpace.experiment.verify import plan_for, tiny_spec
from outpace.jobs.ranks.process_groups import process_groups
from outpace.launch.launcher_env import ranks_from
from outpace.parallel import LayoutRequest, apply

CPU = torch.device("cpu")


def main() -> None:
    ranks = ranks_from(os.environ)
    plan = plan_for(sys.argv[1], ranks.world_size)
    with process_groups(ranks, CPU, 60.0):
        before = set(_world.pg_map)
        apply(LayoutRequest(Trial(tiny_spec([plan])).objective(plan), plan, ranks, CPU))
        made = set(_world.pg_map) - before
        waits = [group._get_backend(CPU).options._timeout.total_seconds() for group in made]
    if ranks.rank == 0:
        print(json.dumps(waits))


if __name__ == "__main__":
    main()
