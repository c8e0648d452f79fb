"""Memory of one block's backward, in the order of its operators."""

import numpy as np

from outpace.planner.memory.saved_activations import FP32
from outpace.planner.memory.setup import Setup
from outpace.planner.memory.timeline import Tape
from outpace.planner.plan_batch import Floats
from outpace.records.plan import Checkpointing

_ATTENTION_ROWS = 512  # of scores that ring attention holds at once


class BlockMemory(Setup):
    """The MLP and attention, each with the norm before it or after."""

    def _block(self, tape: Tape, present: Floats, mode: dict[Checkpointing, Floats]) -> None:
        """A block's backward, with what it computes again before."""
        s, b = self.s, self.block
        kept = self._saved_bytes(mode)
        again = b.saved_bytes - kept
        away = self._offloaded_bytes(mode)  # offloaded tensors are used where they lie
        live = (1 - away / np.maximum(b.saved_bytes, 1)) * present
        copies = self._copy_bytes() * present * (1 - mode["none"])
        # Bytes of copies for each element of a matrix, as far as they are here.
        copied = self._copy_bytes() / np.maximum(self.matrices, 1)
        copied = copied * (1 - self.off_acts * mode["none"])
        tape.pass_over("activations", again * present)
        tape.take("weight copies", copies)
        cached = mode["selective"] * present * b.output
        tape.pass_over("activations", cached)
        stream, read = s.part * s.stream * present, s.whole * s.operand * present
        gathered = read * self.gathers_again
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
            tape.pass_over("temporary", read + gathered)
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
            tape.take("temporary", read + gathered)
            self._gradient(tape, b.up * present, copies=copied)
            tape.drop("temporary", inner)
        tape.drop("temporary", gathered)
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
        tape.pass_over("temporary", 2 * read + gathered)
        self._gradient(tape, (rest - b.vectors) * present, copies=copied)
        self._gradient(tape, b.vectors * present, product=False)
        tape.drop("temporary", read + gathered + heads)
        tape.drop("activations", input_)
        self._through_norm(tape, stream, read, live)
        remains = b.saved_bytes - b.attention - b.inners * b.inner - 2 * b.input
        tape.drop("activations", (remains - 2 * (b.residual + b.norm)) * live + cached)
        held = self._copy_bytes() * present * mode["none"]
        tape.offload(-(held * self.off_acts + away * present), self.acts_on_disk)

    def _through_norm(self, tape: Tape, stream: Floats, read: Floats, live: Floats) -> None:
        """The gradient of what the norm made becomes its input's, and joins the stream's."""
        b, c = self.block, self.columns
        gathered = ((c.tp > 1) & c.sequence_parallel).astype(float)
        tape.take("temporary", read * gathered)  # put together before it is scattered
        tape.drop("temporary", read * gathered)
        tape.pass_over("temporary", stream - read)
        tape.take("temporary", stream * (1 + b.composed))
        tape.drop("activations", (b.residual + b.norm) * live)
        tape.drop("temporary", stream * (2 + b.composed))

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
