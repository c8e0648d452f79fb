"""Number of operators that an optimizer's step launches, by the tensors that it updates."""

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from math import prod

import numpy as np

from outpace.planner.memory.optimizer_bytes import (
    COUNTED_VALUES,
    FEW_VALUES,
    JOINED_VALUES,
    MUON_BATCH_BYTES,
    scale_block_length,
)
from outpace.planner.memory.states import Shape, layer_shapes
from outpace.planner.plan_columns import OPTIMIZERS, Bools, Floats, Ints, PlanBatch
from outpace.records.optimizers import OPTIMIZER_TRAITS, Kept, Operators
from outpace.records.outline import Outline


def count_operators(outline: Outline, kind: str, c: PlanBatch, compiled: Bools) -> Floats:
    """Return the number of operators that update a rank's tensors on a device of `kind`, by plan.

    `compiled` marks the plans whose optimizer is compiled if possible. Operators that do not depend
    on the number of tensors are left out.
    """
    found = np.zeros(len(c))
    keys = np.stack([c.optimizer, c.tp, c.ep, compiled]).astype(np.int64)
    for optimizer, tp, ep, as_function in np.unique(keys, axis=1).T.tolist():
        name = OPTIMIZERS[optimizer]
        traits = OPTIMIZER_TRAITS[name]
        each = (as_function and traits.compiled_operators) or traits.operators
        if not any(each):
            continue
        key = [[optimizer], [tp], [ep], [as_function]]
        chosen = np.flatnonzero((keys == key).all(axis=0))
        zero, shards = c.zero[chosen], c.dp_shard[chosen]
        # Adafactor groups tensors by their unsharded shapes.
        split = 1 if name == "adafactor" else tp
        layers, ends = _layer_shapes(outline, split, ep), _outside_shapes(outline, split)
        # ZeRO-1 assigns whole tensors to ranks.
        counts: dict[Shape, Floats] = {}
        for shape in (*layers, *ends):
            counts[shape] = (layers[shape] / c.pp[chosen] + ends[shape]) / np.where(
                zero == 1, shards, 1
            )
        parts = np.where(zero > 1, shards * c.cp[chosen], 1)
        on_gpu = kind == "cuda"
        if name == "muon":
            whole = np.where(zero == 1, shards, 1)
            found[chosen] = _count_muon(each, layers, ends, c.pp[chosen], whole, on_gpu)
        elif name == "adafactor":
            found[chosen] = _count_adafactor(each, counts, on_gpu and not as_function)
        elif traits.kept is not None:
            sizes = {shape: prod(shape) / parts for shape in counts}
            found[chosen] = _count_low_bit_adamw(each, traits.kept, counts, sizes, kind)
        else:
            found[chosen] = sum(_count_single(each, shape) * n for shape, n in counts.items())
    return found


@lru_cache(maxsize=256)
def _layer_shapes(outline: Outline, tp: int, ep: int) -> Counter[Shape]:
    found: Counter[Shape] = Counter()
    for stack in outline.stacks:
        for shape, count in Counter(layer_shapes(stack, outline.hidden, tp, ep)).items():
            found[shape] += stack.layers * count
    return found


