"""Parameters in host memory or on disk, and optimizers that keep their state there.

Ren et al., "ZeRO-Offload", arXiv 2101.06840: `fully_shard` keeps the shards in host memory, sends
them to the device when they are gathered, and sends gradients back as soon as they are reduced,
during computation. A single process is a group of one.

Rajbhandari et al., "ZeRO-Infinity", arXiv 2104.07857, §5: shards, or whole parameters if the CPU
computes, are in memory-mapped files. Each block's parameters are prefetched during the previous
block, and dropped from memory after their use.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from outpace.nn.dtensor import is_spread
from outpace.nn.model_options import find_blocks
from outpace.nn.offload import require_place
from outpace.nn.scratch_files import Region, Scratch, prefetch, release
from outpace.nn.torch_versions import fsdp_param_groups
from outpace.optim.build import Build, Groups
from outpace.optim.offload import with_offloading
from outpace.parallel.layout import Layout
from outpace.parallel.tensors import local
from outpace.records.errors import BadInputError, join_or
from outpace.records.plan import GATHERS, Plan

if TYPE_CHECKING:
    from torch.distributed.fsdp import OffloadPolicy


def gathers(plan: Plan, device: torch.device) -> bool:
    """Return whether offloaded parameters must be gathered on the device before their use."""
    from_disk = plan.offload_parameters == "disk" and device.type != "cpu"
    return plan.offload_parameters == "cpu" or from_disk


def parameter_device(plan: Plan, device: torch.device) -> torch.device:
    """Return the device of a rank's parameters while they are not gathered."""
    return torch.device("cpu") if plan.offload_parameters == "cpu" else device


def offload_policy(plan: Plan, device: torch.device) -> "OffloadPolicy":
    """Return the offload policy for `fully_shard`."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    if not gathers(plan, device):
        return OffloadPolicy()
    # Mapped files cannot be page-locked.
    locked = plan.offload_parameters == "cpu" and device.type == "cuda"
    return CPUOffloadPolicy(pin_memory=locked)


def require(plan: Plan, device: torch.device) -> None:
    """Raise BadInputError for offload options that the device does not support."""
    require_place(plan.offload_activations, device)
    if plan.strategy not in GATHERS and gathers(plan, device):
        raise BadInputError(
            f"offload_parameters {plan.offload_parameters}: strategy {plan.strategy} computes on "
            f"{device.type} and keeps its parameters there. Use strategy {join_or(GATHERS)}."
        )


def group_of_one(device: torch.device) -> DeviceMesh:
    """Return a mesh that contains only this rank, for `fully_shard`."""
    # Gradients are on the CPU, so fp16 overflow is detected there.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    mine = dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)
    assert isinstance(mine, dist.ProcessGroup)
    return DeviceMesh.from_group(mine, device.type, mesh_dim_names=("dp_shard",))


def place_optimizer(
    layout: Layout, plan: Plan, scratch: Scratch, groups: Groups, build: Build
) -> torch.optim.Optimizer:
    """Return the layout's optimizer, with its state offloaded if the plan says so."""
    return layout.make_optimizer(groups, with_offloading(build, plan, scratch))


@torch.no_grad()
def to_disk(layout: Layout, scratch: Scratch) -> None:
    """Move this rank's parameters into memory-mapped files, and prefetch each block before its use.

    Call this before the first forward, and before creating the optimizer, which checks where
    parameters are stored.
    """
    held = _fsdp_state_by_parameter(layout)
    for _, parameter in layout.named_parameters():
        sharded = held.get(parameter)
        old = local(parameter) if sharded is None else sharded._sharded_param_data
        (memory,), region = scratch.copy_permanently([old])
        if sharded is not None:  # includes the padding that makes shards equal in length
            sharded._sharded_param_data = memory
            memory = memory[: local(parameter).numel()].view(local(parameter).shape)
        if is_spread(parameter):
            parameter._local_tensor = memory
        else:
            parameter.data = memory
        region.release()
    _prefetch_blocks(layout, scratch)


def _fsdp_state_by_parameter(layout: Layout) -> dict[Tensor, Any]:
    from torch.distributed.fsdp import FSDPModule

    states = [m._get_fsdp_state() for m in layout.objective.modules() if isinstance(m, FSDPModule)]
    groups = [group for state in states for group in fsdp_param_groups(state)]
    return {held.sharded_param: held for group in groups for held in group.fsdp_params}


def _prefetch_blocks(layout: Layout, scratch: Scratch) -> None:
    """Register hooks that prefetch the next block in each pass and release used blocks."""
    blocks = _blocks_or_empty(layout.model)
    lies = {name: scratch.region_of(local(p)) for name, p in layout.named_parameters()}
    names = {id(module): name for name, module in layout.model.named_modules()}
    of_block = [
        [region for name, region in lies.items()
         if region is not None and name.startswith(f"{names[id(block)]}.")]
        for block in blocks
    ]  # fmt: skip
    nothing: list[Region] = []
    for number, block in enumerate(blocks):
        before = of_block[number - 1] if number else nothing
        after = of_block[number + 1] if number + 1 < len(blocks) else nothing
        _add_prefetch_hooks(block, before, of_block[number], after)


def _add_prefetch_hooks(
    block: nn.Module, before: Sequence[Region], current: Sequence[Region], after: Sequence[Region]
) -> None:
    def prefetch_next(module: nn.Module, inputs: Any) -> None:
        prefetch(after)

    def release_current(module: nn.Module, inputs: Any, output: Any) -> None:
        release(current)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(prefetch_previous)

    def prefetch_previous(gradient: Tensor) -> None:
        release(after)
        prefetch(before)

    block.register_forward_pre_hook(prefetch_next)
    block.register_forward_hook(release_current)


def _blocks_or_empty(model: nn.Module) -> Sequence[nn.Module]:
    try:
        return find_blocks(model)
    except BadInputError:  # no blocks: an empty stage, or a custom model
        return ()
