"""Memory of the last norm, the head and the loss, whole or in chunks, forward and backward."""

from dataclasses import dataclass, replace

import numpy as np

from outpace.planner.columns import Bools, Floats
from outpace.planner.layer_bytes import FP32
from outpace.planner.memory_setup import Setup
from outpace.planner.places import Place
from outpace.planner.tape import Tape

_MIB = 2**20
# nn.loss: rows of a chunk, from how many bytes of fp32 logits chunks are taken, on an accelerator
# the bytes of a chunk.
_CHUNK_ROWS = 512
_CHUNKS_FROM = {"cpu": 32 * _MIB, "cuda": 512 * _MIB}
_CHUNK_BYTES = 128 * _MIB
# On a CPU in bf16: the bytes of logits that are held whole, of a block of them in fp32, and rows of
# the head that are multiplied at a time.
_LOW_BYTES = 256 * _MIB
_LOW_BLOCK_BYTES = 2 * _MIB
_LOW_HEAD_ROWS = 2048


@dataclass(frozen=True)
class _Head:
    """A rank's: `here` where it has one, of so many `elements`; `rows` tokens come to it.

    `more` micro-batches wait for their backward; `last` bytes of a buffer go as it begins.
    """

    here: Floats
    rows: Floats
    vocab: Floats
    elements: Floats
    more: Floats
    last: Floats

    def of(self, plans: Bools) -> "_Head":
        """Of these plans alone."""
        return replace(self, here=self.here * plans, last=self.last * plans)


