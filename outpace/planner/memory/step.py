"""A step on one rank, moment by moment: permanent memory, forward, backward, optimizer."""

from collections.abc import Iterator

import numpy as np

from outpace.planner.memory.block_backward import BlockMemory
from outpace.planner.memory.fullest_rank import Place, places
from outpace.planner.memory.loss import Loss
from outpace.planner.memory.optimizer_bytes import MASTER_PIECE_BYTES
from outpace.planner.memory.saved_activations import FP32
from outpace.planner.memory.states import whole_share, whole_states
from outpace.planner.memory.timeline import MemoryTimeline
from outpace.planner.plan_batch import OFFLOADS, OPTIMIZERS, Floats, Ints
from outpace.records.optimizers import OPTIMIZER_TRAITS
from outpace.records.precisions import PURE, WEIGHTS

_MIB = 2**20
# Two threads multiply, each with a workspace of cuBLAS: 32 MiB on Hopper and later (torch, CUDABlas
# handle pool, 4096 KiB × 8).
_WORKSPACES = {"cpu": 0, "cuda": 2 * 32 * _MIB}
_UNIT_BYTES = 4 * _MIB  # of parameters that an offloaded optimizer steps together, at least
_TRAITS = [OPTIMIZER_TRAITS[name] for name in OPTIMIZERS]
_STEP_TENSORS = np.array([traits.tensors for traits in _TRAITS])
_COPIES = np.array([traits.copies for traits in _TRAITS])


