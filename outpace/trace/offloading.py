"""Simulated offloading in a trace, without a disk or a second device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from outpace.nn.scratch_files import Region, Scratch
from outpace.nn.torch_versions import fsdp_param_groups
from outpace.optim import offload
from outpace.parallel import Layout
from outpace.parallel.tensors import local
from outpace.records.plan import Plan
from outpace.trace.allocation_tracer import AllocationTracer
from outpace.trace.device import Rules


class _EmptyRegion(Region):
    """Empty region, which takes no memory and never waits."""

    def __init__(self) -> None:
        pass

    def prefetch(self) -> None:
        """Do nothing, since nothing is read."""

    def release(self) -> None:
        """Do nothing, since no memory is held."""


class OffloadScratch(Scratch):
    """Scratch whose tensors `watch` counts as offloaded instead of as device memory."""

    def __init__(self, watch: AllocationTracer) -> None:
        super().__init__()
        self._watch = watch

    def copy_permanently(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Region]:
        """Return the tensors unchanged; from now on, their memory counts as offloaded."""
        self._watch.move_away(tensors)
        return list(tensors), _EmptyRegion()

    def region_of(self, tensor: Tensor) -> Region | None:
        """Return None, since nothing needs prefetching."""
        return None

    def copy_temporarily(self, tensor: Tensor) -> tuple[Tensor, Region]:
        """Return a copy that counts as offloaded."""
        copied = torch.empty_like(tensor)
        self._watch.move_away([copied])
        return copied, _EmptyRegion()


def offload_to_disk(plan: Plan, rules: Rules) -> Plan:
    """Replace offloading to the host, which is refused on a CPU, by offloading to disk."""
    if rules.device == "cpu" or plan.offload_activations != "cpu":
        return plan
    return plan.model_copy(update={"offload_activations": "disk"})


def lies_on_host(plan: Plan, rules: Rules) -> bool:
    """Return whether the plan keeps shards, their gradients and optimizer states in host memory."""
    return plan.offload_parameters == "cpu" and rules.device != "cpu"


def keep_on_host(watch: AllocationTracer, layout: Layout) -> None:
    """Count shards, and their reduced gradients, as offloaded."""
    watch.move_away(local(parameter) for _, parameter in layout.named_parameters())
    parts = (part for part in layout.objective.modules() if isinstance(part, FSDPModule))
    for part in parts:
        for group in fsdp_param_groups(part._get_fsdp_state()):
            group.post_backward = partial(_reduce, watch, group, group.post_backward)


def _reduce(watch: AllocationTracer, group: Any, reduce: Callable[..., None], *unused: Any) -> None:
    """Reduce like `fully_shard`, and copy gradients to the shards' memory."""
    reduce(*unused)
    gradients = (held.sharded_param.grad for held in group.fsdp_params)
    watch.move_away(local(gradient) for gradient in gradients if gradient is not None)


def _count_device_copies() -> Any:
    """Patch FSDP's gathers to copy shards from the host to the device first."""
    inputs = vars(FSDPParam)["all_gather_inputs"].fget

    def copy_inputs(held: Any) -> Any:
        shard = held._sharded_param_data
        if held.offload_to_cpu and held.sharded_state is ShardedState.SHARDED:
            held._sharded_param_data = shard.clone()
        try:
            return inputs(held)
        finally:
            held._sharded_param_data = shard

    return patch.object(FSDPParam, "all_gather_inputs", property(copy_inputs))


@contextmanager
def separate_host_memory(watch: AllocationTracer, rules: Rules) -> Iterator[None]:
    """Count copies to the device as device memory, but not copies to the host."""
    if rules.device == "cpu":
        yield
        return

    def host_copy(lanes: Any, tensor: Tensor, wait: bool = False) -> Tensor:
        memory = torch.empty_like(tensor)
        watch.move_away([memory])
        return memory.copy_(tensor)

    with patch.object(offload._Lanes, "host_copy", host_copy), _count_device_copies():
        yield
