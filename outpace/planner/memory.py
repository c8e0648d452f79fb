"""The memory of a plan's fullest rank, in closed form and for many plans at once.

Rajbhandari et al., "ZeRO", arXiv 1910.02054, §3, for what states take; Korthikanti et al., arXiv
2205.05198, §4, for activations. Every term is derived in docs/memory_formula.md from what the
model's operators save and what the strategies' buffers hold. Nothing is fitted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from outpace.planner.columns import OFFLOADS, OPTIMIZERS, SCHEDULE_NAMES, Bools, Columns, Floats
from outpace.planner.in_flight import Rank, ranks_of
from outpace.planner.layer_bytes import FP32, Layer, Shapes, layer, mean, shapes, share_of
from outpace.planner.outlines import weights
from outpace.planner.stages import balance
from outpace.planner.stored import Outside, States, outside, states, whole_share
from outpace.planner.tape import Tape, fullest
from outpace.records.memory import Kind
from outpace.records.outline import Outline
from outpace.records.plan import Checkpointing

Device = Literal["cuda", "cpu"]

_MIB = 2**20
# nn.loss: rows of a chunk, from how many bytes of fp32 logits chunks are taken, on an accelerator
# the bytes of a chunk.
_CHUNK_ROWS = 512
_CHUNKS_FROM = {"cpu": 32 * _MIB, "cuda": 512 * _MIB}
_CHUNK_BYTES = 128 * _MIB
# Two threads multiply, each with a workspace of cuBLAS: 32 MiB on Hopper and later (torch, CUDABlas
# handle pool, 4096 KiB × 8).
_WORKSPACES = {"cpu": 0, "cuda": 2 * 32 * _MIB}
_ATTENTION_ROWS = 512  # of scores that ring attention holds at once
_UNIT_BYTES = 4 * _MIB  # of parameters that an offloaded optimizer steps together, at least
_HEAVIEST: tuple[Checkpointing, ...] = ("full", "attention", "selective", "none")
# What the CUDA allocator and contexts add: see `reserved_bytes`.
_SEGMENT = 20 * _MIB
_SEGMENT_OF_LARGE = 2 * _MIB
_CONTEXT = 500 * _MIB
_NCCL_CHANNEL = 4 * _MIB
_NCCL_CHANNELS = 32


def anatomy(
    outline: Outline,
    seq_len: int,
    columns: Columns,
    device: Device = "cuda",
    *,
    fused_attention: bool = True,
) -> dict[Kind, Floats]:
    """Bytes by kind at the fullest moment of a step on the fullest rank, for every plan.

    What is offloaded is a kind of its own, and not in the sum. `fused_attention` False is for
    attention that keeps its scores, as in Korthikanti et al., arXiv 2205.05198, eq. 1.
    """
    tapes = list(_tapes(outline, seq_len, columns, device, fused_attention))
    return fullest([tape.by_kind() for tape in tapes], [tape.peak for tape in tapes])


def peak_bytes(
    outline: Outline,
    seq_len: int,
    columns: Columns,
    device: Device = "cuda",
    *,
    fused_attention: bool = True,
) -> Floats:
    """Bytes of tensors on the fullest rank at its fullest moment, for every plan."""
    tapes = _tapes(outline, seq_len, columns, device, fused_attention)
    peak: Floats = np.max(np.stack([tape.peak for tape in tapes]), axis=0)
    return peak


def reserved_bytes(
    outline: Outline, seq_len: int, columns: Columns, device: Device = "cuda"
) -> Floats:
    """What a device has to have: with the allocator's segments, CUDA's context and NCCL's buffers.

    The caching allocator keeps segments of 20 MiB for blocks below 10 MiB and rounds larger ones
    up to 2 MiB (c10/cuda/CUDACachingAllocator.cpp: kLargeBuffer, kMinLargeAlloc, kRoundLarge). Of
    each large pool one segment is partly used at the peak, and what is left of a large block is
    not smaller than a split would be (kSmallSize, 1 MiB): one unit for each tensor that is kept of
    a layer bounds what is lost. Context: see docs/memory_formula.md.
    """
    peak = peak_bytes(outline, seq_len, columns, device)
    if device == "cpu":
        return peak
    pieces = 12.0 * outline.layers / columns.pp
    lost = 2 * _SEGMENT + np.minimum(pieces * _SEGMENT_OF_LARGE / 2, 0.04 * peak)
    groups = sum(
        (size > 1).astype(float)
        for size in (columns.dp_replicate, columns.dp_shard * columns.cp, columns.tp, columns.pp)
    )
    return peak + lost + _CONTEXT + groups * _NCCL_CHANNEL * _NCCL_CHANNELS / 2  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Place:
    """A rank of each plan's pipeline; without a pipeline, the rank."""

    layers: Floats
    chunk_layers: Floats
    stages: Floats
    first: Floats
    last: Floats
    chunks: Floats
    later_chunks: Floats
    losses: Floats
    later_losses: Floats
    borders: Floats


