"""Seconds of one layer, of the embedding and of the head, for one micro-batch on one rank.

Matmuls are estimated from their shapes on the rank, attention from its kernel, memory-bound
operators from their bytes, and the host from the operators that it launches: a device that finishes
earlier waits for the host.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from outpace.catalog import efficiency
from outpace.catalog.stacks import Casts, Dispatcher, Elementwise, Experts, Graphs
from outpace.planner.hardware.device import DeviceRates, sustained_matmul_s
from outpace.planner.model.outline import (
    Weight,
    reads_last_matmul,
    second_matmuls,
    seen_length,
    weights,
)
from outpace.planner.plan_columns import Bools, Floats
from outpace.planner.step_time.adapters import (
    CAST_BYTES,
    Adapters,
    adapter_s,
    unit_waits_s,
    unpacking_s,
    widening_s,
)
from outpace.records.outline import AttentionShape, MatmulShape, Mlp, Outline, Stack

# "fused": the kernel that the newest PyTorch chooses on the chip; "flash2", "flash3", "cudnn":
# kernels by name, or "fused" on a chip without them; "triton": FlashAttention's first Triton
# kernels; "unfused": attention that writes its scores.
Kernel = Literal["fused", "flash2", "flash3", "cudnn", "triton", "unfused"]


@dataclass(frozen=True)
class Cells:
    """Distinct combinations of the values that a layer's time depends on, one entry each.

    - `rate`: FLOP/s of matmuls.
    - `item`, `wide`: bytes per element of a matmul operand, and of the residual stream.
    - `samples`: samples in a micro-batch.
    - `norm_split`: number of ranks that divide norms and the residual stream (sequence
      parallelism).
    - `etp`: number of ranks that divide each expert.
    - `uneven`: some experts get most of the tokens.
    - `adapters`: adapters that are trained on frozen weights.

    All other fields with defaults are traits of the program that trains (`catalog.stacks`), such as
    `elementwise`: how it computes elementwise operations without a compiler.
    """

    rate: Floats
    item: Floats
    wide: Floats
    samples: Floats
    tp: Floats
    cp: Floats
    ep: Floats
    etp: Floats
    norm_split: Floats
    compiled: Bools
    elementwise: Elementwise = "kernels"
    fuses_dropout: bool = False
    dispatcher: Dispatcher = "alltoall"
    experts: Experts = "grouped"
    graphs: Graphs = "none"
    uneven: bool = False
    fuses_accumulation: bool = False
    casts: Casts = "separate"
    adapters: Adapters | None = None
    repeats_keys: bool = False
    shards_fp8: bool = False
    pads_tokens: bool = False


@dataclass(frozen=True)
class LayerWork:
    """Seconds on the device, and number of launched operators, of one layer's forward and backward.

    - `weights_s`, `weights_operators`: the part of the backward that computes weight gradients.
    - `products_s`: the forward's matmuls with weights.
    - `inner_s`, `inner_operators`: attention itself, in a forward, which some recomputation modes
      skip.
    - `last_s`: the MLP's last matmul if no backward reads its result, else 0.
    - `second_s`: every second matmul, which torchtitan's selective recomputation repeats (except in
      8 bits).
    - `units_s`, `units_back_s`: the time that the device waits for the host if each matrix of an
      adapter is gathered separately by FSDP.
    """

    forward_s: Floats
    backward_s: Floats
    weights_s: Floats
    forward_operators: Floats
    backward_operators: Floats
    weights_operators: Floats
    products_s: Floats
    attention_s: Floats
    attention_back_s: Floats
    inner_s: Floats
    inner_operators: Floats
    last_s: Floats
    second_s: Floats
    units_s: Floats
    units_back_s: Floats


# Time of a norm per byte over that of a triad, both measured on the same H200.
_NORM_AHEAD = 4.15 / 4.8 / efficiency.NORM_FORWARD
_NORM_BACK = 4.15 / 4.8 / efficiency.NORM_BACKWARD
# Hidden widths that an RMS norm of several operators reads and writes. Forward: squares, their
# mean, two products. Backward: product and sum for the weight, inner product with the input,
# products and sum of both gradients.
_RMS_PIECES = (2 + 1 + 2 + 2, 4 + 2 + 4 + 2 + 3 + 3)
# The same for nn.norms. Forward: the input twice, the result. Backward: gradient and input, the
# input's gradient, and the gradient's mean, which is added.
_RMS_WHOLE = (2 + 1, 2 + 1 + 1 + 2)
# Bytes per number of a 16-bit RMS norm by operators in fp32 (transformers and, until torch 2.9,
# nn.RMSNorm). Forward: to fp32, square, mean, product, to 16 bits, product with the weight.
# Backward: product and sum for the weight, to fp32, gradients of the products and of the square,
# their sum, to 16 bits.
_RMS_OPERATORS = (6.0 + 8 + 4 + 8 + 6 + 4, 6.0 + 8 + 6 + 12 + 12 + 4 + 12 + 12 + 6)
# Widths that a rotary embedding reads and writes: swapped halves, two products, a sum.
_TURN_PIECES = 2 + 2 + 2 + 3
# Bytes per fp32 logit. Softmax over many columns reads the logits for the maximum, the sum and the
# result, and writes the result; its backward reads result and gradient twice, and writes. The
# loss's gradient is one column of a tensor of zeros. (aten/src/ATen/native/cuda/SoftMax.cu and
# Loss.cu)
_LOSS_AHEAD, _LOSS_BACK = 4.0 * 4, 4.0 * (1 + 4 + 1)
# Scaling to float8 without a compiler, by a dozen operators per operand: |x| (2 + 2 bytes per
# number), its maximum (2), to fp32 (2 + 4), product with the scale (4 + 4), clamp (4 + 4), cast
# (4 + 1). Compiled, it is 2 + 2 + 1. (torchao/float8/float8_utils.py, float8_scaling_utils.py)
_SCALED_EAGERLY = 33 / 5
_SCALING_OPERATORS = 12
# Transformer Engine's casts: bytes read per number, bytes of a copy, and kernels. With
# current scales, 16 bits are read for the largest number, whose scale is a kernel, and read again;
# blocks have a scale of a byte for 32 numbers (NVIDIA/TransformerEngine 0064fbd6, pytorch/csrc/
# quantizer.cpp, common/util/cast_kernels.cuh).
_ENGINE_CASTS: Mapping[Casts, tuple[float, float, int]] = MappingProxyType(
    {"delayed": (2.0, 1.0, 1), "current": (4.0, 1.0, 3), "blocks": (2.0, 1 + 1 / 32, 1)}
)
# On a GPU (nn.head_loss), the vocabulary is padded to a multiple of 64.
_PADDED_TO = 64
# Length at which unmasked attention reaches half of its rate, over that of causal attention: cuDNN
# 9.19 on H200, 633 TFLOP/s at 2,048 keys and 702 at 16,384; causal 484 and 673
# (NVIDIA/cudnn-frontend 3929da2).
_WHOLE = 0.25
# How many times the eager loss moves a logit's bytes, and 4 bytes: it finds the maximum, makes an
# fp32 copy and its softmax, and multiplies by the mask. Compiled, 16-bit logits are read once in
# the forward, and read and written once in the backward.
_EAGER_LOSS = (3, 6)
# Bytes per output number of an expert to which Megatron-Core adds a bias (d98e8a64,
# transformer/moe/experts.py, _apply_bias). Forward: bias times the router's fp32 weight (4
# written), sum (2 + 4 read, 4 written), concatenation of experts (4 + 4), cast (4 + 2). Backward:
# both casts (2 + 4, 4 + 2), concatenation (2 + 2), product and sum for each factor (4 + 4 + 4).
_EXPERT_BIAS = (4.0 + 10 + 8 + 6, 6.0 + 6 + 4 + 2 * 12)
# Bytes per number that enters such an expert's activation, which is clamped by torch's operators
# (e8b9df156d, fusions/fused_bias_geglu.py, weighted_bias_quick_geglu_impl: chunk, two clamps, cat).
# Forward: clamp (2 + 2) and concatenation (2 + 2). Backward: comparisons and selection, of one half
# with one bound (2 + 1, 1 + 2 + 2), of the other with two (2 + 1, 2 + 1, 1 + 1 + 1, 1 + 2 + 2:
# FunctionsManual.cpp, clamp_backward), and the halves' concatenation (2 + 2).
_CLAMP = (4.0 + 4, (8.0 + 14) / 2 + 4)
# Operators besides matmuls of any layer with experts, as `_count_operators` counts them.
_EXPERT_OPERATORS = 20.0
# Further operators of Megatron-Core's experts (d98e8a64, transformer/moe). Of 71, the router has 11
# and its balancing loss 12 (router.py, moe_utils.py); counts by expert and rank, with 5 copies to
# the host, 14; permutations and all-to-alls of tokens and of their weights 13
# (token_dispatcher.py); experts and their activation 16 (experts.py).
_MEGATRON_OPERATORS = 71.0 - _EXPERT_OPERATORS
_ROUTER_OPERATORS = 11.0 + 12.0 + 14.0
# Launches per expert of Transformer Engine's GroupedLinear, which multiplies expert by expert on
# four streams (d0067d0d, common/gemm/cublaslt_gemm.cu, multi_stream_cublas_gemm), and casts each
# expert's rows by a separate kernel (pytorch/module/grouped_linear.py, split_quantize). Matmuls
# with both weights, backward two gradients of each; in 8 bits, casts of the inputs, backward of the
# results' gradients. They are launched from C++, so they take as long as operators of a backward.
_EXPERT_MATMULS, _EXPERT_CASTS = (2.0, 4.0), (2.0, 2.0)
# Estimates (not counted one by one) of scattermoe's further operators (fms-acceleration 876e2ed,
# plugins/accelerated-moe, scattermoe.py and khd/kernels/ops): sort, padding of experts' tokens to
# blocks, three matmuls with their buffers; with expert parallelism also the all-to-all of counts,
# the permutation of received tokens, and the way back (expert_parallel.py).
_SCATTER_OPERATORS, _SCATTER_APART = 16.0, 26.0
# Operators of an expert's matmul in Python (transformers 4.45, granitemoe,
# GraniteMoeParallelExperts). Forward: slice of the weight, transposition, matmul. Backward: a
# second matmul, and for the slice a tensor of zeros as large as all experts' weight (allocated
# and filled), its slice, the copy, and the sum with the other experts'.
_LOOP_AHEAD, _LOOP_BACK = 3.0, 7.0
# Of Megatron-Core's operators for experts, counts by expert and rank have no backward.
_COUNTING_OPERATORS = 14.0
# Bytes per hidden number that Megatron-Core's router in fp32 moves in its backward (d98e8a64,
# transformer/moe/moe_utils.py, RouterGatingLinearFunction): the input is cast to fp32 (2 + 4), its
# gradient cast to 16 bits (4 + 2), and added to that of the experts (2 + 2 + 2).
_ROUTER_BACK = 6.0 + 6 + 6
# Torch's RMSNorm has a block of threads for each row, so that narrow rows take as long as rows of
# this many numbers, forward and backward: 16,384 rows of 128 take 14 and 57 us on GB200, 8,192 take
# 9 and 29 (NVIDIA/cudnn-frontend 3929da2, benchmark/norms).
_NARROW_ROW = (900.0, 1400.0)
_CAST = 6.0  # bytes per number: read in 4 and written in 2, or the other way round


def layer(
    device: DeviceRates, outline: Outline, stack: Stack, cells: Cells, seq_len: int, kernel: Kernel
) -> LayerWork:
    """Return the work of one layer of `stack` in the forward and the backward."""
    length = stack.seq_len or seq_len
    seen = seen_length(outline, stack, seq_len)
    tokens = cells.samples * length / cells.cp
    forward = backward = into = last = second = units = units_back = np.zeros_like(tokens)
    shares = second_matmuls(stack, outline.hidden)
    for weight in weights(stack.model_copy(update={"other": ()}), outline.hidden):
        rows = cells.samples * seen / cells.cp if weight.name == "cross kv" else tokens
        one, inputs, grads = _weight_matmuls_s(device, cells, weight, rows)
        forward, backward, into = forward + one, backward + inputs + grads, into + grads
        second = second + np.where(_uses_fp8(device, cells), 0.0, shares[weight.name] * one)
        if cells.adapters is not None and weight.name in cells.adapters.targets:
            waits = unit_waits_s(device, cells.adapters, weight, one, inputs + grads)
            units, units_back = units + waits[0], units_back + waits[1]
        if weight.name == "down" and not reads_last_matmul(stack):
            last = one
    for one, inputs, grads in _unsplit_matmuls_s(device, cells, stack.other, length):
        forward, backward, into = forward + one, backward + inputs + grads, into + grads
    matmuls = forward
    inner = inner_back = np.zeros_like(tokens)
    for attention, keys in ((stack.attention, length), (stack.cross_attention, seen)):
        if attention is None:
            continue
        ahead, back = _attention_s(device, cells, attention, length, keys, kernel)
        inner, inner_back = inner + ahead, inner_back + back
    fused = kernel != "unfused"
    moved, moved_back = _layer_traffic(device, outline, stack, cells, fused)
    rate = device.memory_bytes_per_s
    small, small_back = _count_routing_kernels(stack, cells)
    forward = forward + inner + tokens * moved / rate + small * device.fixed_s
    backward = backward + inner_back + tokens * moved_back / rate + small_back * device.fixed_s
    operators, inner_operators = _count_operators(outline, stack, fused)
    calls, calls_back = _launched_operators(device, outline, stack, cells, operators)
    kernels, kernels_back = _count_compiled_kernels(outline, stack, inner_operators)
    tight = cells.compiled & (cells.elementwise != "fused")  # Transformer Engine does not compile
    launched_back = np.where(tight, kernels_back, calls_back)
    deferred = _count_weight_gradient_operators(outline, stack)  # and as many that store gradients
    return LayerWork(
        forward_s=forward,
        backward_s=backward,
        weights_s=into,
        forward_operators=np.where(tight, kernels, calls),
        backward_operators=launched_back,
        weights_operators=np.minimum(np.where(tight, deferred, 2 * deferred), launched_back),
        products_s=matmuls,
        attention_s=inner,
        attention_back_s=inner_back,
        inner_s=inner,
        inner_operators=np.full_like(tokens, inner_operators),
        last_s=last,
        second_s=second,
        units_s=units,
        units_back_s=units_back,
    )


def _launched_operators(
    device: DeviceRates, outline: Outline, stack: Stack, cells: Cells, operators: float
) -> tuple[Floats, Floats]:
    """Return the number of operators launched for an uncompiled layer, forward and backward.

    `operators` is the number in its forward on one rank, in 16 bits, with all weights trained.
    """
    more: Floats | float = _count_more_backward_operators(outline, stack)
    names = [weight.name for weight in weights(stack, outline.hidden)]
    # RMS norms of DTensors: five operators instead of one.
    apart = (cells.tp > 1) & device.piecewise & (not stack.norm_bias)
    calls = operators + np.where(apart, 4.0 * stack.norms, 0.0)
    if cells.adapters is not None:
        targets = cells.adapters.targets
        count = sum(targets[name].number for name in names if name in targets)
        launched = cells.adapters.operators
        calls, more = calls + launched[0] * count, launched[1] * count
    by_experts, by_experts_back = _expert_operators(device, stack, cells)
    calls, more = calls + by_experts, more + by_experts_back
    engine = cells.casts != "separate"
    each = _ENGINE_CASTS[cells.casts][2] if engine else _SCALING_OPERATORS
    scaled = np.where(_uses_fp8(device, cells), float(each * len(names)), 0.0)
    calls, more = calls + 2 * scaled, more + scaled  # input and weight; then the gradient
    return _operators_outside_graphs(device, stack, cells, calls, calls + more)


def _operators_outside_graphs(
    device: DeviceRates, stack: Stack, cells: Cells, calls: Floats, calls_back: Floats
) -> tuple[Floats, Floats]:
    experts = stack.mlp is not None and stack.mlp.experts
    if cells.graphs == "blocks" and not experts:
        return np.zeros_like(calls), np.zeros_like(calls)
    if cells.graphs == "blocks":
        own, more = _expert_operators(device, stack, cells)
        own = own + _EXPERT_OPERATORS - _ROUTER_OPERATORS
        return own, own + more
    if cells.graphs == "routers" and experts:
        return calls - _ROUTER_OPERATORS, calls_back - _ROUTER_OPERATORS
    return calls, calls_back


def _weight_matmuls_s(
    device: DeviceRates, cells: Cells, weight: Weight, tokens: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return the seconds of a weight's matmuls: forward, input gradient and weight gradient."""
    if weight.name == "router":  # never in 8 bits
        cells = replace(cells, rate=np.minimum(cells.rate, device.rate("bf16")))
    tp = cells.etp if weight.experts else cells.tp
    n = weight.outputs / np.where(weight.cut == "outputs", tp, 1.0)
    k = weight.inputs / np.where(weight.cut == "inputs", tp, 1.0)
    batch: Floats | float = 1.0
    if weight.experts:
        # If tp does not split experts, its ranks each have a part of the tokens.
        batch = np.maximum(weight.experts / cells.ep, 1.0)
        tokens = tokens * weight.active / batch * cells.etp / cells.tp
    # A gradient that the matmul accumulates in a buffer is read and written there in fp32.
    summed = batch * k * n * (8 - cells.item) if cells.fuses_accumulation else 0.0
    one, inputs, grads = (
        _weight_matmul_s(device, cells, weight, shape, batch, more)
        for shape, more in (
            ((tokens, n, k), 0.0), ((tokens, k, n), 0.0), ((k, n, tokens), summed)
        )
    )  # fmt: skip
    if weight.experts and cells.experts == "loop":
        grads = grads + _sum_slice_gradients_s(device, batch, batch * n * k * cells.item)
    eight = _uses_fp8(device, cells)
    if eight.any():
        scaling = _fp8_cast_s(device, cells, (tokens, n, k))
        one, inputs, grads = (
            seconds + np.where(eight, batch * more, 0.0)
            for seconds, more in zip((one, inputs, grads), scaling, strict=True)
        )
    if weight.bias:
        grads = grads + batch * tokens * n * cells.item / device.memory_bytes_per_s
    if cells.adapters is not None:
        return _frozen_weight_matmuls_s(device, cells, weight, (tokens, n, k), (one, inputs))
    return one, inputs, grads


