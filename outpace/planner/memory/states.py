"""Tensors that stay on a rank: weight elements, and bytes of optimizer state."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache, partial

import numpy as np

from outpace.planner.communication.volume import share_by_size
from outpace.planner.memory.optimizer_bytes import optimizer_bytes
from outpace.planner.model.outline import layer_parameters, weights
from outpace.planner.plan_columns import (
    OPTIMIZERS,
    PRECISIONS,
    Floats,
    PlanBatch,
    distinct_rows,
)
from outpace.records.optimizers import OptimizerName
from outpace.records.outline import Outline, Stack
from outpace.records.precisions import Precision

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OutsideElements:
    """Parameter elements outside of layers on a rank: embedding, head, and the rest."""

    embedding: Floats
    head: Floats  # 0 if tied to the embedding
    positions: Floats
    tail: Floats  # norms and transforms before the head


def outside_elements(outline: Outline, columns: PlanBatch) -> OutsideElements:
    """Return the elements outside of layers; tp splits only the vocabulary."""
    split = columns.tp
    rows = -(-outline.vocab // split)
    zero = np.zeros(len(split))
    tail = sum(p.inputs * p.outputs * p.count for p in outline.head_matmuls)
    tail += outline.outside_parameters
    return OutsideElements(
        embedding=rows * outline.hidden + zero,
        head=zero if outline.tied else -(-outline.outputs // split) * outline.hidden + zero,
        positions=zero + outline.learned_positions * outline.hidden,
        tail=zero + tail,
    )


def layer_shapes(
    stack: Stack, hidden: int, tp: int = 1, ep: int = 1, etp: int | None = None
) -> list[Shape]:
    """Return the shapes of a layer's parameters on a rank.

    `etp` is the number of ranks that split each expert; the default is tp.
    """
    found: list[Shape] = []
    vectors = layer_parameters(stack, hidden)
    for weight in weights(stack, hidden):
        vectors -= weight.elements
        inputs, outputs = weight.inputs, weight.outputs
        cut = etp if weight.experts and etp is not None else tp
        if weight.cut == "outputs":
            outputs //= cut
        elif weight.cut == "inputs":
            inputs //= cut
        copies = max(1, weight.experts // ep)
        for part in _split_fused_rows(weight.name, stack, outputs, cut):
            found += [(part, inputs)] * copies
            found += [(part,)] * copies if weight.bias else []
    biases = sum(1 for _ in range(stack.norms * (2 if stack.norm_bias else 1)))
    found += [(hidden,)] * biases
    vectors -= hidden * biases
    return found + ([(vectors,)] if vectors > 0 else [])


def _split_fused_rows(name: str, stack: Stack, outputs: int, tp: int) -> list[int]:
    """Return the rows of each parameter matrix that a weight of the outline consists of.

    Matmuls with the same input, such as those of queries, keys and values, are one weight in the
    outline, but separate parameters.
    """
    if name.endswith("qkv"):
        one = stack.cross_attention if name.startswith("cross") else stack.attention
        assert one is not None
        keys, values = (one.kv_heads * n // tp for n in (one.head_dim, one.value_dim))
        return [outputs - keys - values, keys, values]
    gated = stack.mlp is not None and stack.mlp.gated
    return [outputs // 2] * 2 if gated and name.endswith("up") else [outputs]


def by_plans(
    columns: PlanBatch, names: tuple[str, ...], value: Callable[..., float | list[float]]
) -> Floats:
    """Return `value(*columns)` for every plan, computed once per distinct combination of values.

    `names` are the columns to pass. The result has one number, or one row of numbers, per plan.
    """
    read = [getattr(columns, name).astype(np.int64) for name in names]
    first, place = distinct_rows(read)
    found = [value(*map(int, one)) for one in zip(*(c[first] for c in read), strict=True)]
    return np.array(found, dtype=float)[place]


@dataclass(frozen=True)
class States:
    """Bytes of optimizer state on a rank without sharding; `layer` is for one layer."""

    layer: Floats
    embedding: Floats
    positions: Floats
    head: Floats
    rest: Floats


_PARTS = tuple(field.name for field in fields(States))


def states(outline: Outline, columns: PlanBatch) -> States:
    """Return the bytes of every plan's optimizer state, from the shapes of its parameters."""
    names = ("optimizer", "precision", "tp", "ep", "etp")

    def value(optimizer: int, precision: int, *axes: int) -> list[float]:
        named = OPTIMIZERS[optimizer], PRECISIONS[precision]
        return [_part_state_bytes(outline, which, *named, *axes) for which in _PARTS]

    return States(*by_plans(columns, names, value).reshape(-1, len(_PARTS)).T.copy())


