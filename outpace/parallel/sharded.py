"""ZeRO-2, ZeRO-3 and HSDP: gradients, optimizer state and parameters split over ranks.

Rajbhandari et al., "ZeRO", SC 2020, §5; Zhao et al., "PyTorch FSDP", VLDB 2023. Each block is a
unit: in every micro-batch, its parameters are gathered before their use, and its gradients are
reduced and scattered right after its backward. ZeRO-3 frees the gathered parameters after the
forward and gathers them again for the backward; ZeRO-2 keeps them until the backward. All three
keep parameters outside blocks gathered, because their backward directly follows their forward.
HSDP works like ZeRO-3 within a group of ranks, and averages gradients between the groups (Zhao et
al., §3.2.2).
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from outpace.nn.model_options import find_blocks
from outpace.parallel.argument_lists import keep_argument_lists
from outpace.parallel.blocks import blocks_of, refuse_scripted
from outpace.parallel.fsdp import (
    find_unshardable,
    keep_class_names,
    refuse_method_names,
    shard,
)
from outpace.parallel.gradient_hooks import refuse_hooks
from outpace.parallel.gradient_use import GradientUse, ranks_may_differ
from outpace.parallel.layout import Batch, Layout, LayoutRequest, ShardedLayout, StepHooks
from outpace.parallel.offload import group_of_one, offload_policy
from outpace.parallel.parameter_attributes import ParameterAttributes
from outpace.parallel.tensors import meta_copy, sum_gradients
from outpace.parallel.unit_order import UnitOrder
from outpace.parallel.whole_parameters import WholeParameters, explain_shards
from outpace.records.errors import BadInputError


class CustomSharded(ShardedLayout):
    """A sharded custom model whose forward may use different parameters on each rank.

    `replicated` parameters are whole on each rank; their gradients are summed after the last
    micro-batch.
    """

    def __init__(
        self,
        objective: nn.Module,
        meta_copy: nn.Module,
        group: dist.ProcessGroup,
        units: Sequence[nn.Module],
        replicated: Sequence[nn.Parameter],
    ) -> None:
        super().__init__(objective, meta_copy, group)
        self._replicated = [p for p in replicated if p.requires_grad]
        assert dist.group.WORLD is not None
        self._order = UnitOrder(objective, units, dist.group.WORLD)
        self._use: GradientUse | None = None
        self._start_step = 0
        for unit in units:
            keep_argument_lists(unit)

    def give_whole(self) -> None:
        """Let the user's loss read whole parameters instead of shards.

        Set `averages` before this call.
        """
        order = self._order
        WholeParameters(self.objective, self.averages, order.used, order.wait_for_reductions)

    def resume_from(self, start_step: int) -> None:
        """Set the number of steps that are already done."""
        self._start_step = start_step

    def discard_comparison(self) -> None:
        """Do not count the comparison of the first batch as a step."""
        if self._use is not None:
            self._use.steps -= 1

    def _forward_backward(self, batch: Batch, hooks: StepHooks) -> Tensor:
        try:
            return super()._forward_backward(batch, hooks)
        except (RuntimeError, AssertionError) as error:
            refused = explain_shards(error)
            if refused is None:
                raise
            raise refused from None

    def gradients(self, batches: Sequence[Batch], hooks: StepHooks) -> Tensor:
        """Compute the step's gradients. Parameters that no rank has used get no gradient."""
        totals = super().gradients(batches, hooks)
        if self._stepped is None:  # otherwise, gradients were freed in the backward
            if self._use is None:
                named = [(n, p) for n, p in self.named_parameters() if p.requires_grad]
                self._use = GradientUse(named, self._device(), steps=self._start_step)
                self._trained = [parameter for _, parameter in named]
            self._order.agree(self._use, self._trained, self._replicated)
            sum_gradients(self._replicated, 1 / self.averages)
        return totals


def apply(request: LayoutRequest) -> Layout:
    """Shard each block as a unit, and the remaining parameters as another unit."""
    plan = request.plan
    if plan.strategy == "single":
        return _shard_units(request, group_of_one(request.device))
    mesh = init_device_mesh(
        request.device.type,
        (plan.dp_replicate, plan.dp_shard),
        mesh_dim_names=("dp_replicate", "dp_shard"),
    )
    return _shard_units(request, mesh if plan.dp_replicate > 1 else mesh["dp_shard"])


def _shard_units(request: LayoutRequest, over: DeviceMesh) -> Layout:
    plan, held = request.plan, offload_policy(request.plan, request.device)
    own = ranks_may_differ(request.objective)
    if own:
        named = request.objective.model.named_parameters()  # type: ignore[union-attr]
        refuse_scripted(request.objective.model, plan.strategy)  # type: ignore[arg-type]
        refuse_hooks(named, plan.strategy, "ranks hold shards of parameters")
    copied = meta_copy(request.objective.model)  # type: ignore[arg-type]
    blocks, reshards = _find_units(request), plan.strategy != "zero2"
    whole = find_unshardable(request.objective, blocks) if own else []
    for parameter in whole:  # fully_shard moves only what it shards
        parameter.data = parameter.data.to(request.device)
    attributes = ParameterAttributes(request.objective)
    if own:
        places = {part: name for name, part in request.objective.model.named_modules()}  # type: ignore[union-attr]
        refuse_method_names([(places[block], block) for block in blocks], plan.strategy)
    kinds = {block: type(block) for block in blocks}
    shard(request.objective, blocks, over, held, plan.precision, request.runs_on, reshards, whole)
    keep_class_names(kinds)
    attributes.keep((*blocks, request.objective))
    group: dist.ProcessGroup = over.get_group("dp_shard")
    if own:
        layout: ShardedLayout = CustomSharded(request.objective, copied, group, blocks, whole)
    else:
        layout = ShardedLayout(request.objective, copied, group)
    layout.averages = plan.data_parallel
    layout.computes_on = request.device
    if isinstance(layout, CustomSharded):
        layout.give_whole()
    return layout


def _find_units(request: LayoutRequest) -> list[nn.Module]:
    model: nn.Module = request.objective.model  # type: ignore[assignment]
    if request.blocks is None and ranks_may_differ(request.objective):
        try:
            return find_blocks(model)
        except BadInputError:
            return []
    return list(dict.fromkeys(blocks_of(request)))