def _tapes(
    outline: Outline, seq_len: int, columns: Columns, device: Device, fused: bool
) -> Iterator[Tape]:
    """Of every rank of a pipeline that may be the fullest, before gradients are there and after."""
    made = _Step(outline, seq_len, columns, device, fused)
    for place in _places(outline, columns):
        yield made.tape(place, later=False)
        again = (place.later_chunks > 0) & (columns.pp > 1)
        if again.any():
            yield made.tape(place, later=True)


def _places(outline: Outline, columns: Columns) -> Iterator[_Place]:
    """Without a pipeline one; else the ranks that `in_flight` gives, the last repeated."""
    names = ("schedule", "pp", "stages_per_rank", "microbatches")
    rows = np.stack([getattr(columns, name) for name in names], axis=1)
    unique, place = np.unique(rows, axis=0, return_inverse=True)
    block = sum(w.inputs * w.outputs * max(1, w.active) for s in outline.stacks[:1]
                for w in weights(s, outline.hidden))  # fmt: skip
    head = outline.outputs * outline.hidden
    head += sum(p.inputs * p.outputs * p.count for p in outline.head_products)
    found = [_ranks(outline.layers, head / max(block, 1), *map(int, row)) for row in unique]
    for number in range(max(map(len, found))):
        chosen = [ranks[min(number, len(ranks) - 1)] for ranks in found]
        table = np.array(chosen, dtype=float)[place.reshape(-1)]
        yield _Place(*table.T)


@lru_cache(maxsize=4096)
def _ranks(
    layers: int, head: float, schedule: int, pp: int, each: int, microbatches: int
) -> tuple[Rank, ...]:
    if pp == 1:
        return (Rank(layers, float(layers), 1, True, True, 1, 0, 1, 0, 0),)
    name = SCHEDULE_NAMES[schedule]
    stages = min(layers, pp * each)
    counts = balance(layers, stages, head) + (0,) * (pp * each - stages)
    return ranks_of(name, pp, each, microbatches, counts)


