"""Compute times by a roofline: each matrix product takes the longer of arithmetic and memory time.

Williams, Waterman and Patterson, "Roofline", CACM 2009: max(FLOPs / rate, bytes / bandwidth).
Norms, activations and the launch of kernels are left out, so times are lower bounds at these rates.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from outpace.planner.communication.volume import StepOnRank
from outpace.planner.pipeline.stages import layers_per_stage
from outpace.records.model import ModelSpec

# AdamW in fp32 reads weight, gradient and two moments of a parameter, and writes all but one.
_STEP_BYTES = 7 * 4


@dataclass(frozen=True)
class Roof:
    """A device's rates, FLOP/s and bytes/s."""

    flops_per_s: float
    bytes_per_s: float

    def seconds(self, flops: float, moved: float) -> float:
        """Return the longer of computing and moving."""
        return max(flops / self.flops_per_s, moved / self.bytes_per_s)


@dataclass(frozen=True)
class RooflineTimes:
    """Seconds of one micro-batch on the slowest stage, and of the optimizer once a step.

    `attention_share` is the part of a pass that is attention itself.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    attention_share: float


def times(work: StepOnRank, roof: Roof) -> RooflineTimes:
    """Return a device's times for its part of a stage; a backward has two products for each."""
    plan, spec = work.plan, work.spec
    tokens = plan.micro_batch * work.seq_len // plan.cp
    products = [*_products(spec, tokens, plan.tp)]
    block = sum(_product(roof, *sizes, work.low_item) for sizes in products)
    # torch stops recomputing at the last tensor that the backward reads (see planner.flops).
    reread = spec.dropout > 0 or not spec.norm_first
    last = 0.0 if reread else _product(roof, *products[-1], work.low_item)
    scores = _attention(work, roof, tokens, 2)
    head = _product(roof, tokens, spec.vocab / plan.tp, spec.hidden, work.low_item)
    modes = plan.modes(spec.layers)
    full = sum(mode == "full" for mode in modes) / len(modes)
    dense = sum(mode in ("full", "attention") for mode in modes) / len(modes)
    again = dense * (block - last) + full * scores
    counts = layers_per_stage(spec, plan.stages)
    # The head is the last stage's: balanced stages are about as slow as the slowest.
    ends = [0.0] * (len(counts) - 1) + [head]
    inward = 2 * block + 2.5 * scores + again
    forward = max(n * (block + scores) + end for n, end in zip(counts, ends, strict=True))
    backward = max(n * inward + 2 * end for n, end in zip(counts, ends, strict=True))
    per_rank = len(counts) // plan.pp
    sharded = plan.tp * plan.pp * plan.dp_shard * (plan.cp if plan.strategy == "3d" else 1)
    return RooflineTimes(
        forward_s=forward * per_rank,
        backward_s=backward * per_rank,
        optimizer_s=sum(work.sizes) / sharded * _STEP_BYTES / roof.bytes_per_s,
        attention_share=scores / (block + scores),
    )


def _products(spec: ModelSpec, tokens: int, split: int) -> Iterator[tuple[float, float, float]]:
    """(m, n, k) of a block's products on one of `split` ranks; the MLP's down is the last."""
    queries, keys = spec.heads * spec.head_dim / split, spec.kv_heads * spec.head_dim / split
    inner = spec.ffn / split
    yield tokens, queries + 2 * keys, spec.hidden
    yield tokens, spec.hidden, queries
    yield tokens, (2 if spec.gated else 1) * inner, spec.hidden
    yield tokens, spec.hidden, inner


def _product(roof: Roof, m: float, n: float, k: float, item: int) -> float:
    return roof.seconds(2 * m * n * k, item * (m * k + k * n + m * n))


def _attention(work: StepOnRank, roof: Roof, tokens: int, products: int) -> float:
    """Scores and mix of a block, fused: no score is written. All scores, as `flops` counts them."""
    spec, width = work.spec, work.spec.heads * work.spec.head_dim / work.plan.tp
    moved = work.low_item * tokens * (2 * width + 2 * width * spec.kv_heads / spec.heads)
    return roof.seconds(products * 2 * tokens * work.seq_len * width, moved)
