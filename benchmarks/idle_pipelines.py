"""Idle time of a pipeline: measured, by the closed form, and by simulation of its schedule.

Stages either compute or wait for a set time, in the same schedule with the same sends and receives.
Waiting stages need no core, so even more stages than cores show only the effect of the schedule.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outpace.jobs.ranks.process_groups import Groups
from outpace.nn.loss import LanguageModelObjective
from outpace.nn.transformer import Transformer
from outpace.parallel import Layout, LayoutRequest, StepHooks, apply
from outpace.planner.pipeline.simulator import (
    Action,
    StageTime,
    Timeline,
    idle_share_formula,
    simulate,
)
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan, Strategy

Batch = dict[str, Tensor]


class _Pause(torch.autograd.Function):
    """Function that returns its input after a wait."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class WaitingBlock(nn.Module):
    """Block that only waits, for the time that a stage is set to take.

    Gradients of inputs and of weights are computed separately, since a schedule may request them
    separately.
    """

    def __init__(self, stage_time: StageTime) -> None:
        super().__init__()
        self.stage_time = stage_time
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, *_: object) -> Tensor:
        """Return `x` after the wait."""
        given = self.stage_time
        passed: Tensor = _Pause.apply(x, given.forward_s, given.inputs_s)  # type: ignore[no-untyped-call]
        own: Tensor = _Pause.apply(self.weight, 0.0, given.weights_s)  # type: ignore[no-untyped-call]
        return passed + own


def waiting_pipeline(
    strategy: Strategy, microbatches: int, times: Sequence[StageTime], groups: Groups
) -> tuple[Layout, Batch]:
    """Return a pipeline with a stage for each of `times`, and a batch for it."""
    ranks = groups.ranks.world_size
    spec = ModelSpec.parse(
        {"family": "llama", "layers": len(times), "hidden": 8, "heads": 1, "ffn": 8, "vocab": 16,
         "max_positions": 8},
        "idle",
    )  # fmt: skip
    model = Transformer(spec)
    for number, stage_time in enumerate(times):
        model.blocks[number] = WaitingBlock(stage_time)
    plan = Plan(strategy=strategy, pp=ranks, pp_microbatches=microbatches)
    if plan.stages != len(times):
        raise BadInputError(f"{strategy} has {plan.stages} stages here, but {len(times)} times")
    objective = LanguageModelObjective(model, "plain")
    layout = apply(LayoutRequest(objective, plan, groups.ranks, torch.device("cpu")))
    tokens = torch.zeros(microbatches, 4, dtype=torch.int64)
    return layout, {"tokens": tokens, "targets": tokens}


@dataclass(frozen=True)
class StepObservation:
    """Observation of one step: its duration, and each action's time by its position in the
    orders.
    """

    makespan_s: float
    seconds: Mapping[Action, float]
    idle_share: float


def watch(
    layout: Layout, batch: Batch, todo: Sequence[Sequence[Action]], groups: Groups
) -> StepObservation:
    """Run a step and record the times of each rank's actions. Every rank of the job calls this."""
    marks: list[tuple[str, float]] = []
    given = StepHooks(
        scale=lambda loss_sum: loss_sum / batch["targets"].numel(),
        mark=lambda part: marks.append((part, time.perf_counter())),
    )
    dist.barrier(groups.control)
    marks.append(("communication", time.perf_counter()))
    layout.gradients([batch], given)
    marks.append(("communication", time.perf_counter()))
    for parameter in layout.model.parameters():
        parameter.grad = None
    mine = _action_times(marks, todo[groups.ranks.rank])
    said: list[Any] = [None] * groups.ranks.world_size
    # The processes are on one host, whose monotonic clock they share.
    dist.all_gather_object(said, (marks[0][1], marks[-1][1], mine), group=groups.control)
    makespan_s = max(end_s for _, end_s, _ in said) - min(begin_s for begin_s, _, _ in said)
    seconds = {action: took for _, _, done in said for action, took in done.items()}
    return StepObservation(
        makespan_s, seconds, 1 - sum(seconds.values()) / (makespan_s * len(said))
    )


def _action_times(
    marks: Sequence[tuple[str, float]], order: Sequence[Action]
) -> dict[Action, float]:
    """Return how long each action took: the time between two communications, in their order.

    The first stage needs no gradients of its inputs, so torch computes none.
    """
    spans: list[float] = []
    for (before, begin_s), (part, end_s) in pairwise(marks):
        if part == "communication":
            continue
        if before == "communication":
            spans.append(0.0)
        spans[-1] += end_s - begin_s
    doing = [action for action in order if (action.kind, action.stage) != ("I", 0)]
    done = dict.fromkeys(order, 0.0)
    done.update(zip(doing, spans, strict=True))
    return done


@dataclass(frozen=True)
class Idleness:
    """Shares of a step in which ranks are idle: measured, by formula, and simulated.

    `simulated` uses the stages' fixed times, if any; `replayed` uses the times of the measured
    step, so its difference from the measured share is the cost of sending.
    """

    measured: float
    formula: float | None
    simulated: float | None
    replayed: float
    makespan_s: float
    simulated_makespan_s: float | None


def judge(
    strategy: Strategy,
    seen: StepObservation,
    todo: Sequence[Sequence[Action]],
    times: Sequence[StageTime],
) -> Idleness:
    """Compare an observed step with its expectation. `times` may be unknown: ()."""
    microbatches = len({action.microbatch for order in todo for action in order})
    played: Timeline | None = None
    if times:
        played = simulate(todo, lambda action: expected_time_s(action, times))
    return Idleness(
        measured=seen.idle_share,
        formula=idle_share_formula(strategy, len(todo), microbatches),
        simulated=None if played is None else played.idle_share,
        replayed=simulate(todo, seen.seconds.__getitem__).idle_share,
        makespan_s=seen.makespan_s,
        simulated_makespan_s=None if played is None else played.makespan_s,
    )


def expected_time_s(action: Action, times: Sequence[StageTime]) -> float:
    """Return a stage's time. The first stage needs no gradients of inputs, so all of its backward
    is in the weights' part.
    """
    whole = times[action.stage]
    if action.stage == 0 and action.kind in ("I", "W"):
        return 0.0 if action.kind == "I" else whole.seconds("B")
    return whole.seconds(action.kind)