def _weight_matmul_s(
    device: DeviceRates, cells: Cells, weight: Weight, shape: tuple[Floats, Floats, Floats],
    batch: Floats | float, more_bytes: Floats | float,
) -> Floats:  # fmt: skip
    """Return the seconds of a weight's matmul, which for experts depends on the software.

    `more_bytes` are moved at the memory rate in addition to operands and result.
    """
    if weight.experts and cells.experts == "loop":
        one = sustained_matmul_s(
            device, cells.rate, *shape, cells.item, more_bytes=more_bytes / batch
        )
        return batch * one
    seconds = sustained_matmul_s(device, cells.rate, *shape, cells.item, batch, more_bytes)
    if weight.experts and cells.experts == "triton":
        alone = sustained_matmul_s(device, cells.rate, *shape, cells.item, batch)
        seconds = seconds + alone * (device.triton_experts - 1)
    if weight.experts and cells.uneven:
        on_one, apart = device.uneven_experts
        seconds = seconds * np.where(cells.ep > 1, apart, on_one)
    return seconds


def _sum_slice_gradients_s(device: DeviceRates, experts: Floats | float, nbytes: Floats) -> Floats:
    """Return the seconds to combine the gradients of all slices of a weight.

    Each slice's gradient is written into zeros of the whole weight's size, `nbytes`, and these are
    added up (torch, tools/autograd/derivatives.yaml, select_backward).
    """
    moved = nbytes * (experts + 2 + 3 * (experts - 1))
    return moved / device.memory_bytes_per_s


