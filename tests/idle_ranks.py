"""One rank of the test of idle pipelines; rank 0 prints what it looks at: of each schedule
the first step that is idle for less than of the schedule before it, if there is one.

python tests/parallel/forked.py 4 tests/idle_ranks.py
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from outpace.jobs.ranks.process_groups import process_groups
from outpace.launch.launcher_env import ranks_from
from outpace.planner.pipeline.schedules import orders
from outpace.planner.pipeline.simulator import StageTime
from outpace.records.pipelines import SCHEDULES

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from idle_pipelines import judge, waiting_pipeline, watch


def main() -> None:
    torch.set_num_threads(1)
    ranks = ranks_from(os.environ)
    said = {}
    with process_groups(ranks, torch.device("cpu"), 60.0) as groups:
        for strategy, microbatches, idle in (("mp", 1, 1), ("gpipe", 4, 3 / 4), ("zbv", 8, 3 / 7)):
            stages = ranks.world_size * SCHEDULES[strategy].stages_per_rank
            times = [StageTime(0.02, 0.02, 0.02)] * stages
            layout, batch = waiting_pipeline(strategy, microbatches, times, groups)
            todo = orders(strategy, ranks.world_size, microbatches)
            watch(layout, batch, todo, groups)  # makes the schedule, and its connections
            # Other work on the machine makes a step idle for longer, but not each of many.
            for _ in range(30):
                seen = judge(strategy, watch(layout, batch, todo, groups), todo, times)
                if seen.measured < idle:
                    break
            said[strategy] = asdict(seen)
    if ranks.rank == 0:
        print(json.dumps(said))


if __name__ == "__main__":
    main()
