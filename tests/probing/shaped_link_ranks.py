"""One rank of two, each in a network of its own: rank 0 prints what it finds of the link.

RANK=… MASTER_ADDR=… python tests/probing/shaped_link_ranks.py     as torchrun on two hosts
"""

import os

import torch

from outpace.jobs.probe.collectives import probe_collectives
from outpace.jobs.ranks.process_groups import process_groups
from outpace.launch.launcher_env import ranks_from
from outpace.probing.timing.interleave import run_turns
from outpace.records.probe_results import ProbeRecord

CPU = torch.device("cpu")
BUDGET_S = 14.0


def main() -> None:
    torch.set_num_threads(1)
    ranks = ranks_from(os.environ)
    with process_groups(ranks, CPU, 60.0) as groups:
        found = run_turns(probe_collectives(groups, CPU, False, BUDGET_S, only="all-reduce"))
    if ranks.rank == 0:
        probed = ProbeRecord(
            date="", versions={}, command="", sections=("allreduce",), quick=False,
            took_s=BUDGET_S, figures=found.figures, fits=found.fits, advice=found.advice,
        )  # fmt: skip
        print(probed.model_dump_json())


if __name__ == "__main__":
    main()
