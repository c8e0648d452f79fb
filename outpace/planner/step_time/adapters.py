"""Low-rank adapters beside frozen weights: their matrix products, traffic and parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from outpace.planner.hardware.device import DeviceRates, sustained_product_s
from outpace.planner.model.outline import Weight, weights
from outpace.planner.plan_batch import Floats
from outpace.records.outline import Outline

# Widths of an adapter's input and output that it moves (peft/tuners/lora/layer.py, Linear.forward):
# dropout reads, writes and masks the input; the output is scaled and added to the frozen product's.
# Backwards dropout's and the sum of the input's gradients, and the scaling's.
_INPUT_AHEAD, _OUTPUT_AHEAD = 2.0, 2.0 + 3.0
_INPUT_BACK, _OUTPUT_BACK = 2.0 + 3.0, 2.0
# Operators: dropout, two products with their transposed weights, scaling, sum; backwards without.
OPERATORS_AHEAD, OPERATORS_BACK = 7.0, 5.0


class Target(NamedTuple):
    """Adapters on one weight: how many, and the share of its outputs that they are on.

    Queries, keys and values are one product here, of which each may have an adapter of its own.
    """

    number: int
    share: float = 1.0


@dataclass(frozen=True)
class Adapters:
    """Adapters of `rank` on the weights that `targets` name, all else frozen.

    `base_bytes` are those of a frozen weight's number where it is unpacked for each product (nf4,
    GPTQ); None: it is kept as it is multiplied.
    """

    rank: int
    targets: Mapping[str, Target]
    base_bytes: float | None = None

    def parameters(self, outline: Outline) -> float:
        """Return the number of trained parameters."""
        total = 0.0
        for stack in outline.stacks:
            for weight in weights(stack, outline.hidden):
                on = self.targets.get(weight.name)
                if on is not None:
                    rows = on.number * weight.inputs + on.share * weight.outputs
                    total += stack.layers * self.rank * rows
        return total


def adapter_s(
    device: DeviceRates, adapters: Adapters, weight: Weight, shape: tuple[Floats, Floats, Floats],
    item: Floats,
) -> tuple[Floats, Floats, Floats]:  # fmt: skip
    """Seconds forwards, of gradients of inputs, and of the adapters' own gradients.

    `shape` is tokens, outputs and inputs of the frozen product on a rank; products are in 16 bits.
    """
    tokens, n, k = shape
    count, share = adapters.targets[weight.name]
    each, rank = n * share / count, np.full_like(tokens, float(adapters.rank))
    rate = np.full_like(tokens, device.rate("bf16"))

    def product(rows: Floats, columns: Floats, inner: Floats) -> Floats:
        return count * sustained_product_s(device, rate, rows, columns, inner, item)

    moved = device.memory_bytes_per_s
    inputs, outputs = count * tokens * k, tokens * n * share
    ahead = product(tokens, rank, k) + product(tokens, each, rank)
    ahead = ahead + (inputs * (_INPUT_AHEAD * item + 1) + outputs * _OUTPUT_AHEAD * item) / moved
    back = product(tokens, k, rank) + product(tokens, rank, each)
    back = back + (inputs * (_INPUT_BACK * item + 1) + outputs * _OUTPUT_BACK * item) / moved
    own = product(k, rank, tokens) + product(rank, each, tokens)
    return ahead, back, own


def unpacking_s(device: DeviceRates, adapters: Adapters, elements: Floats, item: Floats) -> Floats:
    """Return seconds in which frozen weights are read packed and written as they are multiplied.

    As bitsandbytes does, and GPTQ's kernels for training: before the product and once more before
    its gradient of the input.
    """
    if adapters.base_bytes is None:
        return np.zeros_like(elements)
    seconds: Floats = elements * (adapters.base_bytes + item) / device.memory_bytes_per_s
    return seconds