def _expert_operators(device: DeviceRates, stack: Stack, cells: Cells) -> tuple[Floats, Floats]:
    """Return how many operators experts add to `_count_operators`, forward and backward."""
    none = np.zeros_like(cells.ep)
    if stack.mlp is None or not stack.mlp.experts:
        return none, none
    if cells.experts == "grouped":
        if cells.elementwise != "fused":
            return none, none
        ahead, back = _count_expert_launches(device, stack.mlp, cells)
        return _MEGATRON_OPERATORS + ahead, back - ahead
    if cells.experts == "triton":
        return _SCATTER_OPERATORS + np.where(cells.ep > 1, _SCATTER_APART, 0.0), none
    matmuls = 2 * stack.mlp.experts / cells.ep  # up with its gate, and down
    return _LOOP_AHEAD * matmuls, _LOOP_BACK * matmuls


def _count_routing_kernels(stack: Stack, cells: Cells) -> tuple[float, float]:
    """Return the number of kernels that route tokens, forward and backward.

    Each takes at least as long as the smallest matmul, however few elements it has.
    """
    if stack.mlp is None or not stack.mlp.experts:
        return 0.0, 0.0
    if cells.elementwise != "fused":
        return _EXPERT_OPERATORS, _EXPERT_OPERATORS
    count = _EXPERT_OPERATORS + _MEGATRON_OPERATORS
    return count, count - _COUNTING_OPERATORS


