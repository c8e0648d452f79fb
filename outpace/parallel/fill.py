"""Weights of a model that was laid out while it had none, so that no rank ever holds them all.

A rank takes the memory of its own parts and fills these from whole tensors, one at a time. What it
needs beside its parts is the memory of the largest parameter.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from outpace.nn.spread import is_spread
from outpace.parallel.api import Layout
from outpace.parallel.tensors import local
from outpace.records.plan import Plan, Strategy

# Those of which no rank keeps the whole model.
SPREADS: frozenset[Strategy] = frozenset(
    {"zero2", "zero3", "hsdp", "mp", "gpipe", "1f1b", "interleaved", "loopedbfs", "zb", "zbv",
     "dualpipev", "tp", "3d"}
)  # fmt: skip


def fills_later(plan: Plan) -> bool:
    """Whether a model should be laid out on the meta device, and filled then.

    What is adapted, or goes to a disk, needs its values before.
    """
    spread = plan.strategy in SPREADS and plan.world_size > 1
    return spread and plan.lora_rank is None and plan.offload_parameters != "disk"


@torch.no_grad()
def fill(layout: Layout, device: torch.device, value_of: Callable[[str], Tensor]) -> None:
    """Give a layout that has no memory its weights on `device`, before its optimizer is made.

    `value_of` gives a whole parameter by its name in a single process.
    """
    _take_memory(layout.objective, device)
    for name, parameter in layout.named_parameters():
        whole = value_of(name)
        if is_spread(parameter):
            from torch.distributed.tensor import distribute_tensor

            mesh, placements = parameter.device_mesh, parameter.placements
            # Every rank has the values: nothing is sent.
            whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        local(parameter).copy_(local(whole))


def _take_memory(objective: nn.Module, device: torch.device) -> None:
    """Memory for all parameters, of no particular values.

    `fully_shard` and tensor parallelism know how to move their own. Plain ones are made anew, as
    a module would do it, but for fake tensors too.
    """
    made: dict[Tensor, nn.Parameter] = {}
    for module in objective.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not is_spread(parameter):
                if parameter not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[parameter] = nn.Parameter(empty, parameter.requires_grad)
                module.register_parameter(name, made[parameter])
    if any(is_spread(parameter) for parameter in objective.parameters()):
        objective.to_empty(device=device)
