"""Modules whose parameters `fully_shard` splits, and how their ranks exchange them on a CPU.

There gloo would carry every parameter twice and every gradient once, while the ranks wait: ranks of
one host read each other's memory instead (`parallel.direct`).
"""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from outpace.parallel.direct import (
    Neighbours,
    all_gather_directly,
    neighbours,
    reduce_scatter_directly,
)


def shard(
    module: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    held: OffloadPolicy,
    again: bool = True,
) -> None:
    """Split the parameters of each block, and what is left of a module, over the mesh's last ranks.

    `again`: blocks give their parameters up after the forward and gather them for the backward.
    What lies outside of the blocks is kept between them: its forward ends where the backward
    begins. Collective.
    """
    near = neighbours(mesh.get_group(mesh.ndim - 1)) if mesh.device_type == "cpu" else None
    for part in (*blocks, module):
        gathered = again and part is not module
        sharded = fully_shard(part, mesh=mesh, reshard_after_forward=gathered, offload_policy=held)
        if near is not None:
            sharded.set_custom_all_gather(_Gather(near))
            sharded.set_custom_reduce_scatter(_Scatter(near))


class _Near:
    def __init__(self, near: Neighbours) -> None:
        self._near = near


class _Gather(_Near, DefaultAllGather):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        all_gather_directly(output_tensor, input_tensor, group.group_name)
        self._near.all_gather(output_tensor, input_tensor)


class _Scatter(_Near, DefaultReduceScatter):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Any:  # work to wait for, where some is left
        reduce_scatter_directly(output_tensor, input_tensor, group.group_name)
        averaged = op == dist.ReduceOp.AVG  # else their sum
        self._near.reduce_scatter(
            output_tensor, input_tensor, 1 / group.size() if averaged else 1.0
        )
