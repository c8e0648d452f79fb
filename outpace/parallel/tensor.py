"""Tensor and sequence parallelism: each layer's matrices split over ranks.

Shoeybi et al., "Megatron-LM", arXiv 1909.08053, §3: the projections of queries, keys and values and
the MLP's first matrices are split by columns (whole heads), the matrices after them by rows, and
embedding and head by the vocabulary. Korthikanti et al., arXiv 2205.05198, §4.2: between these
matrices, where all ranks would compute the same, each rank has a part of the sequence. An
all-reduce becomes a reduce-scatter and an all-gather.

The residual stream is a plain tensor on each rank: a part of the sequence, or all of it without
sequence parallelism. Modules convert it to a DTensor on entry.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from outpace.nn.block import to_autocast_dtype
from outpace.nn.fp32_modules import in_fp32
from outpace.nn.loss import IGNORED, LanguageModelObjective
from outpace.nn.transformer import Embeddings, Transformer
from outpace.parallel.layout import Batch, Layout, LayoutRequest, ShardedLayout, StepHooks
from outpace.parallel.tensors import local, meta_copy
from outpace.parallel.vocabulary import split_embedding, split_linear_loss_sum
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan


class WholeWeights(ParallelStyle):
    """A style that replicates the weights; the input and output have `placement`."""

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicate(module, device_mesh)
        return distribute_module(module, device_mesh, None, self._to_dtensor, self._to_local)

    def _to_dtensor(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        x = DTensor.from_local(inputs[0], mesh, [self.placement], run_check=False)
        return x, *inputs[1:]

    def _to_local(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.redistribute(placements=[self.placement]).to_local()


class EmbeddingLookup(WholeWeights):
    """A style that replicates an embedding's weights.

    If `placement` is a shard, each rank looks up its part of the sequence, the last dimension of
    the token numbers.
    """

    def _to_dtensor(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        numbers = DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)
        if self.placement.is_shard():
            numbers = numbers.redistribute(placements=[Shard(inputs[0].ndim - 1)])
        return (numbers,)

    def _to_local(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local()


class SplitRows(ParallelStyle):
    """A style that splits the token embedding by vocabulary; its output has `placement`."""

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        spread(module, "weight", device_mesh, Shard(0))
        module.forward = partial(self._look_up_tokens, module, device_mesh)
        return module

    def _look_up_tokens(self, module: nn.Module, mesh: DeviceMesh, tokens_BS: Tensor) -> Tensor:
        weight: Tensor = module.weight  # type: ignore[assignment]  # may be raised to fp32
        share = in_fp32(split_embedding(tokens_BS, local(weight), first_row(weight)))
        summed = DTensor.from_local(share, mesh, [Partial()], run_check=False)
        return summed.redistribute(placements=[self.placement]).to_local()


class GatheredInput(ParallelStyle):
    """Parallel style that gathers a module's first input, laid out as `placement`.

    All matrices of the module share this one gather.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(self._gather_input, device_mesh))
        return module

    def _gather_input(self, mesh: DeviceMesh, module: nn.Module, inputs: Any) -> Any:
        return gather_activation(inputs[0], mesh, self.placement), *inputs[1:]


def first_row(weight: Tensor) -> int:
    """Return the index of this rank's first row of a weight that is split by rows."""
    assert isinstance(weight, DTensor)
    _, offset = compute_local_shape_and_global_offset(
        weight.shape, weight.device_mesh, weight.placements
    )
    return int(offset[0])


