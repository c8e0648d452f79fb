"""Bytes that an optimizer stores per parameter, and how many values it updates together."""

import math
from collections.abc import Sequence

from outpace.records.optimizers import OPTIMIZER_TRAITS, Kept, OptimizerName
from outpace.records.precisions import MASTERS, PRECISION_TRAITS, Precision

# Moments of smaller tensors are kept in fp32, as bitsandbytes does.
LEAST_VALUES = 4096
# The maximum number of values that share a scale, as in the papers. Rows of other lengths use
# shorter blocks, down to the length at which scales would outweigh the savings.
LONGEST_BLOCK = {"8bit": 256, "4bit": 128}
LEAST_BLOCK = 32
# Bytes of fp32 gradients that a step with master weights creates at a time. Those of a whole model
# would exist in addition to its states.
MASTER_PIECE_BYTES = 256 << 20
# Maximum number of values that are updated as one tensor; on a CPU, as many as its caches hold.
JOINED_VALUES = {"cpu": 1 << 17, "cuda": 1 << 24}
FEW_VALUES = 1 << 15  # small parameters, which take little memory in any model
# Maximum number of values of a parameter whose random numbers for rounding come from a counter
# (`random_words`), where a few operators serve many parameters. Larger parameters use a generator
# each, whose kernel makes a single pass.
COUNTED_VALUES = {"cpu": 1 << 15, "cuda": 1 << 20}
# Matrices in bf16 that Muon orthogonalises at a time; their temporaries take three times as much.
MUON_BATCH_BYTES = 256 << 20
_FP32 = 4


def scale_block_length(shape: Sequence[int], kept: Kept, split: int = 1) -> int | None:
    """Return how many consecutive values of an optimizer's moments share a quantization scale.

    Returns None if the moments of a parameter of this `shape` are kept in fp32, because it is small
    or its rows cannot be divided into blocks. `split` is the number of ranks over which each row is
    split.
    """
    if len(shape) < 2 or math.prod(shape) < LEAST_VALUES or shape[-1] % split:
        return None
    length = math.gcd(shape[-1] // split, LONGEST_BLOCK[kept])
    return length if length >= LEAST_BLOCK else None


def optimizer_bytes(
    shape: Sequence[int],
    name: OptimizerName,
    precision: Precision = "fp32",
    *,
    hidden: bool = True,
) -> float:
    """Return the bytes of optimizer state for a parameter of this shape, without the step count.

    `hidden`: the parameter is in a layer. Muon updates only matrices of layers; for all other
    parameters, it uses AdamW.
    """
    values = math.prod(shape)
    master = values * _FP32 if precision in MASTERS else 0
    item = _FP32 if precision in MASTERS else PRECISION_TRAITS[precision].weight_bytes
    traits = OPTIMIZER_TRAITS[name]
    if traits.kept == "bf16":
        return master + traits.moments * 2 * values
    if traits.kept is not None:
        length = scale_block_length(shape, traits.kept)
        if length is None:
            return master + traits.moments * _FP32 * values
        code = 1 if traits.kept == "8bit" else 0.5
        return master + traits.moments * values * (code + _FP32 / length)
    if traits.factored and len(shape) >= 2:
        return master + item * (values // shape[-1] + values // shape[-2])
    once = name == "muon" and hidden and len(shape) == 2
    return master + item * values * (1 if once else traits.moments)
