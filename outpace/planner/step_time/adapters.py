"""Time of low-rank adapters on frozen weights: matmuls, memory traffic and parameters."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from outpace.planner.hardware.device import DeviceRates, sustained_matmul_s
from outpace.planner.model.adapters import NF4_BYTES, AdapterSettings
from outpace.planner.model.outline import Weight, weights
from outpace.planner.plan_columns import Floats
from outpace.records.outline import Outline

_FP32 = 4.0

# Operators of an adapter, including dropout, per pass. Forward: two matmuls with transposed
# weights, scaling, sum. Backward: the same without transpositions.
_OPERATORS_AHEAD, _OPERATORS_BACK = 7.0, 5.0
# Casts of adapters in fp32. With 16-bit matmuls, the input is cast to the matmul's dtype and back.
# With fp32 matmuls, the result is cast instead and, in the backward, the frozen matmul's gradient.
_CASTS = {"low": (0.0, 0.0), "cast": (2.0, 2.0), "fp32": (2.0, 3.0)}
# Bytes moved per four-bit number to unpack it to 16 bits by operators, besides the first read and
# last write (AutoGPTQ 179776bd, nn_modules/qlinear/qlinear_cuda_old.py): shift to int32 (4), cast
# to int8 (4 + 1), mask in place (1 + 1), subtract the zero point (1 + 1), read for scaling (1).
_UNPACKED_BY_OPERATORS = 4.0 + 5 + 2 + 2 + 1
# Edge of the smallest tile of cuBLAS's matmuls without tensor cores (sgemm_32x32_sliced1x4), and
# its depth in the inner dimension.
_SIMT_TILE, _SIMT_DEPTH = 32, 8
# Separate matrices of matmuls whose inputs are in fp32. Attention's kernel returns 16 bits, which
# the output projection reads. peft's prepare_model_for_kbit_training (5d602fd, utils/other.py)
# casts norms and embeddings to fp32, and bitsandbytes' Linear4bit (95f9af3, nn/modules.py) returns
# the dtype of its input; trl (e90e8d9, sft_trainer.py) calls it except under FSDP and ZeRO-3.
# fms-acceleration (876e2ed, framework_plugin_bnb.py) warns of "extraneous dtype casting" and avoids
# it.
WIDENED: Mapping[str, int] = MappingProxyType({"qkv": 3, "up": 2, "down": 1})
# Operators of a unit of FSDP1 that is a single matrix, counted by torch 2.13's dispatcher: before
# and after a forward (gather, views, release), and around a backward, with its Python hooks.
_UNIT_OPERATORS = (20.0, 22.0)
CAST_BYTES = 6.0  # per element, from fp32 to 16 bits or back
# Names of target matrices in plans, by the planner's matmul that contains them.
_MATMULS: Mapping[str, Collection[str]] = MappingProxyType(
    {"qkv": ("q", "k", "v"), "out": ("out",), "up": ("gate", "up"), "down": ("down",)}
)


class Target(NamedTuple):
    """Adapters on one weight: their number, and the fraction of its outputs that they cover.

    Queries, keys and values are a single weight here, but each may have its own adapter.
    """

    number: int
    share: float = 1.0


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters on the weights that `targets` names, with everything else frozen.

    - `rank`: the rank of each adapter.
    - `base_bytes`: bytes per element of frozen weights that are unpacked for each matmul (nf4,
      GPTQ). None: they are stored in the matmul dtype.
    - `kept`: how adapters of a 16-bit base are stored and multiplied. "low": both in the base's
      dtype. "cast": stored in fp32 (PEFT since 0.12, autocast_adapter_dtype), multiplied in 16 bits
      through autocast or FSDP. "fp32": both in fp32.
    - `unpacks_by_operators`: torch operators unpack weights, and autograd keeps the result for the
      backward. Otherwise, a kernel unpacks weights, and does so again before the gradient of the
      input.
    - `drops_inputs`: dropout is applied to the input.
    - `scales_outputs`: the outputs are scaled, as in PEFT. Otherwise, the low-rank values are
      (nn.lora).
    - `widened`: the number of separate matrices of each matmul, by name, with packed weights and
      fp32 inputs (`WIDENED`). bitsandbytes casts these inputs to 16 bits and the results back.
    - `copies_results`: the frozen matmul's result is copied before the adapter's is added
      (peft/tuners/lora/bnb.py, Linear4bit).
    """

    rank: int
    targets: Mapping[str, Target]
    base_bytes: float | None = None
    kept: Literal["low", "cast", "fp32"] = "low"
    unpacks_by_operators: bool = False
    drops_inputs: bool = True
    scales_outputs: bool = True
    widened: Mapping[str, int] = field(default_factory=dict)
    copies_results: bool = False

    @property
    def operators(self) -> tuple[float, float]:
        """Return the number of operators of one adapter in the forward and in the backward."""
        ahead, back = _CASTS[self.kept]
        less = 0.0 if self.drops_inputs else 1.0
        ahead += self.copies_results
        return _OPERATORS_AHEAD + ahead - less, _OPERATORS_BACK + back - less

    def parameters(self, outline: Outline) -> float:
        """Return the number of trained parameters in all adapters."""
        total = 0.0
        for stack in outline.stacks:
            for weight in weights(stack, outline.hidden):
                on = self.targets.get(weight.name)
                if on is not None:
                    rows = on.number * weight.inputs + on.share * weight.outputs
                    total += stack.layers * self.rank * rows
        return total