def _count_expert_launches(device: DeviceRates, mlp: Mlp, cells: Cells) -> tuple[Floats, Floats]:
    local = mlp.experts / cells.ep
    ahead, back = (
        local * (matmuls + np.where(_uses_fp8(device, cells), casts, 0.0))
        for matmuls, casts in zip(_EXPERT_MATMULS, _EXPERT_CASTS, strict=True)
    )
    return ahead * efficiency.BACKWARD_SHARE, back


def _frozen_weight_matmuls_s(
    device: DeviceRates, cells: Cells, weight: Weight, shape: tuple[Floats, Floats, Floats],
    matmuls: tuple[Floats, Floats],
) -> tuple[Floats, Floats, Floats]:  # fmt: skip
    """Return the seconds of a frozen weight's matmuls, with its adapters.

    In order, they are the forward, input gradients, and the adapters' weight gradients. `matmuls`
    has the seconds of the first two without adapters.
    """
    assert cells.adapters is not None
    one, inputs = matmuls
    grads = np.zeros_like(one)
    if weight.name not in ("head", "router"):
        before = unpacking_s(device, cells.adapters, shape[1] * shape[2], cells.item)
        cast_s = widening_s(device, cells.adapters, weight, shape)
        one, inputs = one + before[0] + cast_s, inputs + before[1] + cast_s
    if weight.name in cells.adapters.targets:
        ahead, back, grads = adapter_s(
            device, cells.adapters, weight, shape, cells.rate, cells.item
        )
        one, inputs = one + ahead, inputs + back
    return one, inputs, grads


def _uses_fp8(device: DeviceRates, cells: Cells) -> Bools:
    return device.is_fp8(cells.rate)


def _fp8_cast_s(
    device: DeviceRates, cells: Cells, shape: tuple[Floats, Floats, Floats]
) -> tuple[Floats, Floats, Floats]:
    """Return the seconds to cast operands to fp8, for a matmul and for both of its gradients.

    `shape` is tokens, outputs and inputs. torchao's Float8Linear has one scale per tensor. In bytes
    per element: finding the largest value reads 2 for an activation or gradient and 4 for a weight;
    the cast reads the same and writes 1; a transposed copy for the operand's other matmul reads and
    writes 1. Each step launches kernels: two to find and cast, one to transpose. Weights that are
    cast as shards arrive in 8 bits. Transformer Engine has different casts (`_engine_cast_s`).
    """
    tokens, n, k = shape
    rate = device.memory_bytes_per_s
    # Transformer Engine keeps weights in float8 for all micro-batches of a step.
    own = 0.0 if cells.elementwise == "fused" else 1.0
    if cells.casts != "separate":
        each, fixed_s = _engine_cast_s(device, cells)
        one = each * (tokens * k + own * n * k) + (1 + own) * fixed_s
        return one, each * tokens * n + fixed_s, np.zeros_like(tokens)
    casts = np.where(cells.compiled, 1.0, _SCALED_EAGERLY)
    here = 0.0 if cells.shards_fp8 else own
    one = casts * (5 * tokens * k + here * 9 * n * k) / rate + (2 + 2 * here) * device.fixed_s
    inputs = (casts * 5 * tokens * n + own * 2 * n * k) / rate + 3 * device.fixed_s
    return one, inputs, 2 * (tokens * n + tokens * k) / rate + 2 * device.fixed_s


