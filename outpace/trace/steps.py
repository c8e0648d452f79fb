"""The first two steps of a training run, for tracing and measuring memory."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from outpace.nn.lora import add_adapters, first_value
from outpace.nn.loss import LanguageModelObjective
from outpace.nn.mixed_precision import MixedPrecision, keeps_casts, make_mixed
from outpace.nn.model_options import apply_options
from outpace.nn.scratch_files import Scratch
from outpace.nn.transformer import Transformer, use_dense_masks
from outpace.optim.build import begin_step, make_optimizer
from outpace.parallel import Layout, LayoutRequest, StepHooks
from outpace.parallel.deferred_init import fill, fills_later
from outpace.parallel.offload import place_optimizer
from outpace.planner.model.shapes import parameter_shapes
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.trace.allocation_tracer import AllocationTracer
from outpace.trace.device import Rules
from outpace.trace.offloading import keep_on_host, keeps_shards_on_host

STEPS = 2  # only the second one starts with optimizer state
CPU = torch.device("cpu")
_ANY_LR = 1e-3  # used if none is set yet
LayOut = Callable[[LayoutRequest, Any], Layout]


@dataclass(frozen=True)
class Workload:
    """Training of one of outpace's models, in steps of `accumulation` passes.

    `settings` configure the optimizer.
    """

    spec: ModelSpec
    plan: Plan
    seq_len: int
    accumulation: int
    settings: TrainSettings

    def batch(self) -> dict[str, Tensor]:
        """Return the batch of one pass on a rank that reads data, with arbitrary tokens."""
        shape = (self.plan.samples_read, self.seq_len)
        batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "targets")}
        if self.settings.document_attention:
            batch["documents"] = torch.zeros(shape, dtype=torch.int32)
        return batch

    def dropout_context(self, rules: Rules) -> AbstractContextManager[object]:
        """Return a context in which dropout saves what it saves on the traced device."""
        return rules.dropout_context(self.spec.dropout > 0, self.plan)

    def make_mixed(self) -> MixedPrecision:
        """Return the plan's mixed precision."""
        plan, cache = self.plan, keeps_casts(self.settings.autocast_cache, False)
        return make_mixed(plan.precision, CPU, cache, fully_shards=plan.fully_shards)

    def lay_out_model(
        self, mixed: MixedPrecision, ranks: Ranks, watch: AllocationTracer, lay_out: LayOut,
        rules: Rules, scratch: Scratch,
    ) -> Layout:  # fmt: skip
        """Build the model and apply the plan to it on this rank."""
        plan, objective = self.plan, _build_objective(self, mixed)
        rules.prepare(objective)
        watch.allocate_permanently(rules.workspaces(), "workspaces")
        apply_options(objective.model, plan, scratch=scratch, device=CPU)
        if plan.compile:
            from outpace.trace.compiled_region import trace_compiled

            trace_compiled(objective.model, plan, watch)
        layout = lay_out(LayoutRequest(objective, plan, ranks, CPU, scratch=scratch), self.batch())
        if fills_later(plan):
            shapes = parameter_shapes(self.spec)

            def value_of(name: str) -> torch.Tensor:
                adapter = first_value(name, shapes, plan.lora_rank, 0)
                return (
                    adapter
                    if adapter is not None
                    else torch.empty(shapes[name], dtype=torch.float32)
                )

            fill(layout, CPU, value_of)
        return layout


class Trainable(Protocol):
    """Training that `run_steps` can run: a `Workload`, or a `ModuleWorkload` of a custom model."""

    @property
    def plan(self) -> Plan: ...
    @property
    def accumulation(self) -> int: ...
    @property
    def settings(self) -> TrainSettings: ...
    def batch(self) -> Any: ...
    def dropout_context(self, rules: Rules) -> AbstractContextManager[object]: ...
    def make_mixed(self) -> MixedPrecision: ...
    def lay_out_model(
        self, mixed: MixedPrecision, ranks: Ranks, watch: AllocationTracer, lay_out: LayOut,
        rules: Rules, scratch: Scratch,
    ) -> Layout: ...  # fmt: skip


def run_steps(
    work: Trainable,
    ranks: Ranks,
    watch: AllocationTracer,
    lay_out: LayOut,
    rules: Rules,
    scratch: Scratch,
) -> None:
    """Build the model, apply the plan and run two steps as the trainer does.

    Call this in the context of `watch`, which is told when each part of a step begins.
    """
    plan, away = work.plan, keeps_shards_on_host(work.plan, rules)
    lr = work.settings.lr or _ANY_LR
    with watch.on_host(away):
        mixed = work.make_mixed()
        layout = work.lay_out_model(mixed, ranks, watch, lay_out, rules, scratch)
        optimizer = make_optimizer(
            layout.named_parameters(),
            plan.optimizer,
            work.settings.model_copy(update={"lr": lr}),
            partial(place_optimizer, layout, plan, scratch),
            master_weights=mixed.keeps_masters,
        )
    if plan.optimizer_in_backward:
        layout.step_in_backward(optimizer)
    watch.register(layout.model, (parameter for _, parameter in layout.named_parameters()))
    if away:
        keep_on_host(watch, layout)
    for step in range(1, STEPS + 1):
        watch.begin_step(step)
        begin_step(optimizer, step, lr)
        _run_step(work, ranks, watch, layout, optimizer, mixed, away)


def _build_objective(work: Workload, mixed: MixedPrecision) -> LanguageModelObjective:
    """Create the model and its loss, in the dtype of the plan's weights.

    If the weights are filled in later, the model is on the meta device.
    """
    plan, before = work.plan, torch.get_default_dtype()
    torch.set_default_dtype(mixed.weights or before)  # modules cannot be cast under fake tensors
    try:
        with torch.device("meta" if fills_later(plan) else CPU):
            model = Transformer(work.spec)
    finally:
        torch.set_default_dtype(before)
    add_adapters(model, plan, work.settings.seed)
    if work.settings.compile is False:
        use_dense_masks(model)
    return LanguageModelObjective(model, plan.loss, mixed.dtype, plan.compile)


def _run_step(
    work: Trainable,
    ranks: Ranks,
    watch: AllocationTracer,
    layout: Layout,
    optimizer: torch.optim.Optimizer,
    mixed: MixedPrecision,
    on_host: bool,
) -> None:
    reads = work.plan.data_rank(ranks.rank) is not None
    batches = [work.batch() for _ in range(work.accumulation)] if reads else []
    for batch in batches:
        watch.classify((x for x in tree_leaves(batch) if isinstance(x, Tensor)), "inputs")
    watch.mark("data")
    given = StepHooks(mixed.cast, _scale_loss, watch.mark)
    if mixed.wide_sums and work.accumulation * work.plan.pp_microbatches > 1:
        layout.add_up_in_fp32()
    layout.gradients(batches or [None] * work.accumulation, given)
    if mixed.wide_gradients:
        layout.widen_gradients()
    watch.mark("communication")
    with watch.on_host(on_host):
        layout.clip(work.settings.clip, optimizer)
        optimizer.step()
    watch.classify(states(optimizer), "optimizer state")
    optimizer.zero_grad(set_to_none=True)
    if mixed.wide_gradients:
        layout.drop_wide_gradients()
    watch.mark("optimizer")


def _scale_loss(loss_sum: Tensor) -> Tensor:
    return loss_sum * 1.0


def states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield all tensors of an optimizer's state; for ZeRO-1, that of the optimizer inside."""
    within = getattr(optimizer, "optim", optimizer)
    for state in within.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
