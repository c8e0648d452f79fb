"""Memory of one block's backward, in the order of its operators."""

import numpy as np

from outpace.planner.memory.saved_activations import FP32
from outpace.planner.memory.setup import MemorySetup
from outpace.planner.memory.timeline import MemoryTimeline
from outpace.planner.plan_batch import Floats
from outpace.records.plan import Checkpointing

_ATTENTION_ROWS = 512  # of scores that ring attention holds at once


class BlockMemory(MemorySetup):
    """The MLP and attention, each with the norm before it or after."""

    def _block(
        self, timeline: MemoryTimeline, present: Floats, mode: dict[Checkpointing, Floats]
    ) -> None:
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
        timeline.pass_over("activations", again * present)
        timeline.take("weight copies", copies)
        cached = mode["selective"] * present * b.output
        timeline.pass_over("activations", cached)
        stream, read = s.part * s.stream * present, s.whole * s.operand * present
        gathered = read * self.regathers_inputs
        inner = b.inner * present
        in_it = inner * live / np.maximum(present, 1e-9)
        # The MLP. The gradient of its output in the products' dtype, then of the inner tensor.
        cast = read * s.casts
        timeline.pass_over("temporary", cast)
        timeline.take("temporary", inner)
        self._gradient(timeline, b.down * present, copies=copied)
        timeline.drop("temporary", cast)
        timeline.drop("activations", in_it)
        if b.gated:
            timeline.take("temporary", 2 * inner)
            timeline.drop("activations", 2 * in_it)
            timeline.drop("temporary", inner)
            timeline.pass_over("temporary", read + gathered)
            self._gradient(timeline, b.up * present, copies=copied)
            timeline.drop("temporary", inner)
            timeline.take("temporary", inner)
            timeline.drop("activations", in_it)
            timeline.drop("temporary", inner)
            timeline.take("temporary", read)
            timeline.drop("temporary", read)
            self._gradient(timeline, b.up * present, copies=copied)
            timeline.drop("temporary", inner)
        else:
            timeline.take("temporary", inner)
            timeline.drop("activations", in_it)
            timeline.drop("temporary", inner)
            timeline.take("temporary", read + gathered)
            self._gradient(timeline, b.up * present, copies=copied)
            timeline.drop("temporary", inner)
        timeline.drop("temporary", gathered)
        input_ = b.input * live
        timeline.drop("activations", input_)
        self._through_norm(timeline, stream, read, live)
        # Attention.
        timeline.pass_over("temporary", cast)
        timeline.pass_over("temporary", b.mixed * present)
        heads = (b.queries + 2 * b.keys) * present
        timeline.take("temporary", heads)
        self._ring(timeline, present)
        self._workspace(timeline, present)
        timeline.drop("temporary", (b.mixed * present) + cast)
        timeline.drop("activations", b.attention * live)
        if self.outline.learned_positions == 0:
            wide = FP32 / s.operand
            turned = wide * (2 * b.queries + b.keys) + b.queries - b.queries - b.keys
            timeline.moment("temporary", np.maximum(turned, 0) * present)
        rest = b.elements - b.down - b.up * (2 if b.gated else 1)
        timeline.pass_over("temporary", 2 * read + gathered)
        self._gradient(timeline, (rest - b.vectors) * present, copies=copied)
        self._gradient(timeline, b.vectors * present, product=False)
        timeline.drop("temporary", read + gathered + heads)
        timeline.drop("activations", input_)
        self._through_norm(timeline, stream, read, live)
        remains = b.saved_bytes - b.attention - b.inners * b.inner - 2 * b.input
        timeline.drop("activations", (remains - 2 * (b.residual + b.norm)) * live + cached)
        held = self._copy_bytes() * present * mode["none"]
        timeline.offload(-(held * self.off_acts + away * present), self.acts_on_disk)

    def _through_norm(
        self, timeline: MemoryTimeline, stream: Floats, read: Floats, live: Floats
    ) -> None:
        """The gradient of what the norm made becomes its input's, and joins the stream's."""
        b, c = self.block, self.columns
        gathered = ((c.tp > 1) & c.sequence_parallel).astype(float)
        timeline.take("temporary", read * gathered)  # put together before it is scattered
        timeline.drop("temporary", read * gathered)
        timeline.pass_over("temporary", stream - read)
        timeline.take("temporary", stream * (1 + b.composed))
        timeline.drop("activations", (b.residual + b.norm) * live)
        timeline.drop("temporary", stream * (2 + b.composed))

    def _ring(self, timeline: MemoryTimeline, present: Floats) -> None:
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
        timeline.moment("temporary", spread * (3 * scores + operands))

    def _workspace(self, timeline: MemoryTimeline, present: Floats) -> None:
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
        timeline.moment("temporary", (c.cp == 1) * present * (nbytes + repeated))