def _engine_cast_s(device: DeviceRates, cells: Cells) -> tuple[float, float]:
    """Return the seconds of Transformer Engine's cast from 16 to 8 bits, per value and per call.

    Trained weights need a second 8-bit copy for the matmuls of gradients. If scales are per block,
    the copy has its own scales, for blocks along columns. Otherwise, it is a transposed copy,
    needed only if matmuls on this device accept no other layout.
    """
    read, copy, kernels = _ENGINE_CASTS[cells.casts]
    blocks = cells.casts == "blocks"
    twice = cells.adapters is None and (blocks or not device.any_fp8_layout)
    rate = device.memory_bytes_per_s * (efficiency.MXFP8_CAST_SHARE if blocks else 1.0)
    return (read + copy * (2 if twice else 1)) / rate, kernels * device.fixed_s


def _unsplit_matmuls_s(
    device: DeviceRates, cells: Cells, matmuls: Sequence[MatmulShape], length: int
) -> Iterator[tuple[Floats, Floats, Floats]]:
    """Yield the seconds of matmuls that tensor parallelism does not split.

    Each entry is the forward, input gradient and weight gradient of one of the `matmuls`.
    """
    for matmul in matmuls:
        tokens = cells.samples * (matmul.positions or length) / cells.cp
        weight = Weight(matmul.name, matmul.inputs, matmul.outputs, "none")
        times = matmul.count * matmul.uses
        one, inputs, grads = _weight_matmuls_s(device, cells, weight, tokens)
        yield times * one, times * inputs, times * grads


def _attention_s(
    device: DeviceRates,
    cells: Cells,
    attention: AttentionShape,
    length: int,
    keys: int,
    kernel: Kernel,
) -> tuple[Floats, Floats]:
    """Return the seconds of attention, forward and backward.

    Fused kernels skip the masked half of causal attention.
    """
    heads = np.maximum(attention.heads / cells.tp, 1.0)
    own = length / cells.cp  # queries of this rank; keys of all ranks arrive one after the other
    widths = attention.head_dim + attention.value_dim
    if kernel != "unfused":
        seen = _scored_keys(device, attention, keys)
        causal = attention.causal and seen == length
        flops = 2.0 * cells.samples * heads * own * seen * widths * (0.5 if causal else 1.0)
        # FlexAttention's efficiencies are relative to FlashAttention-2's rate on every chip.
        by_blocks = device.kind == "cuda" and seen < keys
        named = "flash2" if by_blocks else kernel
        forward, backward, narrow, half = _kernel_efficiency(device, named)
        speed = _attention_rate(device, cells) * _head_width_factor(attention.head_dim, narrow)
        speed = speed * seen / (seen + half * (1.0 if causal else _WHOLE))
        flex = (efficiency.FLEX_FORWARD, efficiency.FLEX_BACKWARD) if by_blocks else (1.0, 1.0)
        ahead = flops / (speed * forward * flex[0])
        back = 2.5 * flops / (speed * backward * flex[1])
        return ahead + device.fixed_s, back + 2 * device.fixed_s
    batch = cells.samples * heads
    forward_s = backward_s = _scores_matmuls_s(device, cells, attention, own, keys, batch)
    if device.unaligned_batches is not None:  # measured in 16 bits
        forward_s, backward_s = (
            np.where(cells.item < 4, _scores_matmuls_s(
                replace(device, unaligned=share), cells, attention, own, keys, batch
            ), forward_s)
            for share in device.unaligned_batches
        )  # fmt: skip
    entries = batch * own * keys
    # Softmax reads and writes scores; dropout reads and writes them, and writes a mask of one byte
    # each.
    ahead_bytes = entries * (4 * cells.item + 1)
    # Dropout likewise; softmax reads its outputs and their gradients, and writes.
    back_bytes = entries * (2 * cells.item + 1 + 3 * cells.item)
    rate = device.memory_bytes_per_s
    return forward_s + ahead_bytes / rate, 2 * backward_s + back_bytes / rate


def _scores_matmuls_s(
    device: DeviceRates,
    cells: Cells,
    attention: AttentionShape,
    queries: Floats,
    keys: int,
    batch: Floats,
) -> Floats:
    every = np.full_like(queries, float(keys))
    wide, mixed = (
        np.full_like(queries, width) for width in (attention.head_dim, attention.value_dim)
    )
    scores = sustained_matmul_s(device, cells.rate, queries, every, wide, cells.item, batch)
    mix = sustained_matmul_s(device, cells.rate, queries, mixed, every, cells.item, batch)
    return scores + mix


def _kernel_efficiency(device: DeviceRates, kernel: Kernel) -> tuple[float, float, float, float]:
    """Return how fast a fused attention kernel is on this device.

    In order: its efficiency in the forward and in the backward, a factor for heads of width 64, and
    the number of keys at which causal attention reaches half of its full rate.
    """
    own = (device.attention_forward, device.attention_backward, device.attention_narrow,
           device.attention_half)  # fmt: skip
    found = device.attention_kernels.get("flash2" if kernel == "triton" else kernel)
    if found is not None:
        own = (found.forward, found.backward, found.narrow, found.half_length)
    slower = efficiency.TRITON_SLOWER if kernel == "triton" else 1.0
    return own[0] / slower, own[1] / slower, own[2], own[3]


