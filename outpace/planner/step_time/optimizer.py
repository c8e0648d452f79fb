"""Time of an optimizer's step: the bytes that its operators move, its matmuls and its launches."""

from functools import lru_cache

import numpy as np

from outpace.planner.hardware.device import DeviceRates
from outpace.planner.hardware.links import Fabric
from outpace.planner.memory.states import layer_shapes
from outpace.planner.plan_columns import OPTIMIZERS, Bools, Floats, PlanBatch
from outpace.planner.step_time.optimizer_operators import count_operators
from outpace.records.optimizers import OPTIMIZER_TRAITS
from outpace.records.outline import Outline
from outpace.records.precisions import MASTERS

_FP32 = 4.0
_CLIPPING = 12.0  # bytes per element: read for the norm; read and written to be scaled
_MASTERS = 12.0  # bytes per parameter: unscaling of 16-bit gradients, writing of 16-bit weights
# Bytes per parameter with outpace's master weights (optim.master): 16-bit gradients are cast to
# fp32 (6, or none if micro-batches were accumulated in fp32) and scaled (8), weights rounded (6).
_WIDENED, _MULTIPLIED, _ROUNDED = 6.0, 8.0, 6.0
# Bytes per parameter of outpace's kernel over master weights (optim.fused_master), besides the
# gradient: master weight and moments are read and written, the weight is written.
_KERNEL = 24.0 + 2.0
# Number of operators of an optimizer step that does not depend on its parameters.
_OPERATORS = 100
_KERNEL_OPERATORS = 20  # most of them compute the norm
_NEWTON_SCHULZ_STEPS = 5

_TRAITS = [OPTIMIZER_TRAITS[name] for name in OPTIMIZERS]
_EAGER_BYTES = np.array([traits.bytes for traits in _TRAITS])
_COMPILED_BYTES = np.array([traits.compiled_bytes or 0.0 for traits in _TRAITS])
_KERNEL_BYTES = np.array([traits.kernel_bytes or 0.0 for traits in _TRAITS])
_COMPILES_PARTS = np.array([traits.compiles_parts for traits in _TRAITS])


def optimizer_s(
    outline: Outline, device: DeviceRates, fabric: Fabric, c: PlanBatch, stepped: Floats,
    ahead_s: Floats | None = None,
) -> Floats:  # fmt: skip
    """Return the seconds of an optimizer's step, with clipping.

    `stepped` is the number of parameter elements that a rank updates. An operator runs while the
    host launches the next one, and the slower of the two determines the time. `ahead_s` is how far
    the host is ahead of the GPU when the optimizer begins; it is None unless outpace trains on a
    GPU, because other programs wait for the loss or the norm. Muon adds the matmuls of its
    iteration and the gathers of its matrices.
    """
    moved = _EAGER_BYTES[c.optimizer]
    compiled, fused = np.zeros(len(c), dtype=bool), np.zeros(len(c), dtype=bool)
    masters = np.where(c.precision_in(*MASTERS) & ~c.holds_masters(), _MASTERS, 0.0)
    moved = moved + _CLIPPING + masters
    operators: Floats | float = float(_OPERATORS)
    if ahead_s is not None:
        spread = (c.zero > 1) | (c.tp > 1)  # tensors are sharded
        compiled = c.compile & ~(spread & ~_COMPILES_PARTS[c.optimizer])
        fused = (_KERNEL_BYTES[c.optimizer] > 0) & ~spread
        moved, operators = _gpu_bytes_and_operators(c, moved, spread, compiled, fused)
    rate = device.memory_bytes_per_s * device.optimizer_share
    busy = stepped * moved / rate
    muon = c.optimizer == OPTIMIZERS.index("muon")
    if muon.any():
        busy = busy + np.where(muon, _muon_s(outline, device, fabric, c), 0.0)
    launched = np.where(fused, 0.0, count_operators(outline, device.kind, c, compiled))
    host, besides = launched * device.operator_s, operators * device.operator_s
    if ahead_s is not None:
        return np.maximum(busy, host + besides - ahead_s)
    together = busy + host if device.kind == "cpu" else np.maximum(busy, host)
    return together + besides


def _gpu_bytes_and_operators(
    c: PlanBatch, moved: Floats, spread: Bools, compiled: Bools, fused: Bools
) -> tuple[Floats, Floats]:
    """Return the bytes per parameter and operators per step of outpace's optimizers on a GPU.

    `moved` is the bytes per parameter of uncompiled operators. `spread` marks the plans with
    sharded tensors, `compiled` those that compile the optimizer, and `fused` those that use a fused
    kernel.
    """
    fixed = np.where(c.precision_in(*MASTERS) & ~c.holds_masters(), _MASTERS, 0.0) + _CLIPPING
    nbytes = _COMPILED_BYTES[c.optimizer]
    moved = np.where(compiled & (nbytes > 0), fixed + nbytes, moved)
    moved = np.where(fused, fixed + _KERNEL_BYTES[c.optimizer], moved)
    # With bf16 over master weights, scaling makes a copy. Accumulated gradients are in fp32.
    masters = c.precision_in("bf16-master") & ~c.holds_masters()
    several = c.microbatches * c.passes > 1
    gradient = np.where(several, 4.0, 2.0)
    parts = np.where(several, 0.0, _WIDENED) + _MULTIPLIED + _ROUNDED
    moved = np.where(masters, moved - fixed + gradient + parts, moved)
    kernel = masters & ~spread & (c.optimizer == OPTIMIZERS.index("adamw-fused"))
    moved = np.where(kernel, gradient + gradient + _KERNEL, moved)
    return moved, np.where(kernel, float(_KERNEL_OPERATORS), float(_OPERATORS))


@lru_cache(maxsize=256)
def _muon_elements_and_flops(outline: Outline, ep: int) -> tuple[float, float]:
    """Return the elements of the layers' matrices, and the FLOPs to orthogonalise all of them.

    For an (r, k) matrix with r ≤ k, each iteration has X·Xᵀ, its square, and one matmul with X:
    4r²k + 2r³ FLOPs (Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
    2024).
    """
    elements = flops = 0.0
    for stack in outline.stacks:
        for shape in layer_shapes(stack, outline.hidden, 1, ep):
            if len(shape) == 2:
                r, k = sorted(map(float, shape))
                elements += stack.layers * r * k
                flops += stack.layers * _NEWTON_SCHULZ_STEPS * (4 * r * r * k + 2 * r**3)
    return elements, flops


def _muon_s(outline: Outline, device: DeviceRates, fabric: Fabric, c: PlanBatch) -> Floats:
    """Return the seconds of Muon's bf16 matmuls, and of its gathers over shards and tp.

    Every rank orthogonalises all matrices of its layers, except in ZeRO-1, which distributes whole
    matrices.
    """
    each, place = np.unique(c.ep, return_inverse=True)
    found = np.array([_muon_elements_and_flops(outline, int(ep)) for ep in each], float).reshape(
        -1, 2
    )[place]
    elements, flops = found.T / c.pp
    whole = np.where(c.zero == 1, c.dp_shard, 1)
    parts = c.tp * np.where(c.zero > 1, c.dp_shard * c.cp, 1)
    gathered = fabric.gather_s(_FP32 * elements, parts, np.ones_like(parts))
    seconds: Floats = flops / whole / device.rate("bf16") + gathered
    return seconds