@lru_cache(maxsize=4096)
def _part_state_bytes(
    outline: Outline, part: str, name: OptimizerName, precision: Precision, tp: int, ep: int,
    etp: int,
) -> float:  # fmt: skip
    hidden, vocab, outputs = outline.hidden, outline.vocab, outline.outputs
    if part == "layer":
        total = sum(
            stack.layers * sum(optimizer_bytes(shape, name, precision)
                               for shape in layer_shapes(stack, hidden, tp, ep, etp))
            for stack in outline.stacks
        )  # fmt: skip
        return total / outline.layers
    if part == "embedding":
        return optimizer_bytes((-(-vocab // tp), hidden), name, precision, hidden=False)
    if part == "head":
        if outline.tied or not outputs:
            return 0.0
        return optimizer_bytes((-(-outputs // tp), hidden), name, precision, hidden=False)
    if part == "positions":
        if not outline.learned_positions:
            return 0.0
        shape = (outline.learned_positions, hidden)
        return optimizer_bytes(shape, name, precision, hidden=False)
    rest = sum(
        p.count * optimizer_bytes((p.outputs, p.inputs), name, precision, hidden=False)
        for p in outline.head_matmuls
    )
    return rest + optimizer_bytes((outline.outside_parameters,), name, precision, hidden=False)


def whole_share(outline: Outline, columns: PlanBatch) -> Floats:
    """Return the largest fraction of all elements that one rank updates under ZeRO-1.

    Ranks own whole parameters, so their fractions differ.
    """
    return by_plans(columns, ("shards", "tp"), partial(_largest_share, outline))


def whole_states(outline: Outline, columns: PlanBatch) -> Floats:
    """Return the fullest rank's bytes of optimizer state if ranks own whole parameters (zero1).

    Parameters are assigned largest first, each to the rank with the fewest elements. With tensor
    parallelism, the parts on a tp rank are assigned.
    """

    def value(ranks: int, tp: int, optimizer: int, precision: int) -> float:
        return _most_state_bytes(outline, ranks, tp, OPTIMIZERS[optimizer], PRECISIONS[precision])

    return by_plans(columns, ("shards", "tp", "optimizer", "precision"), value)


def _all_shapes(outline: Outline, tp: int) -> list[tuple[Shape, bool]]:
    """Return the shape of every parameter on a tp rank, and whether the parameter is in a layer."""
    hidden = outline.hidden
    outside = [(-(-outline.vocab // tp), hidden), (outline.learned_positions, hidden)]
    outside += [(p.outputs, p.inputs) for p in outline.head_matmuls for _ in range(p.count)]
    outside += [] if outline.tied else [(-(-outline.outputs // tp), hidden)]
    found: list[tuple[Shape, bool]] = [(shape, False) for shape in outside if shape[0]]
    found.append(((outline.outside_parameters,), False))
    for stack in outline.stacks:
        found += [(shape, True) for shape in layer_shapes(stack, hidden, tp)] * stack.layers
    return found


@lru_cache(maxsize=256)
def _rank_shapes(
    outline: Outline, ranks: int, tp: int
) -> tuple[tuple[tuple[Shape, bool], ...], ...]:
    held = _all_shapes(outline, tp)
    shares = share_by_size([math.prod(shape) for shape, _ in held], ranks)
    return tuple(tuple(held[number] for number in share) for share in shares)


@lru_cache(maxsize=1024)
def _largest_share(outline: Outline, ranks: int, tp: int) -> float:
    sizes = [sum(math.prod(s) for s, _ in share) for share in _rank_shapes(outline, ranks, tp)]
    return max(sizes) / sum(sizes)


@lru_cache(maxsize=1024)
def _most_state_bytes(
    outline: Outline, ranks: int, tp: int, name: OptimizerName, precision: Precision
) -> float:
    return max(
        sum(optimizer_bytes(shape, name, precision, hidden=layered) for shape, layered in share)
        for share in _rank_shapes(outline, ranks, tp)
    )