def gather_activation(part: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    """Return an activation as a replicated DTensor, gathered after a cast to autocast's dtype."""
    spread = DTensor.from_local(to_autocast_dtype(part), mesh, [placement], run_check=False)
    return spread.redistribute(placements=[Replicate()])


class Colwise(ColwiseParallel):
    """A style that splits a matrix by columns, and the factor B of its adapter with it.

    The adapter's small factor A stays whole. torch's own style would split A along the adapter's
    rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        a = module._parameters.pop("lora_a", None)
        split_module: nn.Module = super()._apply(module, device_mesh)
        if a is not None:
            split_module.register_parameter("lora_a", a)
            spread(split_module, "lora_a", device_mesh, Replicate())
        return split_module


class Rowwise(RowwiseParallel):
    """A style that splits a matrix by rows, and the factor A of its adapter with it.

    The adapter's factor B stays whole.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if getattr(module, "lora_a", None) is not None:
            spread(module, "lora_a", device_mesh, Shard(1))
        return super()._apply(module, device_mesh)


class RankLocalDropout(ParallelStyle):
    """A style for dropout on shards of an activation: each rank draws a different mask."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.forward = partial(
            _run_with_rank_seed, module, module.forward, device_mesh.get_local_rank()
        )
        return module


def _run_with_rank_seed(
    module: nn.Module, forward: Callable[..., Any], index: int, *args: Any
) -> Any:
    if not module.training:
        return forward(*args)
    with rank_local_random(args[0].device, index):
        return forward(*args)


@contextmanager
def rank_local_random(device: torch.device, index: int) -> Iterator[None]:
    """Make ranks draw different random numbers in the body, and the same ones again after it.

    The seed comes from the common generator, so that recomputation draws the same numbers again.
    """
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed + index)
        yield


def replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Convert all of a module's parameters to replicated DTensors."""
    for part in module.modules():
        for name, _ in list(part.named_parameters(recurse=False)):
            spread(part, name, mesh, Replicate())


def spread(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Convert a parameter to a DTensor. All ranks already have its values, so nothing is sent."""
    given = getattr(module, name)
    tensor = distribute_tensor(given.detach(), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(tensor, given.requires_grad))


def block_styles(spec: ModelSpec, stream: Placement) -> dict[str, ParallelStyle]:
    """Return the styles of a block's submodules by name. `stream` is the residual's placement."""
    styles: dict[str, ParallelStyle] = {
        "attention_norm": WholeWeights(stream),
        "attention": GatheredInput(stream),
        "attention.out": Rowwise(output_layouts=stream),
        "mlp_norm": WholeWeights(stream),
        "mlp": GatheredInput(stream),
        "mlp.up": Colwise(),
        "mlp.down": Rowwise(output_layouts=stream),
    }
    styles |= {f"attention.{part}": Colwise() for part in "qkv"}
    if spec.gated:
        styles["mlp.gate"] = Colwise()
    if spec.qk_norm:
        # Each rank has its own heads: (B, H, S, C).
        heads = Shard(1)
        styles |= {f"attention.{part}_norm": WholeWeights(heads) for part in "qk"}
    return styles


def split_model(model: Transformer, mesh: DeviceMesh, stream: Placement) -> None:
    """Split a Transformer over the ranks of `mesh`, in place."""
    for block in model.blocks:
        parallelize_module(block, mesh, block_styles(model.spec, stream), src_data_rank=None)
    _split_embeddings(model.embed, mesh, stream)
    if model.final_norm is not None:
        parallelize_module(model.final_norm, mesh, WholeWeights(stream))
    if model.head_transform is not None:
        replicate(model.head_transform, mesh)
        parallelize_module(model.head_transform, mesh, GatheredInput(stream))
    if model.head is not None:
        spread(model.head, "weight", mesh, Shard(0))
    if model.head_bias is not None:
        spread(model, "head_bias", mesh, Shard(0))
    if model.spec.dropout:
        parts = ["attention", "dropout"] if stream.is_shard() else ["attention"]
        for block in model.blocks:
            parallelize_module(block, mesh, {part: RankLocalDropout() for part in parts})


def _split_embeddings(embed: Embeddings, mesh: DeviceMesh, stream: Placement) -> None:
    styles: dict[str, ParallelStyle] = {
        "tokens": SplitRows(stream),
        "positions": EmbeddingLookup(stream),
        "segments": EmbeddingLookup(stream),
        "norm": WholeWeights(stream),
    }
    if stream.is_shard() and getattr(embed.dropout, "p", False):
        styles["dropout"] = RankLocalDropout()
    held = {name: style for name, style in styles.items() if getattr(embed, name) is not None}
    parallelize_module(embed, mesh, held, src_data_rank=None)


class SplitObjective(LanguageModelObjective):
    """An objective with a model and a vocabulary that are split over `mesh`."""

    def __init__(self, model: Transformer, mesh: DeviceMesh, stream: Placement) -> None:
        super().__init__(model)
        self._mesh = mesh
        self._stream = stream

    def hidden_states(self, batch: dict[str, Tensor]) -> Tensor:
        """Return this rank's part of the hidden states."""
        self.check_length(batch["tokens"].shape[1])
        return super().hidden_states(batch)

    def loss_from_hidden(self, hidden_BSD: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of losses and the number of targets, equal on all ranks of the mesh."""
        if not isinstance(hidden_BSD, DTensor):
            hidden_BSD = gather_activation(hidden_BSD, self._mesh, self._stream)
        assert isinstance(hidden_BSD, DTensor)
        # Each rank's rows of the head contribute a share of the gradient.
        hidden_ND = hidden_BSD.to_local(grad_placements=[Partial()]).flatten(0, -2)
        weight, bias = self.model.head_weight, self.model.head_bias
        targets_N = targets_BS.flatten()
        loss_sum = split_linear_loss_sum(
            hidden_ND,
            local(weight),
            None if bias is None else local(bias),
            targets_N,
            first_row(weight),
            self._mesh.get_group(),
            self.compute_dtype,
            self.functions_for(hidden_ND.device.type) if self.on_accelerator(hidden_ND) else None,
        )
        return loss_sum, (targets_N != IGNORED).sum()

    def check_length(self, length: int) -> None:
        """Raise BadInputError if the ranks cannot share a sequence of this length."""
        ranks = self._mesh.size()
        if self._stream.is_shard() and length % ranks:
            raise BadInputError(
                f"sequence parallelism splits each sequence over {ranks} ranks, but {length} "
                f"tokens are not a multiple of {ranks}. Use --seq-len "
                f"{-(-length // ranks) * ranks}, or --no-sequence-parallel."
            )


def add_shares(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients of replicated weights that processed only a part of the sequence or heads.

    Takes one all-reduce over the mesh, whose ranks all have these parameters.
    """
    shared = []
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and grad.placements[0].is_partial():
            assert isinstance(parameter, DTensor)
            shared.append((parameter, grad))
    if not shared:
        return
    flat = torch.cat([local(grad).flatten() for _, grad in shared])
    dist.all_reduce(flat, group=shared[0][1].device_mesh.get_group())
    parts = flat.split([p.numel() for p, _ in shared])
    for (p, _), summed in zip(shared, parts, strict=True):
        p.grad = DTensor.from_local(
            summed.view(p.shape), p.device_mesh, p.placements, run_check=False
        )


class TensorParallel(ShardedLayout):
    """A Transformer split over the ranks of `mesh`, which all read the same samples."""

    def __init__(self, objective: SplitObjective, whole: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(objective, whole, mesh.get_group())
        # All ranks compute the loss of all samples, so only one reports it.
        self._tells = mesh.get_local_rank() == 0

    def gradients(self, batches: Sequence[Batch], hooks: StepHooks) -> Tensor:
        """Compute the step's gradients; sum those of replicated weights once, at the end."""
        totals = super().gradients(batches, hooks)
        add_shares(self.model.parameters())
        return totals * self._tells

    def evaluate(self, batch: Batch, hooks: StepHooks) -> Tensor:
        """Evaluate a micro-batch; only the group's first rank reports totals, others zeros."""
        return super().evaluate(batch, hooks) * self._tells


def split(objective: nn.Module, plan: Plan, mesh: DeviceMesh) -> SplitObjective:
    """Split an objective's model over `mesh`, in place.

    Raises BadInputError if it cannot be split.
    """
    assert isinstance(objective, LanguageModelObjective)  # custom models use `custom.tensor`
    require_splittable(objective.model.spec, plan.tp)
    if plan.loss == "chunked":
        raise BadInputError(
            f"--loss chunked cannot be combined with tp: its logits are split over {plan.tp} ranks "
            "instead. Leave --loss out."
        )
    stream = Shard(1) if plan.sequence_parallel else Replicate()
    split_model(objective.model, mesh, stream)
    made = SplitObjective(objective.model, mesh, stream)
    made.compute_dtype, made.compiles = objective.compute_dtype, objective.compiles
    made.runs_on, made.passes = objective.runs_on, objective.passes
    return made


def apply(request: LayoutRequest) -> Layout:
    """Split the model over the ranks of the plan."""
    plan = request.plan
    mesh = init_device_mesh(request.device.type, (plan.tp,), mesh_dim_names=("tp",))
    copied = meta_copy(request.objective.model)  # type: ignore[arg-type]
    return TensorParallel(split(request.objective, plan, mesh), copied, mesh)


def require_splittable(spec: ModelSpec, ranks: int) -> None:
    """Raise BadInputError if the vocabulary, heads or MLP width cannot be split over the ranks."""
    if -(-spec.vocab // ranks) * (ranks - 1) >= spec.vocab:
        raise BadInputError(
            f"tp {ranks} leaves a rank without a part of the vocabulary of {spec.vocab}. Use a "
            "smaller tp."
        )
    for name in ("heads", "kv_heads", "ffn"):
        size = getattr(spec, name)
        if size % ranks:
            fits = [n for n in range(ranks, 1, -1) if not (spec.kv_heads % n or spec.ffn % n)]
            fewer = f"tp {fits[0]} or " if fits else ""
            raise BadInputError(
                f"{ranks} tensor-parallel ranks cannot share {size} {name} evenly. Use {fewer}a "
                f"model whose heads, kv_heads and ffn are multiples of {ranks}."
            )