def _head_width_factor(head_dim: int, narrow: float) -> float:
    """Return the rate at a head width, relative to the rate at width 128.

    Between 64 and 128, the rate grows linearly with the width (72 and 80: aiconfigurator 095f58a5,
    kernels of vllm 0.24.0 for images).
    """
    return narrow + (1 - narrow) * min(max(head_dim - 64, 0) / 64, 1.0)


def _scored_keys(device: DeviceRates, attention: AttentionShape, keys: int) -> int:
    """Return the number of keys for which a query has scores.

    On GPUs, a window covers whole blocks.
    """
    if attention.window is None:
        return keys
    sides = 1 if attention.causal else 2
    if device.kind != "cuda":
        return min(keys, sides * (attention.window - 1) + 1)
    block = efficiency.FLEX_BLOCK
    return min(keys, block * (1 + sides * -(-(attention.window - 1) // block)))


def _attention_rate(device: DeviceRates, cells: Cells) -> Floats:
    if device.attention_rates:
        low, full = device.attention_rates["bf16"], device.attention_rates["fp32"]
        return np.where(cells.item < 4, low, full)
    return np.minimum(device.rate("bf16"), cells.rate)


def _layer_traffic(
    device: DeviceRates, outline: Outline, stack: Stack, cells: Cells, fused: bool
) -> tuple[Floats, Floats]:
    """Return the bytes per token that a layer's elementwise operators move, forward and backward.

    These are norms, activations, rotations, dropout, casts, sums into the residual stream, and the
    routing of tokens to experts.
    """
    routed, routed_back = _routing_traffic(device, outline, stack, cells)
    widened: Floats | float = 0.0
    if cells.adapters is not None and cells.adapters.widened:
        four = np.full_like(cells.item, 4.0)
        cells = replace(cells, item=four, wide=four)
        widened = _query_key_value_width(stack) / cells.tp * CAST_BYTES
    ahead, back = _eager_traffic(device, outline, stack, cells, fused)
    ahead, back = ahead + widened, back + widened
    if device.kind == "cuda":
        tight = _compiled_traffic(outline, stack, cells, fused)
        ahead = np.where(cells.compiled, tight[0], ahead)
        back = np.where(cells.compiled, tight[1], back)
    repeated = _repeated_keys_traffic(stack, cells)
    return ahead + routed + repeated, back + routed_back + repeated


def _query_key_value_width(stack: Stack) -> int:
    a = stack.attention
    return 0 if a is None else a.heads * a.head_dim + a.kv_heads * (a.head_dim + a.value_dim)


def _repeated_keys_traffic(stack: Stack, cells: Cells) -> Floats:
    """Return the bytes per token to write keys and values for all query heads.

    The backward reads as many bytes of gradients, which are summed over those heads.
    """
    a = stack.attention
    if not cells.repeats_keys or a is None or a.heads == a.kv_heads:
        return np.zeros_like(cells.tp)
    return a.heads * (a.head_dim + a.value_dim) * cells.item / cells.tp


def _routing_traffic(
    device: DeviceRates, outline: Outline, stack: Stack, cells: Cells
) -> tuple[Floats, Floats]:
    """Return the bytes per token to sort tokens by expert and to restore their order.

    Forward: a token is read, and written once for each of its experts; the experts' results are
    read, weighted and summed. The backward does the reverse, and reads the results again for the
    gradients of the routing weights. tp ranks with whole experts each have a part of the tokens. If
    copies of tokens are sent with an all-to-all, they arrive in the order of ranks, are sorted by
    expert, and are sorted back afterwards (Megatron-Core, moe_utils.py, sort_chunks_by_idxs;
    torchtitan's permutation after the all-to-all).

    8-bit matmuls need a multiple of 16 or 32 tokens; programs that pad copy all tokens and all
    results. Megatron-Core uses separate operators to add the biases of experts and to clamp the
    activation's input; all models whose experts have biases (gpt-oss) also clamp. If the whole step
    is one CUDA graph, both are done within the matmuls.
    """
    mlp = stack.mlp
    if mlp is None or not mlp.experts:
        zero = np.zeros_like(cells.tp)
        return zero, zero
    own = outline.hidden * cells.etp / cells.tp
    width = own * cells.item
    sorts = np.zeros_like(cells.tp)
    if cells.dispatcher == "alltoall":
        sorts = np.where((cells.ep > 1) & (mlp.experts > cells.ep), 4.0 * mlp.active, 0.0)
    if cells.pads_tokens and cells.dispatcher == "alltoall":  # HybridEP sends padded tokens
        sorts = sorts + np.where(_uses_fp8(device, cells), 4.0 * mlp.active, 0.0)
    ahead, back = width * (2 + 2 * mlp.active + sorts), width * (2 + 3 * mlp.active + sorts)
    if cells.elementwise == "fused":
        back = back + own * _ROUTER_BACK
    if mlp.bias and cells.elementwise == "fused":
        ahead = ahead + own * mlp.active * _EXPERT_BIAS[0]
        back = back + own * mlp.active * _EXPERT_BIAS[1]
        if cells.graphs != "step":
            entering = (1 + mlp.gated) * mlp.width * mlp.active / cells.tp
            ahead, back = ahead + entering * _CLAMP[0], back + entering * _CLAMP[1]
    return ahead, back


def _inner_norm_widths(stack: Stack, cells: Cells) -> tuple[Floats, Floats]:
    """Return the widths per token of the norms within attention, on a rank.

    The first width is that of norms of heads (queries and keys), which tp divides. The second is
    that of norms of the low-rank latents of latent attention, which are divided like the residual
    stream.
    """
    a = stack.attention
    if a is None:
        return np.zeros_like(cells.tp), np.zeros_like(cells.tp)
    heads = (a.heads + a.kv_heads) * a.head_dim if a.qk_norm else 0
    latents = (a.query_rank or 0) + (a.kv_rank or 0)
    return heads / cells.tp, latents / cells.norm_split


def _count_inner_norms(stack: Stack) -> int:
    a = stack.attention
    if a is None:
        return 0
    return 2 * a.qk_norm + (a.query_rank is not None) + (a.kv_rank is not None)


def _compiled_traffic(
    outline: Outline, stack: Stack, cells: Cells, fused: bool
) -> tuple[Floats, Floats]:
    """Return the bytes of `_layer_traffic` for Inductor's kernels on a GPU.

    Inductor fuses elementwise operations with a reduction over the same rows
    (torch/_inductor/scheduler.py). A sum into the residual stream, the norm after it and the cast
    for the next matmul are one kernel, which reads the stream and the branch and writes the stream
    and the norm's result. In the backward, one kernel reads the gradient of the result, the stream
    and the stream's gradient, and writes the new gradient of the stream and its cast for the
    preceding matmul. Another kernel reads the gradient of the result and the stream again for the
    norm's weights. Dropout regenerates its random numbers. An activation is one kernel between
    matmuls, and so is a rotation.
    """
    split = outline.hidden / cells.norm_split
    wide, low = split * cells.wide, split * cells.item
    ahead = stack.norms * (2 * wide + 2 * low)
    back = stack.norms * (3 * wide + 2 * low + (wide + low))
    if stack.mlp is not None:
        width = _mlp_width(stack.mlp) * cells.item / cells.tp
        ahead = ahead + width * (3 if stack.mlp.gated else 2)
        back = back + width * (5 if stack.mlp.gated else 3)
    if stack.attention is not None:
        a = stack.attention
        keys = (a.heads + a.kv_heads) * a.head_dim * cells.item / cells.tp
        values = a.kv_heads * a.value_dim * cells.item / cells.tp
        if not outline.learned_positions:
            ahead, back = ahead + 2 * keys, back + 2 * keys
        if not fused:
            ahead, back = ahead + 2 * (keys + values), back + 2 * (keys + values)
    heads, latents = _inner_norm_widths(stack, cells)
    # A rotation is part of the kernel that normalises, so only the backward moves more.
    apart = 2.0 if outline.learned_positions else 0.0
    ahead = ahead + (apart * heads + 2 * latents) * cells.item
    back = back + ((3 + apart) * heads + 5 * latents) * cells.item
    return ahead, back


def _count_compiled_kernels(outline: Outline, stack: Stack, inner: float) -> tuple[float, float]:
    """Return the number of kernels of a compiled layer, forward and backward, including matmuls.

    In the backward, a matmul has two kernels, a norm two, a bias one for its sum, and attention one
    more than in the forward, because it first sums gradients times outputs.
    """
    parts = list(weights(stack, outline.hidden))
    matmuls = len(parts) + sum(p.count for p in stack.other)
    biases = sum(weight.bias for weight in parts)
    between = (stack.mlp is not None) + (
        stack.attention is not None and not outline.learned_positions
    )
    norms = stack.norms + _count_inner_norms(stack)
    ahead = matmuls + inner + norms + between
    return float(ahead), float(2 * matmuls + inner + 1 + 2 * norms + between + biases)


def _eager_traffic(
    device: DeviceRates, outline: Outline, stack: Stack, cells: Cells, fused: bool
) -> tuple[Floats, Floats]:
    """Return the bytes of `_layer_traffic` if each operator is a separate kernel.

    This applies to uncompiled layers, and on CPUs also to compiled ones. On a GPU, autocast casts
    the output of a norm for the next matmul, and in the backward the gradient that enters each
    branch of the residual stream.
    """
    wide = outline.hidden * cells.wide / cells.norm_split
    adds = 2 if stack.mlp is not None and stack.attention is not None else 1
    adds += stack.cross_attention is not None
    own = ~cells.compiled & device.piecewise & (not stack.norm_bias)
    spread = cells.tp > 1
    norm, norm_back = (
        np.where(own, np.where(spread, pieces, whole), kernel)
        for pieces, whole, kernel in zip(
            _RMS_PIECES, _RMS_WHOLE, (2 * _NORM_AHEAD, 3 * _NORM_BACK), strict=True
        )
    )
    ahead = stack.norms * norm * wide + adds * 3 * wide
    back = stack.norms * norm_back * wide + adds * 3 * wide
    operators = cells.elementwise == "operators" and not stack.norm_bias
    if operators:
        each = stack.norms * outline.hidden / cells.norm_split
        ahead = ahead + each * (_RMS_OPERATORS[0] - norm * cells.wide)
        back = back + each * (_RMS_OPERATORS[1] - norm_back * cells.wide)
    heads, latents = _inner_norm_widths(stack, cells)
    if operators:
        ahead = ahead + (heads + latents) * _RMS_OPERATORS[0]
        back = back + (heads + latents) * _RMS_OPERATORS[1]
    else:
        rows, rows_back = _narrow_row_slowdown(device, stack, cells)
        ahead = ahead + (heads * rows + latents) * norm * cells.item
        back = back + (heads * rows_back + latents) * norm_back * cells.item
    if device.kind == "cuda":
        cast = np.where(cells.item < cells.wide, outline.hidden / cells.norm_split, 0.0)
        cast = cast * (cells.wide + cells.item)
        ahead, back = ahead + stack.norms * cast, back + (stack.norms + adds) * cast
    if stack.dropout:
        mask = outline.hidden / cells.norm_split
        written = 0.0 if cells.fuses_dropout else 2.0  # otherwise a separate operator
        ahead, back = ahead + adds * (written * wide + mask), back + adds * (2 * wide + mask)
    if stack.mlp is not None:
        width = _mlp_width(stack.mlp) * cells.item / cells.tp
        eager = 5.0 if stack.mlp.gated else 2.0
        eager_back = 9.0 if stack.mlp.gated else 3.0
        tight = 3.0 if stack.mlp.gated else 2.0
        tight_back = 5.0 if stack.mlp.gated else 3.0
        one = cells.compiled | (cells.elementwise == "fused")
        ahead = ahead + width * np.where(one, tight, eager)
        back = back + width * np.where(one, tight_back, eager_back)
    if stack.attention is not None:
        a = stack.attention
        keys = (a.heads + a.kv_heads) * a.head_dim * cells.item / cells.tp
        values = a.kv_heads * a.value_dim * cells.item / cells.tp
        if not outline.learned_positions:
            apart = ~cells.compiled & (device.piecewise or operators)
            turned = np.where(apart, _TURN_PIECES, 4)  # or they are read, rotated and written
            ahead, back = ahead + turned * keys, back + turned * keys
        if not fused:  # heads become contiguous for batched matmuls
            ahead, back = ahead + 2 * (keys + values), back + 2 * (keys + values)
    return ahead, back


def _narrow_row_slowdown(device: DeviceRates, stack: Stack, cells: Cells) -> tuple[float, float]:
    """Return how many times longer norms of attention heads take because their rows are narrow.

    The two factors are for forward and backward. They are 1 except for torch's norm kernel on a
    GPU.
    """
    if device.kind != "cuda" or cells.elementwise != "kernels" or stack.attention is None:
        return 1.0, 1.0
    ahead, back = (max(1.0, least / stack.attention.head_dim) for least in _NARROW_ROW)
    return ahead, back


def _mlp_width(mlp: Mlp) -> int:
    return mlp.width * (mlp.active if mlp.experts else 1) + mlp.shared


def _count_operators(outline: Outline, stack: Stack, fused: bool) -> tuple[float, float]:
    """Return the number of operators, with views, of a layer's forward and of its attention."""
    count = float(stack.norms + _count_inner_norms(stack))
    inner = 0.0
    for attention in (stack.attention, stack.cross_attention):
        if attention is None:
            continue
        # Matmul and view; a split of three; a transposition of each.
        count += 8 + (4 if attention.kv_rank is not None else 0)
        if not outline.learned_positions:
            count += 12  # for two tensors: halves, products, sums
        # Scores, scaled and masked softmax, dropout and weighted sum, with views; or a single
        # kernel.
        inner += 2 if fused else 12
        count += 3  # transposition back, and the output matmul
    if stack.mlp is not None:
        count += 3 + (2 if stack.mlp.gated else 0) + (_EXPERT_OPERATORS if stack.mlp.experts else 0)
    count += 2 * (2 if stack.dropout else 1)
    return count + inner + sum(p.count for p in stack.other), inner


def _count_more_backward_operators(outline: Outline, stack: Stack) -> float:
    """Return how many more operators a layer's backward has than its forward.

    A matmul has two gradients, a bias needs a sum, and each parameter's gradient is stored or
    accumulated.
    """
    matmuls = _count_weight_gradient_operators(outline, stack)
    norms = stack.norms * (2 if stack.norm_bias else 1) + _count_inner_norms(stack)
    return 2 * matmuls + norms


def _count_weight_gradient_operators(outline: Outline, stack: Stack) -> float:
    own = list(weights(stack, outline.hidden))
    return float(len(own) + sum(weight.bias for weight in own))


class EndsTime(NamedTuple):
    """Device seconds of everything before or after the layers, with matmuls separately."""

    forward_s: Floats
    backward_s: Floats
    products_s: Floats
    products_back_s: Floats
    operators: Floats


def head(
    device: DeviceRates, outline: Outline, cells: Cells, seq_len: int, outpace_loss: bool = True
) -> EndsTime:
    """Return the times of the head with the loss, and the number of operators in each direction.

    `outpace_loss`: on a GPU, the loss is `nn.head_loss` instead of another program's.
    """
    zero = np.zeros_like(cells.samples)
    if not outline.outputs:
        return EndsTime(zero, zero, zero, zero, zero)
    length = outline.stacks[-1].seq_len or seq_len
    length = min(length, outline.predicted or length)
    tokens = cells.samples * length / cells.cp
    # Float8 is used only in blocks.
    cells = replace(cells, rate=np.minimum(cells.rate, device.rate("bf16")))
    outputs = outline.outputs
    outpace_loss = outpace_loss and device.kind == "cuda"
    if outpace_loss and outline.vocab:  # tokens are predicted, not classes
        outputs = -(-outputs // _PADDED_TO) * _PADDED_TO
    weight = Weight("head", outline.table_width, outputs, "outputs")
    one, inputs, grads = _weight_matmuls_s(device, cells, weight, tokens)
    for ahead, back, own in _unsplit_matmuls_s(device, cells, outline.head_matmuls, length):
        one, inputs, grads = one + ahead, inputs + back, grads + own
    columns = outline.outputs / cells.tp
    low = cells.item < 4
    cast = np.where(low, _CAST, 0.0)
    ahead_bytes, back_bytes = columns * (cast + _LOSS_AHEAD), columns * (cast + _LOSS_BACK)
    if outpace_loss:
        tight, eager = cells.compiled, _EAGER_LOSS[0] * cells.item + _EAGER_LOSS[1] * 4.0
        ahead_bytes = columns * np.where(tight, cells.item, eager)
        back_bytes = columns * np.where(tight, 2 * cells.item, 0.0)
    rate = device.memory_bytes_per_s
    return EndsTime(
        one + tokens * ahead_bytes / rate,
        inputs + grads + tokens * back_bytes / rate,
        one,
        inputs + grads,
        np.full_like(tokens, 8.0),
    )


def embedding(device: DeviceRates, outline: Outline, cells: Cells, seq_len: int) -> EndsTime:
    """Return the times before the layers, and the number of operators in each direction.

    They cover lookups, gradients added to a table of zeros, and matmuls that embed patches, for
    example.
    """
    length = outline.stacks[0].seq_len or seq_len
    tokens = cells.samples * length / cells.cp
    hidden = outline.hidden * cells.wide
    rate = device.memory_bytes_per_s
    one = back_s = np.zeros_like(tokens)
    for ahead, inputs, grads in _unsplit_matmuls_s(device, cells, outline.embed_matmuls, length):
        one, back_s = one + ahead, back_s + inputs + grads
    moved = tokens * hidden * (2 + (3 if outline.learned_positions else 0)) / rate
    table = outline.vocab / cells.tp * outline.table_width * cells.wide
    moved_back = (tokens * hidden * 3 + (table if outline.vocab else 0.0)) / rate
    if cells.adapters is not None:
        moved_back = np.zeros_like(tokens)
    operators = np.full_like(tokens, 6.0 + 2 * len(outline.embed_matmuls))
    return EndsTime(one + moved, back_s + moved_back, one, back_s, operators)