def adapter_matmuls(settings: AdapterSettings, outline: Outline) -> Adapters:
    """Return a plan's adapters, grouped by the matmuls that contain their target matrices."""
    targets = {}
    for name, parts in _MATMULS.items():
        joined = [matrix for matrix in settings.matrices(outline) if matrix.name in parts]
        adapted = [matrix for matrix in joined if matrix.adapted]
        if adapted:
            outputs = sum(matrix.outputs for matrix in adapted)
            share = outputs / sum(matrix.outputs for matrix in joined)
            targets[name] = Target(len(adapted), share)
    return Adapters(
        settings.rank, targets, NF4_BYTES if settings.base == "nf4" else None,
        drops_inputs=settings.dropout > 0, scales_outputs=False,
    )  # fmt: skip


def adapter_s(
    device: DeviceRates, adapters: Adapters, weight: Weight, shape: tuple[Floats, Floats, Floats],
    rate: Floats, item: Floats,
) -> tuple[Floats, Floats, Floats]:  # fmt: skip
    """Return the seconds of the forward, of input gradients, and of the adapters' gradients.

    `shape` is tokens, outputs and inputs of the frozen matmul on a rank. Matmuls are in 16 bits, or
    in fp32 at the `rate` of the frozen ones. fp32 adapters next to 16-bit matmuls do not use tensor
    cores (torch.backends.cuda.matmul.allow_tf32 is off by default).
    """
    tokens, n, k = shape
    count, share = adapters.targets[weight.name]
    each, rank = n * share / count, np.full_like(tokens, float(adapters.rank))
    rate = np.minimum(rate, device.rate("bf16"))  # only frozen weights are in float8

    def matmul(rows: Floats, columns: Floats, inner: Floats) -> Floats:
        if adapters.kept == "fp32":
            return count * _simt_matmul_s(device, rows, columns, inner)
        return count * sustained_matmul_s(device, rate, rows, columns, inner, item)

    inputs, outputs = count * tokens * k, tokens * n * share
    (input_ahead, output_ahead), (input_back, output_back) = _adapter_bytes_per_element(
        adapters, item
    )
    ahead = matmul(tokens, rank, k) + matmul(tokens, each, rank)
    # A tensor of shape tokens × rank.
    scaled = 0.0 if adapters.scales_outputs else 2 * item * count * tokens * rank
    moved = inputs * input_ahead + outputs * output_ahead + scaled
    ahead = ahead + moved / device.memory_bytes_per_s
    back = matmul(tokens, k, rank) + matmul(tokens, rank, each)
    moved = inputs * input_back + outputs * output_back + scaled
    back = back + moved / device.memory_bytes_per_s
    own = matmul(k, rank, tokens) + matmul(rank, each, tokens)
    return ahead, back, own


