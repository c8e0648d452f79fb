"""One file per strategy; `apply(request)` lays an objective out on the ranks of a plan."""

from importlib import import_module

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from outpace.nn.loss import LanguageModelObjective
from outpace.nn.torch_versions import split_backward_refusal
from outpace.parallel.api import Layout, Pass, Request
from outpace.parallel.gradient_use import ranks_may_differ
from outpace.parallel.offload import gathers, require, to_disk
from outpace.parallel.shared_buffers import SharedBuffers
from outpace.parallel.tensors import make_equal
from outpace.records.errors import BadInputError
from outpace.records.pipelines import SCHEDULES
from outpace.records.plan import Strategy
from outpace.records.ranks import Ranks

__all__ = ["Layout", "Pass", "Request", "apply", "why_not"]

# Strategies that share a file; every other has one of its own name.
_FILES = {
    **dict.fromkeys(("zero2", "zero3", "hsdp"), "sharded"),
    **dict.fromkeys(SCHEDULES, "pipeline"),
    "tp": "tensor",
    "cp": "context",
    "3d": "combined",
}
# Every rank has all of a model's buffers, and a share of the samples.
_REPLICATED = ("ddp", "zero1", "zero2", "zero3", "hsdp", "ring", "horovod")
# A person's own model is cut by the names of its parts.
_OWN_FILES = {**dict.fromkeys(SCHEDULES, "own_pipeline"), "tp": "own_tensor"}


def apply(request: Request) -> Layout:
    """Lay the objective (on its device, or on meta: see `fill`) out as the plan's strategy says."""
    strategy, plan = request.plan.strategy, request.plan
    if plan.training_obstacle is not None:
        raise BadInputError(
            f"outpace does not train this plan: {plan.training_obstacle}. Write it for another "
            "trainer with outpace plan --emit, or take the next that outpace plan proposes."
        )
    require(plan, request.device)
    lacking = _split_backward_refusal(strategy, request.device)
    if lacking is not None:
        raise BadInputError(f"{lacking}.")
    own = not isinstance(request.objective, LanguageModelObjective)
    files = {**_FILES, **_OWN_FILES} if own else _FILES
    if own and request.plan.world_size > 1:
        make_equal(request.objective)  # a person's builder may draw from anything
    file = files.get(strategy, strategy)
    if strategy == "single" and gathers(plan, request.device):
        file = "sharded"
    module = import_module(f"outpace.parallel.{file}")
    before = set(_world.pg_map)
    layout: Layout = module.apply(request)
    if ranks_may_differ(request.objective) and strategy in _REPLICATED and plan.world_size > 1:
        layout.buffers = SharedBuffers(layout.model, request.device)
    if plan.offload_parameters == "disk":
        assert request.scratch is not None
        to_disk(layout, request.scratch)
    _wait_as_the_default(set(_world.pg_map) - before, request.device)
    return layout


def _wait_as_the_default(groups: set[dist.ProcessGroup], device: torch.device) -> None:
    """New groups, and those of a mesh, would have torch's timeout, not the default group's."""
    if not groups:
        return
    assert dist.group.WORLD is not None
    options = getattr(dist.group.WORLD._get_backend(device), "options", None)
    if options is not None:  # MPI has none
        for group in groups:
            group._get_backend(device)._set_default_timeout(options._timeout)


def why_not(strategy: Strategy, ranks: Ranks, device: torch.device) -> str | None:
    """What a strategy lacks on this machine, as a sentence; None where nothing."""
    if strategy != "horovod":
        return _split_backward_refusal(strategy, device)
    reason: str | None = import_module("outpace.parallel.horovod").why_not(ranks)
    return reason


def _split_backward_refusal(strategy: Strategy, device: torch.device) -> str | None:
    """Why this torch cannot run a zero-bubble schedule on a CPU; None where it can."""
    schedule = SCHEDULES.get(strategy)
    if schedule is None or not schedule.splits_backward or device.type != "cpu":
        return None
    return split_backward_refusal(strategy)
