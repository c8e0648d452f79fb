"""Memory of the last norm, the head and the loss, whole or in chunks, forward and backward."""

from dataclasses import dataclass, replace

import numpy as np

from outpace.planner.memory.fullest_rank import Place
from outpace.planner.memory.saved_activations import FP32
from outpace.planner.memory.setup import MemorySetup
from outpace.planner.memory.timeline import MemoryTimeline
from outpace.planner.plan_batch import Bools, Floats
from outpace.records.precisions import COMPUTES_IN_BF16

_MIB = 2**20
# nn.loss, on a CPU: rows of a chunk, from how many bytes of fp32 logits chunks are taken.
_CHUNK_ROWS = 512
_CHUNKS_FROM = 32 * _MIB
# nn.head_loss, on an accelerator: what the vocabulary is padded to, up to how many bytes all logits
# are made at once, bytes and least rows of a chunk, and of fp32 logits that eager passes have.
_PADDED_TO = 64
_WHOLE_BYTES = 4096 * _MIB
_CHUNK_BYTES = 2048 * _MIB
_CHUNK_ROWS_ACCELERATOR = 4096
_BLOCK_BYTES = 256 * _MIB
_KEPT_OF_TOKEN = 4 + 8 + 1  # log Σ exp, the target's column, whether there is one
# On a CPU in bf16: the bytes of logits that are held whole, of a block of them in fp32, and rows of
# the head that are multiplied at a time.
_LOW_BYTES = 256 * _MIB
_LOW_BLOCK_BYTES = 2 * _MIB
_LOW_HEAD_ROWS = 2048


@dataclass(frozen=True)
class _Head:
    """Head of a rank: `here` where it has one, of `elements`; `rows` tokens come to it.

    `more` micro-batches wait for their backward; `last` bytes of a buffer go as it begins.
    """

    here: Floats
    rows: Floats
    vocab: Floats
    elements: Floats
    more: Floats
    last: Floats

    def select(self, plans: Bools) -> "_Head":
        """Return the head of these plans alone."""
        return replace(self, here=self.here * plans, last=self.last * plans)


