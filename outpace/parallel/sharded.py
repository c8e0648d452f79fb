"""ZeRO-2, ZeRO-3 and HSDP: gradients, optimizer state and parameters split over ranks.

Rajbhandari et al., "ZeRO", SC 2020, §5; Zhao et al., "PyTorch FSDP", VLDB 2023. Each block is a
unit: its parameters are gathered before they are used, and its gradients reduced and scattered
right after its backward, with every micro-batch. ZeRO-3 gives the gathered parameters up after the
forward and gathers them again for the backward; ZeRO-2 keeps them until then. So do all with what
lies outside of the blocks: its forward ends where the backward begins. HSDP does as ZeRO-3 within a
group of ranks, and averages gradients between the groups (Zhao et al., §3.2.2).
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from outpace.parallel.api import Batch, Layout, Pass, Request, Sharded
from outpace.parallel.blocks import blocks_of
from outpace.parallel.gradient_use import GradientUse, ranks_may_differ
from outpace.parallel.offload import group_of_one, policy
from outpace.parallel.shards import shard
from outpace.parallel.tensors import hollow
from outpace.parallel.unit_order import UnitOrder


class OwnSharded(Sharded):
    """As Sharded, of a user's module, of which ranks may use different parameters."""

    def __init__(
        self,
        objective: nn.Module,
        hollow: nn.Module,
        group: dist.ProcessGroup,
        units: Sequence[nn.Module],
    ) -> None:
        super().__init__(objective, hollow, group)
        assert dist.group.WORLD is not None
        self._order = UnitOrder(objective, units, dist.group.WORLD)
        self._use: GradientUse | None = None

    def gradients(self, batches: Sequence[Batch], given: Pass) -> Tensor:
        """As for every layout. What no rank has used has no gradient."""
        totals = super().gradients(batches, given)
        if self._stepped is None:  # else gradients are gone
            trained = [p for p in self._parameters() if p.requires_grad]
            if self._use is None:
                self._use = GradientUse(trained, self._device())
            self._order.agree(self._use, trained)
        return totals


def apply(request: Request) -> Layout:
    """Shard each block, and what is left with the objective."""
    plan = request.plan
    if plan.strategy == "single":
        return _shard(request, group_of_one(request.device))
    mesh = init_device_mesh(
        request.device.type,
        (plan.dp_replicate, plan.dp_shard),
        mesh_dim_names=("dp_replicate", "dp_shard"),
    )
    return _shard(request, mesh if plan.dp_replicate > 1 else mesh["dp_shard"])


def _shard(request: Request, over: DeviceMesh) -> Layout:
    plan, held = request.plan, policy(request.plan, request.device)
    copied = hollow(request.objective.model)  # type: ignore[arg-type]
    blocks, again = blocks_of(request), plan.strategy != "zero2"
    shard(request.objective, blocks, over, held, plan.precision, request.runs_on, again)
    group: dist.ProcessGroup = over.get_group("dp_shard")
    if ranks_may_differ(request.objective) and plan.world_size > 1:
        layout: Sharded = OwnSharded(request.objective, copied, group, blocks)
    else:
        layout = Sharded(request.objective, copied, group)
    layout.averages = plan.data_parallel
    layout.computes_on = request.device
    return layout
