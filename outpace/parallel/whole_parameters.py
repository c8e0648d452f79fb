"""Whole parameters for a user's loss that reads parameters while ranks hold shards.

A penalty such as `sum(p.square().sum() for p in module.parameters())`, computed outside the
module's forward, would read shards. It gets whole tensors instead, which are gathered on access.
Their gradients are averaged over ranks like all others.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outpace.interop.custom_model import CustomObjective
from outpace.nn.dtensor import is_spread
from outpace.records.errors import BadInputError

_MIXED = "got mixed torch.Tensor and DTensor"
_COPIED = "FSDP does not support deepcopy"
_TRANSFORMED = "functorch transforms"
_UNUSED = "to not have been used in the graph"  # in torch.autograd.grad
_FREED = "out of bounds for storage of size 0"


class WholeParameters:
    """A replacement of `module.parameters()` that returns whole parameters within the loss.

    Shards that get a gradient in this way are added to `used`. Sums of gradients over ranks are
    divided by `averages`. `wait()` makes the current stream wait for gradients that other streams
    add to the shards.
    """

    def __init__(
        self, objective: nn.Module, averages: int, used: set[Any], wait: Callable[[], None]
    ) -> None:
        assert isinstance(objective, CustomObjective)
        self._module = objective.model
        self._averages, self._used, self._wait = averages, used, wait
        self._asks_whole = False
        loss = objective.loss
        if loss is None:
            return

        def loss_of_whole_parameters(module: nn.Module, batch: Any) -> Any:
            self._asks_whole = True
            try:
                return loss(module, batch)
            finally:
                self._asks_whole = False

        # This hides the loss, which may be a registered submodule.
        vars(objective)["loss"] = loss_of_whole_parameters
        vars(self._module)["named_parameters"] = self._named_parameters
        self._module.register_forward_pre_hook(self._begin_forward)
        self._module.register_forward_hook(self._end_forward)

    def _begin_forward(self, *_: Any) -> None:
        """Return shards instead of whole parameters while the module's forward runs.

        The units of the module gather the parameters that they use.
        """
        self._in_loss, self._asks_whole = self._asks_whole, False

    def _end_forward(self, *_: Any) -> None:
        self._asks_whole = self._in_loss

    def _named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in nn.Module.named_parameters(self._module, *args, **options):
            if self._asks_whole and is_spread(parameter):
                given = parameter, self._averages, self._used, self._wait
                yield name, _WholeParameter.apply(*given)  # type: ignore[no-untyped-call]
            else:
                yield name, parameter


def explain_shards(error: Exception) -> BadInputError | None:
    """Return an error with advice if `error` shows that user code misuses shards; else None."""
    if _MIXED in str(error) or _UNUSED in str(error):
        return BadInputError(
            "the module or its loss uses parameters of a block outside of a call of the block, "
            "where this rank holds only shards of them. Call the block itself (layer(x), not "
            "layer.forward(x)), use module.parameters() in a separate loss function, pass "
            "blocks=[] to parallelize to treat the model as one block, or use strategy ddp or "
            "zero1."
        )
    if _COPIED in str(error):
        return BadInputError(
            "the module or its loss copies the module (copy.deepcopy) in training, where this "
            "rank holds only shards of its parameters. Use torch.func.functional_call to "
            "compute with other values, or use strategy ddp or zero1."
        )
    if _TRANSFORMED in str(error):
        return BadInputError(
            "the module or its loss applies a transform of torch.func (vmap, grad, jvp) to whole "
            "parameters or across blocks, but this rank holds only shards of them. Apply the "
            "transform inside a block, or use strategy ddp or zero1."
        )
    if _FREED in str(error):
        return BadInputError(
            "the backward needs parameters of a block that were not gathered: the block returns "
            "tensors in an object (a distribution, or a class that is not a dataclass), or its "
            "output is changed in place. Return tensors from blocks alone or in tuples, dicts or "
            "dataclasses, pass blocks=[] to treat the model as one block, or use strategy ddp or "
            "zero1."
        )
    return None


class _WholeParameter(torch.autograd.Function):
    """A whole parameter, gathered from its shards. Collective in forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, shard: Any, averages: int, used: set[Any], wait: Callable[[], None]
    ) -> Tensor:
        ctx.averages, ctx.used, ctx.shard, ctx.wait = averages, used, shard, wait
        whole: Tensor = shard.detach().full_tensor()
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Average the gradient over ranks and return this rank's shard of the average.

        Autograd then adds the result to the shard's gradient on the current stream. `fully_shard`
        may still be writing that gradient on a different stream, so the current stream waits first.
        """
        from torch.distributed.tensor import distribute_tensor

        average = gradients[0].contiguous().clone()
        dist.all_reduce(average)
        ctx.used.add(ctx.shard)
        mesh, placements = ctx.shard.device_mesh, ctx.shard.placements
        shard = distribute_tensor(average / ctx.averages, mesh, placements, src_data_rank=None)
        ctx.wait()
        return shard, None, None, None