class _Step:
    """What all ranks of a plan have in common, and a step of one of them."""

    def __init__(
        self, outline: Outline, seq_len: int, columns: Columns, device: Device, fused: bool
    ) -> None:
        self.outline, self.columns, self.device = outline, columns, device
        self.seq_len = seq_len
        c = columns
        self.s: Shapes = shapes(outline, seq_len, c)
        self.layers: Sequence[Layer] = [
            layer(outline, stack, c, self.s, device, fused) for stack in outline.stacks
        ]
        # The block that is looked at is of the stack that keeps the most.
        widest = max(range(len(self.layers)), key=lambda i: float(self.layers[i].kept.mean()))
        self.block = self.layers[widest]
        self.kept = {
            mode: mean([one.kept_in(mode) for one in self.layers], outline.stacks)
            for mode in _HEAVIEST
        }
        self.elements = mean([one.elements for one in self.layers], outline.stacks)
        self.matrices = mean([one.matrices for one in self.layers], outline.stacks)
        self.ends: Outside = outside(outline, c)
        self.states: States = states(outline, c)
        self._strategies()

    def _strategies(self) -> None:
        c = self.columns
        product = c.of("3d")
        away = c.offload_parameters == OFFLOADS.index("cpu")
        replicas = c.dp_replicate * c.dp_shard * c.cp
        level = np.where(product & (c.zero == 0), 3, c.zero)
        gathered = (product & (replicas > 1) & (level >= 2)) | (~product & (c.zero >= 2)) | away
        self.fsdp = gathered.astype(float)
        self.regathers = gathered & ~(c.of("zero2") | (product & (level == 2)))
        shards = np.where(product, c.dp_shard * c.cp, c.dp_shard)
        self.shards = np.where(gathered, shards, 1).astype(float)
        self.bucketed = (
            c.of("ddp", "ring", "horovod", "zero1", "cp")
            | (product & ~gathered & (replicas > 1))
        ).astype(float)  # fmt: skip
        self.fused_buffers = c.of("dp", "ps").astype(float)
        self.zero1 = (c.of("zero1") | (product & (level == 1))) & (c.dp_shard > 1)
        self.off_acts = (c.offload_activations > 0).astype(float)
        self.in_backward = c.in_backward.astype(float)

    # ---- what lies there for good

    def _for_good(self, tape: Tape, place: _Place, later: bool) -> None:
        c, s = self.columns, self.s
        ends = self._outside_elements(place)
        elements = self.elements * place.layers + ends
        held = s.weight * elements / self.shards
        on_host = (c.offload_parameters == OFFLOADS.index("cpu")) & (self.device == "cuda")
        on_disk = c.offload_parameters == OFFLOADS.index("disk")
        weights_away = (on_host | on_disk).astype(float)
        kept = self._state_bytes(place)
        optimizer_away = (
            (c.offload_optimizer == OFFLOADS.index("disk"))
            | ((c.offload_optimizer == OFFLOADS.index("cpu")) & (self.device == "cuda"))
            | on_host
        ).astype(float)
        twins = ((c.offload_optimizer == OFFLOADS.index("cpu")) & (c.offload_parameters == 0)) | (
            (c.offload_optimizer > 0) & (self.device == "cuda") & (c.offload_parameters == 0)
        )
        twin = held * twins
        tape.pass_over("weights", held * (1 - weights_away))
        tape.pass_over("optimizer state", (kept + twin) * (1 - optimizer_away))
        tape.pass_over("offloaded", held * weights_away + (kept + twin) * optimizer_away)
        tape.pass_over("workspaces", _WORKSPACES[self.device])
        tape.pass_over("inputs", 16.0 * c.micro_batch * c.microbatches * c.passes * self.seq_len  # type: ignore[arg-type]
                       * np.where(c.of("dp"), c.data_parallel, 1))  # fmt: skip
        whole = s.weight * elements
        tape.pass_over("gradients", whole * self.bucketed)
        tape.pass_over("communication", whole * self.fused_buffers)
        # What a pipeline sends and receives has a buffer for each micro-batch.
        stream = s.part * s.stream
        piped = (c.pp > 1).astype(float)
        tape.pass_over("communication", piped * place.borders * c.microbatches * stream)
        # Micro-batches that are not exchanged add up apart from the buckets.
        apart = c.of("ddp", "zero1", "cp", "ring", "horovod") & (c.passes > 1)
        tape.pass_over("gradients", whole * apart)
        again = ((c.passes > 1) & ~c.of("dp")) | later
        self.there = np.maximum(self.bucketed, again)
        # Within a pipeline sharded gradients are whole until the last micro-batch.
        self.waits = self.fsdp * (c.pp > 1) * (c.microbatches > 1)
        grown = self.there * (1 - self.bucketed)
        shards = np.where(self.waits > 0, 1, self.shards)
        grown = grown * s.weight * elements / shards * (1 - on_host)
        tape.pass_over("gradients", grown * (1 - self.waits))
        tape.pass_over("communication", grown * self.waits)
        tape.look()

    def _outside_elements(self, place: _Place) -> Floats:
        e = self.ends
        head = np.where(e.head > 0, e.head, e.embedding)
        both = place.first * place.last
        tied = float(self.outline.tied)
        return place.first * (e.embedding + e.positions) + place.last * (
            e.tail + np.where(e.head > 0, head, tied * head * (1 - both))
        )

    def _state_bytes(self, place: _Place) -> Floats:
        c, t = self.columns, self.states
        tied_again = float(self.outline.tied) * (1 - place.first) * t.embedding
        all_of = (
            place.layers * t.layer
            + place.first * (t.embedding + t.positions)
            + place.last * (t.head + t.rest + tied_again)
        )
        share = 1 / self.shards
        if self.zero1.any():
            share = np.where(self.zero1, whole_share(self.outline, c), share)
        # Under dp rank 0 alone steps; where servers are told to, workers keep nothing.
        return all_of * share

    # ---- a step

    def tape(self, place: _Place, later: bool) -> Tape:
        """A step on one rank; `later`: after a pipeline's first backward."""
        c, s = self.columns, self.s
        tape = Tape(len(c.pp))
        self._for_good(tape, place, later)
        chunks = np.maximum(place.later_chunks if later else place.chunks, 1)
        losses = place.later_losses if later else place.losses
        piped = (c.pp > 1).astype(float)
        count = np.maximum(place.chunk_layers, 1e-9)
        mean_kept = self._mean_kept()
        stream = s.part * s.stream
        # Of a stage that is not the first the input is what was received; the output of one that
        # is not the last stays until it is sent and backward has come.
        ends = piped * stream * (1 - place.last / place.stages)
        ends = ends - piped * stream * (1 - place.first / place.stages)
        per_chunk = count * mean_kept + ends
        self._gather_root(tape, place)
        self._replicate(tape, place)
        others = np.maximum(chunks - 1, 0) * per_chunk
        self._keep(tape, others)
        self._copies(tape, np.maximum(chunks - 1, 0) * count)
        # Where blocks end with norms the embedding has one too, which keeps the sum.
        summed = stream * place.first * bool(self.outline.head_products)
        tape.pass_over("activations", summed)
        self._tables(tape)
        self._keep(tape, per_chunk)
        self._copies(tape, count)
        self._gathers_forward(tape, count, place)
        self._loss(tape, place, losses)
        self._backward(tape, place, count, per_chunk)
        self._optimizer(tape, place)
        return tape

    def _mean_kept(self) -> Floats:
        return sum(
            (share_of(self.columns, mode) * self.kept[mode] for mode in _HEAVIEST),
            start=np.zeros(len(self.columns.pp)),
        )

    def _keep(self, tape: Tape, nbytes: Floats) -> None:
        tape.pass_over("activations", nbytes * (1 - self.off_acts))
        tape.pass_over("offloaded", nbytes * self.off_acts)

    def _copies(self, tape: Tape, layers: Floats) -> None:
        """Casts of matrices that backward reads again, of blocks that recompute nothing."""
        nbytes = layers * self._copy_bytes() * share_of(self.columns, "none")
        tape.pass_over("weight copies", nbytes * (1 - self.off_acts))
        tape.pass_over("offloaded", nbytes * self.off_acts)

    def _copy_bytes(self) -> Floats:
        s = self.s
        casts = (s.operand < s.weight) & ~self.columns.precise("fp8")  # which saves the weight
        return self.matrices * s.operand * casts

    def _tables(self, tape: Tape) -> None:
        """Cosines and sines of positions, in fp32."""
        first = self.outline.stacks[0].attention
        if self.outline.learned_positions == 0 and first is not None:
            width = first.rope_dim or first.head_dim
            tape.pass_over("activations", 2 * FP32 * width * self.seq_len / self.columns.cp)

    def _replicate(self, tape: Tape, place: _Place) -> None:
        """Under dp the weights leave in one message."""
        leads = self.columns.of("dp") * 1.0
        elements = self.elements * place.layers + self._outside_elements(place)
        tape.moment("communication", leads * self.s.weight * elements)

    # ---- gathered weights

    def _gather_root(self, tape: Tape, place: _Place) -> None:
        root = self.fsdp * self.s.weight * self._outside_elements(place)
        tape.take("unsharded", root)
        tape.take("communication", root)  # given back once the first block is gathered

    def _gathers_forward(self, tape: Tape, count: Floats, place: _Place) -> None:
        """Of each block what is gathered is copied out, while the last block's is still there."""
        unit = self.fsdp * self.s.weight * self.elements
        root = self.fsdp * self.s.weight * self._outside_elements(place)
        others = np.where(self.regathers, 0, unit * (count - 1))
        before = np.where(count > 1.5, unit, root)
        tape.drop("communication", root)
        tape.pass_over("unsharded", others + unit)
        tape.moment("communication", before + unit)
        tape.pass_over("communication", unit)
        tape.pass_over("unsharded", -np.where(self.regathers, unit, 0))

    # ---- the loss

    def _loss(self, tape: Tape, place: _Place, losses: Floats) -> None:
        """The last norm and the head; what is left of it is the gradient of the last hidden state.

        `losses` micro-batches have been through it whose backward is not done.
        """
        c, s = self.columns, self.s
        here = place.last
        many = np.where(c.of("dp"), c.dp_replicate, 1)  # rank 0 has all ranks' outputs
        rows = s.tokens * many
        vocab = np.ceil(self.outline.outputs / c.tp)
        stream = s.part * s.stream
        # What the norm before the head keeps, and its transform where there is one.
        rms = self.block.rms
        before = stream + (self.block.norm if rms else 0) + self._transformed()
        kept_before = np.maximum(losses, 1) * before * here
        tape.pass_over("activations", kept_before)
        tape.pass_over("activations", (many > 1) * rows * self.outline.hidden * s.stream)
        head = vocab * self.outline.hidden
        chunked = self._chunked(rows, vocab)
        more = np.maximum(losses - 1, 0) * here
        self._whole_logits(tape, here * ~chunked, rows, vocab, head, more)
        self._in_chunks(tape, here * chunked, rows, vocab, head, more)
        tape.drop("activations", (many > 1) * rows * self.outline.hidden * s.stream)
        self._gradient(tape, here * head)
        tape.pass_over("temporary", self._tied_waits(place))
        tape.drop("activations", kept_before - (np.maximum(losses, 1) - 1) * before * here)
        # From here on there is the gradient of the stream.
        tape.take("temporary", stream)

    def _tied_waits(self, place: _Place) -> Floats:
        """A tied head's gradient, which waits for the embedding's where it is not kept as such."""
        both = place.first * place.last * float(self.outline.tied) * ~self.columns.of("dp")
        stays = (1 - self.there) * (1 - self.in_backward)
        nbytes: Floats = both * (1 - self.fsdp) * (1 - stays) * self.ends.embedding * self.s.weight
        return nbytes

    def _transformed(self) -> Floats:
        """BERT's product, activation and norm before the head."""
        if not self.outline.head_products:
            return np.zeros(len(self.columns.pp))
        s = self.s
        return 2 * s.whole * s.operand + s.casts * s.whole * s.operand

    def _chunked(self, rows: Floats, vocab: Floats) -> Bools:
        c = self.columns
        splits = c.scheduled("zb", "zbv", "dualpipev")
        large = (rows > _CHUNK_ROWS) & (FP32 * rows * vocab > _CHUNKS_FROM[self.device])
        return ((large & ~splits) | c.chunked_loss) & (c.tp == 1)  # type: ignore[no-any-return]

    def _whole_logits(
        self, tape: Tape, here: Floats, rows: Floats, vocab: Floats, head: Floats, more: Floats
    ) -> None:
        s, c = self.s, self.columns
        logits, wide = here * rows * vocab, np.maximum(s.operand, FP32)
        low = s.operand < FP32
        read = here * rows * self.outline.hidden * s.operand
        copy = here * head * s.operand * (s.operand < s.weight)
        split = c.tp > 1
        tape.pass_over("activations", more * (logits * wide + read))
        tape.pass_over("activations", read)
        tape.pass_over("weight copies", copy)
        # Products, in fp32, and their logarithms of softmax (split over ranks: exponentials).
        output = here * rows * self.outline.hidden * s.stream * s.casts  # what was cast
        tape.moment("temporary", output + logits * (s.operand * low + 2 * wide))
        tape.take("activations", logits * wide)
        # Its gradient, and that of the products; split, it is made at once and cast.
        made = np.where(split, wide + s.operand * low, 2 * wide)
        tape.moment("temporary", logits * made)
        tape.drop("activations", logits * wide)
        grads = logits * s.operand + here * head * s.operand + read
        tape.moment("temporary", grads)
        tape.drop("weight copies", copy)
        tape.drop("activations", read)

    def _in_chunks(
        self, tape: Tape, here: Floats, rows: Floats, vocab: Floats, head: Floats, more: Floats
    ) -> None:
        """The gradients of hidden states and head are made in the forward."""
        s, hidden = self.s, self.outline.hidden
        own = (self.device == "cuda") & (s.operand < FP32)  # the package's own chunks
        chunk = np.minimum(_CHUNK_ROWS, rows)
        large = np.maximum(_CHUNK_ROWS, np.floor(_CHUNK_BYTES / (FP32 * np.maximum(vocab, 1))))
        chunk = np.where(own, np.minimum(large, rows), chunk)
        states_grad = here * rows * hidden * np.where(own, s.stream, np.maximum(s.operand, FP32))
        weights_grad = here * head * np.maximum(FP32, s.weight)
        raised = here * head * FP32 * (s.weight < FP32) * ~own
        tape.pass_over("activations", (1 + more) * (states_grad + weights_grad))
        output = here * rows * hidden * s.stream
        cast = here * head * s.operand * own
        inside = np.where(
            own,
            np.maximum(12 * chunk * vocab, chunk * vocab * s.operand + head * s.operand) * here,
            FP32 * chunk * (vocab + hidden) * here,
        )
        tape.moment("temporary", inside + output + cast + raised)
        # Before they are scaled, torch's operator makes zeros for the ones that nobody asked for.
        tape.moment("temporary", np.where(own, 0, states_grad + weights_grad))
        tape.drop("activations", states_grad + weights_grad)

    # ---- the backward

    def _gradient(
        self, tape: Tape, elements: Floats, product: bool = True, copies: Floats | float = 0.0
    ) -> None:
        """A weight's gradient: kept, added to what is there, or kept for its exchange.

        That of a `product` is made in its dtype, and cast when the weight's copy is gone.
        """
        s = self.s
        low = elements * s.operand * (s.operand < s.weight) * product
        nbytes = elements * s.weight
        stays = (1 - self.there) * (1 - self.in_backward)
        tape.take("temporary", low)
        tape.drop("weight copies", copies * elements)
        tape.moment("gradients", nbytes * (1 - self.fsdp) * (1 - stays))
        tape.take("gradients", nbytes * (1 - self.fsdp) * stays)
        tape.moment("communication", nbytes * self.fsdp * self.waits * self.there)
        tape.take("communication", nbytes * self.fsdp * (1 - self.waits * self.there))
        tape.drop("temporary", low)

    def _backward(self, tape: Tape, place: _Place, count: Floats, per_chunk: Floats) -> None:
        """The last blocks, then the first ones; those between do alike."""
        c, s = self.columns, self.s
        unit = self.fsdp * s.weight * self.elements
        again = self.regathers.astype(float)
        # zero2 has kept all; what was gathered last goes.
        tape.drop("communication", unit)
        lightest, heaviest = self._mode_of(reverse=True), self._mode_of(reverse=False)
        # A split backward keeps what gradients of weights are made from until their turn.
        # DualPipeV splits only where it fills bubbles, when fewer are under way.
        splits = c.scheduled("zb", "zbv")
        tape.take("temporary", splits * count * self.block.outputs)
        done = np.zeros_like(count)
        given = np.zeros_like(count)
        reduced = 0.0 * unit
        positions = (
            (count > 0, lightest, count > 1.5),
            (count > 2.5, lightest, count > 2.5),
            (count > 3.5, heaviest, count > 3.5),
            (count > 1.5, heaviest, count < 0),
        )
        for number, (present, mode, prefetches) in enumerate(positions):
            p = present.astype(float)
            if number == 2:
                left = np.maximum(count - 4, 0)
                grads = left * s.weight * self.elements
                stays = (1 - self.there) * (1 - self.in_backward)
                shards = np.where(self.waits > 0, 1, self.shards)
                tape.pass_over("gradients", grads / shards * stays)
                tape.pass_over("unsharded", left * unit * np.where(self.waits > 0, 1, again - 1))
                between = np.where(count > 4, per_chunk - given - self._kept_by(heaviest) * 2, 0)
                self._keep(tape, -np.maximum(between, 0))
                self._copies(tape, -left)
            # Gathered: this block's copied out, the next one's on its way.
            tape.take("communication", p * again * unit)
            tape.take("unsharded", p * again * unit)
            tape.drop("communication", p * again * unit)
            tape.take("communication", p * again * unit * prefetches)
            self._block(tape, p, mode)
            tape.drop("communication", p * again * unit * prefetches)
            given = given + p * self._kept_by(mode)
            # Reduced and scattered, at once or after a pipeline's last micro-batch.
            now = 1 - self.waits
            tape.drop("unsharded", p * unit * now)
            tape.drop("communication", p * reduced)
            tape.take("communication", p * unit * now)
            tape.drop("communication", p * unit * now)  # the block's own gradients
            reduced = np.where(present, unit * now, reduced)
            stays = (1 - self.there) * (1 - self.in_backward) * now
            tape.take("gradients", p * unit / self.shards * stays)
            done = done + p
        tape.drop("temporary", splits * count * self.block.outputs)
        self._embedding(tape, place, reduced)

    def _mode_of(self, reverse: bool) -> dict[Checkpointing, Floats]:
        """The mode of the block that is looked at: the one that recomputes least, or most."""
        found: dict[Checkpointing, Floats] = {}
        free = np.ones(len(self.columns.pp))
        for mode in reversed(_HEAVIEST) if reverse else _HEAVIEST:
            found[mode] = free * (share_of(self.columns, mode) > 0)
            free = free - found[mode]
        return found

    def _kept_by(self, mode: dict[Checkpointing, Floats]) -> Floats:
        return sum(
            (mode[one] * self.kept[one] for one in _HEAVIEST), start=np.zeros_like(mode["none"])
        )

    def _block(self, tape: Tape, present: Floats, mode: dict[Checkpointing, Floats]) -> None:
        """A block's backward, with what it computes again before."""
        s, b = self.s, self.block
        kept = self._kept_by(mode)
        again = b.kept - kept
        # Offloaded tensors are used where they lie.
        live = np.where(self.off_acts > 0, again / np.maximum(b.kept, 1), 1.0) * present
        copies = self._copy_bytes() * present * (1 - mode["none"])
        # Bytes of copies for each element of a matrix, as far as they are here.
        copied = self._copy_bytes() / np.maximum(self.matrices, 1)
        copied = copied * (1 - self.off_acts * mode["none"])
        tape.pass_over("activations", again * present)
        tape.take("weight copies", copies)
        cached = mode["selective"] * present * b.output
        tape.pass_over("activations", cached)
        stream, read = s.part * s.stream * present, s.whole * s.operand * present
        inner = b.inner * present
        in_it = inner * live / np.maximum(present, 1e-9)
        # The MLP. The gradient of its output in the products' dtype, then of the inner tensor.
        cast = read * s.casts
        tape.pass_over("temporary", cast)
        tape.take("temporary", inner)
        self._gradient(tape, b.down * present, copies=copied)
        tape.drop("temporary", cast)
        tape.drop("activations", in_it)
        if b.gated:
            tape.take("temporary", 2 * inner)
            tape.drop("activations", 2 * in_it)
            tape.drop("temporary", inner)
            tape.pass_over("temporary", read)
            self._gradient(tape, b.up * present, copies=copied)
            tape.drop("temporary", inner)
            tape.take("temporary", inner)
            tape.drop("activations", in_it)
            tape.drop("temporary", inner)
            tape.take("temporary", read)
            tape.drop("temporary", read)
            self._gradient(tape, b.up * present, copies=copied)
            tape.drop("temporary", inner)
        else:
            tape.take("temporary", inner)
            tape.drop("activations", in_it)
            tape.drop("temporary", inner)
            tape.take("temporary", read)
            self._gradient(tape, b.up * present, copies=copied)
            tape.drop("temporary", inner)
        input_ = b.input * live
        tape.drop("activations", input_)
        self._through_norm(tape, stream, read, live)
        # Attention.
        tape.pass_over("temporary", cast)
        tape.pass_over("temporary", b.mixed * present)
        heads = (b.queries + 2 * b.keys) * present
        tape.take("temporary", heads)
        self._ring(tape, present)
        self._workspace(tape, present)
        tape.drop("temporary", (b.mixed * present) + cast)
        tape.drop("activations", b.attention * live)
        if self.outline.learned_positions == 0:
            wide = FP32 / s.operand
            turned = wide * (2 * b.queries + b.keys) + b.queries - b.queries - b.keys
            tape.moment("temporary", np.maximum(turned, 0) * present)
        rest = b.elements - b.down - b.up * (2 if b.gated else 1)
        tape.pass_over("temporary", 2 * read)
        self._gradient(tape, (rest - b.vectors) * present, copies=copied)
        self._gradient(tape, b.vectors * present, product=False)
        tape.drop("temporary", 2 * read + heads)
        tape.drop("activations", input_)
        self._through_norm(tape, stream, read, live)
        remains = b.kept - b.attention - b.inners * b.inner - 2 * b.input
        tape.drop("activations", (remains - 2 * (b.residual + b.norm)) * live + cached)
        held = self._copy_bytes() * present * mode["none"]
        tape.drop("offloaded", (held + kept * present) * self.off_acts)

    def _through_norm(self, tape: Tape, stream: Floats, read: Floats, live: Floats) -> None:
        """The gradient of what the norm made becomes its input's, and joins the stream's."""
        b, c = self.block, self.columns
        gathered = ((c.tp > 1) & c.sequence_parallel).astype(float)
        tape.take("temporary", read * gathered)  # put together before it is scattered
        tape.drop("temporary", read * gathered)
        tape.pass_over("temporary", stream)
        tape.take("temporary", stream * (2 if b.rms else 1))
        tape.drop("activations", (b.residual + b.norm) * live)
        tape.drop("temporary", stream * (3 if b.rms else 2))

    def _ring(self, tape: Tape, present: Floats) -> None:
        """Attention round a ring of ranks: operands in fp32, 512 rows of scores three times."""
        c, s, b = self.columns, self.s, self.block
        spread = (c.cp > 1).astype(float) * present
        if not spread.any():
            return
        wide = FP32 / s.operand
        one = self.outline.stacks[0].attention
        heads = (one.heads if one else 0) / c.tp
        length = self.seq_len / c.cp
        rows = np.minimum(_ATTENTION_ROWS, length)
        scores = FP32 * c.micro_batch * heads * rows * length
        operands = wide * (4 * b.queries + 8 * b.keys) + 2 * b.keys
        tape.moment("temporary", spread * (3 * scores + operands))

    def _workspace(self, tape: Tape, present: Floats) -> None:
        """FlashAttention's sums of queries' gradients in fp32 (Dao, arXiv 2307.08691, §3)."""
        one = self.outline.stacks[0].attention
        if self.device == "cpu" or one is None:
            return
        c = self.columns
        unit = 32 if one.head_dim <= 128 else 64
        width = -(-one.head_dim // unit) * unit + 1
        length = np.ceil(self.seq_len / 128) * 128
        nbytes = FP32 * c.micro_batch * one.heads / c.tp * length * width
        repeated = 2 * self.block.queries if one.kv_heads != one.heads else 0
        tape.moment("temporary", (c.cp == 1) * present * (nbytes + repeated))

    def _embedding(self, tape: Tape, place: _Place, reduced: Floats) -> None:
        """The embedding's gradient has all rows; a tied head's is added to it."""
        s, e = self.s, self.ends
        rows = e.embedding * s.weight
        both = place.first * place.last * float(self.outline.tied)
        single = place.first * (1 - both)
        self._gradient(tape, place.first * e.positions, product=False)
        # Tied: there is the head's, and a third for the sum.
        tape.moment("temporary", both * rows * np.where(self.columns.of("dp"), 1, 2))
        tape.drop("temporary", self._tied_waits(place))
        self._gradient(tape, single * e.embedding, product=False)
        tape.drop("communication", reduced)
        tape.drop("temporary", s.part * s.stream)
        # The head's own were counted where the loss was; root shards are reduced at the end.
        root = self.fsdp * s.weight * self._outside_elements(place)
        tape.moment("communication", self.waits * s.weight * self.elements)
        tape.drop("unsharded", root + self.waits * s.weight * self.elements * place.chunk_layers)
        tape.moment("communication", root)
        once = 1 - self.waits * self.there
        tape.drop("communication", once * (root - self.fsdp * place.last * e.tail * s.weight))
        stays = (1 - self.there) * (1 - self.in_backward)
        tape.take("gradients", root / self.shards * stays)
        # What pipelines' ends tell each other of a tied embedding.
        ends = (place.first + place.last - 2 * place.first * place.last) * float(self.outline.tied)
        tape.moment("communication", ends * rows)

    # ---- the optimizer

    def _optimizer(self, tape: Tape, place: _Place) -> None:
        """What a step of the optimizer makes for itself."""
        c, s, e = self.columns, self.s, self.ends
        elements = (self.elements * place.layers + self._outside_elements(place)) / self.shards
        # 16-bit gradients are made fp32 one by one.
        master = c.precise("fp16-master").astype(float)
        tape.take("gradients", master * (FP32 - s.weight) * elements)
        ends = np.maximum(place.first, place.last * np.where(e.head > 0, 1, 0))
        largest = np.maximum(self.block.largest, np.maximum(ends, place.last) * e.embedding)
        largest = largest / self.shards
        stepped = (
            elements * np.where(self.zero1, whole_share(self.outline, c), 1)
            if self.zero1.any()
            else elements
        )
        item = np.maximum(s.weight, FP32)
        pure, rounds = c.precise("bf16-pure", "fp16-pure"), c.precise("bf16-pure")
        factors = {
            "adamw-fused": 0.0,
            "adamw-foreach": 0.0,
            "adamw-for-loop": 2.0,
            # Moments in fp32, random bits, and what is rounded from them (optim.low).
            "adamw-bf16": np.where(pure, np.where(rounds, 5.5, 4.5), 3.5),
            "adamw-8bit": np.where(pure, np.where(rounds, 5.5, 5.25), 4.25),
            "adamw-4bit": np.where(pure, np.where(rounds, 5.5, 5.25), 4.25),
            "adafactor": 2.0,
            "muon": 2.0,
            "sgd": 1.0,
        }
        chosen = np.select(
            [c.optimizer == OPTIMIZERS.index(name) for name in factors],
            [np.broadcast_to(factor, largest.shape) for factor in factors.values()],  # type: ignore[call-overload]
        )
        tape.moment("temporary", chosen * largest * item)
        every = (c.optimizer == OPTIMIZERS.index("adamw-foreach")) * stepped * item
        tape.moment("temporary", every)
        # Copies of gradients on their way to the host, of two units.
        copied = (c.offload_optimizer == OFFLOADS.index("cpu")) & (c.offload_parameters == 0)
        unit = np.minimum(np.maximum(_UNIT_BYTES, largest * s.weight) * 2, elements * s.weight)
        tape.moment("temporary", copied * (self.device == "cpu") * unit)
