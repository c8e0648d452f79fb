"""One of several strategies in the same job: the cost of its step on each rank."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from outpace.jobs.defaults import resolve_plan
from outpace.jobs.ranks.process_groups import Groups
from outpace.parallel import why_not
from outpace.records.errors import BadInputError
from outpace.records.machine import Machine
from outpace.records.plan import Plan, Strategy
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.trace.allocations import Allocations
from outpace.training.collective_counter import CollectiveCounter
from outpace.training.synthetic import SyntheticSteps, SyntheticTraining
from outpace.training.timing import thread_busy_s

_WARMUP_STEPS = 2  # for allocators, buckets, and shapes for which pipelines are built


@dataclass(frozen=True)
class StepDuration:
    """A step on this rank: its time, and the computing time of its main thread."""

    seconds: float
    busy_s: float


@dataclass(frozen=True)
class StepCost:
    """Cost of a step of a strategy on this rank.

    `sent_bytes` and `collectives` are those that `CollectiveCounter` counts. `peak_bytes` is the
    largest size of all tensors, `left_bytes` their size between two steps: weights, optimizer
    state, buffers.
    """

    sent_bytes: int
    collectives: dict[str, int]
    peak_bytes: int
    left_bytes: int


def plans(
    strategy: Strategy, course: SyntheticTraining, ranks: Ranks, machine: Machine
) -> Iterator[Plan | str]:
    """Yield the plans that `outpace train` makes from a strategy's name, or the reason why it
    refuses.

    Half of the ranks are parameter servers, since one server and three workers could not share a
    global batch that is a power of two. The second plan for servers lets them update parameters.
    """
    values = {
        "strategy": strategy,
        "global_batch": course.global_batch,
        "precision": "fp32",
        "servers": ranks.world_size // 2 if strategy == "ps" else None,
    }
    world = Ranks() if strategy == "single" else ranks
    lacking = why_not(strategy, ranks, torch.device("cpu"))
    if lacking is not None:
        yield lacking
        return
    try:
        settings = TrainSettings.parse(values, strategy)
        plan = resolve_plan(settings, world, torch.device("cpu"), machine)
    except BadInputError as error:
        yield str(error)
        return
    yield plan
    if strategy == "ps":
        yield plan.model_copy(update={"server_updates": True})


class StrategyRun:
    """A laid-out plan that is ready to run steps. Ranks outside of it do nothing.

    Every rank of the job must create one and call it in the same order.
    """

    def __init__(self, plan: Plan, course: SyntheticTraining, groups: Groups) -> None:
        self.plan = plan
        self._groups = groups
        with Allocations() as allocated:
            self._steps = SyntheticSteps(
                plan, course, groups.ranks, torch.device("cpu"), groups.control
            )
            if groups.ranks.rank < plan.world_size:
                for _ in range(_WARMUP_STEPS):
                    self._steps.step()
        wire = CollectiveCounter()
        with wire:
            self._steps.step()
        self.cost = StepCost(
            wire.tally.bytes,
            dict(wire.tally.collectives),
            allocated.peak_bytes,
            allocated.left_bytes,
        )

    def step(self) -> StepDuration:
        """Run one step, which all ranks start together."""
        dist.barrier(self._groups.control)
        began_s, busy_s = time.perf_counter(), thread_busy_s()
        self._steps.step()
        return StepDuration(time.perf_counter() - began_s, thread_busy_s() - busy_s)


def gather_from_ranks(groups: Groups, mine: Any) -> list[Any]:
    """Return each rank's value, on every rank. Collective."""
    said: list[Any] = [None] * groups.ranks.world_size
    dist.all_gather_object(said, mine, group=groups.control)
    return said