class Loss(MemorySetup):
    """Memory from the last hidden state to its gradient."""

    def _loss(self, timeline: MemoryTimeline, place: Place, losses: Floats) -> None:
        """The last norm and the head; what is left of it is the gradient of the last hidden state.

        `losses` micro-batches have been through it whose backward is not done.
        """
        c, s = self.columns, self.s
        here = place.last
        many = np.where(self.dp, c.dp_replicate, 1)  # rank 0 has all ranks' outputs
        rows = s.tokens * many
        vocab = np.ceil(self.outline.outputs / c.tp)
        stream = s.part * s.stream
        # What the norm before the head keeps, and its transform where there is one.
        before = stream + self.block.norm * self.block.composed + self._head_transform()
        kept_before = np.maximum(losses, 1) * before * here
        timeline.pass_over("activations", kept_before)
        timeline.pass_over("activations", (many > 1) * rows * self.outline.hidden * s.stream)
        head = vocab * self.outline.hidden
        chunked = self._uses_chunks(rows, vocab)
        more = np.maximum(losses - 1, 0) * here
        # Where weights stay gathered, the last block's buffer goes as the backward begins.
        last = self.fsdp * self.used * self.elements * ~self.regathers
        low, accelerated = self._low() & ~chunked, self._uses_head_loss()
        at = _Head(here, rows, vocab, head, more, last)
        self._low_logits(timeline, at.select(low))
        self._whole_logits(timeline, at.select(~chunked & ~low & ~accelerated))
        self._in_chunks(timeline, at.select(chunked & ~accelerated))
        padded = np.ceil(vocab / _PADDED_TO) * _PADDED_TO
        at = replace(at, vocab=padded, elements=padded * self.outline.hidden)
        whole = accelerated & ~chunked & self._keeps_logits(rows, padded)
        copied = (self.s.operand < self.used) | (padded != vocab)
        self._logits_in_place(timeline, at.select(whole), copied)
        self._chunks_in_place(timeline, at.select(accelerated & ~whole), copied)
        timeline.drop("activations", (many > 1) * rows * self.outline.hidden * s.stream)
        self._gradient(timeline, here * head)
        timeline.pass_over("temporary", self._tied_waits(place))
        timeline.drop("activations", kept_before - (np.maximum(losses, 1) - 1) * before * here)
        # From here on there is the gradient of the stream.
        timeline.take("temporary", stream)

    def _head_waits(self, place: Place) -> tuple[Floats, Floats]:
        """Return what the head's split gradient is made from: of logits, the copy."""
        s, c = self.s, self.columns
        vocab = np.ceil(self.outline.outputs / c.tp)
        here = place.last * ~self._uses_chunks(s.tokens, vocab)
        copy = here * vocab * self.outline.hidden * s.operand * (s.operand < self.used)
        return here * s.tokens * vocab * s.operand, copy * ~self._uses_head_loss()

    def _tied_waits(self, place: Place) -> Floats:
        """A tied head's gradient, which waits for the embedding's where it is not kept as such."""
        both = place.first * place.last * float(self.outline.tied)
        both = both * ~self.dp * (self.columns.pp == 1)
        stays = (1 - self.there) * (1 - self.in_backward)
        waits: Floats = both * (1 - self.fsdp) * (1 - stays) * self.ends.embedding
        return waits * self._added_bytes()

    def _head_transform(self) -> Floats:
        """BERT's product, activation and norm before the head."""
        if not self.outline.head_products:
            return np.zeros(len(self.columns.pp))
        s = self.s
        return 2 * s.whole * s.operand + s.casts * s.whole * s.operand

    def _uses_chunks(self, rows: Floats, vocab: Floats) -> Bools:
        c = self.columns
        large = (rows > _CHUNK_ROWS) & (FP32 * rows * vocab > _CHUNKS_FROM)
        large = np.where(self._low(), rows > self._low_rows(vocab), large)
        large = np.where(self._uses_head_loss(), ~self._fits(rows, vocab), large)
        asked: Bools = ((large & ~self._splits()) | c.chunked_loss) & (c.tp == 1)
        return asked & self.traits.chunks_loss

    def _uses_head_loss(self) -> Bools:
        """Return which losses are `nn.head_loss`: outpace's own, on an accelerator."""
        own = self.traits.chunks_loss and self.device == "cuda"
        return np.full(len(self.columns.pp), own)

    def _fits(self, rows: Floats, vocab: Floats) -> Bools:
        """Whether all logits are made at once by their size."""
        padded = np.ceil(vocab / _PADDED_TO) * _PADDED_TO
        fits: Bools = rows * padded * self.s.operand <= _WHOLE_BYTES
        return fits

    def _keeps_logits(self, rows: Floats, padded: Floats) -> Bools:
        """Whether logits are there between forward and backward; else the forward ends them."""
        c = self.columns
        between: Bools = self._splits() | (c.tp > 1) | (c.compile & self._fits(rows, padded))
        return between

    def _loss_block(self, rows: Floats, padded: Floats) -> Floats:
        """Logits in fp32 beside the logits; compiled passes have none."""
        most = np.maximum(1, np.floor(_BLOCK_BYTES / (FP32 * np.maximum(padded, 1))))
        block: Floats = FP32 * np.minimum(rows, most) * padded * ~self.columns.compile
        return block

    def _logits_in_place(self, timeline: MemoryTimeline, at: _Head, copied: Bools) -> None:
        """All logits, over which the backward writes their gradient."""
        s, here, rows = self.s, at.here, at.rows
        states = here * rows * self.outline.hidden
        logits = here * rows * at.vocab * s.operand
        kept = logits + states * s.operand * (s.operand < s.stream) + here * rows * _KEPT_OF_TOKEN
        copy = here * at.elements * s.operand * copied
        block = here * self._loss_block(rows, at.vocab)
        timeline.pass_over("activations", at.more * kept)
        timeline.pass_over("weight copies", (1 + at.more) * copy)
        timeline.moment("temporary", kept + block + states * s.stream * s.casts)
        timeline.take("activations", kept)
        timeline.drop("communication", at.last)
        timeline.moment("temporary", np.maximum(block, states * (s.operand + s.stream * s.casts)))
        timeline.drop("weight copies", copy)
        timeline.moment("temporary", states * s.stream + here * at.elements * self.used)
        timeline.drop("activations", kept)

    def _chunks_in_place(self, timeline: MemoryTimeline, at: _Head, copied: Bools) -> None:
        """All logits or some rows of them, whose gradient the forward multiplies."""
        s, here, rows = self.s, at.here, at.rows
        row_bytes = np.maximum(at.vocab, 1) * s.operand
        most = np.floor(_CHUNK_BYTES / row_bytes / _PADDED_TO) * _PADDED_TO
        most = np.maximum(_CHUNK_ROWS_ACCELERATOR, most)
        chunks = np.ceil(rows / most)
        chunk = np.ceil(rows / np.maximum(chunks, 1) / _PADDED_TO) * _PADDED_TO
        chunk = np.where(self._fits(rows, at.vocab), rows, chunk)
        chunk = np.where(self.columns.chunked_loss, _CHUNK_ROWS_ACCELERATOR, chunk)
        chunk = np.minimum(chunk, rows)
        hidden = self.outline.hidden
        states_grad = here * rows * hidden * s.stream
        weights_grad = here * at.elements * FP32
        logits = here * chunk * row_bytes + here * chunk * hidden * s.operand * (
            s.operand < s.stream
        )
        copy = here * at.elements * s.operand * copied
        # Cast for the softmax, and the softmax.
        block = here * self._loss_block(chunk, at.vocab) * np.where(s.operand < FP32, 2, 1)
        block = block + weights_grad * (rows > chunk)
        product = weights_grad + here * chunk * hidden * s.operand * (s.operand < s.stream)
        timeline.pass_over("activations", (1 + at.more) * states_grad + at.more * weights_grad)
        output = here * rows * hidden * s.stream
        timeline.moment("temporary", logits + copy + output + np.maximum(block, product))
        timeline.pass_over("activations", weights_grad)
        timeline.drop("communication", at.last)
        timeline.moment("temporary", here * at.elements * self.used * (self.used < FP32))
        timeline.drop("activations", states_grad + weights_grad)

    def _splits(self) -> Bools:
        return self.columns.schedule_in("zb", "zbv", "dualpipev")

    def _low(self) -> Bools:
        """Return whose products are of bf16 on a CPU, where logits' gradient takes their place."""
        c = self.columns
        own = c.precision_in(*COMPUTES_IN_BF16) & ~self._splits() & (c.tp == 1)
        here: Bools = own & self.traits.chunks_loss & (self.device == "cpu")
        return here

    def _low_rows(self, vocab: Floats) -> Floats:
        """Return the number of tokens of which all logits are held."""
        rows: Floats = np.maximum(_CHUNK_ROWS, np.floor(_LOW_BYTES / (2 * np.maximum(vocab, 1))))
        return rows

    def _low_block(self, vocab: Floats, rows: Floats) -> Floats:
        """Return the tokens whose softmax is made at a time."""
        most = np.floor(_LOW_BLOCK_BYTES / (FP32 * np.maximum(vocab, 1)))
        block: Floats = np.minimum(np.maximum(1, most), rows)
        return block

    def _low_logits(self, timeline: MemoryTimeline, at: _Head) -> None:
        """All logits in 16 bits, of which the gradient is made in place."""
        s, hidden = self.s, self.outline.hidden
        here, rows, vocab, head = at.here, at.rows, at.vocab, at.elements
        logits = here * rows * vocab * s.operand
        output = here * rows * hidden * s.stream * s.casts
        read = here * rows * hidden * s.operand * (s.operand < s.stream)
        part = s.operand * np.minimum(vocab, _LOW_HEAD_ROWS) * hidden * here
        cast = part * (s.operand < self.used)
        block = self._low_block(vocab, rows)
        timeline.pass_over("activations", at.more * logits)
        within = np.maximum(read + cast, 2 * FP32 * block * vocab * here)
        timeline.moment("temporary", logits + within + output)
        timeline.take("activations", logits)
        timeline.drop("communication", at.last)
        states = here * rows * hidden
        made = here * head * self.used + states * np.where(s.stream < FP32, FP32 + s.stream, FP32)
        timeline.moment("temporary", made + read + cast + np.maximum(part, states * s.operand))
        timeline.drop("activations", logits)

    def _whole_logits(self, timeline: MemoryTimeline, at: _Head) -> None:
        s, c = self.s, self.columns
        here, rows, vocab, head = at.here, at.rows, at.vocab, at.elements
        logits, wide = here * rows * vocab, np.maximum(s.operand, FP32)
        low = s.operand < FP32
        read = here * rows * self.outline.hidden * s.operand
        # What the head reads is gathered for its product and again for its gradient, or kept.
        gathered = read * self.regathers_inputs * (1 - 1 / c.tp)
        copy = here * head * s.operand * (s.operand < self.used)
        split = c.tp > 1
        timeline.pass_over("activations", at.more * (logits * wide + read - gathered))
        timeline.pass_over("weight copies", at.more * copy)
        timeline.pass_over("activations", read - gathered)
        timeline.pass_over("weight copies", copy)
        # Products, in fp32, and their logarithms of softmax (split over ranks: exponentials).
        output = here * rows * self.outline.hidden * s.stream * s.casts  # what was cast
        again = 0 if self.traits.softmax_in_place else wide
        timeline.moment("temporary", output + logits * (s.operand * low + wide + again))
        timeline.take("activations", logits * wide)
        timeline.drop("communication", at.last)
        # Its gradient, and that of the products; split or in place it is made at once, and cast.
        made = np.where(split | self.traits.softmax_in_place, again + s.operand * low, 2 * wide)
        timeline.moment("temporary", logits * made)
        timeline.drop("activations", logits * wide)
        grads = logits * s.operand + here * head * s.operand + read + gathered
        timeline.moment("temporary", grads)
        timeline.drop("weight copies", copy)
        timeline.drop("activations", read - gathered)

    def _in_chunks(self, timeline: MemoryTimeline, at: _Head) -> None:
        """Add the CPU's chunked loss: the forward makes gradients of hidden states and head."""
        s, hidden = self.s, self.outline.hidden
        here, rows, vocab, head = at.here, at.rows, at.vocab, at.elements
        low = self._low()
        chunk = np.where(
            low & ~self.columns.chunked_loss, self._low_rows(vocab), float(_CHUNK_ROWS)
        )
        chunk = np.minimum(chunk, rows)
        states_grad = here * rows * hidden * np.where(low, s.stream, np.maximum(s.operand, FP32))
        weights_grad = here * head * np.maximum(FP32, self.used)
        raised = here * head * FP32 * (self.used < FP32) * ~low
        timeline.pass_over("activations", (1 + at.more) * (states_grad + weights_grad))
        output = here * rows * hidden * s.stream
        cast = here * head * s.operand * low * (s.operand < self.used)
        # In bf16 a chunk's gradient of the head lives while the next one is made.
        grad, before = head * s.operand, rows > chunk
        block = self._low_block(vocab, chunk)
        softmax = 2 * FP32 * block * vocab
        part = s.operand * np.maximum(np.minimum(vocab, _LOW_HEAD_ROWS), chunk) * hidden
        in_place = s.operand * chunk * vocab + np.maximum(softmax + grad * before, grad + part)
        inside = here * np.where(low, in_place, FP32 * (chunk + block) * vocab)
        timeline.moment("temporary", inside + output + cast + raised)
        timeline.drop("communication", at.last)
        timeline.drop("activations", states_grad + weights_grad)
