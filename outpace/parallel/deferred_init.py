"""Weights for a model that was laid out on the meta device, so that no rank holds all weights.

A rank allocates memory for its parts, then fills them from one whole parameter at a time. In
addition to its parts, it needs memory only for the largest parameter.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from outpace.nn.dtensor import is_spread
from outpace.parallel.layout import Layout
from outpace.parallel.tensors import local
from outpace.records.plan import Plan
from outpace.records.strategies import TRAITS


def fills_later(plan: Plan) -> bool:
    """Return whether to lay out a model on the meta device and fill it later.

    Parameters that are quantized to 4 bits or offloaded to disk need their values earlier.
    """
    spread = not TRAITS[plan.strategy].whole_model and plan.world_size > 1
    rounded = plan.lora_rank is not None and plan.base != "fp32"
    return spread and not rounded and plan.offload_parameters != "disk"


@torch.no_grad()
def fill(
    layout: Layout,
    device: torch.device,
    value_of: Callable[[str], Tensor],
    keeps_wide: bool = False,
) -> dict[str, Tensor]:
    """Allocate and fill the weights of a layout that is on the meta device, on `device`.

    Call this before creating the optimizer. `value_of` returns a whole parameter by its
    single-process name. With `keeps_wide`, returns this rank's parts of the trained 16-bit
    parameters in fp32, by name; otherwise, returns an empty dict.
    """
    _allocate_parameters(layout.objective, device)
    wide: dict[str, Tensor] = {}
    for name, parameter in layout.named_parameters():
        part = part_of(value_of(name), parameter)
        here = local(parameter)
        here.copy_(part)
        if keeps_wide and here.itemsize == 2 and parameter.requires_grad:
            wide[name] = part.to(here.device, torch.float32, copy=True)
    return wide


@torch.no_grad()
def parts_of(layout: Layout, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's parts of the whole tensors in `values`, by parameter name.

    Parts of DTensors are copies. For any other parameter, the part is the whole tensor itself.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in layout.named_parameters():
        if name in values:
            part = part_of(values[name], parameter)
            found[name] = part.clone() if is_spread(parameter) else part
    return found


def part_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter's whole tensor."""
    if not is_spread(parameter):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    # every rank has the values, so nothing is sent
    return local(distribute_tensor(whole, mesh, placements, src_data_rank=None))


def _allocate_parameters(objective: nn.Module, device: torch.device) -> None:
    """Allocate uninitialised memory for all parameters.

    `to_empty` allocates DTensors. Plain parameters are replaced first, which also works for fake
    tensors.
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