def _adapter_bytes_per_element(
    adapters: Adapters, item: Floats
) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """Return the bytes moved per element of an adapter's input and output, forward and backward.

    From peft/tuners/lora/layer.py, Linear.forward: dropout, if any, reads, writes and masks the
    input; the output is scaled and added to the frozen matmul's output. The backward moves bytes
    for dropout, for the sum of the input gradients, and for scaling. An fp32 adapter first casts
    its input (_cast_input_dtype), and again for the matmul; with fp32 matmuls, it casts the sum of
    the outputs instead. Gradients are cast in the same places.
    """
    narrow = adapters.kept == "low" and not adapters.widened
    wide = item if narrow else np.full_like(item, _FP32)
    dropout = (2 * wide + 1) * adapters.drops_inputs
    scaled = wide if adapters.kept == "fp32" else item
    scaling = 2 * scaled * adapters.scales_outputs
    copied = 2 * (_FP32 if adapters.widened else item) * adapters.copies_results
    cast = item + _FP32
    if adapters.widened:
        ahead = (dropout + cast, scaling + item + 2 * _FP32 + copied)
        return ahead, (dropout + cast + 3 * _FP32, scaling + cast)
    if adapters.kept == "low":
        return (dropout, scaling + 3 * item + copied), (dropout + 3 * item, scaling)
    if adapters.kept == "cast":
        return (2 * cast + dropout, scaling + 3 * item), (2 * cast + dropout + 3 * item, scaling)
    ahead = (cast + dropout, scaling + item + 2 * _FP32 + cast)
    return ahead, (dropout + cast + 3 * item, 2 * cast + scaling)


def widening_s(
    device: DeviceRates, adapters: Adapters, weight: Weight, shape: tuple[Floats, Floats, Floats]
) -> Floats:
    """Return the seconds per pass to cast a frozen matmul's fp32 input, and its result back."""
    tokens, n, k = shape
    count = adapters.widened.get(weight.name, 0)
    if count == 0:
        return np.zeros_like(tokens)
    seconds: Floats = CAST_BYTES * tokens * (count * k + n) / device.memory_bytes_per_s
    return seconds


def unit_waits_s(
    device: DeviceRates, adapters: Adapters, weight: Weight, ahead: Floats, back: Floats
) -> tuple[Floats, Floats]:
    """Return the seconds, forward and backward, that a device waits while adapters are gathered.

    FSDP gathers parameters in units. peft makes each of an adapter's two matrices a unit
    (fsdp_auto_wrap_policy), and the host may gather two units ahead (limit_all_gathers:
    torch/distributed/fsdp/_limiter_utils.py). The host therefore prepares an adapter's units while
    the device computes the frozen matrix and the adapter, which take `ahead` seconds in the forward
    and `back` in the backward.
    """
    units = 2 * adapters.targets[weight.name].number
    one, other = (
        np.maximum(units * count * device.operator_s - seconds, 0.0)
        for count, seconds in zip(_UNIT_OPERATORS, (ahead, back), strict=True)
    )
    return one, other


def _simt_matmul_s(device: DeviceRates, rows: Floats, columns: Floats, inner: Floats) -> Floats:
    """Return the seconds of an fp32 matmul in which one dimension is an adapter's rank.

    It uses cuBLAS's narrowest tiles, and the other dimensions have enough tiles to fill the device.
    """
    padded = np.ceil(rows / _SIMT_TILE) * np.ceil(columns / _SIMT_TILE) * _SIMT_TILE**2
    flops = 2 * padded * np.ceil(inner / _SIMT_DEPTH) * _SIMT_DEPTH
    moved = _FP32 * (rows * inner + inner * columns + rows * columns)
    busy = np.maximum(flops / device.rate("fp32"), moved / device.memory_bytes_per_s)
    return device.fixed_s + busy


def unpacking_s(
    device: DeviceRates, adapters: Adapters, elements: Floats, item: Floats
) -> tuple[Floats, Floats]:
    """Return the seconds to unpack frozen weights for a matmul's forward and for its backward.

    Kernels such as those of bitsandbytes and GPTQ read packed weights and write them in the matmul
    dtype.
    """
    if adapters.base_bytes is None:
        return np.zeros_like(elements), np.zeros_like(elements)
    by_operators = adapters.unpacks_by_operators
    moved = adapters.base_bytes + (_UNPACKED_BY_OPERATORS if by_operators else 0.0) + item
    seconds: Floats = elements * moved / device.memory_bytes_per_s
    return seconds, np.zeros_like(seconds) if by_operators else seconds
