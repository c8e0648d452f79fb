"""Pipelines: the model's layers are split over ranks in stages, which micro-batches pass through.

`mp` is naive model parallelism, with one micro-batch in flight and one rank busy at a time. `gpipe`
runs all forwards, then all backwards (Huang et al., arXiv 1811.06965, §2). `1f1b` runs each
backward as soon as possible, so that a stage keeps at most as many micro-batches as there are
stages from it to the last (Narayanan et al., PipeDream, SOSP 2019, §3.2; arXiv 2104.04473, §2.2).
`interleaved` (arXiv 2104.04473, §2.2.2) and `loopedbfs` (Lamy-Poirier, arXiv 2211.05953) have two
stages on each rank. `zb`, `zbv` (Qi et al., arXiv 2401.10241, §2 and §6) and `dualpipev`
(DeepSeek-AI, arXiv 2412.19437, §3.2.1, as a V of half the stages) defer weight gradients to times
when a rank would wait.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.profiler import record_function

from outpace.nn.loss import LanguageModelObjective
from outpace.nn.model_part import Part, take_part
from outpace.nn.torch_versions import fill_missing_gradients
from outpace.nn.transformer import Transformer
from outpace.parallel.layout import Batch, Layout, LayoutRequest, SpreadLayout, StepHooks
from outpace.parallel.tensors import local, meta_copy, whole, widen_trained
from outpace.planner.pipeline.stages import layers_per_stage
from outpace.records.errors import BadInputError
from outpace.records.pipelines import SCHEDULES, Kind, traced_name
from outpace.records.plan import Plan

CLASSES: Mapping[str, type[Any]] = {
    "mp": ScheduleGPipe,
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "loopedbfs": ScheduleLoopedBFS,
    "zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
# trace names of torch's kinds of backward
_BACKWARDS: Mapping[str, Kind] = {"full": "B", "input": "I", "weight": "W"}
# Arguments of a stage besides tokens. Every rank has them, because all ranks read the same samples.
_CONTEXT = ("documents", "segments", "padding_mask")


class Stage(PipelineStage):
    """A pipeline stage that casts as the trainer asks and records the times of passes."""

    given = StepHooks()

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch's forward.

        The time since the last recorded mark counts as communication.
        """
        self.given.mark("communication")
        with self.given.cast(), record_function(traced_name("F", self.stage_index)):
            output = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.given.mark("forward")
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run a micro-batch's backward, and fill missing gradients of its inputs with zeros.

        The previous stage waits for these gradients.
        """
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        fill_missing_gradients(self, bwd_chunk_id)

    def backward_maybe_with_nosync(self, backward_type: str, *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch's full backward, or only its input or weight gradients."""
        self.given.mark("communication")
        with record_function(traced_name(_BACKWARDS[backward_type], self.stage_index)):
            gradients = super().backward_maybe_with_nosync(backward_type, *args, **kwargs)
        self.given.mark("backward")
        return gradients


