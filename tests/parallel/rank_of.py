"""One rank of a large world, by torch's fake backend: what it holds of a large model.

python tests/parallel/rank_of.py PLANS.json

PLANS.json has [model, plan, rank] of each case. Weights are on the meta device: shapes, no memory.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import fork
from torch.testing._internal.distributed.fake_pg import FakeStore

from outpace.catalog.models import preset
from outpace.nn.loss import LanguageModelObjective
from outpace.nn.transformer import Transformer
from outpace.optim.build import fill_state, make_optimizer
from outpace.parallel import LayoutRequest, apply
from outpace.parallel.tensors import local
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings


def held(model: str, plan: Plan, rank: int, _: Ranks) -> dict[str, Any]:
    """Local shapes by name, and bytes of weights and of the optimizer's moments."""
    size = plan.world_size
    ranks = Ranks(rank=rank, world_size=size, local_rank=rank % 8, local_world_size=min(8, size))
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    with torch.device("meta"):
        objective = LanguageModelObjective(Transformer(preset(model)))
    layout = apply(LayoutRequest(objective, plan, ranks, torch.device("cpu")))
    named = dict(layout.named_parameters())
    settings = TrainSettings(lr=1e-3)
    optimizer = make_optimizer(named.items(), "adamw-for-loop", settings, layout.make_optimizer)
    fill_state(optimizer)
    moments = [state[kind] for state in optimizer.state.values()
               for kind in ("exp_avg", "exp_avg_sq")]  # fmt: skip
    return {
        "shapes": {name: list(local(p).shape) for name, p in named.items()},
        "weight_bytes": sum(local(p).nbytes for p in named.values()),
        "moment_bytes": sum(local(moment).nbytes for moment in moments),
    }


def main() -> None:
    for model, values, rank in json.loads(Path(sys.argv[1]).read_text()):
        (found,) = fork(1, partial(held, model, Plan.parse(values, "test"), rank))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
