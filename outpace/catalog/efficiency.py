"""Shares of their datasheets that accelerators and links reach: published measurements.

Each figure has its source. A chip that nobody has published has the shares of its architecture's
measured one; an architecture without has those of the nearest, which the source then says.
"""

from collections.abc import Mapping
from types import MappingProxyType

from pydantic import NonNegativeFloat, PositiveFloat

from outpace.records.base import Record
from outpace.records.hardware import Accelerator, Architecture, LinkKind


class ProductCurve(Record):
    """Matrix products on one architecture, as tiles that multiprocessors take in waves.

    `share` of the dense peak is reached by large products; tiles of 128 by 64 and of 64 by 64 have
    `half_tile` and `quarter_tile` of that rate. `fixed_s` is what the smallest product takes.
    """

    share: PositiveFloat
    half_tile: PositiveFloat
    quarter_tile: PositiveFloat
    fixed_s: PositiveFloat
    source: str


class AttentionRate(Record):
    """Fused attention, as shares of the dense 16-bit peak, for long sequences and heads of 128.

    Heads of 64 reach `narrow` of these.
    """

    forward: PositiveFloat
    backward: PositiveFloat
    narrow: PositiveFloat
    source: str


# What a product reaches of its best under sustained load, when its operands are not in the L2 cache
# already, as in a step: on an A100 233.6 (below) of 256.5 TFLOP/s (16384³, random values, 10,000
# repetitions before: Azure/AI-benchmarking-guide 3bb66cac).
_COLD = 233.6 / 256.5
_XLA = (
    "shape fitted to the 125 products of 256 to 4096 in XLA's matmul_interpolator_data.h, sm_90, "
    "bf16 (tensorflow/tensorflow 372d578bb8), mean error 5 %; plateau: 1377 of 1979 TFLOP/s, fp8, "
    "16384³, random values, after 10,000 repetitions (Azure/AI-benchmarking-guide 0126c300), times "
    "what a cold cache costs on A100"
)
_TRITON = (
    "fitted to the 21 products that Triton's tutorial 03 prints for cuBLAS, fp16, with a cold "
    "cache, mean error 5 %: plateau 233.6 of 312 TFLOP/s"
)
_MAMF = "stas00/ml-engineering, compute/accelerator, Maximum Achievable Matmul FLOPS: {}"
_LIKE = "plateau of {}, and what of it is sustained, cold, as on H100; shape of {}"

_AMPERE = ProductCurve(
    share=233.6 / 312, half_tile=0.88, quarter_tile=0.98, fixed_s=7.8e-6, source=_TRITON
)
_SUSTAINED_HOPPER = 1377.3 / 1979
_HOPPER = ProductCurve(
    share=_SUSTAINED_HOPPER * _COLD, half_tile=0.77, quarter_tile=0.66, fixed_s=5.6e-6, source=_XLA
)
_OF_BEST = _HOPPER.share / (794.5 / 989.5)


def _copy_curve(share: float, what: str, shape: ProductCurve, whose: str) -> ProductCurve:
    return shape.model_copy(
        update={"share": share * _OF_BEST, "source": _LIKE.format(_MAMF.format(what), whose)}
    )


PRODUCTS: Mapping[Architecture, ProductCurve] = MappingProxyType(
    {
        "pascal": _AMPERE.model_copy(update={"source": f"as Ampere: {_TRITON}"}),
        "volta": _AMPERE.model_copy(update={"source": f"as Ampere: {_TRITON}"}),
        "turing": _AMPERE.model_copy(update={"source": f"as Ampere: {_TRITON}"}),
        "ampere": _AMPERE,
        "ada": _AMPERE.model_copy(update={"source": f"as Ampere: {_TRITON}"}),
        "hopper": _HOPPER,
        "blackwell": _copy_curve(1745 / 2250, "B200 1745 of 2250", _HOPPER, "Hopper"),
        "cdna2": _copy_curve(147 / 191.5, "MI250X, one GCD, 147 of 191.5", _AMPERE, "Ampere"),
        "cdna3": _copy_curve(668.4 / 1307.4, "MI300X 668.4 of 1307.4", _HOPPER, "Hopper"),
    }
)

_FA2 = (
    "FlashAttention-2 on A100 80GB, head 128: forward 213 to 225, backward 178 to 181 of 312 "
    "(NVIDIA/cudnn-frontend 816ea4573a, benchmark/attention_training, PCIe); head 64 against 128: "
    "arXiv 2307.08691, figure 5"
)
_FA2_HOPPER = (
    "FlashAttention-2 on H100 SXM, heads of 128 and 64, sequences of 2k to 16k: arXiv 2407.08608, "
    "figures 5 and 6"
)
_ATTENTION_AMPERE = AttentionRate(
    forward=215 / 312, backward=179 / 312, narrow=185 / 218, source=_FA2
)
ATTENTION: Mapping[Architecture, AttentionRate] = MappingProxyType(
    {
        **dict.fromkeys(
            ("pascal", "volta", "turing", "ampere", "ada", "cdna2"),
            _ATTENTION_AMPERE,
        ),
        **dict.fromkeys(
            ("hopper", "blackwell", "cdna3"),
            AttentionRate(
                forward=367 / 989.5, backward=310 / 989.5, narrow=321 / 367, source=_FA2_HOPPER
            ),
        ),
    }
)