def _outside_shapes(outline: Outline, tp: int) -> Counter[Shape]:
    rows = [outline.vocab // tp, outline.learned_positions]
    rows += [] if outline.tied else [outline.outputs // tp]
    found: Counter[Shape] = Counter((count, outline.hidden) for count in rows if count)
    found[outline.hidden,] += 2
    return found


def _count_single(ops: Operators, shape: Shape) -> float:
    return ops.matrix if len(shape) > 1 else ops.vector


def _count_muon(
    ops: Operators, layers: Counter[Shape], ends: Counter[Shape], pp: Ints, parts: Ints,
    on_gpu: bool,
) -> Floats:  # fmt: skip
    """Return the number of operators of Muon's step, including AdamW's for other tensors.

    Muon updates the matrices of layers; vectors and all tensors outside of layers are AdamW's. On a
    GPU, AdamW is a fused kernel and is not counted.
    """
    matrices = {shape: count / pp / parts for shape, count in layers.items() if len(shape) == 2}
    found = np.zeros(len(pp))
    for shape, count in matrices.items():
        most = max(1, MUON_BATCH_BYTES // (2 * prod(shape))) if on_gpu else 1
        found += np.ceil(count / most) * (ops.matrices if on_gpu else ops.matrix)
    if not on_gpu:
        vectors = sum(count for shape, count in layers.items() if len(shape) == 1)
        found += ops.vector * (vectors / pp + ends.total()) / parts
    return found


def _count_adafactor(
    ops: Operators, counts: Mapping[Shape, Floats], stacked: bool
) -> Floats | float:  # fmt: skip
    """Return the number of Adafactor's operators.

    If `stacked`, small tensors of one shape are updated together.
    """
    found: Floats | float = 0.0
    for is_matrix in (True, False):
        shapes = [shape for shape in counts if (len(shape) > 1) == is_matrix]
        most = _max_batched_values(max(map(prod, shapes), default=0), "cuda")
        for shape in shapes:
            size, count = prod(shape), counts[shape]
            alone = count * _count_single(ops, shape)
            if stacked and size <= most // 2:
                batches = np.ceil(count / (most // size))
                joined = batches * (ops.matrices if is_matrix else ops.vectors)
                found = found + np.where(count > 1, joined, alone)
            else:
                found = found + alone
    return found


def _count_low_bit_adamw(
    ops: Operators, kept: Kept, counts: Mapping[Shape, Floats], sizes: Mapping[Shape, Floats],
    kind: str,
) -> Floats:  # fmt: skip
    """Return the number of low-bit AdamW's operators, which update small tensors in batches.

    `sizes` are the values per tensor on a rank. Batches are counted as if all sizes were equal.
    """
    found = np.zeros(np.shape(next(iter(sizes.values()))))
    for is_matrix in (True, False):
        shapes = [shape for shape in counts if (len(shape) > 1) == is_matrix]
        if not shapes:
            continue
        most = _max_batched_values(np.max([sizes[shape] for shape in shapes], axis=0), kind)
        for alike in _group_by_scale_block(kept, shapes):
            wide = is_matrix and (kept == "bf16" or _block_length(kept, alike[0]) is not None)
            alone, batch = (ops.matrix, ops.matrices) if wide else (ops.vector, ops.vectors)
            for counted in (True, False):
                tensors = np.zeros_like(found)
                values = np.zeros_like(found)
                for shape in alike:
                    size = sizes[shape]
                    here = (size <= COUNTED_VALUES.get(kind, 0)) == counted
                    small = here & (size <= most // 2)
                    single = alone + (ops.counted if counted else 0.0)
                    found += np.where(here & ~small, counts[shape] * single, 0.0)
                    tensors += np.where(small, counts[shape], 0.0)
                    values += np.where(small, counts[shape] * size, 0.0)
                mean = np.maximum(values, 1) / np.maximum(tensors, 1)
                batches = np.ceil(tensors / np.maximum(most // mean, 1))
                more = ops.counted if counted else 0.0
                own = ops.each + (0.0 if counted else ops.drawn)
                joined = batches * (batch + more) + tensors * own
                found += np.where(tensors > 1, joined, tensors * (alone + more))
    return found


def _group_by_scale_block(kept: Kept, shapes: list[Shape]) -> list[list[Shape]]:
    kinds: dict[int | None, list[Shape]] = {}
    for shape in shapes:
        kinds.setdefault(_block_length(kept, shape), []).append(shape)
    return list(kinds.values())


def _block_length(kept: Kept, shape: Shape) -> int | None:
    return None if kept == "bf16" else scale_block_length(shape, kept)


def _max_batched_values(largest: Floats | int, kind: str) -> Floats:
    return np.minimum(JOINED_VALUES.get(kind, 0), np.maximum(largest // 2, FEW_VALUES))
