"""How long a step of each optimizer takes: bytes that its operators move, products, launches."""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from outpace.planner.columns import OPTIMIZERS, Columns, Floats
from outpace.planner.device import Device
from outpace.planner.fabric import Fabric
from outpace.planner.stored import layer_shapes
from outpace.records.optimizers import MASTERS, OptimizerName
from outpace.records.outline import Outline

_FP32 = 4.0
_CLIPPING = 12.0  # bytes of a parameter's gradient: read for the norm; read and written, scaled
_MASTERS = 12.0  # read in 16 bits and unscaled before, weights written in 16 bits
# What an optimizer launches besides, whatever its parameters are.
_OPERATORS = 100
_ENDS = 4  # tensors outside of layers
_NEWTON_SCHULZ_STEPS = 5


class _Step(NamedTuple):
    """Bytes moved for a parameter, and operators launched for a tensor."""

    nbytes: float
    operators: float


# Counted in the sources, with weights, gradients and what is reckoned with in fp32. Eager operators
# read their inputs from memory and write their outputs to it, one after the other:
# torch/optim/adam.py of 2.13 (fused: weight and moments read and written, gradient read; otherwise
# decay 8, mean 12, square 20, root 24, update 16), sgd.py (decay 12, momentum 20, update 12), and
# optim/low.py, adafactor.py and muon.py of outpace. Of LowAdamW 96 bytes are arithmetic in fp32;
# the rest reads moments (bf16 6, 8 bits 21, 4 bits 25 each) and writes them: rounded by random bits
# 34, or as codes 35 and 37, with their blocks' largest magnitudes.
_STEPS: Mapping[OptimizerName, _Step] = {
    "adamw-fused": _Step(28, 0),
    "adamw-foreach": _Step(80, 0),
    "adamw-for-loop": _Step(80, 10),
    "adamw-bf16": _Step(176, 22),
    "adamw-8bit": _Step(208, 32),
    "adamw-4bit": _Step(220, 42),
    "adafactor": _Step(108, 30),
    "muon": _Step(62, 30),
    "sgd": _Step(44, 4),
}


def optimizer_s(
    outline: Outline, device: Device, fabric: Fabric, c: Columns, own: Floats
) -> Floats:
    """Seconds of a step and of clipping before it. `own` is the parameters that a rank steps.

    Operators go on beside the host, which launches them: what takes longer is waited for. Muon
    adds the products of its iteration and gathers its matrices.
    """
    moved, launched = (np.array(values)[c.optimizer] for values in zip(*_rows(), strict=True))
    masters = np.where(c.precise(*MASTERS) & ~c.holds_masters(), _MASTERS, 0.0)
    rate = device.memory_bytes_per_s * device.optimizer_share
    busy = own * (moved + _CLIPPING + masters) / rate
    muon = c.optimizer == OPTIMIZERS.index("muon")
    if muon.any():
        busy = busy + np.where(muon, _muon_s(outline, device, fabric, c), 0.0)
    # ZeRO-1 shares out whole tensors; the embedding, the head and what lies beside them are few.
    tensors = (_tensors(outline) / c.pp + _ENDS) / np.where(c.zero == 1, c.dp_shard, 1)
    host = launched * tensors * device.operator_s
    together = busy + host if device.kind == "cpu" else np.maximum(busy, host)
    found: Floats = together + _OPERATORS * device.operator_s
    return found


def _rows() -> list[_Step]:
    return [_STEPS[name] for name in OPTIMIZERS]


@lru_cache(maxsize=256)
def _tensors(outline: Outline) -> int:
    """Parameters of all layers, as tensors."""
    return sum(s.layers * len(layer_shapes(s, outline.hidden)) for s in outline.stacks)


@lru_cache(maxsize=256)
def _matrices(outline: Outline, ep: int) -> tuple[float, float]:
    """Elements of the layers' matrices, and FLOPs that make all of them orthogonal.

    Of (r, k) with r ≤ k each step of the iteration is X·Xᵀ, its square, and one product with X:
    4r²k + 2r³ (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024).
    """
    elements = flops = 0.0
    for stack in outline.stacks:
        for shape in layer_shapes(stack, outline.hidden, 1, ep):
            if len(shape) == 2:
                r, k = sorted(map(float, shape))
                elements += stack.layers * r * k
                flops += stack.layers * _NEWTON_SCHULZ_STEPS * (4 * r * r * k + 2 * r**3)
    return elements, flops


def _muon_s(outline: Outline, device: Device, fabric: Fabric, c: Columns) -> Floats:
    """The iteration's products, in bf16, and gathers of what shards and tp have parts of.

    Every rank turns every matrix of its layers, but under ZeRO-1, which shares out whole ones.
    """
    each, place = np.unique(c.ep, return_inverse=True)
    found = np.array([_matrices(outline, int(ep)) for ep in each], float).reshape(-1, 2)[place]
    elements, flops = found.T / c.pp
    whole = np.where(c.zero == 1, c.dp_shard, 1)
    parts = c.tp * np.where(c.zero > 1, c.dp_shard * c.cp, 1)
    gathered = fabric.gather_s(_FP32 * elements, parts, np.ones_like(parts))
    seconds: Floats = flops / whole / device.rate("bf16") + gathered
    return seconds