# Of the rate that products reach where a row of an operand is no multiple of 16 bytes. cuBLAS then
# takes CUTLASS's kernels for Turing, whose instructions are half as deep: on the RTX 4090, with
# none faster for fp32 accumulation, 111.6 of 155.9 TFLOP/s; elsewhere half of that share.
_UNALIGNED = 111.6 / 155.9
UNALIGNED: Mapping[Architecture, float] = MappingProxyType(
    {
        **dict.fromkeys(("pascal", "volta", "turing", "ada"), _UNALIGNED),
        **dict.fromkeys(("ampere", "hopper", "blackwell", "cdna2", "cdna3"), _UNALIGNED / 2),
    }
)
UNALIGNED_SOURCE = (
    "RTX 4090, bf16, 2055, 2057, 2071 and 2073 against 2040 (pytorch/pytorch issue 181718); half: "
    "mma.m16n8k8 against m16n8k16 at the same rate of instructions (PTX ISA, CUTLASS)"
)

# FlashAttention's first Triton kernels are 1.3 to 2.5 times slower than FlashAttention-2.
TRITON_SLOWER = 1.9
TRITON_SOURCE = "Dao, FlashAttention-2, arXiv 2307.08691, section 4.1"

# FlexAttention, of FlashAttention-2's rate; it computes whole blocks of queries and keys.
FLEX_BLOCK = 128
FLEX_FORWARD, FLEX_BACKWARD = 0.90, 0.85
FLEX_SOURCE = "PyTorch, 'FlexAttention', blog of 7 August 2024: both ways, on an A100"

# Of the memory's bandwidth, by large triads (two reads, one write).
MEMORY_SHARE: Mapping[Architecture, float] = MappingProxyType(
    {
        **dict.fromkeys(("pascal", "turing", "ampere", "ada", "cdna2"), 1.70 / 2.039),
        "volta": 0.83 / 0.9,
        "hopper": 2.97 / 3.35,
        "blackwell": 2.97 / 3.35,
        "cdna3": 4.09 / 5.3,
    }
)
MEMORY_SOURCE = (
    "BabelStream's triad on A100-80GB SXM 1.70, H100 SXM 2.97, MI300X 4.09 TB/s "
    "(Azure/AI-benchmarking-guide 3bb66cac, 0126c300 and its fork for MI300X); torch's add on V100 "
    "0.83 TB/s; others as the nearest"
)

# Norms reach less of it than a triad: forwards 0.6, backwards 0.34 of the memory's rate.
NORM_FORWARD, NORM_BACKWARD = 2.9 / 4.8, 1.62 / 4.8
NORM_SOURCE = (
    "torch's RMSNorm on H200: forward 2.4 to 3.4, backward 1.45 to 1.8 of 4.8 TB/s "
    "(NVIDIA/cudnn-frontend df73764a, benchmark/norms)"
)

# Of a link's rate in one direction, by a ring of NCCL's.
LINK_SHARE: Mapping[LinkKind, float] = MappingProxyType(
    {
        "nvlink": 235 / 300,
        "infinity-fabric": 316 / 448,
        "pcie": 0.8,
        "infiniband": 191 / 200,
        "omni-path": 0.95,
        "ethernet": 0.9,
        "efa": 0.85,
        "slingshot": 0.95,
    }
)
LINK_SOURCE = (
    "busbw of large all-reduces: 8 × A100 235 of 300 GB/s (microsoft/superbenchmark, test of "
    "nccl_bw_performance), 8 × MI300X 316 of 448, 4 × DGX A100 with 8 × HDR 191 of 200 "
    "(NVIDIA/deepops, Slurm cluster guide); other networks as the nearest of these"
)

# Of a bridge between two cards, by a ring of its two devices.
BRIDGE_SHARE = 21.5 / 50
BRIDGE_SOURCE = (
    "all-reduce of 64 to 128 MB on two RTX 2080 Ti with an NVLink bridge (TU102, two links): busbw "
    "21.5 of 50 GB/s (NVIDIA/nccl-tests issue 44)"
)

# Between devices without links of their own, of a slot's rate: every byte goes to the host and from
# it, through one bridge.
HOST_BRIDGE_SHARE = 0.4
HOST_BRIDGE_SOURCE = "0.8 of a slot's rate, halved: what is sent is also received there"

