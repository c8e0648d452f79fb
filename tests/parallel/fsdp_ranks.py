"""What ranks that split parameters send over gloo itself; rank 0 prints it.

python tests/parallel/forked.py 2 tests/parallel/fsdp_ranks.py zero3,hsdp bf16
"""

import json
import os
import sys
from collections import Counter
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outpace.experiment.parity import Trial
from outpace.experiment.verify import plan_for, tiny_spec, verify
from outpace.jobs.ranks.process_groups import process_groups
from outpace.launch.launcher_env import ranks_from
from outpace.parallel import fsdp


class Dtypes(TorchDispatchMode):
    """Counts the calls of gloo's collectives, by kind and dtype of what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._opname.strip("_")
        if func.namespace == "c10d" and name.startswith(("allgather_base", "reduce_scatter")):
            given = next(leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, torch.Tensor))
            # Ranks report in fp64, and as objects: integers, which torch 2.15 gathers like tensors.
            if given.dtype.is_floating_point and given.dtype != torch.float64:
                self.calls[f"{name.split('_tensor')[0]} {given.dtype}"] += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    torch.set_num_threads(1)
    strategies, precision = sys.argv[1:]
    ranks = ranks_from(os.environ)
    said = {}
    with (
        process_groups(ranks, torch.device("cpu"), 60.0) as groups,
        mock.patch.object(fsdp, "peer_memory_group", lambda group: None),
    ):
        for strategy in strategies.split(","):
            plan = plan_for(strategy, ranks.world_size, precision)
            with Dtypes() as seen:
                (verdict,) = verify([plan], Trial(tiny_spec([plan])), groups).verdicts
            said[strategy] = {**verdict.model_dump(), "calls": dict(seen.calls)}
    if ranks.rank == 0:
        print(json.dumps(said))


if __name__ == "__main__":
    main()