class StepMemory(Loss, BlockMemory):
    """A step of each plan, on the ranks that may need the most memory."""

    def _for_good(self, timeline: MemoryTimeline, place: Place, later: Floats) -> None:
        c, s = self.columns, self.s
        ends = self._outside_elements(place)
        elements = self.elements * place.layers + ends
        stored = (self.stored * place.layers + ends) / self.shards
        held = s.weight * stored
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
        timeline.pass_over("weights", held * (1 - weights_away))
        timeline.pass_over("optimizer state", (kept + twin) * (1 - optimizer_away))
        timeline.offload(held * weights_away, on_disk)
        state_on_disk = c.offload_optimizer == OFFLOADS.index("disk")
        timeline.offload((kept + twin) * optimizer_away, state_on_disk)
        # States are made before they are moved to a disk, unit after unit.
        made = kept / np.maximum(stored, 1) * self._largest(place)
        on_way = (c.offload_optimizer == OFFLOADS.index("disk")) & (self.device == "cpu")
        timeline.pass_over("gradients", self.gradient * elements * self.bucketed)
        timeline.moment("temporary", made * on_way)
        timeline.pass_over("workspaces", _WORKSPACES[self.device])
        # Numbers of tokens and their targets, 8 bytes each; under dp rank 0 reads everyone's.
        readers = np.where(self.dp, c.data_parallel, 1).astype(float)
        samples: Floats = readers * (c.micro_batch * c.microbatches * c.passes).astype(float)
        timeline.pass_over("inputs", 16.0 * self.seq_len * samples)
        whole = s.weight * elements
        timeline.pass_over("communication", whole * self.fused_buffers)
        # What a pipeline sends and receives has a buffer for each micro-batch, or for one.
        stream = s.part * s.stream
        piped = (c.pp > 1).astype(float)
        each = 1 if self.traits.reuses_receive_buffer else c.microbatches
        timeline.pass_over("communication", piped * place.borders * each * stream)
        timeline.pass_over("communication", piped * place.inputs_done * stream * later)
        timeline.pass_over("gradients", self._sums_apart() * elements)
        # Sums in fp32 are rounded to the buckets' dtype before the last micro-batch.
        rounded = self.replicas & self.adds_in_fp32
        beside = np.where(self.casts_sums, s.weight, FP32) * rounded
        timeline.moment("gradients", beside * elements)
        again = np.maximum((c.passes > 1) & (~self.dp | self.adds_in_fp32), later)
        self.there = np.maximum(self.bucketed, again)
        # Gradients of weights on the host are copied there as soon as they are reduced.
        self.on_device = 1.0 - on_host
        # Within a pipeline sharded gradients are whole until the last micro-batch.
        self.waits = self.fsdp * (c.pp > 1) * (c.microbatches > 1)
        grown = self.there * (1 - self.bucketed)
        shards = np.where((self.waits > 0) | self.traits.accumulates_unsharded, 1, self.shards)
        item = np.where(self.waits > 0, s.reduced, self.summed)
        grown = grown * item * elements / shards
        self._offload_gradients(timeline, grown * (1 - self.waits))
        grown = grown * self.on_device
        timeline.pass_over("gradients", grown * (1 - self.waits))
        timeline.pass_over("communication", grown * self.waits)
        # What passes before this one have left is sharded already.
        left = self.waits * (c.passes > 1) * s.weight * elements / self.shards
        timeline.pass_over("gradients", left * self.on_device)
        self._offload_gradients(timeline, left)
        timeline.look()

    def _sums_apart(self) -> Floats:
        """Bytes of a gradient in which micro-batches before the last add up, beside buckets.

        In the 16 bits of DDP's buckets while two add up, the first of which ends with them.
        """
        c = self.columns
        apart = (self.replicas | c.strategy_in("ring", "horovod")) & (c.passes > 1)
        return apart.astype(float) * np.where(self.casts_sums, FP32, self.s.weight)

    def _offload_gradients(self, timeline: MemoryTimeline, nbytes: Floats) -> None:
        """Gradients that lie where their weights do, in host memory; of others nothing."""
        timeline.offload(nbytes * (1 - self.on_device), False)

    def _state_bytes(self, place: Place) -> Floats:
        c, t = self.columns, self.states
        tied_again = float(self.outline.tied) * (1 - place.first) * t.embedding
        all_of = (
            place.layers * t.layer
            + place.first * (t.embedding + t.positions)
            + place.last * (t.head + t.rest + tied_again)
        )
        share = 1 / self.owners
        if self.zero1.any() and not self.traits.shards_by_element:
            whole = whole_states(self.outline, c) * place.layers / self.outline.layers
            return np.where(self.zero1, whole, all_of * share)
        # Under dp rank 0, which is looked at, steps all.
        return all_of * share

    def timelines(self, last: bool = False) -> Iterator[tuple[Ints, MemoryTimeline]]:
        """Yield timelines of the ranks that may need the most memory, or only of the `last`.

        They start when gradients exist; if fewer activations are kept then, also before.
        """
        everyone = np.arange(len(self.columns))
        for place in places(self.outline, self.columns):
            if last and not place.last.all():
                continue
            later = (place.later_chunks >= place.chunks).astype(float)
            yield everyone, self.timeline(place, later)
            again = np.flatnonzero((place.later_chunks > 0) & (later == 0))
            if len(again):
                of_some = self.columns.take(again)
                some = StepMemory(
                    self.outline, self.seq_len, of_some, self.device, self.fused, self.finds,
                    self.traits,
                )  # fmt: skip
                yield again, some.timeline(place.select(again), np.ones(len(again)))

    def timelines_at_start(self) -> Iterator[MemoryTimeline]:
        """Yield timelines of the ranks that may need the most memory, up to the first forward."""
        for place in places(self.outline, self.columns):
            timeline = MemoryTimeline(len(self.columns), self.finds)
            self._for_good(timeline, place, np.zeros(len(self.columns)))
            yield timeline

    def timeline(self, place: Place, later: Floats) -> MemoryTimeline:
        """Return the timeline of a step on one rank; `later`: after a pipeline's first backward."""
        c, s = self.columns, self.s
        timeline = MemoryTimeline(len(c.pp), self.finds)
        self._for_good(timeline, place, later)
        chunks = np.maximum(np.where(later > 0, place.later_chunks, place.chunks), 1)
        losses = np.where(later > 0, place.later_losses, place.losses)
        piped = (c.pp > 1).astype(float)
        count = np.maximum(place.chunk_layers, 1e-9)
        self._modes(place)
        mean_kept, away = self._saved_bytes(self.shares), self._offloaded_bytes(self.shares)
        stream = s.part * s.stream
        # Of a stage that is not the first the input is what was received; the output of one that
        # is not the last stays until it is sent and backward has come. Where each is received
        # anew the input is a block's like any other.
        ends = piped * stream * (1 - place.last / place.stages)
        ends = ends - piped * stream * (1 - place.first / place.stages)
        per_chunk = count * mean_kept + ends * (not self.traits.reuses_receive_buffer)
        self._gather_root(timeline, place)
        self._replicate(timeline, place)
        timeline.pass_over("activations", chunks * (per_chunk - count * away))
        timeline.offload(chunks * count * away, self.acts_on_disk)
        self._copies(timeline, chunks * count)
        # Where blocks end with norms the embedding has one too, which keeps the sum.
        summed = stream * place.first * bool(self.outline.head_products)
        timeline.pass_over("activations", summed)
        self._tables(timeline)
        self._gathers_forward(timeline, count, place)
        # Of chunks before, the gradients that weights' are still to be made from.
        before = place.waiting * later
        waits = before * count * self.block.outputs
        logits, copy = self._head_waits(place)
        delayed = np.minimum(before, 1) * c.schedule_in("zb")
        timeline.pass_over("temporary", delayed * logits)
        timeline.pass_over("weight copies", delayed * copy)
        timeline.take("temporary", waits)
        self._loss(timeline, place, losses)
        timeline.drop("temporary", waits * c.schedule_in("zbv"))
        self._backward(timeline, place, count, per_chunk)
        self._optimizer(timeline, place)
        return timeline

    def _copies(self, timeline: MemoryTimeline, layers: Floats) -> None:
        """Casts of matrices that backward reads again, of blocks that recompute nothing."""
        nbytes = layers * self._copy_bytes() * self.shares["none"]
        timeline.pass_over("weight copies", nbytes * (1 - self.off_acts))
        timeline.offload(nbytes * self.off_acts, self.acts_on_disk)

    def _tables(self, timeline: MemoryTimeline) -> None:
        """Cosines and sines of positions, in fp32."""
        first = self.outline.stacks[0].attention
        if self.outline.learned_positions == 0 and first is not None:
            width = first.rope_dim or first.head_dim
            timeline.pass_over("activations", 2 * FP32 * width * self.seq_len / self.columns.cp)

    def _replicate(self, timeline: MemoryTimeline, place: Place) -> None:
        """Send the weights in one message under dp."""
        leads = self.dp * 1.0
        elements = self.elements * place.layers + self._outside_elements(place)
        timeline.moment("communication", leads * self.s.weight * elements)

    def _gather_root(self, timeline: MemoryTimeline, place: Place) -> None:
        root = self.fsdp * self.used * self._outside_elements(place)
        timeline.take("unsharded", root)
        timeline.take("communication", root)  # given back once the first block is gathered
        timeline.moment("temporary", self._raised_table(place))

    def _raised_table(self, place: Place) -> Floats:
        """The embedding's table in fp32 (`nn.fp32_modules`), to look up in and to sum into."""
        autocast = ~self.columns.precision_in(*WEIGHTS) & (self.s.reduced > self.used)
        raised = (self.device == "cpu") * self.fsdp * autocast
        table: Floats = place.first * raised * FP32 * self.ends.embedding
        return table

    def _gathers_forward(self, timeline: MemoryTimeline, count: Floats, place: Place) -> None:
        """Copy out what each block gathers, while the last block's is still there."""
        unit = self.fsdp * self.used * self.elements
        root = self.fsdp * self.used * self._outside_elements(place)
        others = np.where(self.regathers, 0, unit * (count - 1))
        before = np.where(count > 1.5, unit, root)
        timeline.drop("communication", root)
        timeline.pass_over("unsharded", others + unit)
        timeline.moment("communication", before + unit)
        timeline.pass_over("communication", unit)
        timeline.pass_over("unsharded", -np.where(self.regathers, unit, 0))

    def _backward(
        self, timeline: MemoryTimeline, place: Place, count: Floats, per_chunk: Floats
    ) -> None:
        """The last blocks, then the first ones; those between do alike."""
        c, s = self.columns, self.s
        unit, sent = (self.fsdp * item * self.elements for item in (self.used, s.reduced))
        kept = self.fsdp * s.weight * self.elements
        again = self.regathers.astype(float)
        timeline.drop("communication", unit * again)
        # A split backward keeps what gradients of weights are made from until their turn.
        # DualPipeV splits only where it fills bubbles, when fewer are under way.
        splits = c.schedule_in("zb", "zbv")
        timeline.take("temporary", splits * count * self.block.outputs)
        given = np.zeros_like(count)
        reduced = 0.0 * unit
        # Where weights are gathered the second and the last but one are looked at, too.
        sharded = self.fsdp > 0
        positions = (
            (count > 0, self.last_mode, count > 1.5),
            (sharded & (count > 2.5), self.last_mode, count > 2.5),
            (sharded & (count > 3.5), self.first_mode, count > 3.5),
            (count > 1.5, self.first_mode, count < 0),
        )
        seen = sum(present.astype(float) for present, _, _ in positions)
        seconds = positions[2][0].astype(float) + positions[3][0]
        for number, (present, mode, prefetches) in enumerate(positions):
            p = present.astype(float)
            if number == 2:
                left = np.maximum(count - seen, 0)
                grads = left * np.where(self.waits > 0, s.reduced, self.summed) * self.elements
                stays = (1 - self.there) * (1 - self.in_backward)
                shards = np.where(self.waits > 0, 1, self.shards)
                grads = grads * self.more / shards * stays
                timeline.pass_over("gradients", grads * self.on_device)
                timeline.pass_over(
                    "unsharded", left * unit * np.where(self.waits > 0, 1, again - 1)
                )
                between = per_chunk - given - self._saved_bytes(self.first_mode) * seconds
                between = np.where(left > 0, np.maximum(between, 0), 0)
                away = np.minimum(between, left * self._offloaded_bytes(self.shares))
                timeline.drop("activations", between - away)
                timeline.offload(-away, self.acts_on_disk)
                self._copies(timeline, -left)
                self._offload_gradients(timeline, grads * (1 - self.waits))
            if not present.any():
                continue
            # Gathered: this block's copied out, the next one's on its way.
            timeline.take("communication", p * again * unit)
            timeline.take("unsharded", p * again * unit)
            timeline.drop("communication", p * again * unit)
            timeline.take("communication", p * again * unit * prefetches)
            self._block(timeline, p, mode)
            timeline.drop("communication", p * again * unit * prefetches)
            given = given + p * self._saved_bytes(mode)
            # Reduced and scattered, at once or after a pipeline's last micro-batch.
            now = 1 - self.waits
            timeline.drop("unsharded", p * unit * now)
            timeline.drop("communication", p * reduced)
            timeline.take("communication", p * sent * now)
            timeline.drop("communication", p * unit * now)  # the block's own gradients
            # Until it is on the host, what was reduced is beside what it is made of.
            timeline.moment("temporary", p * kept * self.more / self.shards * (1 - self.on_device))
            reduced = np.where(present, sent * now, reduced)
            self._wait_for_last(timeline, p * unit, p * sent)
            stays = (1 - self.there) * (1 - self.in_backward) * now
            made = p * kept * self.more / self.shards * stays
            timeline.take("gradients", made * self.on_device)
            self._offload_gradients(timeline, made)
        timeline.drop("temporary", splits * count * self.block.outputs)
        self._embedding(timeline, place, reduced)

    def _wait_for_last(self, timeline: MemoryTimeline, made: Floats, sent: Floats) -> None:
        """Gradients of a unit become, or join, those that wait for a pipeline's last micro-batch.

        One by one, in the dtype that they are reduced in, after the unit's backward.
        """
        first, other = self.waits * (1 - self.there), self.s.reduced != self.used
        timeline.take("communication", first * (sent - made))
        timeline.moment("communication", first * other * self.used * self.block.largest)
        timeline.drop("communication", self.waits * self.there * other * made)

    def _embedding(self, timeline: MemoryTimeline, place: Place, reduced: Floats) -> None:
        """The embedding's gradient has all rows; a tied head's is added to it."""
        s, e = self.s, self.ends
        rows = e.embedding * self.used
        both = place.first * place.last * float(self.outline.tied)
        single = place.first * (1 - both)
        self._gradient(timeline, place.first * e.positions, product=False)
        # Tied: there is the head's, and a third for the sum.
        alone = self.dp | (self.columns.pp > 1)  # each in a backward of its own
        raised = self._raised_table(place)
        cast = raised / FP32 * self.used
        # Sums in fp32: each is cast before it is added.
        added = rows / self.used * self._added_bytes()
        sums = np.maximum(added * np.where(alone, 1, 2), (rows + added) * self.casts_sums)
        timeline.moment("temporary", np.maximum(both * sums, raised + cast))
        timeline.drop("temporary", self._tied_waits(place))
        self._gradient(timeline, single * e.embedding, product=False)
        timeline.drop("communication", reduced)
        timeline.drop("temporary", s.part * s.stream)
        # The head's own were counted where the loss was; root shards are reduced at the end.
        elements = self.fsdp * self._outside_elements(place)
        timeline.moment("communication", self.waits * s.reduced * self.elements)
        root = self.used * (elements + self.waits * self.elements * place.chunk_layers)
        timeline.drop("unsharded", root)
        timeline.moment("communication", s.reduced * elements)
        once = 1 - self.waits * self.there * (s.reduced == self.used)
        made = self.used * (elements - self.fsdp * place.last * e.tail)
        timeline.drop("communication", once * made)
        leaving = (1 - self.on_device) * elements
        timeline.take("communication", s.reduced * leaving)
        timeline.moment("temporary", s.weight * leaving / self.shards)
        timeline.drop("communication", s.reduced * leaving)
        stays = (1 - self.there) * (1 - self.in_backward)
        made = s.weight * elements / self.shards * stays
        timeline.take("gradients", made * self.on_device)
        # A pipeline's gradients that waited for its last micro-batch are reduced by now, too.
        first = self.waits * (self.columns.passes == 1) * (1 - self.in_backward)
        waited = first * s.weight * self.stored * place.layers / self.shards
        self._offload_gradients(timeline, made + waited)
        # What pipelines' ends tell each other of a tied embedding.
        ends = (place.first + place.last - 2 * place.first * place.last) * float(self.outline.tied)
        timeline.moment("communication", ends * rows)

    def _optimizer(self, timeline: MemoryTimeline, place: Place) -> None:
        """Add what a step of the optimizer makes for itself."""
        timeline.clear("activations", "temporary", "weight copies", "unsharded")
        # They are in the buffers by now, of which sums in fp32 are made again.
        timeline.clear("gradients", share=self.fused_buffers * ~self.adds_in_fp32)
        c, s = self.columns, self.s
        gone = self._sums_apart() * (self.replicas | ~self.adds_in_fp32)
        timeline.drop(
            "gradients", gone * (self.elements * place.layers + self._outside_elements(place))
        )
        elements = (self.stepped * place.layers + self._outside_elements(place)) / self.shards
        # 16-bit gradients are made fp32 one by one, by who owns the masters, for fp16's loss scale.
        master = c.precision_in("fp16-master") & (self.gradient < FP32)
        # Where these are views of buffers, which stay, beside them.
        stay = np.maximum(self.bucketed, self.fused_buffers)
        owned = self.shards / self.owners
        timeline.take("gradients", master * owned * (FP32 - s.weight * (1 - stay)) * elements)
        largest = self._largest(place)
        stepped = elements
        if self.zero1.any():
            stepped = elements * np.where(self.zero1, whole_share(self.outline, c), 1)
        # Offloaded states are stepped unit by unit.
        unit = np.minimum(np.maximum(_UNIT_BYTES / FP32, largest), elements)
        by_unit = (c.offload_optimizer > 0) | (c.offload_parameters == OFFLOADS.index("disk"))
        stepped = np.where(by_unit, np.minimum(unit, stepped), stepped)
        item = np.maximum(s.weight, FP32)
        pure, rounds = c.precision_in(*PURE), c.precision_in("bf16-pure")
        in_fp32, in_fp16, in_bf16 = _STEP_TENSORS[c.optimizer].T
        chosen = np.where(pure, np.where(rounds, in_bf16, in_fp16), in_fp32)
        # bf16's are made fp32 in pieces, but for sums in fp32.
        piece = np.minimum(np.maximum(MASTER_PIECE_BYTES, FP32 * largest), FP32 * stepped)
        narrow = self.replicas | ~self.adds_in_fp32
        masters = c.precision_in("bf16-master") & ~c.holds_masters()
        timeline.moment("temporary", masters * narrow * piece)
        # Copies of gradients on their way to the host, of two units.
        copied = (c.offload_optimizer == OFFLOADS.index("cpu")) & (c.offload_parameters == 0)
        copies = copied * (self.device == "cpu") * np.minimum(2 * unit, elements) * s.weight
        timeline.pass_over("temporary", copies)
        arrived = copied * (self.device == "cuda") * np.minimum(2 * unit, elements) * s.weight
        timeline.offload(arrived, False)
        timeline.offload(-arrived, False)
        timeline.take("temporary", chosen * largest * item)
        timeline.drop("temporary", chosen * largest * item)
        timeline.moment("temporary", _COPIES[c.optimizer] * stepped * item)
        timeline.drop("temporary", copies)