class Loss(Setup):
    """From the last hidden state to its gradient."""

    def _loss(self, tape: Tape, place: Place, losses: Floats) -> None:
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
        before = stream + self.block.norm * self.block.composed + self._transformed()
        kept_before = np.maximum(losses, 1) * before * here
        tape.pass_over("activations", kept_before)
        tape.pass_over("activations", (many > 1) * rows * self.outline.hidden * s.stream)
        head = vocab * self.outline.hidden
        chunked = self._chunked(rows, vocab)
        more = np.maximum(losses - 1, 0) * here
        # Where weights stay gathered, the last block's buffer goes as the backward begins.
        last = self.fsdp * self.used * self.elements * ~self.regathers
        low = self._low() & ~chunked
        at = _Head(here, rows, vocab, head, more, last)
        self._low_logits(tape, at.of(low))
        self._whole_logits(tape, at.of(~chunked & ~low))
        self._in_chunks(tape, at.of(chunked))
        tape.drop("activations", (many > 1) * rows * self.outline.hidden * s.stream)
        self._gradient(tape, here * head)
        tape.pass_over("temporary", self._tied_waits(place))
        tape.drop("activations", kept_before - (np.maximum(losses, 1) - 1) * before * here)
        # From here on there is the gradient of the stream.
        tape.take("temporary", stream)

    def _head_waits(self, place: Place) -> tuple[Floats, Floats]:
        """What the head's gradient is made from where backwards are split: of logits, the copy."""
        s, c = self.s, self.columns
        vocab = np.ceil(self.outline.outputs / c.tp)
        here = place.last * ~self._chunked(s.tokens, vocab)
        copy = here * vocab * self.outline.hidden * s.operand * (s.operand < self.used)
        return here * s.tokens * vocab * s.operand, copy

    def _tied_waits(self, place: Place) -> Floats:
        """A tied head's gradient, which waits for the embedding's where it is not kept as such."""
        both = place.first * place.last * float(self.outline.tied)
        both = both * ~self.dp * (self.columns.pp == 1)
        stays = (1 - self.there) * (1 - self.in_backward)
        nbytes: Floats = both * (1 - self.fsdp) * (1 - stays) * self.ends.embedding * self.used
        return nbytes

    def _transformed(self) -> Floats:
        """BERT's product, activation and norm before the head."""
        if not self.outline.head_products:
            return np.zeros(len(self.columns.pp))
        s = self.s
        return 2 * s.whole * s.operand + s.casts * s.whole * s.operand

    def _chunked(self, rows: Floats, vocab: Floats) -> Bools:
        c = self.columns
        large = (rows > _CHUNK_ROWS) & (FP32 * rows * vocab > _CHUNKS_FROM[self.device])
        large = np.where(self._low(), rows > self._low_rows(vocab), large)
        asked: Bools = ((large & ~self._splits()) | c.chunked_loss) & (c.tp == 1)
        return asked & self.habits.chunks_loss

    def _splits(self) -> Bools:
        return self.columns.scheduled("zb", "zbv", "dualpipev")

    def _low(self) -> Bools:
        """Whose products are of bf16 on a CPU, where logits' gradient takes their place."""
        c = self.columns
        own = c.precise("bf16", "bf16-master", "bf16-pure", "fp8") & ~self._splits() & (c.tp == 1)
        here: Bools = own & self.habits.chunks_loss & (self.device == "cpu")
        return here

    def _low_rows(self, vocab: Floats) -> Floats:
        """Of how many tokens it holds all logits."""
        rows: Floats = np.maximum(_CHUNK_ROWS, np.floor(_LOW_BYTES / (2 * np.maximum(vocab, 1))))
        return rows

    def _low_block(self, vocab: Floats, rows: Floats) -> Floats:
        """Tokens whose softmax is made at a time, of so many."""
        most = np.floor(_LOW_BLOCK_BYTES / (FP32 * np.maximum(vocab, 1)))
        block: Floats = np.minimum(np.maximum(1, most), rows)
        return block

    def _low_logits(self, tape: Tape, at: _Head) -> None:
        """All logits in 16 bits, of which the gradient is made in place."""
        s, hidden = self.s, self.outline.hidden
        here, rows, vocab, head = at.here, at.rows, at.vocab, at.elements
        logits = here * rows * vocab * s.operand
        output = here * rows * hidden * s.stream * s.casts
        read = here * rows * hidden * s.operand * (s.operand < s.stream)
        part = s.operand * np.minimum(vocab, _LOW_HEAD_ROWS) * hidden * here
        cast = part * (s.operand < self.used)
        block = self._low_block(vocab, rows)
        tape.pass_over("activations", at.more * logits)
        within = np.maximum(read + cast, 2 * FP32 * block * vocab * here)
        tape.moment("temporary", logits + within + output)
        tape.take("activations", logits)
        tape.drop("communication", at.last)
        states = here * rows * hidden
        made = here * head * self.used + states * np.where(s.stream < FP32, FP32 + s.stream, FP32)
        tape.moment("temporary", made + read + cast + np.maximum(part, states * s.operand))
        tape.drop("activations", logits)

    def _whole_logits(self, tape: Tape, at: _Head) -> None:
        s, c = self.s, self.columns
        here, rows, vocab, head = at.here, at.rows, at.vocab, at.elements
        logits, wide = here * rows * vocab, np.maximum(s.operand, FP32)
        low = s.operand < FP32
        read = here * rows * self.outline.hidden * s.operand
        # What the head reads is gathered for its product and again for its gradient, or kept.
        gathered = read * self.gathers_again * (1 - 1 / c.tp)
        copy = here * head * s.operand * (s.operand < self.used)
        split = c.tp > 1
        tape.pass_over("activations", at.more * (logits * wide + read - gathered))
        tape.pass_over("weight copies", at.more * copy)
        tape.pass_over("activations", read - gathered)
        tape.pass_over("weight copies", copy)
        # Products, in fp32, and their logarithms of softmax (split over ranks: exponentials).
        output = here * rows * self.outline.hidden * s.stream * s.casts  # what was cast
        again = 0 if self.habits.softmax_in_place else wide
        tape.moment("temporary", output + logits * (s.operand * low + wide + again))
        tape.take("activations", logits * wide)
        tape.drop("communication", at.last)
        # Its gradient, and that of the products; split or in place it is made at once, and cast.
        made = np.where(split | self.habits.softmax_in_place, again + s.operand * low, 2 * wide)
        tape.moment("temporary", logits * made)
        tape.drop("activations", logits * wide)
        grads = logits * s.operand + here * head * s.operand + read + gathered
        tape.moment("temporary", grads)
        tape.drop("weight copies", copy)
        tape.drop("activations", read - gathered)

    def _in_chunks(self, tape: Tape, at: _Head) -> None:
        """The gradients of hidden states and head are made in the forward."""
        s, hidden = self.s, self.outline.hidden
        here, rows, vocab, head = at.here, at.rows, at.vocab, at.elements
        low = self._low()
        own = (self.device == "cuda") & (s.operand < FP32) | low  # the package's own chunks
        chunk = np.minimum(_CHUNK_ROWS, rows)
        large = np.maximum(_CHUNK_ROWS, np.floor(_CHUNK_BYTES / (FP32 * np.maximum(vocab, 1))))
        large = np.where(low, self._low_rows(vocab), large)
        chunk = np.where(own & ~(low & self.columns.chunked_loss), np.minimum(large, rows), chunk)
        states_grad = here * rows * hidden * np.where(own, s.stream, np.maximum(s.operand, FP32))
        weights_grad = here * head * np.maximum(FP32, self.used)
        raised = here * head * FP32 * (self.used < FP32) * ~own
        tape.pass_over("activations", (1 + at.more) * (states_grad + weights_grad))
        output = here * rows * hidden * s.stream
        cast = here * head * s.operand * own * (s.operand < self.used)
        # Of the package's own, a chunk's gradient of the head lives while the next one is made.
        grad, before = head * s.operand, rows > chunk
        inside = np.where(
            own,
            np.maximum(12 * chunk * vocab + grad * before, chunk * vocab * s.operand + grad) * here,
            FP32 * chunk * (vocab + hidden) * here,
        )
        block = self._low_block(vocab, chunk)
        on_cpu = (self.device == "cpu") & ~own
        inside = np.where(on_cpu, FP32 * (chunk + block) * vocab * here, inside)
        softmax = 2 * FP32 * block * vocab
        part = s.operand * np.maximum(np.minimum(vocab, _LOW_HEAD_ROWS), chunk) * hidden
        in_place = s.operand * chunk * vocab + np.maximum(softmax + grad * before, grad + part)
        inside = np.where(low, in_place * here, inside)
        tape.moment("temporary", inside + output + cast + raised)
        tape.drop("communication", at.last)
        # Before they are scaled, torch's operator makes zeros for the ones that nobody asked for.
        tape.moment("temporary", np.where(own | on_cpu, 0, states_grad + weights_grad))
        tape.drop("activations", states_grad + weights_grad)
