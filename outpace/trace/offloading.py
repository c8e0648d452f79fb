"""Offloading in a trace, simulated without a disk or a second device."""

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
    """Region of a scratch file that holds no memory, so that it is always ready to read."""

    def __init__(self) -> None:
        pass

    def prefetch(self) -> None:
        """Do nothing, since nothing is read."""

    def release(self) -> None:
        """Do nothing, since no memory is held."""


class OffloadScratch(Scratch):
    """Scratch that writes no files. `watch` counts the tensors copied to it as offloaded."""

    def __init__(self, watch: AllocationTracer) -> None:
        super().__init__()
        self._watch = watch

    def copy_permanently(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Region]:
        """Return the tensors themselves, which count as offloaded from now on."""
        self._watch.mark_offloaded(tensors)
        return list(tensors), _EmptyRegion()

    def region_of(self, tensor: Tensor) -> Region | None:
        """Return None, since nothing needs prefetching."""
        return None

    def copy_temporarily(self, tensor: Tensor) -> tuple[Tensor, Region]:
        """Return a copy that counts as offloaded."""
        copied = torch.empty_like(tensor)
        self._watch.mark_offloaded([copied])
        return copied, _EmptyRegion()


def offload_to_disk(plan: Plan, rules: Rules) -> Plan:
    """Return the plan with activations offloaded to disk, if it offloads them to the host.

    A trace for an accelerator runs on CPU tensors, for which offloading to the host is refused. The
    plan for a CPU is unchanged.
    """
    if rules.device == "cpu" or plan.offload_activations != "cpu":
        return plan
    return plan.model_copy(update={"offload_activations": "disk"})


def keeps_shards_on_host(plan: Plan, rules: Rules) -> bool:
    """Return whether the plan keeps shards, their gradients and optimizer states in host memory."""
    return plan.offload_parameters == "cpu" and rules.device != "cpu"


def keep_on_host(watch: AllocationTracer, layout: Layout) -> None:
    """Count parameter shards and their reduced gradients as offloaded."""
    watch.mark_offloaded(local(parameter) for _, parameter in layout.named_parameters())
    parts = (part for part in layout.objective.modules() if isinstance(part, FSDPModule))
    for part in parts:
        for group in fsdp_param_groups(part._get_fsdp_state()):
            group.post_backward = partial(_reduce_and_offload, watch, group, group.post_backward)


def _reduce_and_offload(
    watch: AllocationTracer, group: Any, reduce: Callable[..., None], *unused: Any
) -> None:
    reduce(*unused)
    gradients = (held.sharded_param.grad for held in group.fsdp_params)
    watch.mark_offloaded(local(gradient) for gradient in gradients if gradient is not None)


def _patch_device_copies() -> Any:
    """Patch FSDP so that it copies offloaded shards to the device before gathering them.

    The shards are CPU tensors here, so FSDP would not copy them.
    """
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
    """Count copies to the host as offloaded, and others as device memory, in the context."""
    if rules.device == "cpu":
        yield
        return

    def host_copy(streams: Any, tensor: Tensor, wait: bool = False) -> Tensor:
        memory = torch.empty_like(tensor)
        watch.mark_offloaded([memory])
        return memory.copy_(tensor)

    with patch.object(offload._CopyStreams, "host_copy", host_copy), _patch_device_copies():
        yield
