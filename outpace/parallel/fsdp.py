"""Sharding of modules with torch's `fully_shard`: units, dtypes and collectives.

In mixed precision, parameters are gathered in the 16-bit dtype of matmuls and gradients are reduced
in fp32 (`records.precisions.SHARD_DTYPES`); shards and their accumulated gradients are fp32. Inputs
of units are not cast: autocast stays on around units, so tensors that are not operands of matmuls
(the residual stream, position tables, a user's batch) keep their dtype.

On a CPU, gloo would send every parameter twice and every gradient once while the ranks wait, so
ranks of one host read each other's memory instead (`parallel.peer_memory`).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from outpace.nn.fp32_modules import compute_in_fp32
from outpace.parallel.peer_memory import (
    PeerMemoryGroup,
    all_gather_directly,
    peer_memory_group,
    reduce_scatter_directly,
)
from outpace.records.errors import BadInputError
from outpace.records.precisions import SHARD_DTYPES, Precision

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def shard(
    module: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    held: OffloadPolicy,
    precision: Precision,
    runs_on: str,
    reshards: bool = True,
    replicated: Collection[nn.Parameter] = (),
) -> None:
    """Shard the parameters of each block, and the remaining ones, over the mesh's last dimension.

    `held` is the offload policy. `runs_on`: the device type to optimize for, if tensors are traced
    on another. `reshards`: blocks free their gathered parameters after the forward and gather them
    again for the backward. Parameters outside of blocks stay gathered in between, because their
    backward directly follows their forward. `replicated` parameters stay whole on each rank.
    Collective.
    """
    near = peer_memory_group(mesh.get_group(mesh.ndim - 1)) if mesh.device_type == "cpu" else None
    if precision in SHARD_DTYPES:
        compute_in_fp32(module, runs_on)
    whole = set(replicated)
    done: set[nn.Parameter] = set(whole)
    for number, part in enumerate((*blocks, module)):
        own = [p for p in part.parameters() if p not in done]
        sharded = fully_shard(
            part,
            mesh=mesh,
            reshard_after_forward=reshards and part is not module,
            mp_policy=policy_of(own, precision),
            offload_policy=held,
            ignored_params=whole,
        )
        done.update(part.parameters())
        if near is not None:
            sharded.set_custom_all_gather(_PeerAllGather(near, number))
            sharded.set_custom_reduce_scatter(_PeerReduceScatter(near, number))


def find_unshardable(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that `fully_shard` cannot shard; make all others contiguous.

    It cannot shard scalars and empty tensors, whose first dimension cannot be split, or parameters
    that several units share (a unit is a block, or the rest of the module). A unit also reduces all
    gradients in one dtype, here that of most of its values, so it cannot shard trained parameters
    of other dtypes.
    """
    units = _modules_by_unit(module, blocks)
    owners = Counter(p for parts in units for p in _direct_parameters(parts))
    found: dict[nn.Parameter, None] = {}
    for unit in map(_direct_parameters, units):
        sizes: Counter[torch.dtype] = Counter()
        for parameter in unit:
            if parameter.requires_grad and parameter.is_floating_point():
                sizes[parameter.dtype] += parameter.numel()
        most = sizes.most_common(1)[0][0] if sizes else None
        for parameter in unit:
            other = parameter.requires_grad and parameter.dtype != most
            if not (parameter.dim() and parameter.numel()) or owners[parameter] > 1 or other:
                found[parameter] = None
            else:
                parameter.data = parameter.data.contiguous()
    return list(found)


def refuse_method_names(named: Iterable[tuple[str, nn.Module]], strategy: str) -> None:
    """Raise BadInputError if a block has an attribute that a method of FSDPModule would hide."""
    theirs = [name for name in vars(FSDPModule) if not name.startswith("_")]
    for path, block in named:
        held = (*block._modules, *block._parameters, *block._buffers)
        clash = next((n for n in theirs if hasattr(type(block), n) or n in held), None)
        if clash is not None:
            raise BadInputError(
                f"block {path!r} ({type(block).__name__}) has {clash!r}, but strategy {strategy} "
                "uses torch's sharded modules, which have a method of that name. Rename it, pass "
                "blocks=[] to parallelize to treat the model as one block, or use strategy ddp or "
                "zero1."
            )


def keep_class_names(blocks: Mapping[nn.Module, type]) -> None:
    """Restore the class names of sharded modules, because user code may check them."""
    for block, kind in blocks.items():
        type(block).__name__, type(block).__qualname__ = kind.__name__, kind.__qualname__


def _modules_by_unit(module: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return the modules of each unit: each block without its nested blocks, then the rest.

    Each list is in the order of `module.modules()`, which is the same on all ranks.
    """
    within = {block: set(block.modules()) for block in blocks}
    units = []
    for block, parts in within.items():
        inner = [within[one] for one in parts & within.keys() if one is not block]
        units.append(parts.difference(*inner))
    units.append(set(module.modules()).difference(*within.values()))
    place = {part: number for number, part in enumerate(module.modules())}
    return [sorted(parts, key=place.__getitem__) for parts in units]


def _direct_parameters(parts: Iterable[nn.Module]) -> dict[nn.Parameter, None]:
    return {p: None for part in parts for p in part.parameters(recurse=False)}


def policy_of(parameters: Iterable[nn.Parameter], precision: Precision) -> MixedPrecisionPolicy:
    """Return the policy by which `fully_shard` casts the parameters and gradients of a unit."""
    dtypes = SHARD_DTYPES.get(precision)
    if dtypes is None or not all(p.is_floating_point() for p in parameters):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=_DTYPES[dtypes.gathered],
        reduce_dtype=_DTYPES[dtypes.reduced],
        cast_forward_inputs=False,
    )


class _PeerCollective:
    def __init__(self, near: PeerMemoryGroup, unit: int) -> None:
        self._near, self._unit = near, unit


class _PeerAllGather(_PeerCollective, DefaultAllGather):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        all_gather_directly(output_tensor, input_tensor, group.group_name)
        self._near.all_gather(output_tensor, input_tensor, self._unit)


class _PeerReduceScatter(_PeerCollective, DefaultReduceScatter):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Any:  # work to wait for, if any
        reduce_scatter_directly(output_tensor, input_tensor, group.group_name)
        averaged = op == dist.ReduceOp.AVG  # otherwise summed
        self._near.reduce_scatter(
            output_tensor, input_tensor, 1 / group.size() if averaged else 1.0, self._unit
        )
