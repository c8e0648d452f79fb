"""Inputs of the memory formula for many plans at once: sizes, and traits of strategies."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from outpace.planner.memory.framework_traits import OUTPACE, FrameworkTraits
from outpace.planner.memory.fullest_rank import Place
from outpace.planner.memory.saved_activations import (
    FP32,
    Layer,
    Shapes,
    layer,
    mean,
    shapes,
    share_of,
)
from outpace.planner.memory.states import OutsideElements, States, outside_elements, states
from outpace.planner.memory.timeline import MemoryTimeline
from outpace.planner.plan_batch import OFFLOADS, PRECISIONS, Floats, PlanBatch
from outpace.records.outline import Outline, Stack
from outpace.records.plan import Checkpointing
from outpace.records.strategies import strategies_that

Device = Literal["cuda", "cpu"]
_BUCKETS = strategies_that(lambda traits: traits.buckets)
HEAVIEST: tuple[Checkpointing, ...] = ("full", "attention", "selective", "none")


class MemorySetup:
    """Values shared by all ranks of a plan.

    `used` are bytes of a parameter as a forward finds it, and of its gradient as the backward makes
    it. `gradient` are bytes of a gradient that is kept, `summed` of one to which micro-batches add
    theirs (`casts_sums`: made in 16 bits, cast to fp32), `owners` ranks states are spread over.
    `there` is 1 where gradients exist before a backward makes new ones, `waits` where a pipeline's
    sharded gradients are whole until its last micro-batch. Of modes of recomputation `shares` are
    of the blocks of the rank that is looked at.
    """

    there: Floats
    waits: Floats
    shares: dict[Checkpointing, Floats]
    first_mode: dict[Checkpointing, Floats]
    last_mode: dict[Checkpointing, Floats]

    def __init__(
        self,
        outline: Outline,
        seq_len: int,
        columns: PlanBatch,
        device: Device,
        fused: bool,
        finds: bool,
        traits: FrameworkTraits = OUTPACE,
    ) -> None:
        self.finds = finds
        self.fused = fused
        self.traits = traits
        self.outline, self.columns, self.device = outline, columns, device
        self.seq_len = seq_len
        c = columns
        self.s: Shapes = shapes(outline, seq_len, c)
        self.layers: Sequence[Layer] = [
            layer(outline, stack, c, self.s, device, fused, traits) for stack in outline.stacks
        ]
        # The block that is looked at is of the stack that keeps the most, whatever the plan.
        widest = max(range(len(self.layers)), key=lambda i: _width(outline.stacks[i]))
        self.block = self.layers[widest]
        self.kept = {
            mode: mean([one.saved_bytes_in(mode) for one in self.layers], outline.stacks)
            for mode in HEAVIEST
        }
        self.elements = mean([one.elements for one in self.layers], outline.stacks)
        self.matrices = mean([one.matrices for one in self.layers], outline.stacks)
        self.ends: OutsideElements = outside_elements(outline, c)
        # 1 where what products read is gathered again for the backward.
        apart = (c.tp > 1) & c.sequence_parallel & traits.regathers_inputs
        self.regathers_inputs = apart.astype(float)
        self._strategies()
        self._experts()

    def _strategies(self) -> None:
        c = self.columns
        product = c.strategy_in("3d")
        away = c.offload_parameters == OFFLOADS.index("cpu")
        replicas = c.dp_replicate * c.dp_shard * c.cp
        buffer = self.traits.main_gradients
        # Where nothing is to be sharded outpace's 3d has fully_shard's copies all the same.
        level = np.where(product & (c.zero == 0), 3 if buffer is None else 0, c.zero)
        gathered = (product & (replicas > 1) & (level >= 2)) | (~product & (c.zero >= 2)) | away
        self.fsdp = gathered.astype(float)
        self.used = np.where(gathered, self.s.gathered, self.s.weight)
        self.regathers = gathered & ~(c.strategy_in("zero2") | (product & (level == 2)))
        shards = np.where(product, c.dp_shard * c.cp, c.dp_shard)
        self.shards = np.where(gathered, shards, 1).astype(float)
        self.bucketed = (
            c.strategy_in(*_BUCKETS)
            | (product & ~gathered & (replicas > 1))
        ).astype(float)  # fmt: skip
        self.gradient = self.s.weight
        if buffer is not None:
            self.bucketed = 1.0 - gathered
            self.gradient = np.where(gathered, self.s.weight, float(buffer))
        self.dp = c.strategy_in("dp")
        self.fused_buffers = c.strategy_in("dp", "ps").astype(float)
        # DDP's no_sync: micro-batches before the last add up beside the buckets.
        self.replicas = c.strategy_in("ddp", "zero1", "cp")
        several = c.passes * c.microbatches > 1
        self.adds_in_fp32 = c.precision_in("bf16-master") & ~gathered & several & (buffer is None)
        self.summed = np.where(self.adds_in_fp32, FP32, self.s.weight)
        # The last micro-batch of replicas is added in the buckets' dtype.
        self.casts_sums = self.adds_in_fp32 & (~self.replicas | (c.passes > 2))
        self.zero1 = (c.strategy_in("zero1") | (product & (level == 1))) & (c.dp_shard > 1)
        self.owners = self.shards
        if self.traits.shards_by_element:
            self.owners = np.where(self.zero1, shards, self.shards)
        self.off_acts = (c.offload_activations > 0).astype(float)
        self.acts_on_disk = c.offload_activations == OFFLOADS.index("disk")
        self.in_backward = c.in_backward.astype(float)

    def _experts(self) -> None:
        """Experts are shared out by ranks that shard as well: of what is sharded, ep is a part.

        `stored` are a layer's elements that are cut into shards, `stepped` those whose states are
        (under zero1 a rank keeps its own experts' weights, and states of all are over all ranks);
        `more` is how many times as many as a rank computes with.
        """
        c = self.columns
        spread = self.shards > 1
        split = spread | self.zero1
        whole = replace(c, ep=np.where(split, 1, c.ep), etp=np.where(split, c.tp, c.etp))
        # Whose shards are the masters keeps no others.
        plain = PRECISIONS.index("bf16")
        whole = replace(whole, precision=np.where(c.holds_masters(), plain, c.precision))
        self.states: States = states(self.outline, whole)
        self.stored = self.stepped = self.elements
        if (whole.ep < c.ep).any():
            layers = [
                layer(self.outline, stack, whole, self.s, self.device, self.fused, self.traits)
                for stack in self.outline.stacks
            ]
            self.stepped = mean([one.elements for one in layers], self.outline.stacks)
            self.stored = np.where(spread, self.stepped, self.elements)
        self.more = self.stored / np.maximum(self.elements, 1)

    def _outside_elements(self, place: Place) -> Floats:
        e = self.ends
        head = np.where(e.head > 0, e.head, e.embedding)
        both = place.first * place.last
        tied = float(self.outline.tied)
        return place.first * (e.embedding + e.positions) + place.last * (
            e.tail + np.where(e.head > 0, head, tied * head * (1 - both))
        )

    def _largest(self, place: Place) -> Floats:
        """Elements of the largest parameter: a matrix of a layer, or an end's embedding or head."""
        ends = np.maximum(place.first, place.last) * self.ends.embedding
        largest: Floats = np.maximum(self.block.largest, ends) / self.shards
        return largest

    def _copy_bytes(self) -> Floats:
        s = self.s
        casts = (s.operand < self.used) & ~self.columns.precision_in(
            "fp8"
        )  # which saves the weight
        return self.matrices * s.operand * casts

    def _modes(self, place: Place) -> None:
        """Set what the blocks of a rank recompute: on average, the last one and the first one."""
        recomputed = 1 - share_of(self.columns, "none")
        local = place.again / np.maximum(recomputed, 1e-9)
        self.shares = {mode: share_of(self.columns, mode) * local for mode in HEAVIEST}
        self.shares["none"] = 1 - place.again
        self.last_mode = self._mode_of(place.last_again, HEAVIEST[2::-1])
        self.first_mode = self._mode_of(place.first_again, HEAVIEST[:3])

    def _mode_of(
        self, again: Floats, modes: Sequence[Checkpointing]
    ) -> dict[Checkpointing, Floats]:
        """1 for the mode of a block: where it recomputes, the first of `modes` that there is."""
        found: dict[Checkpointing, Floats] = {"none": 1 - again}
        free = again
        for mode in modes:
            found[mode] = free * (share_of(self.columns, mode) > 0)
            free = free - found[mode]
        return found

    def _saved_bytes(self, mode: dict[Checkpointing, Floats]) -> Floats:
        return sum(
            (mode[one] * self.kept[one] for one in HEAVIEST), start=np.zeros_like(mode["none"])
        )

    def _offloaded_bytes(self, mode: dict[Checkpointing, Floats]) -> Floats:
        """Return what is offloaded: what autograd saves, not what checkpointing keeps by itself."""
        saved = mode["none"] * self.kept["none"] + (1 - mode["none"]) * self.kept["full"]
        away: Floats = self.off_acts * saved
        return away

    def _gradient(
        self,
        timeline: MemoryTimeline,
        elements: Floats,
        product: bool = True,
        copies: Floats | float = 0.0,
    ) -> None:
        """Add a weight's gradient: kept, added to the present one, or kept for its reduction.

        That of a `product` is made in its dtype, and cast when the weight's copy is gone.
        """
        s = self.s
        low = elements * s.operand * (s.operand < self.used) * product
        nbytes = elements * self.used
        kept = elements * self._added_bytes() * (1 - self.fsdp)
        stays = (1 - self.there) * (1 - self.in_backward)
        low = low + nbytes * self.casts_sums
        timeline.take("temporary", low)
        timeline.drop("weight copies", copies * elements)
        timeline.moment("gradients", kept * (1 - stays))
        timeline.take("gradients", kept * stays)
        # Added to what waits for a pipeline's last micro-batch: at once where that is of its dtype.
        adds = self.waits * self.there * (s.reduced == self.used)
        timeline.moment("communication", nbytes * self.fsdp * adds)
        timeline.take("communication", nbytes * self.fsdp * (1 - adds))
        timeline.drop("temporary", low)

    def _added_bytes(self) -> Floats:
        """Bytes of a gradient as it comes to those that are there, where none are gathered."""
        added: Floats = np.where(self.casts_sums, FP32, self.used)
        return added


def _width(stack: Stack) -> int:
    """Return the columns of all products that a token passes in a layer."""
    width = 0
    if stack.mlp is not None:
        times = 2 if stack.mlp.gated else 1
        active = stack.mlp.active if stack.mlp.experts else 1
        width += times * (stack.mlp.width * active + stack.mlp.shared)
    for attention in (stack.attention, stack.cross_attention):
        if attention is not None:
            width += attention.heads * (attention.head_dim + attention.value_dim)
    return width + sum(product.outputs * product.count for product in stack.other)