class PipelineLayout(SpreadLayout):
    """Layout of a transformer and its loss as a pipeline.

    `parts` has the part of the model in each stage. `group` contains the ranks of the pipeline,
    starting with that of the first stage. Only the last stage's rank has the totals of losses and
    targets. `whole` is the model on the meta device, and `share` returns this rank's part of a
    batch.
    """

    objective: LanguageModelObjective
    # State of the current step, kept here because schedules pass no arguments to the loss before
    # torch 2.13.
    _pass: StepHooks
    _totals: Tensor

    def __init__(
        self,
        request: LayoutRequest,
        parts: Sequence[Part],
        group: dist.ProcessGroup,
        whole: Transformer,
        share: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        super().__init__(request.objective, group)
        plan, model = request.plan, self.objective.model
        self._plan, self._share = plan, share
        self._rank = dist.get_rank(group)
        schedule = SCHEDULES[plan.schedule]
        self._ranks_of = [schedule.rank_of(stage, plan.pp) for stage in range(len(parts))]
        self._parts = parts
        self._meta_model = whole
        # Read before parts are sharded: gathered parameters are in the dtype of matmuls.
        self._hidden_dtype = next(model.parameters()).dtype
        mine = [stage for stage, rank in enumerate(self._ranks_of) if rank == self._rank]
        self.modules = {stage: take_part(model, parts[stage]) for stage in mine}
        self._tied_rank = self._find_tied_rank(tied=model.head is None)
        own = [parts[stage] for stage in mine]
        blocks = [block for part in own for block in part.blocks]
        merged = Part(blocks, any(part.first for part in own), any(part.last for part in own))
        self.objective.model = take_part(model, merged)
        self.averages = plan.data_parallel
        self._shape: torch.Size | None = None

    def _find_tied_rank(self, tied: bool) -> int | None:
        """Return the other rank that has the tied embedding; None if no two ranks have it."""
        first, last = self._ranks_of[0], self._ranks_of[-1]
        if not tied or first == last or self._rank not in (first, last):
            return None
        return first if self._rank == last else last

    def gradients(self, batches: Sequence[Batch], hooks: StepHooks) -> Tensor:
        """Compute the step's gradients. Each batch is split into the pipeline's micro-batches."""
        # A loss scaler sets its scale in the first call, and only the last stage has a loss.
        hooks.scale(torch.zeros((), device=self._device()))
        totals = torch.zeros(2, dtype=torch.float64, device=self._device())
        for batch in map(self._share, batches):
            schedule = self._schedule_for(batch["tokens"])
            for stage in self._stages:
                stage.given = hooks
            self._pass, self._totals = hooks, totals
            schedule.step(
                batch["tokens"],
                target=batch["targets"],
                return_outputs=False,
                **_block_context(batch),
            )
        self._sum_tied_gradients()
        return totals

    def _schedule_for(self, tokens: Tensor) -> Any:
        if self._shape != tokens.shape:
            self._shape = tokens.shape
            self._stages = [self._build_stage(number, tokens) for number in self.modules]
            kind, count = CLASSES[self._plan.schedule], self._plan.pp_microbatches
            single = issubclass(kind, PipelineScheduleSingle)
            held = self._stages[0] if single else self._stages
            self._schedule: Any = kind(
                held, count, loss_fn=self._add_and_scale_loss, scale_grads=False
            )
        return self._schedule

    def _hidden_shape(self, tokens: Tensor) -> tuple[int, int, int]:
        split = self._plan.tp if self._plan.sequence_parallel else 1
        return len(tokens), tokens.shape[1] // split, self._meta_model.spec.hidden

    def _build_stage(self, number: int, tokens: Tensor) -> Stage:
        # With the shapes of input and output given, torch need not infer them.
        shape = self._hidden_shape(tokens[: self._plan.micro_batch])
        hidden = torch.empty(shape, dtype=self._hidden_dtype, device="meta", requires_grad=True)
        first = tokens[: self._plan.micro_batch].to("meta")
        return Stage(
            self.modules[number],
            number,
            len(self._parts),
            self._device(),
            input_args=hidden if number else first,
            output_args=hidden,
            group=self._group,
        )

    def _add_and_scale_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        given = self._pass
        with given.cast():
            loss_sum, count = self.objective.loss_from_hidden(hidden, targets)
        self._totals += torch.stack((loss_sum.detach().double(), count.double()))
        scaled = given.scale(loss_sum)
        given.mark("forward")
        return scaled

    def _sum_tied_gradients(self) -> None:
        if self._tied_rank is None:
            return
        gradient = self.model.get_parameter("embed.tokens.weight").grad
        if gradient is None:
            return
        mine = local(gradient)
        theirs = torch.empty_like(mine)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, group=self._group, group_peer=self._tied_rank),
                dist.P2POp(dist.irecv, theirs, group=self._group, group_peer=self._tied_rank),
            ]
        )
        for work in works:
            work.wait()
        mine += theirs

    def evaluate(self, batch: Batch, hooks: StepHooks) -> Tensor:
        """Run only forwards, one micro-batch at a time through all of this rank's stages.

        In this order, sends and receives match for any placement of stages.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=self._device())
        sent: list[tuple[dist.Work, Tensor]] = []
        size = self._plan.micro_batch
        for begin in range(0, len(batch["tokens"]), size):
            micro_batch = {name: part[begin : begin + size] for name, part in batch.items()}
            totals += self._evaluate_micro_batch(self._share(micro_batch), hooks, sent)
        for work, _ in sent:
            work.wait()
        return totals

    def _evaluate_micro_batch(
        self, batch: Batch, hooks: StepHooks, sent: list[tuple[dist.Work, Tensor]]
    ) -> Tensor:
        """Run a micro-batch's forward through this rank's stages.

        Appends pending sends to `sent`. Returns the totals, which are zeros unless this rank has
        the last stage.
        """
        hidden: Tensor = batch["tokens"]
        ranks, last = self._ranks_of, len(self._parts) - 1
        for stage, module in self.modules.items():
            if stage and ranks[stage - 1] != self._rank:
                shape = self._hidden_shape(batch["tokens"])
                hidden = torch.empty(shape, dtype=self._hidden_dtype, device=self._device())
                dist.recv(hidden, group=self._group, group_src=ranks[stage - 1])
            with hooks.cast():
                hidden = module(hidden, **_block_context(batch))
                if stage == last:
                    loss_sum, count = self.objective.loss_from_hidden(hidden, batch["targets"])
                    return torch.stack((loss_sum.double(), count.double()))
            if ranks[stage + 1] != self._rank:
                work = dist.isend(hidden, group=self._group, group_dst=ranks[stage + 1])
                assert work is not None
                sent.append((work, hidden))
        return torch.zeros(2, dtype=torch.float64, device=self._device())

    def counted_gradients(self) -> list[Tensor]:
        """Return this rank's gradients that count in the norm.

        The first and the last stage may both have the embedding; only the first stage counts it.
        """
        copies = self._rank != self._ranks_of[0]
        return [
            parameter.grad
            for name, parameter in self.named_parameters()
            if parameter.grad is not None and not (copies and name.startswith("embed."))
        ]

    def raise_weights(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace weights with master weights.

        From then on, `whole_model` receives fp32 weights from other ranks.
        """
        super().raise_weights(optimizer)
        widen_trained(self._meta_model)

    def whole_model(self, wanted: bool) -> nn.Module | None:
        """Send all weights to the first rank, and return the whole model if it is `wanted`.

        Only the first rank receives weights, so `wanted` must be False on all others.
        """
        held = self.model.state_dict()
        weights: dict[str, Tensor] = {}
        for name, owner in self._sending_ranks().items():
            mine = whole(held[name]) if self._rank == owner else None
            tensor = self._send_to_first_rank(mine, self._meta_model.get_parameter(name), owner)
            if wanted and tensor is not None:
                weights[name] = tensor.cpu()
        if not wanted:
            return None
        self._meta_model.load_state_dict(weights, assign=True)
        return self._meta_model

    def _sending_ranks(self) -> dict[str, int]:
        owners: dict[str, int] = {}
        for part, rank in zip(self._parts, self._ranks_of, strict=True):
            for name in take_part(self._meta_model, part).state_dict():
                owners.setdefault(name, rank)
        return owners

    def _send_to_first_rank(self, held: Tensor | None, like: Tensor, owner: int) -> Tensor | None:
        if self._rank == 0 == owner:
            return held
        if self._rank == owner:
            assert held is not None
            dist.send(held.contiguous(), group=self._group, group_dst=0)
        elif self._rank == 0:
            received = torch.empty_like(like, device=self._device())
            dist.recv(received, group=self._group, group_src=owner)
            return received
        return None


