"""Number of rows of logits that the loss computes at a time: all rows, chunks, or blocks."""

import numpy as np

from outpace.planner.memory.saved_activations import FP32
from outpace.planner.plan_columns import Bools, Floats

_MIB = 2**20
# nn.loss, on a CPU: rows of a chunk, and the bytes of fp32 logits from which chunks are used.
CHUNK_ROWS = 512
_CHUNKS_FROM = 32 * _MIB
# nn.head_loss, on an accelerator: the multiple to which the vocabulary is padded, the maximum bytes
# of logits computed as a whole, bytes and minimum rows of a chunk, and bytes of fp32 logits in
# eager passes.
_PADDED_TO = 64
_WHOLE_BYTES = 4096 * _MIB
_CHUNK_BYTES = 2048 * _MIB
_CHUNK_ROWS_ACCELERATOR = 4096
_BLOCK_BYTES = 256 * _MIB
KEPT_OF_TOKEN = 4 + 8 + 1  # log Σ exp, the target's column, whether there is a target
# On a CPU in bf16: the maximum bytes of logits that are held as a whole, the bytes of a block of
# them in fp32, and the rows of the head that are multiplied at a time.
_LOW_BYTES = 256 * _MIB
_LOW_BLOCK_BYTES = 2 * _MIB
LOW_HEAD_ROWS = 2048


def padded_columns(vocab: Floats) -> Floats:
    """Return the number of columns of the logits on an accelerator: the vocabulary, padded."""
    return np.ceil(vocab / _PADDED_TO) * _PADDED_TO


def computes_whole_logits(rows: Floats, columns: Floats, operand: Floats) -> Bools:
    """Return whether an accelerator computes the logits of all rows at once.

    `rows` is the number of tokens, `columns` the padded vocabulary, and `operand` the bytes of a
    logit.
    """
    return rows * columns * operand <= _WHOLE_BYTES


def accelerator_rows(rows: Floats, columns: Floats, operand: Floats, asked: Bools) -> Floats:
    """Return the number of rows of logits that an accelerator computes at a time.

    `asked`: the plan requests a chunked loss.
    """
    row_bytes = np.maximum(columns, 1) * operand
    most = np.floor(_CHUNK_BYTES / row_bytes / _PADDED_TO) * _PADDED_TO
    chunks = np.ceil(rows / np.maximum(_CHUNK_ROWS_ACCELERATOR, most))
    chunk = np.ceil(rows / np.maximum(chunks, 1) / _PADDED_TO) * _PADDED_TO
    chunk = np.where(computes_whole_logits(rows, columns, operand), rows, chunk)
    chunk = np.where(asked, _CHUNK_ROWS_ACCELERATOR, chunk)
    return np.minimum(chunk, rows)


def block_bytes(rows: Floats, columns: Floats, compiled: Bools) -> Floats:
    """Return the bytes of logits that an accelerator's loss casts to fp32 at a time.

    The cast is done in blocks of rows; returns 0 for plans that compile the loss, which stores no
    cast.
    """
    most = np.maximum(1, np.floor(_BLOCK_BYTES / (FP32 * np.maximum(columns, 1))))
    return np.where(compiled, 0.0, FP32 * np.minimum(rows, most) * columns)


def exceeds_cpu(rows: Floats, vocab: Floats, in_bf16: Bools) -> Bools:
    """Return whether all logits together are too large for a CPU, which then splits them."""
    large = (rows > CHUNK_ROWS) & (FP32 * rows * vocab > _CHUNKS_FROM)
    return np.where(in_bf16, rows > whole_bf16_rows(vocab), large)


def whole_bf16_rows(vocab: Floats) -> Floats:
    """Return the largest number of tokens whose logits a CPU in bf16 computes at once."""
    return np.maximum(CHUNK_ROWS, np.floor(_LOW_BYTES / (2 * np.maximum(vocab, 1))))


def softmax_rows(vocab: Floats, rows: Floats) -> Floats:
    """Return the number of tokens whose softmax a CPU in bf16 computes at a time."""
    most = np.floor(_LOW_BLOCK_BYTES / (FP32 * np.maximum(vocab, 1)))
    return np.minimum(np.maximum(1, most), rows)
