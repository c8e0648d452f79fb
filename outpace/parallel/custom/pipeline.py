"""Pipelines of a custom model that is split at given or detected blocks.

Stages are in stage.py, the inspection with the first batch in pipeline_inspection.py. This module
splits the model, and sends messages between stages as the schedule requires.

The ranks of the first and the last stage both hold the parameters outside of the blocks (embedding,
head). The gradients of these parameters are summed over the two ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.pipelining import _backward
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.utils._pytree import tree_leaves

from outpace.nn.compiler_exclusion import has_compiled_parts, run_eagerly
from outpace.nn.extra_state import is_extra_state
from outpace.nn.torch_versions import nested_split_refusal
from outpace.optim.build import Build
from outpace.parallel.batches import cut
from outpace.parallel.batchnorm import by_micro_batch, commit
from outpace.parallel.blocks import (
    flatten_blocks,
    named_blocks,
    parameters_outside,
    refuse_scripted,
)
from outpace.parallel.custom.absent_parameters import AbsentParameters, Owner
from outpace.parallel.custom.message import Message, receive, send
from outpace.parallel.custom.pipeline_inspection import PipelineInspection
from outpace.parallel.custom.stage import CustomStage, copy_structure
from outpace.parallel.custom.stage_blocks import (
    require_separate_blocks,
    require_split_backward,
    stages_of,
)
from outpace.parallel.custom.stage_checkpoints import without_reentry
from outpace.parallel.custom.stage_norms import measure_all_stages
from outpace.parallel.custom.stage_saving import StageExtraState, drop_buffers
from outpace.parallel.custom.staged_objective import StagedObjective
from outpace.parallel.fusion import fuse
from outpace.parallel.layout import Batch, Layout, LayoutRequest, SpreadLayout, StepHooks
from outpace.parallel.loop_settings import LoopSettings
from outpace.parallel.pipeline import CLASSES, Stage
from outpace.parallel.placeholder_parameter import PlaceholderParameter
from outpace.parallel.rank_objects import gather_objects
from outpace.parallel.refusals import LoopPosition
from outpace.parallel.sample_rows import SampleRows
from outpace.parallel.stage_draws import PlainDraws, StageDraws
from outpace.parallel.tensors import (
    all_parameters,
    drop_all_but,
    meta_copy,
    widen_trained,
)
from outpace.records.errors import BadInputError
from outpace.records.pipelines import SCHEDULES


class CustomPipelineStage(Stage):
    """A stage whose user-written forward may use activation checkpointing around blocks."""

    submod: CustomStage

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward with non-reentrant activation checkpointing."""
        with without_reentry(not self.submod.first):
            return super().forward_maybe_with_nosync(*args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: Any = False,
    ) -> None:
        """Run a micro-batch's backward; if it recomputes activations, include weight gradients.

        Weight gradients that are deferred would recompute the activations once more for each
        weight.
        """
        whole = full_backward or self.submod.recomputes
        if whole:
            self._done.add(bwd_chunk_id)
        with (
            patch.object(_backward, "get_param_groups", _group_parameters),
            self.submod.allow_recompute(bwd_chunk_id, whole),
            without_reentry(not self.submod.first),
        ):
            super().backward_one_chunk(bwd_chunk_id, loss, whole, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: Any = False) -> None:
        """Compute the weight gradients unless they exist already."""
        if bwd_chunk_id in self._done:
            return
        with (
            self.submod.allow_recompute(bwd_chunk_id, True),
            without_reentry(not self.submod.first),
        ):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backward, and make the gradients to be sent contiguous."""
        gradients, groups = super().backward_maybe_with_nosync(*args, **kwargs)
        if gradients is not None:
            gradients = tuple(g if g is None else g.contiguous() for g in gradients)
        return gradients, groups

    def clear_runtime_states(self) -> None:
        """Clear the state of the last step."""
        self._done: set[int] = set()
        super().clear_runtime_states()


class CustomPipeline(SpreadLayout):
    """This rank's stages of a custom model; `parts` has the numbers of each stage's blocks.

    `rows` records which values of batches are split by samples.
    """

    # The state of the current step: before torch 2.13, the schedule passes no arguments to the
    # loss.
    _pass: StepHooks
    _totals: Tensor

    def __init__(
        self,
        request: LayoutRequest,
        names: Sequence[str],
        parts: Sequence[range],
        group: dist.ProcessGroup,
    ) -> None:
        objective, plan = request.objective, request.plan
        self._plan, self._names, self._parts = plan, names, parts
        self._rank, self._at = dist.get_rank(group), request.device
        schedule = SCHEDULES[plan.strategy]
        self._ranks_of = [schedule.rank_of(stage, plan.pp) for stage in range(len(parts))]
        model: nn.Module = objective.model  # type: ignore[assignment]
        self._user_module = model
        self._meta_model = meta_copy(model)
        blocks = self._user_blocks = named_blocks(model, names)
        rest = parameters_outside(model, blocks)
        ends = (0, len(parts) - 1)
        mine = [stage for stage, rank in enumerate(self._ranks_of) if rank == self._rank]
        held: nn.Module = copy_structure(model)
        kept = [p for stage in mine for n in parts[stage] for p in all_parameters(blocks[n])]
        kept += rest.values() if any(stage in ends for stage in mine) else []
        drop_all_but([*kept, *model.buffers()], held)
        drop_buffers(named_blocks(held, names), {n for s in mine for n in parts[s]})
        self._draws = StageDraws(request.device, group)
        self._absent = AbsentParameters(self._find_owners(model, blocks, rest), self._rank)
        # The last stage uses the objective itself, so it comes after the others, which copy it.
        self._stages = {
            stage: CustomStage(
                objective,
                names,
                parts[stage],
                stage in ends,
                stage == mine[-1],
                schedule.splits_backward,
                stage,
                self._draws,
                self._absent,
            )
            for stage in mine
        }
        self._extra = StageExtraState(held, self._stages, names, len(parts))
        super().__init__(StagedObjective(held, self._stages), group)
        self._rest = set(rest)
        self._shared = self._make_shared_group(rest)
        self.averages = plan.data_parallel
        self._shapes: object = None
        self._steps = 0
        self.rows = SampleRows()
        self._inspection = PipelineInspection(
            self._stages, self._ranks_of, names, parts, held, group, self._at, plan.strategy
        )

    def _find_owners(
        self, model: nn.Module, blocks: Sequence[nn.Module], rest: Mapping[str, nn.Parameter]
    ) -> dict[int, Owner]:
        names = {id(p): name for name, p in nn.Module.named_parameters(model)}
        owners = {id(p): Owner(n, 0, self._ranks_of[0], outside=True) for n, p in rest.items()}
        for stage, part in enumerate(self._parts):
            held = (p for number in part for p in all_parameters(blocks[number]))
            owners |= {id(p): Owner(names[id(p)], stage, self._ranks_of[stage]) for p in held}
        return owners

    def guard(self) -> None:
        """Refuse, from now on, uses of other stages' parameters between steps."""
        super().guard()
        models = [stage.objective.model for stage in self._stages.values()]
        copies = [one for one in models if one is not self._user_module]
        self._settings = LoopSettings(self._user_module, copies)  # type: ignore[arg-type]
        self._absent.refuse_use()
        self._place = LoopPosition()
        measure_all_stages(self, self._place)

    def _list_watched(self) -> set[nn.Module]:
        """Return the user's module and its blocks, whose forwards are refused between steps.

        The stages may run copies of them.
        """
        return {self._user_module, *self._user_blocks}

    @contextmanager
    def in_call(self) -> Iterator[None]:
        """Allow uses of other stages' parameters, which are NaN, during the call."""
        self._place.announce()
        self._settings.apply()
        try:
            with super().in_call(), self._absent.allow():
                yield
        finally:
            self._settings.note()

    def _make_shared_group(self, rest: Mapping[str, nn.Parameter]) -> dist.ProcessGroup | None:
        """Create the group that reduces gradients of parameters outside of blocks. Collective.

        It has the ranks of the first and the last stage. Returns None on all others.
        """
        ends = {self._ranks_of[0], self._ranks_of[-1]}
        trained = [parameter for parameter in rest.values() if parameter.requires_grad]
        if len(ends) == 1 or not trained:
            return None
        everyone = dist.get_process_group_ranks(self._group)
        group: dist.ProcessGroup = dist.new_group([everyone[rank] for rank in sorted(ends)])
        if self._rank not in ends:
            return None
        self._buckets = fuse(trained)
        return group

    def _device(self) -> torch.device:
        return self._at

    def make_optimizer(self, groups: list[dict[str, Any]], build: Build) -> torch.optim.Optimizer:
        """Build this rank's optimizer.

        If its stages have no parameters (only activation functions or pooling), a placeholder
        parameter takes their place.
        """
        if any(True for group in groups for _ in group["params"]):
            return build(groups)
        return PlaceholderParameter(self._at).optimizer(build, groups)

    def checkpoint_state(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module | None, torch.optim.Optimizer | None]:
        """Return the model and the optimizer to save; None for either if it has no state."""
        if any(parameter.requires_grad for parameter in all_parameters(self.model)):
            return self.model, optimizer
        return (self.model if self.model.state_dict() else None), None

    def resume_from(self, start_step: int) -> None:
        """Copy the extra state that the last stage has loaded to all stages. Collective."""
        if start_step:
            self._extra.share(self._at, self._group)

    def learn_forms(self, batch: Batch, hooks: StepHooks) -> None:
        """Find out from a batch which values stages send, and which buffers they change."""
        self._schedule_for(self.rows.cut(batch, self._plan.pp_microbatches)[0], hooks)

    def learn_forms_alone(self, objective: nn.Module, batch: Batch, hooks: StepHooks) -> None:
        """Do the same as `learn_forms` without other ranks.

        This rank runs all stages of `objective`, whose tensors have no values.
        """
        ends = (0, len(self._parts) - 1)
        by_micro_batch(objective.model)  # type: ignore[arg-type]
        whole = {
            stage: CustomStage(objective, self._names, part, stage in ends)
            for stage, part in enumerate(self._parts)
        }
        self._inspection.learn_alone(whole, cut(batch, self._plan.pp_microbatches)[0], hooks)

    def gradients(self, batches: Sequence[Batch], hooks: StepHooks) -> Tensor:
        """Compute the step's gradients; each batch is split into the pipeline's micro-batches."""
        # A loss scaler sets its scale at its first call, but only the last stage has a loss.
        hooks.scale(torch.zeros((), device=self._at))
        totals = torch.zeros(2, dtype=torch.float64, device=self._at)
        self.learn_forms(batches[0], hooks)  # this also finds where random numbers are drawn
        with self._draws.step():
            self._run_schedule(batches, hooks, totals)
        self._refuse_unsent_nan(totals)
        self._steps += 1
        done = self._steps - 1
        has_values = not isinstance(totals, FakeTensor)
        if has_values and done and done & (done - 1) == 0:  # steps 2, 3, 5, 9, …, since it waits
            self._refuse_new_nan(batches, hooks, totals)
        self._reduce_gradients_outside_blocks()
        for stage in self._stages.values():
            for block in stage.blocks():
                commit(block)
        self._inspection.settle_buffers()
        return totals

    def _run_schedule(self, batches: Sequence[Batch], hooks: StepHooks, totals: Tensor) -> None:
        count = self._plan.pp_microbatches
        for place, batch in enumerate(batches):
            parts = self.rows.cut(batch, self._plan.pp_microbatches)
            schedule = self._schedule_for(parts[0], hooks)
            self._draws.begin_pass(place * count)
            for stage in self._stages.values():
                stage.batches = parts
            for running in self._running:
                running.given = hooks
            numbers = torch.arange(count)
            self._pass, self._totals = hooks, totals
            try:
                schedule.step(numbers, target=numbers, return_outputs=False, number=numbers)
            except RuntimeError as error:  # torch's stages wrap any exception that a forward raises
                if isinstance(error.__cause__, BadInputError):
                    raise error.__cause__ from None
                raise

    def _refuse_new_nan(self, batches: Sequence[Batch], hooks: StepHooks, totals: Tensor) -> None:
        """Inspect stages again if the loss is NaN, to name a stage that makes it so. Collective.

        The forward may have begun to use something that stages do not send, and that is NaN here.
        """
        if not any(gather_objects(bool(totals[0].isnan()), self._group)):
            return
        for batch in batches:
            for part in self.rows.cut(batch, self._plan.pp_microbatches):
                self._inspect(part, hooks)

    def _refuse_unsent_nan(self, totals: Tensor) -> None:
        last = self._stages.get(len(self._parts) - 1)
        if last is None or not last.unsent_used or not bool(totals[0].isnan()):
            return
        part, attribute = sorted(last.unsent_used)[0]
        raise BadInputError(
            f"the forward or the loss reads {attribute!r} of module {part!r} in this step, but did "
            "not for the first batch of these shapes, so the value is not sent to the last stage "
            "of the pipeline. Read it in every step (times 0 while it should have no effect), or "
            "use zero3."
        )

    def plain_draws(self) -> PlainDraws:
        """Return seeds with which a single process draws the same random numbers as the stages."""
        told = gather_objects(self._draws.peek(), self._group)
        if self._draws.shared:
            after = {name: number + 1 for number, name in enumerate(self._names)}
            return PlainDraws([told[0]] * (len(after) + 1), after, self._at)
        keys = [told[rank] for rank in self._ranks_of]
        begins = {self._names[part.start - 1]: n for n, part in enumerate(self._parts) if n}
        return PlainDraws(keys, begins, self._at)

    def _schedule_for(self, batch: Batch, hooks: StepHooks) -> Any:
        """Return the schedule for the shapes in a micro-batch.

        If they are not those of the last micro-batch, stages are inspected again, which is
        collective.
        """
        shapes = [leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        if self._shapes != shapes:
            self._inspect(batch, hooks)
            self._shapes = shapes
            self._running = [self._build_stage(number) for number in self._stages]
            kind, count = CLASSES[self._plan.strategy], self._plan.pp_microbatches
            held = self._running[0] if issubclass(kind, PipelineScheduleSingle) else self._running
            self._schedule: Any = kind(
                held, count, loss_fn=self._add_and_scale_loss, scale_grads=False
            )
        return self._schedule

    def _inspect(self, batch: Batch, hooks: StepHooks) -> None:
        with run_eagerly(has_compiled_parts(self.objective)):
            self._inspection.inspect(batch, hooks)
        self._draws.shared = self._inspection.shares_draws

    def _add_and_scale_loss(self, totals: Tensor, number: Tensor) -> Tensor:
        self._totals += totals.detach().double()
        return self._pass.scale(totals[0])

    def _build_stage(self, number: int) -> CustomPipelineStage:
        stage = self._stages[number]
        inputs = [torch.empty(1, dtype=torch.int64)] if stage.taken is None else stage.taken.flat()
        totals = [torch.empty(2, dtype=self._inspection.loss_dtype)]
        outputs = totals if stage.given is None else stage.given.flat()
        return CustomPipelineStage(
            stage,
            number,
            len(self._parts),
            self._at,
            input_args=tuple(map(_meta_like, inputs)),
            output_args=tuple(map(_meta_like, outputs)),
            group=self._group,
        )

    def evaluate(self, batch: Batch, hooks: StepHooks) -> Tensor:
        """Run only forward passes, one micro-batch at a time, through this rank's stages."""
        parts = self.rows.cut(batch, self._plan.pp_microbatches)
        if not self._inspection.taken:
            self._inspect(parts[0], hooks)
        totals = self._zero_totals()
        for part in parts:
            totals += self._evaluate_part(part, hooks)
        return totals

    def _evaluate_part(self, batch: Batch, hooks: StepHooks) -> Tensor:
        """Run a micro-batch's forward through this rank's stages.

        Returns the totals on the last stage's rank, and zeros on other ranks.
        """
        output: Message | Tensor | None = None
        ranks = self._ranks_of
        for number, stage in self._stages.items():
            if number and ranks[number - 1] != self._rank:
                output = receive(self._at, self._group, ranks[number - 1])
            assert not isinstance(output, Tensor)
            stage.records = True
            try:
                with hooks.cast():
                    output = stage.run(batch, output)
            finally:
                stage.records = False
            if isinstance(output, Tensor):
                return output.double()
            if ranks[number + 1] != self._rank:
                send(output, self._group, ranks[number + 1])
        return self._zero_totals()

    def _zero_totals(self) -> Tensor:
        sums = getattr(self.objective, "sums", ())
        return torch.zeros(2 + len(sums), dtype=torch.float64, device=self._at)

    def _reduce_gradients_outside_blocks(self) -> None:
        if self._shared is None:
            return
        for bucket in self._buckets:
            bucket.take_all()
            dist.all_reduce(bucket.buffer, group=self._shared)
            bucket.assign_gradients()

    def counted_gradients(self) -> list[Tensor]:
        """Return this rank's gradients, each counted on one rank only.

        Gradients that both the first and the last stage's ranks hold are counted on the first.
        """
        copies = self._rest if self._rank != self._ranks_of[0] else set()
        return [
            parameter.grad
            for name, parameter in self.named_parameters()
            if parameter.grad is not None and name not in copies
        ]

    def raise_weights(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace weights with the optimizer's fp32 master weights.

        From then on, `whole_model` expects fp32 weights from other ranks.
        """
        super().raise_weights(optimizer)
        widen_trained(self._meta_model)

    def whole_model(self, wanted: bool) -> nn.Module | None:
        """Send all stages' parameters to the first rank; return the whole model if `wanted`.

        All ranks must call this. Only the first rank may set `wanted`.
        """
        held = self.model.state_dict()
        weights: dict[str, Any] = {}
        wanted_state = self._meta_model.state_dict(keep_vars=True)
        sent_as = self._choose_sent_names(wanted_state)
        for name, like in wanted_state.items():
            if sent_as[name] != name:
                continue
            owner = self._owner_rank(name)
            if is_extra_state(name):
                weights[name] = self._send_to_first_rank(held.get(name), owner)
            elif self._rank == owner != 0:
                dist.send(held[name].contiguous(), group=self._group, group_dst=0)
            elif self._rank == 0 and owner:
                # Messages are sent as contiguous memory.
                weights[name] = torch.empty_like(
                    like, device=self._at, memory_format=torch.contiguous_format
                )
                dist.recv(weights[name], group=self._group, group_src=owner)
            elif self._rank == 0:
                weights[name] = held[name]
        if not wanted:
            return None
        weights |= {name: weights[main] for name, main in sent_as.items()}
        self._meta_model.load_state_dict(
            {n: w.cpu() if isinstance(w, Tensor) else w for n, w in weights.items()}, assign=True
        )
        return self._meta_model

    def _choose_sent_names(self, state: Mapping[str, Any]) -> dict[str, str]:
        """Map each name in a state dict to the name under which its tensor is sent.

        A tied tensor has several names, but is sent only once, if possible by a name in a block.
        """
        names: dict[int, list[str]] = {}
        for name, value in state.items():
            if isinstance(value, Tensor):
                names.setdefault(id(value), []).append(name)
        main = {
            key: next((one for one in some if self._find_block_rank(one) is not None), some[0])
            for key, some in names.items()
        }
        return {name: main.get(id(value), name) for name, value in state.items()}

    def _send_to_first_rank(self, value: Any, owner: int) -> Any:
        given = [value]
        if self._rank == owner != 0:
            dist.send_object_list(given, group=self._group, group_dst=0)
        elif self._rank == 0 and owner:
            dist.recv_object_list(given, group=self._group, group_src=owner)
        return given[0]

    def _owner_rank(self, name: str) -> int:
        """Return the rank that sends an entry of the state dict.

        Entries outside of blocks come from the first stage, except extra state and buffers that
        change, which come from the last stage.
        """
        rank = self._find_block_rank(name)
        if name in self._inspection.buffers or (rank is None and is_extra_state(name)):
            return self._ranks_of[-1]
        return self._ranks_of[0] if rank is None else rank

    def _find_block_rank(self, name: str) -> int | None:
        for part, rank in zip(self._parts, self._ranks_of, strict=True):
            if any(name.startswith(f"{self._names[number]}.") for number in part):
                return rank
        return None


_torch_get_param_groups = _backward.get_param_groups


def _group_parameters(inputs: Any, params: Any, reverse_edges: Any) -> list[dict[str, Any]]:
    """Group parameters as torch's split backward does, but without a node in two groups.

    This replaces `get_param_groups`. torch's groups may overlap if a parameter is used in several
    places, depending on the order of a set. In that case, a gradient is computed twice, or from a
    graph that has been freed. The weight backward of a parameter with several uses also has to run
    the nodes between them. Raises BadInputError if this torch version cannot do that.
    """
    merged: list[dict[str, Any]] = []
    for group in _torch_get_param_groups(inputs, params, reverse_edges):
        whole = {kind: set(group[kind]) for kind in ("params", "intermediates")}
        while True:  # merging adds nodes between the uses of both, which other groups may share
            between = _nodes_between(whole["intermediates"], reverse_edges)
            whole["nodes"] = whole["intermediates"] | between
            touching = [
                other
                for other in merged
                if any(whole[kind] & other[kind] for kind in ("params", "nodes"))
            ]
            if not touching:
                break
            merged = [other for other in merged if other not in touching]
            for other in touching:
                whole = {kind: whole[kind] | other[kind] for kind in whole}
        merged.append(whole)
    refused = nested_split_refusal()
    if refused and any(_any_reaches_another(group["intermediates"]) for group in merged):
        raise BadInputError(refused)
    return [{kind: group[kind] for kind in ("params", "intermediates")} for group in merged]


def _any_reaches_another(nodes: set[Any]) -> bool:
    return not nodes.isdisjoint(_reachable_nodes(nodes, _next_nodes))


def _nodes_between(nodes: set[Any], reverse_edges: Any) -> set[Any]:
    if len(nodes) < 2:
        return set()
    return _reachable_nodes(nodes, _next_nodes) & _reachable_nodes(
        nodes, lambda node: reverse_edges.get(node, ())
    )


def _next_nodes(node: Any) -> list[Any]:
    return [following for following, _ in node.next_functions]


def _reachable_nodes(starts: set[Any], edges: Callable[[Any], Iterable[Any]]) -> set[Any]:
    found: set[Any] = set()
    left = list(starts)
    while left:
        new = {node for node in edges(left.pop()) if node is not None} - found
        found |= new
        left += new
    return found


def _meta_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").requires_grad_(
        tensor.is_floating_point()
    )


def apply(request: LayoutRequest) -> Layout:
    """Keep only this rank's stages of the model. Requires the default process group.

    Raises BadInputError if the blocks cannot form stages.
    """
    model: nn.Module = request.objective.model  # type: ignore[assignment]
    if request.plan.compile:
        raise BadInputError(
            "compile does not work with a pipeline of a custom model, because each stage is a "
            "copy of the model that leaves its forward early. Omit compile, or use zero3."
        )
    refuse_scripted(model, request.plan.strategy)
    stages = stages_of(model, request.blocks, request.plan.strategy, request.plan.pp)
    names = flatten_blocks(stages)
    blocks = named_blocks(model, names)
    require_separate_blocks(model, stages, blocks)
    if SCHEDULES[request.plan.strategy].splits_backward:
        require_split_backward(model, request.plan.strategy)
    by_micro_batch(model)
    parts, begin = [], 0
    for stage in stages:
        parts.append(range(begin, begin + len(stage)))
        begin += len(stage)
    group = dist.new_group()
    assert group is not None
    return CustomPipeline(request, names, parts, group)