def _block_context(batch: Batch) -> dict[str, Tensor]:
    held = {f"{name}_BS": batch[name] for name in _CONTEXT if name in batch}
    if "positions" in batch:
        held["positions"] = batch["positions"].expand_as(batch["tokens"])  # split like tokens
    return held


def cut(plan: Plan, model: Transformer) -> list[Part]:
    """Return a plan's stages. Raises BadInputError if there are fewer layers than stages."""
    spec = model.spec
    if spec.layers < plan.stages:
        # Each stage has at least one layer.
        most = spec.layers // SCHEDULES[plan.schedule].stages_per_rank
        instead = [f"{most} ranks"] if most > 1 else []
        if plan.pp <= spec.layers:
            instead.append("gpipe or 1f1b (one stage on each rank)")
        raise BadInputError(
            f"{plan.schedule} on {plan.pp} ranks has {plan.stages} stages, but the model has "
            f"{spec.layers} layers. Use {', '.join([*instead, 'zero3'])} or a deeper model."
        )
    parts, begin = [], 0
    for stage, count in enumerate(layers_per_stage(spec, plan.stages)):
        blocks = range(begin, begin + count)
        parts.append(Part(blocks, first=stage == 0, last=stage == plan.stages - 1))
        begin += count
    return parts


def apply(request: LayoutRequest) -> Layout:
    """Keep only this rank's stages of the model. Requires the default process group.

    Raises BadInputError if there are fewer layers than stages.
    """
    objective, plan = request.objective, request.plan
    assert isinstance(objective, LanguageModelObjective)  # custom models use `custom.pipeline`
    if SCHEDULES[plan.schedule].splits_backward and objective.loss == "auto":
        objective.loss = "plain"  # the chunked loss supports only one backward
    group = dist.new_group()
    copied: Transformer = meta_copy(objective.model)  # type: ignore[assignment]
    return PipelineLayout(request, cut(plan, objective.model), group, copied)
