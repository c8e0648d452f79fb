"""3d: any product of dp_replicate × dp_shard × cp × tp × pp, applied in one explicit order.

Matrices are split first, then sequences, then layers; what remains on a rank is sharded or
replicated over ranks with different samples or different parts of sequences (Narayanan et al.,
arXiv 2104.04473, §3; Liang et al., "TorchTitan", arXiv 2410.06511, §2). Ranks of a tensor-parallel
group are neighbours; ranks of a pipeline are furthest apart.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from outpace.nn.loss import LanguageModelObjective
from outpace.nn.transformer import Transformer
from outpace.parallel.context import PartOfSequence, SequenceRing, share_sequences
from outpace.parallel.fsdp import shard
from outpace.parallel.layout import (
    Batch,
    Layout,
    LayoutRequest,
    ShardedLayout,
    SpreadLayout,
    StepHooks,
)
from outpace.parallel.offload import gathers, offload_policy
from outpace.parallel.pipeline import PipelineLayout, cut
from outpace.parallel.tensor import SplitObjective, add_shares, split
from outpace.parallel.tensors import meta_copy
from outpace.records.errors import BadInputError
from outpace.records.plan import AXES, Plan


class Product(SpreadLayout):
    """A layout over all axes of `mesh`. `inner` is a layout over only some of them.

    `inner` holds the parameters and runs the passes.
    """

    def __init__(self, inner: Layout, mesh: DeviceMesh) -> None:
        assert dist.group.WORLD is not None
        super().__init__(inner.objective, dist.group.WORLD, mesh.size() // mesh["pp"].size())
        self._inner = inner
        self.averages = inner.averages
        # All ranks of a tensor-parallel group compute the same loss, so only one reports it.
        self._tells = mesh["tp"].get_local_rank() == 0

    @property
    def model(self) -> nn.Module:
        return self._inner.model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._inner.named_parameters()

    def gradients(self, batches: Sequence[Batch], hooks: StepHooks) -> Tensor:
        """Compute the inner layout's gradients, and sum those that tensor-parallel ranks share."""
        totals = self._inner.gradients(batches, hooks)
        add_shares(self.model.parameters())
        return totals * self._tells

    def evaluate(self, batch: Batch, hooks: StepHooks) -> Tensor:
        return self._inner.evaluate(batch, hooks) * self._tells

    def counted_gradients(self) -> list[Tensor]:
        return self._inner.counted_gradients()

    def raise_weights(self, optimizer: torch.optim.Optimizer) -> None:
        self._inner.raise_weights(optimizer)

    def whole_model(self, wanted: bool) -> nn.Module | None:
        return self._inner.whole_model(wanted)


def apply(request: LayoutRequest) -> Layout:
    """Lay out the model over all axes of the plan. Raises BadInputError for a custom model."""
    objective, plan = request.objective, request.plan
    if not isinstance(objective, LanguageModelObjective):
        raise BadInputError(
            "strategy 3d splits outpace's own and Hugging Face models, but does not know where to "
            "split a custom model. Use zero3 or hsdp, which split any model."
        )
    sizes = tuple(getattr(plan, axis) for axis in AXES)
    mesh = init_device_mesh(request.device.type, sizes, mesh_dim_names=AXES)
    copied: Transformer = meta_copy(objective.model)  # type: ignore[assignment]
    if plan.tp > 1:
        objective = split(objective, plan, mesh["tp"])
    part = share_sequences(objective, _make_ring(mesh)) if plan.cp > 1 else None
    if plan.pp == 1:
        inner: Layout = _lay_out_without_pipeline(request, part or objective, copied, mesh)
    else:
        inner = _lay_out_pipeline(request, objective, part, copied, mesh)
    layout = Product(inner, mesh)
    layout.computes_on = inner.computes_on = request.device
    return layout


def _make_ring(mesh: DeviceMesh) -> SequenceRing:
    return SequenceRing(mesh["cp"].get_group(), mesh["cp"].get_local_rank(), mesh["cp"].size())


def _gradient_replicas(plan: Plan) -> int:
    return plan.dp_replicate * plan.dp_shard * plan.cp


def _gathers_parameters(request: LayoutRequest) -> bool:
    return _gradient_replicas(request.plan) > 1 or gathers(request.plan, request.device)


def _lay_out_without_pipeline(
    request: LayoutRequest,
    objective: PartOfSequence | LanguageModelObjective,
    copied: Transformer,
    mesh: DeviceMesh,
) -> Layout:
    plan, held = request.plan, offload_policy(request.plan, request.device)
    if _gathers_parameters(request):
        shard(
            objective,
            objective.model.blocks,
            _sharding_mesh(mesh),
            held,
            plan.precision,
            request.runs_on,
        )
    assert dist.group.WORLD is not None
    layout = ShardedLayout(objective, copied, dist.group.WORLD)
    layout.averages = _gradient_replicas(plan)
    return layout


def _lay_out_pipeline(
    request: LayoutRequest,
    objective: LanguageModelObjective,
    part: PartOfSequence | None,
    copied: Transformer,
    mesh: DeviceMesh,
) -> Layout:
    plan, held = request.plan, offload_policy(request.plan, request.device)
    stages = cut(plan, objective.model)
    inner = PipelineLayout(
        LayoutRequest(objective, plan, request.ranks, request.device),
        stages,
        mesh["pp"].get_group(),
        copied,
        partial(
            _take_sequence_part, part, objective if isinstance(objective, SplitObjective) else None
        ),
    )
    if _gathers_parameters(request):
        for stage, module in inner.modules.items():
            if stages[stage].last and plan.tp > 1 and module.final_norm is not None:
                module.final_norm.register_forward_hook(_clone_output)
            blocks = [module.blocks[block] for block in stages[stage].blocks]
            shard(module, blocks, _sharding_mesh(mesh), held, plan.precision, request.runs_on)
        if len(inner.modules) == 1:
            # The loss reads the head's bias, which sharding has replaced only in the stage.
            (inner.objective.model,) = inner.modules.values()
        elif objective.model.head_bias is not None:
            raise BadInputError(
                f"pp_schedule {plan.pp_schedule} puts two stages on each rank, and with shards or "
                "replicas neither stage would hold the bias of an encoder's head. Use 1f1b or "
                "gpipe."
            )
    inner.averages = _gradient_replicas(plan)
    return inner


def _clone_output(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Clone the output, because sharded modules warn if it is a view of a DTensor's shard."""
    return output.clone()


def _take_sequence_part(
    part: PartOfSequence | None, split_over: SplitObjective | None, batch: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return this rank's part of a batch, with the positions of its tokens under cp and tp."""
    if part is not None:
        batch = part.part_of(batch)
    if split_over is not None:
        tokens = batch["tokens"]
        split_over.check_length(tokens.shape[1])
        batch = {"positions": torch.arange(tokens.shape[1], device=tokens.device), **batch}
    return batch


def _sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh (dp_replicate, shard), in which dp_shard and cp are one dimension.

    Parameters are sharded over both, because the gradient is the same sum whether ranks have
    different samples or different tokens.
    """
    shards = mesh["dp_shard", "cp"]._flatten("shard")
    return DeviceMesh._concatenate([mesh["dp_replicate"], shards])
