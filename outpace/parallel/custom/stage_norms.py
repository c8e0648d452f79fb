"""Norms of gradients that a user's loop computes by torch, over all stages of a pipeline.

`torch.nn.utils.clip_grad_norm_` clips by the norm of the gradients that it gets, which are those of
this rank's stages only.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import utils
from torch.nn.utils import clip_grad

from outpace.parallel.layout import SpreadLayout
from outpace.parallel.refusals import CommonPlace, refuse_between_steps

TotalNorm = Callable[..., Tensor]


def measure_all_stages(layout: SpreadLayout, group: dist.ProcessGroup, place: CommonPlace) -> None:
    """Make torch's `get_total_norm` and `clip_grad_norm_` use all stages' gradients of `layout`.

    Each is counted once. Gradients of other modules have their own norm. Collective when called.
    """
    of_tensors: TotalNorm = clip_grad._get_total_norm
    known = ref(layout)  # torch's functions outlive the layout

    def get_total_norm(
        tensors: Tensor | Iterable[Tensor], norm_type: float = 2.0, *args: Any, **kwargs: Any
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        pipeline, ids = known(), {id(tensor) for tensor in given}
        mine = [] if pipeline is None else pipeline.local_gradients()
        if pipeline is None or (given and ids.isdisjoint(map(id, mine))):
            return of_tensors(given, norm_type, *args, **kwargs)
        place.wait_for_all("computes a norm of gradients")
        once = [one for one in pipeline.counted_gradients() if id(one) in ids]
        total = _sum_norms(of_tensors(once, norm_type), float(norm_type), group, pipeline)
        kind = given[0] if given else total
        return of_tensors(total.to(kind.device, kind.dtype), norm_type, *args, **kwargs)

    clip_grad._get_total_norm = get_total_norm
    utils.get_total_norm = get_total_norm


def _sum_norms(
    norm: Tensor, order: float, group: dist.ProcessGroup, layout: SpreadLayout
) -> Tensor:
    """Return the norm of all ranks' vectors together, in float64. Collective."""
    if order <= 0:
        raise refuse_between_steps(
            f"a norm of order {order:g} cannot be computed over the stages of a pipeline. Use a "
            "positive order, such as 2 or math.inf."
        )
    wide = norm.detach().to(layout._device(), torch.float64)
    powers = wide if math.isinf(order) else wide**order
    dist.all_reduce(powers, dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM, group)
    return powers if math.isinf(order) else powers ** (1 / order)
