"""Modules whose parameters `fully_shard` splits, and how their ranks exchange them.

In mixed precision parameters are gathered in the 16 bits that products read and gradients reduced
in fp32, as `records.optimizers.SHARD_DTYPES` says; shards, and what is added up of their gradients,
are fp32. Inputs of units are not cast: autocast stays on around them, so that what is no product's
operand (the residual stream, positions' tables, a batch of the user's) keeps its dtype.

On a CPU gloo would carry every parameter twice and every gradient once, while the ranks wait: ranks
of one host read each other's memory instead (`parallel.direct`).
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from outpace.nn.fp32_modules import compute_in_fp32
from outpace.parallel.direct import (
    Neighbours,
    all_gather_directly,
    neighbours,
    reduce_scatter_directly,
)
from outpace.records.optimizers import SHARD_DTYPES, Precision

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def shard(
    module: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    held: OffloadPolicy,
    precision: Precision,
    runs_on: str,
    again: bool = True,
) -> None:
    """Split the parameters of each block, and what is left of a module, over the mesh's last ranks.

    `runs_on` is the kind of device to choose for, where tensors are traced on another.

    `again`: blocks give their parameters up after the forward and gather them for the backward.
    What lies outside of the blocks is kept between them: its forward ends where the backward
    begins. Collective.
    """
    near = neighbours(mesh.get_group(mesh.ndim - 1)) if mesh.device_type == "cpu" else None
    if precision in SHARD_DTYPES:
        compute_in_fp32(module, runs_on)
    done: set[nn.Parameter] = set()
    for part in (*blocks, module):
        own = [p for p in part.parameters() if p not in done]
        sharded = fully_shard(
            part,
            mesh=mesh,
            reshard_after_forward=again and part is not module,
            mp_policy=policy_of(own, precision),
            offload_policy=held,
        )
        done.update(part.parameters())
        if near is not None:
            sharded.set_custom_all_gather(_Gather(near))
            sharded.set_custom_reduce_scatter(_Scatter(near))


def policy_of(parameters: Iterable[nn.Parameter], precision: Precision) -> MixedPrecisionPolicy:
    """What a unit of these parameters sends."""
    dtypes = SHARD_DTYPES.get(precision)
    if dtypes is None or not all(p.is_floating_point() for p in parameters):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=_DTYPES[dtypes.gathered],
        reduce_dtype=_DTYPES[dtypes.reduced],
        cast_forward_inputs=False,
    )


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
