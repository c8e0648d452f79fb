"""Parallelism strategies, one per module, and `apply`, which runs the one that a plan names."""

from importlib import import_module

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from outpace.nn.loss import LanguageModelObjective
from outpace.nn.torch_versions import split_backward_refusal
from outpace.parallel.gradient_use import ranks_may_differ
from outpace.parallel.layout import Layout, LayoutRequest, StepHooks
from outpace.parallel.offload import gathers, require, to_disk
from outpace.parallel.shared_buffers import SharedBuffers
from outpace.parallel.tensors import make_equal
from outpace.records.errors import BadInputError
from outpace.records.pipelines import SCHEDULES
from outpace.records.plan import Strategy
from outpace.records.ranks import Ranks
from outpace.records.strategies import TRAITS

__all__ = ["Layout", "LayoutRequest", "StepHooks", "apply", "why_not"]


def apply(request: LayoutRequest) -> Layout:
    """Lay out the objective of `request` on its ranks, according to its plan.

    The objective may be on the meta device (see `deferred_init`). Raises BadInputError if outpace
    cannot train with the plan, or if the device or this version of torch does not support it.
    """
    strategy, plan = request.plan.strategy, request.plan
    if plan.training_obstacle is not None:
        raise BadInputError(
            f"outpace does not train this plan: {plan.training_obstacle}. Export it to another "
            "trainer with outpace plan --emit, or use the next plan that outpace plan proposes."
        )
    require(plan, request.device)
    lacking = _explain_no_split_backward(strategy, request.device)
    if lacking is not None:
        raise BadInputError(f"{lacking}.")
    is_custom = not isinstance(request.objective, LanguageModelObjective)
    traits = TRAITS[strategy]
    if is_custom and request.plan.world_size > 1:
        make_equal(request.objective)  # the user's `build` may draw random numbers
    # Custom models are split by the names of their submodules.
    file = (traits.custom_module if is_custom else None) or traits.module
    if strategy == "single" and gathers(plan, request.device):
        file = "sharded"
    module = import_module(f"outpace.parallel.{file}")
    before = set(_world.pg_map)
    layout: Layout = module.apply(request)
    if ranks_may_differ(request.objective) and traits.shares_buffers and plan.world_size > 1:
        layout.buffers = SharedBuffers(layout.model, request.device)
    if plan.offload_parameters == "disk":
        assert request.scratch is not None
        to_disk(layout, request.scratch)
    _apply_default_timeout(set(_world.pg_map) - before, request.device)
    return layout


def _apply_default_timeout(groups: set[dist.ProcessGroup], device: torch.device) -> None:
    if not groups:
        return
    assert dist.group.WORLD is not None
    options = getattr(dist.group.WORLD._get_backend(device), "options", None)
    if options is not None:  # MPI has none
        for group in groups:
            group._get_backend(device)._set_default_timeout(options._timeout)


def why_not(strategy: Strategy, ranks: Ranks, device: torch.device) -> str | None:
    """Explain why a strategy cannot run on this machine; return None if it can."""
    if strategy != "horovod":
        return _explain_no_split_backward(strategy, device)
    reason: str | None = import_module("outpace.parallel.horovod").why_not(ranks)
    return reason


def _explain_no_split_backward(strategy: Strategy, device: torch.device) -> str | None:
    schedule = SCHEDULES.get(strategy)
    if schedule is None or not schedule.splits_backward or device.type != "cpu":
        return None
    return split_backward_refusal(strategy)
