"""ZeRO-1: replicas that each keep the optimizer state for a part of the parameters.

Rajbhandari et al., "ZeRO", SC 2020, §5.1 ("P_os"). Gradients are averaged as under ddp; each rank
steps its share of the parameters and broadcasts them. torch's ZeroRedundancyOptimizer assigns whole
parameters to ranks, largest first, always to the rank with the least so far. A model's largest
parameter therefore limits how even the shares can be.

The option `overlap_with_ddp` is not used: it supports only one parameter group, whereas weight
decay needs two, and it skips the updates of the first steps.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from outpace.optim.build import Build
from outpace.optim.master import master_weights
from outpace.parallel.ddp import Replicas
from outpace.parallel.layout import Layout, LayoutRequest
from outpace.parallel.optimizer_split import parameters_in
from outpace.parallel.refusals import refuse_between_steps
from outpace.parallel.tensors import replace_by_wider


class _ShardedOptimizer(ZeroRedundancyOptimizer):
    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters.

        Raises BadInputError if `consolidate_state_dict` has not been called.
        """
        try:
            return super().state_dict()
        except RuntimeError as error:
            if "consolidate" not in str(error):
                raise
            raise refuse_between_steps(
                "the optimizer's state_dict() is called on a rank that has the state of only some "
                "parameters. Call optimizer.consolidate_state_dict() on all ranks, then "
                "state_dict() on rank 0 alone, or use strategy ddp, under which every rank has the "
                "whole state."
            ) from error


class _MixedDtypeOptimizer(_ShardedOptimizer):
    """ZeroRedundancyOptimizer for parameters of several dtypes, each broadcast separately."""

    def _verify_same_dense_param_type(self) -> None:
        """Skip torch's check, which requires a single dtype although there is no common buffer."""


class _CustomModelOptimizer(_ShardedOptimizer):
    """ZeroRedundancyOptimizer for custom models, which may assign `p.data = …` or freeze `p`."""

    def _sync_params(self) -> None:
        """Broadcast the parameters' current values, even if they are no longer views of buffers."""
        own: Any = self
        parts = [part for parts in own._device_to_params_per_rank.values() for part in parts]
        buffers = [buffer for buffers in self._buckets for buffer in buffers]
        pairs = zip(buffers, parts, strict=True) if buffers else ()
        if any(_address(p) != _address(b) for b, part in pairs for p in part if p.requires_grad):
            own._build_param_buckets()
        super()._sync_params()  # type: ignore[misc]
        # Buffers omit parameters that were frozen since the backward, but the optimizer steps them.
        for parameter, owner in own._param_to_rank.items():
            if buffers and not parameter.requires_grad and parameter.grad is not None:
                dist.broadcast(parameter.data, owner, group=self.process_group)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class SharedStates(Replicas):
    """DistributedDataParallel replicas, each with an optimizer for its share of the parameters."""

    def make_optimizer(self, groups: list[dict[str, Any]], build: Build) -> torch.optim.Optimizer:
        """Return an optimizer of all parameters that updates and broadcasts this rank's share."""
        groups = [{**group, "params": parameters_in(group)} for group in groups]
        dtypes = {parameter.dtype for group in groups for parameter in group["params"]}
        # One broadcast per rank instead of one per parameter. It needs a buffer, which has a single
        # dtype (torch does not check that all parameters have it) and is not on disk.
        has_buffer = len(dtypes) == 1 and not self.on_disk
        kind: type[ZeroRedundancyOptimizer] = _MixedDtypeOptimizer
        if has_buffer:
            kind = ZeroRedundancyOptimizer if self.use is None else _CustomModelOptimizer
        made = kind(
            groups,
            optimizer_class=build,  # type: ignore[arg-type]  # it is only called
            parameters_as_bucket_view=has_buffer,
        )
        made.defaults.update(made.optim.defaults)  # OneCycleLR reads betas from these
        return made

    def checkpoint_state(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module | None, torch.optim.Optimizer | None]:
        """Return the whole module, and the inner optimizer with the state of this rank's share.

        The optimizer is None if there are more ranks than parameters and this rank has none.
        `ZeroRedundancyOptimizer.state_dict` would gather the state of all ranks on one rank, keyed
        by number.
        """
        assert isinstance(optimizer, ZeroRedundancyOptimizer)
        self._make_buffers_equal()
        within: torch.optim.Optimizer = optimizer.optim
        steps = any(group["params"] for group in within.param_groups)
        return self.model, within if steps else None

    @torch.no_grad()
    def raise_weights(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace 16-bit weights with master weights, of which each rank broadcasts its share."""
        assert isinstance(optimizer, ZeroRedundancyOptimizer)
        kept = dict(master_weights(optimizer.optim))
        rank = dist.get_rank()
        owners: dict[torch.Tensor, int] = optimizer._param_to_rank  # type: ignore[attr-defined]
        for parameter, owner in owners.items():
            if parameter.itemsize == 2:
                if owner != rank:
                    kept[parameter] = torch.empty_like(parameter, dtype=torch.float32)
                dist.broadcast(kept[parameter], owner)
        replace_by_wider(self.model, kept)


def apply(request: LayoutRequest) -> Layout:
    """Replicate the objective with DistributedDataParallel, and split the optimizer over ranks.

    Requires the default process group.
    """
    return SharedStates(request)