# Between host and device, of the link's rate: copies from and to pinned memory.
HOST_LINK_SHARE = 53 / 63
HOST_LINK_SOURCE = "PCIe 5: 51 to 55 of 63 GB/s (Azure/AI-benchmarking-guide 0126c300)"
# A process's share of a host's memory bandwidth, and of its disks, where nothing was measured.
HOST_MEMORY_BYTES_PER_S = 25e9
HOST_MEMORY_SOURCE = "two sockets of 8 channels of DDR4-3200, 409.6 GB/s, shared by 8, half reached"
DISK_BYTES_PER_S = 8.2e9 / 8
DISK_SOURCE = "8.2 GB/s written by a host's NVMe array, shared by 8 (Azure/AI-benchmarking-guide)"

# One operator of eager PyTorch on the host, its Python and its launch.
OPERATOR_S = 30e-6
OPERATOR_SOURCE = (
    "EfficientNet-B5's forward on an A100, bound by dispatch: 17.8 ms for 583 operators "
    "(pytorch/pytorch issue 82793)"
)
# Guesses for a CPU that was not measured: its clock under wide vectors, what products reach of its
# peak, and its memory. A plan that rests on them says so.
CPU_CLOCK_HZ = 2.5e9
CPU_SHARE = 0.5
CPU_MEMORY_BYTES_PER_S = 15e9

# On a CPU that computes itself, with autograd.
CPU_OPERATOR_S = 7e-6
CPU_OPERATOR_SOURCE = "7 µs an operator on small CPU tensors (pytorch/pytorch issue 41383)"
# A guess: Python and copies around a unit's gather or sum in FSDP. Steps of a probe put it right.
CPU_UNIT_S = 1e-3
CUDA_UNIT_S = 1e-4
# Of it in a backward, which autograd runs without Python.
BACKWARD_SHARE = 0.5
BACKWARD_SOURCE = "half of an operator's host time is Python's (pytorch/pytorch issue 41383)"


class Latency(Record):
    """Seconds of a collective: once, and for each step by link; and its share of the bandwidth.

    `by_size`, of trees: what of it is reached by the array's size, powers of two from 64 bytes.
    """

    base_s: NonNegativeFloat
    nvlink_s: NonNegativeFloat
    pcie_s: NonNegativeFloat
    network_s: NonNegativeFloat
    bandwidth: PositiveFloat
    by_size: tuple[PositiveFloat, ...] = ()


# NCCL's rings by protocol. A step of "Simple" takes 1.9 times as long where data are many.
_COLUMNS = ("base_s", "nvlink_s", "pcie_s", "network_s", "bandwidth")
_RINGS = {
    "LL": (6.6e-6, 0.6e-6, 1e-6, 2.7e-6, 1 / 4),
    "LL128": (14e-6, 1.9e-6, 2.5e-6, 4e-6, 0.92),
    "Simple": (8.4e-6, 1.9 * 3.4e-6, 1.9 * 5.7e-6, 14e-6, 1.0),
}
NCCL: Mapping[str, Latency] = MappingProxyType(
    {
        name: Latency.parse(dict(zip(_COLUMNS, row, strict=True)), name)
        for name, row in _RINGS.items()
    }
)
# Its double binary trees, for all-reduces over several nodes: 0.92 of a ring's bus, of that LL
# 1/3.8 and LL128 120/128; "by_size" is NCCL's own correction, up to 256 MiB. Steps through a node
# are a chain's. What a channel can carry at most is left out: so are NCCL's other algorithms, which
# sum in switches (NVLS, CollNet).
_TREES = {
    "LL": (6.8e-6, 0.6e-6, 1e-6, 5e-6, 0.92 / 3.8),
    "LL128": (14e-6, 1.25e-6, 1.9e-6, 8.5e-6, 0.92 * 120 / 128),
    "Simple": (0.0, 28e-6, 28e-6, 28e-6, 0.92),
}
_BY_SIZE = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9,
           1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9,
              0.9, 0.9, 1, 1),
    "Simple": (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7,
               0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
}  # fmt: skip
NCCL_TREES: Mapping[str, Latency] = MappingProxyType(
    {
        name: Latency.parse(
            {**dict(zip(_COLUMNS, row, strict=True)), "by_size": (*_BY_SIZE[name], 1.0)}, name
        )
        for name, row in _TREES.items()
    }
)
NCCL_SOURCE = (
    "NVIDIA/nccl b6475625fb, src/graph/tuning.cc: latencies and protocols, rings and trees"
)


def product_curve(accelerator: Accelerator) -> ProductCurve:
    """Return the curve of the accelerator's architecture."""
    return PRODUCTS[accelerator.architecture]
