"""Inputs of the memory formula for many plans: sizes, and properties of strategies."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from outpace.planner.memory.framework_traits import OUTPACE, FrameworkTraits
from outpace.planner.memory.saved_activations import FP32, Layer, Shapes, layer, mean, shapes
from outpace.planner.memory.states import OutsideElements, States, outside_elements, states
from outpace.planner.plan_columns import OFFLOADS, Bools, Floats, PlanBatch
from outpace.records.outline import Outline, Stack
from outpace.records.plan import Checkpointing
from outpace.records.strategies import strategies_that

Device = Literal["cuda", "cpu"]
_BUCKETS = strategies_that(lambda traits: traits.buckets)
HEAVIEST: tuple[Checkpointing, ...] = ("full", "attention", "selective", "none")


@dataclass(frozen=True)
class MemoryQuestion:
    """A model, a device type, and the trainer's memory traits.

    `fused_attention` is False if attention stores its scores, as in Korthikanti et al., arXiv
    2205.05198, eq. 1.
    """

    outline: Outline
    seq_len: int
    device: Device = "cuda"
    fused_attention: bool = True
    traits: FrameworkTraits = OUTPACE


@dataclass(frozen=True)
class Sharding:
    """Distribution of parameters and optimizer states over ranks, one entry per plan.

    - `gathers`: parameters are gathered before use.
    - `regathers`: parameters are freed after the forward, and gathered again for the backward.
    - `item`: bytes per element of a parameter in the forward and of its gradient in the backward.
    - `shards`: number of ranks over which each weight is split.
    - `owners`: number of ranks over which optimizer states are split by elements.
    - `shares_states`: only states are split, not weights (ZeRO-1).
    - `states`: bytes of optimizer state before they are split.
    - `stored`, `stepped`: elements of a layer that are split into `shards`, and those whose states
      are split.
    - `expert_factor`: `stored` divided by the elements of a layer with which a rank computes.

    Ranks that shard parameters also divide the experts among them. `stored` and `stepped` therefore
    count the experts of all ep ranks; with `shares_states`, only `stepped` does, because a rank
    keeps the weights of its own experts.
    """

    gathers: Bools
    regathers: Bools
    item: Floats
    shards: Floats
    owners: Floats
    shares_states: Bools
    states: States
    stored: Floats
    stepped: Floats
    expert_factor: Floats


@dataclass(frozen=True)
class GradientBuffers:
    """Buffers in which a rank accumulates gradients, one entry per plan.

    - `buckets`: gradients are in permanent buffers, of `bucket_item` bytes per element.
    - `fuses`: the step copies all gradients into one buffer.
    - `replicas`: all micro-batches except the last accumulate outside of the buckets (DDP's
      no_sync).
    - `sum_item`: bytes per element of accumulated gradients.
    - `sums_in_fp32`: accumulated gradients are in fp32 in any precision.
    - `casts_sums`: each micro-batch's gradients are computed in 16 bits, and cast to fp32 to be
      added.
    - `apart`: bytes per element of gradients that accumulate outside of the buckets.
    """

    buckets: Bools
    bucket_item: Floats
    fuses: Bools
    replicas: Bools
    sums_in_fp32: Bools
    sum_item: Floats
    casts_sums: Bools
    apart: Floats


@dataclass(frozen=True)
class MemorySetup:
    """Memory inputs that all ranks of a plan share, one entry per plan.

    - `block`: the layer from which the block's peak is computed, one of the stack with the widest
      matmuls.
    - `saved`: bytes that an average layer saves in each recomputation mode.
    - `elements`, `matrices`: an average layer's parameter elements, and those in matrices.
    - `copies`: bytes of an average layer's matrices after a cast to the matmul dtype; 0 without a
      cast.
    - `unit`: bytes of an average layer's gathered parameters; 0 if they are not gathered.
    - `ends`: parameter elements outside of layers.
    - `dp`: which plans use the strategy dp, in which rank 0 has the outputs of all ranks.
    - `splits_stream`: which plans shard the residual stream over tp ranks and gather it for
      matmuls.
    - `regathers_inputs`: which plans gather these inputs again for the backward.
    """

    question: MemoryQuestion
    columns: PlanBatch
    sizes: Shapes
    block: Layer
    saved: Mapping[Checkpointing, Floats]
    elements: Floats
    matrices: Floats
    copies: Floats
    unit: Floats
    ends: OutsideElements
    sharding: Sharding
    gradients: GradientBuffers
    dp: Bools
    splits_stream: Bools
    regathers_inputs: Bools
    offloads_activations: Bools
    activations_on_disk: Bools
    gradients_on_host: Bools

    @property
    def outline(self) -> Outline:
        return self.question.outline


def set_up(question: MemoryQuestion, columns: PlanBatch) -> MemorySetup:
    """Return, for every plan, the values that all of its ranks share."""
    c, outline = columns, question.outline
    sizes = shapes(outline, question.seq_len, c)
    layers = _layer_per_stack(question, c, sizes)
    elements = mean([one.elements for one in layers], outline.stacks)
    matrices = mean([one.matrices for one in layers], outline.stacks)
    # Peaks are those of blocks of the stack that saves the most, regardless of the plan.
    widest = max(range(len(layers)), key=lambda i: _matmul_width(outline.stacks[i]))
    sharding = _set_up_sharding(question, c, sizes, elements)
    splits_stream = (c.tp > 1) & c.sequence_parallel
    casts = (sizes.operand < sharding.item) & ~c.precision_in("fp8")  # fp8 saves the weight itself
    return MemorySetup(
        question=question,
        columns=c,
        sizes=sizes,
        block=layers[widest],
        saved={
            mode: mean([one.saved_bytes_in(mode) for one in layers], outline.stacks)
            for mode in HEAVIEST
        },
        elements=elements,
        matrices=matrices,
        copies=np.where(casts, matrices * sizes.operand, 0.0),
        unit=np.where(sharding.gathers, sharding.item * elements, 0.0),
        ends=outside_elements(outline, c),
        sharding=sharding,
        gradients=_set_up_gradient_buffers(question, c, sizes, sharding.gathers),
        dp=c.strategy_in("dp"),
        splits_stream=splits_stream,
        regathers_inputs=splits_stream & question.traits.regathers_inputs,
        offloads_activations=c.offload_activations > 0,
        activations_on_disk=c.offload_activations == OFFLOADS.index("disk"),
        gradients_on_host=(c.offload_parameters == OFFLOADS.index("cpu"))
        & (question.device == "cuda"),
    )


def _layer_per_stack(question: MemoryQuestion, columns: PlanBatch, sizes: Shapes) -> list[Layer]:
    q = question
    return [
        layer(q.outline, stack, columns, sizes, q.device, q.fused_attention, q.traits)
        for stack in q.outline.stacks
    ]


def _set_up_sharding(
    question: MemoryQuestion, columns: PlanBatch, sizes: Shapes, elements: Floats
) -> Sharding:
    c, traits = columns, question.traits
    product = c.strategy_in("3d")
    on_host = c.offload_parameters == OFFLOADS.index("cpu")
    several = c.dp_replicate * c.dp_shard * c.cp > 1
    # outpace's 3d uses fully_shard, which copies parameters even if nothing is sharded.
    level = np.where(product & (c.zero == 0), 3 if traits.main_gradients is None else 0, c.zero)
    gathers = (product & several & (level >= 2)) | (~product & (c.zero >= 2)) | on_host
    ranks = np.where(product, c.dp_shard * c.cp, c.dp_shard)
    shards = np.where(gathers, ranks, 1).astype(float)
    shares_states = (c.strategy_in("zero1") | (product & (level == 1))) & (c.dp_shard > 1)
    owners = np.where(shares_states, ranks, shards) if traits.shards_by_element else shards
    spread = shards > 1
    split = spread | shares_states
    whole = replace(c, ep=np.where(split, 1, c.ep), etp=np.where(split, c.tp, c.etp))
    whole = whole.with_kept_states()
    stored = stepped = elements
    if (whole.ep < c.ep).any():
        layers = _layer_per_stack(question, whole, sizes)
        stepped = mean([one.elements for one in layers], question.outline.stacks)
        stored = np.where(spread, stepped, elements)
    return Sharding(
        gathers=gathers,
        regathers=gathers & ~(c.strategy_in("zero2") | (product & (level == 2))),
        item=np.where(gathers, sizes.gathered, sizes.weight),
        shards=shards,
        owners=owners,
        shares_states=shares_states,
        states=states(question.outline, whole),
        stored=stored,
        stepped=stepped,
        expert_factor=stored / np.maximum(elements, 1),
    )


def _set_up_gradient_buffers(
    question: MemoryQuestion, columns: PlanBatch, sizes: Shapes, gathers: Bools
) -> GradientBuffers:
    c, main = columns, question.traits.main_gradients
    replicas = c.strategy_in("ddp", "zero1", "cp")
    several = c.dp_replicate * c.dp_shard * c.cp > 1
    buckets = c.strategy_in(*_BUCKETS) | (c.strategy_in("3d") & ~gathers & several)
    adds = c.passes * c.microbatches > 1
    sums_in_fp32 = c.precision_in("bf16-master") & ~gathers & adds & (main is None)
    # The last micro-batch of replicas is added in the buckets' dtype.
    casts_sums = sums_in_fp32 & (~replicas | (c.passes > 2))
    # If only two micro-batches add up, the first one's gradients stay in the 16 bits of DDP's
    # buckets.
    apart = (replicas | c.strategy_in("ring", "horovod")) & (c.passes > 1)
    return GradientBuffers(
        buckets=buckets if main is None else ~gathers,
        bucket_item=sizes.weight if main is None else np.where(gathers, sizes.weight, float(main)),
        fuses=c.strategy_in("dp", "ps"),
        replicas=replicas,
        sums_in_fp32=sums_in_fp32,
        sum_item=np.where(sums_in_fp32, FP32, sizes.weight),
        casts_sums=casts_sums,
        apart=np.where(apart, np.where(casts_sums, FP32, sizes.weight), 0.0),
    )


def _matmul_width(stack: Stack) -> int:
    """Return the total width of a layer's matmuls that a token passes through."""
    width = 0
    if stack.mlp is not None:
        times = 2 if stack.mlp.gated else 1
        active = stack.mlp.active if stack.mlp.experts else 1
        width += times * (stack.mlp.width * active + stack.mlp.shared)
    for attention in (stack.attention, stack.cross_attention):
        if attention is not None:
            width += attention.heads * (attention.head_dim + attention.value_dim)
    return width + sum(matmul.outputs * matmul.count for matmul in stack.other)
