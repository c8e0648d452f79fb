"""Fractions of datasheet rates that accelerators and links reach, from published measurements.

Each figure has its source. A chip without published measurements uses the figures of a measured
chip of the same architecture. An architecture without measurements uses those of the most similar
architecture, and its source says so.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat

from outpace.catalog.accelerators import ACCELERATORS
from outpace.records.base import Record
from outpace.records.hardware import Accelerator, Architecture


class MatmulCurve(Record):
    """Model of an architecture's matmuls as tiles that multiprocessors compute in waves.

    A full wave of the best tiles reaches `share` of the dense 16-bit peak, or `share_fp8` of the
    fp8 peak. Tiles of 128 by 64 and 64 by 64 reach `half_tile` and `quarter_tile` of that rate.
    Filling the pipeline and writing results takes additional time per tile. In 16 bits, this is the
    time to compute `fill` elements of the inner dimension. The smallest matmul takes `fixed_s`.
    Where even short matmuls reach the board's power limit, `limit` caps the rate as a fraction of
    the best rate. During a training step, the rate stays below `sustained`, or `sustained_fp8`, of
    the dense peak.
    """

    share: PositiveFloat
    share_fp8: PositiveFloat
    half_tile: PositiveFloat
    quarter_tile: PositiveFloat
    fill: NonNegativeFloat
    fixed_s: NonNegativeFloat
    limit: PositiveFloat = 1.0
    sustained: PositiveFloat
    sustained_fp8: PositiveFloat
    source: str


class AttentionRate(Record):
    """Rates of fused attention on long sequences, as fractions of the dense 16-bit peak.

    `forward` and `backward` are for head width 128. With head width 64, attention reaches the
    fraction `narrow` of these rates. Causal attention over `half_length` keys reaches half of its
    rate on long sequences.
    """

    forward: PositiveFloat
    backward: PositiveFloat
    narrow: PositiveFloat
    half_length: NonNegativeFloat
    source: str


# Fitted to half of the shapes of each table; the mean error on the other half is given. The
# measurements in fp8 include casts of activations, whose time per element is fitted separately.
_TABLES = (
    "aiconfigurator 095f58a5, tables gemm of vllm, trtllm and sglang, bf16 (kernels/products); "
    "mean error on the held-out half of the shapes: {}"
)
# A training step is a sustained load: under it, H200 and B200 are at their power limits, and
# matmuls of a second and more are slower than short ones.
_SUSTAINED = (
    "; sustained: the rate that no matmul of a second or more exceeds ({}, vllm 0.22.0), mean "
    "error on the held-out half {}"
)
# In a training step on an A100, operands are not in the L2 cache. It sustains 256.5 TFLOP/s
# (16384³, random values, 10,000 repetitions: Azure/AI-benchmarking-guide 3bb66cac); with a cold
# cache, Triton's tutorial 03 prints 233.6 for cuBLAS.
_COLD = "; sustained: 233.6 TFLOP/s, cuBLAS with a cold cache (Triton's tutorial 03)"
_MAMF = "stas00/ml-engineering, compute/accelerator, Maximum Achievable Matmul FLOPS: {}"
_LIKE = "plateau of {}; the same share of it sustained as on H200; shape of {}"

_AMPERE = MatmulCurve(
    share=0.865, share_fp8=0.865, half_tile=0.808, quarter_tile=0.549, fill=145, fixed_s=2.6e-6,
    sustained=233.6 / 312, sustained_fp8=233.6 / 312,
    source=_TABLES.format("A100 6.3 %") + _COLD,
)  # fmt: skip
# fp8 after 10,000 repetitions, in matmuls of 1 to 2 TFLOP, as in training (8192³ and
# 6144 × 12288²): 1290.1 and 1351.4 TFLOP/s on H100 (Azure/AI-benchmarking-guide f350e7e6), 1300.6
# and 1318.0 on H200 (7f20e5fa). Larger ones, which training does not have, reach 1350 to 1382.
_HOPPER = MatmulCurve(
    share=0.859, share_fp8=0.81, half_tile=0.99, quarter_tile=0.3, fill=165, fixed_s=2.3e-6,
    sustained=0.675, sustained_fp8=1315.0 / 1979,
    source=_TABLES.format("H100 6.6 %, H200 6.9 %; fp8 3.9 %")
    + _SUSTAINED.format("H200", "5.7 %")
    + "; in fp8 1315 of 1979 TFLOP/s, the mean of H100 and H200 in matmuls of 1 to 2 TFLOP after "
    "10,000 repetitions (Azure/AI-benchmarking-guide f350e7e6, 7f20e5fa)",
)  # fmt: skip
_B200 = MatmulCurve(
    share=0.74, share_fp8=0.73, half_tile=1.0, quarter_tile=0.589, fill=84, fixed_s=2.15e-6,
    sustained=0.595, sustained_fp8=0.57,
    source=_TABLES.format("B200 7.0 %, fp8 5.0 %") + _SUSTAINED.format("B200", "7.1 %, fp8 4.9 %"),
)  # fmt: skip
_GB200 = MatmulCurve(
    share=0.775, share_fp8=0.63, half_tile=1.0, quarter_tile=0.29, fill=108, fixed_s=2.35e-6,
    sustained=0.55, sustained_fp8=0.51,
    source=_TABLES.format("GB200 10 %, fp8 5.1 %")
    + _SUSTAINED.format("GB200", "10 %, fp8 4.6 %"),
)  # fmt: skip


def _power_share(power_w: float, reference_w: float) -> float:
    """Return the sustained rate at a power limit, relative to the rate at `reference_w`.

    Dynamic power is proportional to the clock times the square of the voltage, and the voltage
    follows the clock, so power grows with the cube of the clock (Chandrakasan, Sheng & Brodersen,
    "Low-power CMOS digital design", 1992).
    """
    share: float = (power_w / reference_w) ** (1 / 3)
    return share


def _power_w(name: str) -> int:
    found = ACCELERATORS[name].power_w
    assert found is not None
    return found


def _make_blackwell_ultra(power_w: float) -> MatmulCurve:
    """Return the curve of a B300 or GB300, whose sustained rate is estimated from a B200.

    No sustained matmuls have been measured on these boards. The ratio of the sustained rate to the
    rate of short matmuls is assumed to be the B200's, scaled to this board's power limit.
    """
    reference_w = _power_w("B200")
    more = _power_share(power_w, reference_w)
    share, share_fp8 = 0.81, 0.763
    return MatmulCurve(
        share=share, share_fp8=share_fp8, half_tile=1.0, quarter_tile=0.581, fill=72,
        fixed_s=2.3e-6, sustained=share * min(1.0, _B200.sustained / _B200.share * more),
        sustained_fp8=share_fp8 * min(1.0, _B200.sustained_fp8 / _B200.share_fp8 * more),
        source=_TABLES.format("GB300 6.9 %, B300 7.8 %, fp8 4.1 %")
        + "; sustained as on B200 by the third root of the power, "
        f"{power_w:.0f} of {reference_w:.0f} W",
    )  # fmt: skip


_B300, _GB300 = (_make_blackwell_ultra(_power_w(name)) for name in ("B300", "GB300"))
# L40S and the RTX cards: no measured matmul ran for a second; on the L40S, even short ones reach
# its limit of 350 W.
_ADA = MatmulCurve(
    share=0.835, share_fp8=0.57, half_tile=0.938, quarter_tile=1.0, fill=412, fixed_s=1.1e-6,
    limit=0.589 / 0.835, sustained=0.589, sustained_fp8=0.57,
    source=_TABLES.format("L40S 9.9 %, fp8 12 %"),
)  # fmt: skip
_RTX_BLACKWELL = MatmulCurve(
    share=0.85, share_fp8=0.778, half_tile=0.931, quarter_tile=0.69, fill=158, fixed_s=1.4e-6,
    sustained=0.85, sustained_fp8=0.778,
    source=_TABLES.format("RTX PRO 6000 Blackwell Server 6.0 %, fp8 7.9 %"),
)  # fmt: skip
_GEFORCE_ADA = _RTX_BLACKWELL.model_copy(
    update={
        "share": 0.97, "sustained": 158.6 / 165.2,
        "source": "RTX 4090, 8192³, fp16, 158.6 of 165.2 TFLOP/s (mli/transformers-benchmarks "
        "issue 4); shape of RTX PRO 6000 Blackwell Server",
    }
)  # fmt: skip
# Share of the fp32 rate, of PyTorch on Metal: median of an M1 Pro, M2 Ultra, M3 Max and M4 Max in
# fp32; "sustained": M4 Max, 10,240 wide. Tiles are not known.
_APPLE = _AMPERE.model_copy(
    update={
        "share": 0.80, "sustained": 12.17 / 17.2,
        "source": "torch.matmul on Metal: M1 Pro 4.28 of 5.2 and M4 Max 13.78 of 17.2 TFLOP/s "
        "(zzc0721/torch-performance-test-data issues 191 and 65), M2 Ultra 20 of 27.2, M3 Max "
        "11.4 of 14.1 (chsasank/device-benchmarks 02b8262e and pull request 7); small matmuls as "
        "on Ampere, not measured",
    }
)  # fmt: skip
_HELD = _HOPPER.sustained / (794.5 / 989.5)


def _copy_curve(share: float, what: str, shape: MatmulCurve, whose: str) -> MatmulCurve:
    values = {
        "share": share, "share_fp8": share, "sustained": share * _HELD,
        "sustained_fp8": share * _HELD, "source": _LIKE.format(_MAMF.format(what), whose),
    }  # fmt: skip
    return shape.model_copy(update=values)


MATMULS: Mapping[Architecture, MatmulCurve] = MappingProxyType(
    {
        **{
            old: _AMPERE.model_copy(update={"source": f"as Ampere: {_AMPERE.source}"})
            for old in ("pascal", "volta", "turing")
        },
        "ampere": _AMPERE,
        "ada": _ADA,
        "hopper": _HOPPER,
        "blackwell": _B200,
        "apple": _APPLE,
        "cdna2": _copy_curve(147 / 191.5, "MI250X, one GCD, 147 of 191.5", _AMPERE, "Ampere"),
        "cdna4": _copy_curve(1565 / 2300, "MI355X 1565 of 2300", _HOPPER, "Hopper"),
        "cdna3": _copy_curve(668.4 / 1307.4, "MI300X 668.4 of 1307.4", _HOPPER, "Hopper"),
    }
)
# Chips with measurements of their own, by prefixes of names.
_MATMULS_OF: Mapping[str, MatmulCurve] = MappingProxyType(
    {"GB200": _GB200, "GB300": _GB300, "B300": _B300}
)

# Attention kernels: FlashAttention by generation, and cuDNN's.
AttentionKernel = Literal["flash2", "flash3", "cudnn"]
_FA2 = (
    "FlashAttention-2 on A100 80GB: forward by length, heads of 128, causal, aiconfigurator "
    "095f58a5, sglang 0.5.10; both ways 195 (128) and 174 (64) of 312 for long ones, "
    "Dao-AILab/flash-attention 0251105a, assets/flash2_a100_fwd_bwd_benchmark.png"
)
_FA2_HOPPER = (
    "FlashAttention-2 on H100 SXM, Dao-AILab/flash-attention 0251105a, assets/flash2_h100_*.png, "
    "flash3_fp16_fwd.png; backward: PyTorch's on H200, NVIDIA/cudnn-frontend 7606332"
)
_FA3 = (
    "FlashAttention-3 on H100 SXM, Dao-AILab/flash-attention 0251105a, assets/flash3_fp16_fwd.png; "
    "aiconfigurator 095f58a5, vllm 0.24.0; backward: 1.5 to 1.75 times FlashAttention-2's "
    "(arXiv 2407.08608)"
)
_CUDNN_HOPPER = (
    "cuDNN 9.19 on H200, causal, 2k to 32k: NVIDIA/cudnn-frontend 3929da2, "
    "sdpa_benchmark_training/results; heads of 64: cuDNN 9 on H100, 388 against 539 "
    "(Dao-AILab/flash-attention 0251105a, assets/flash3_fp16_fwd.png)"
)
_CUDNN_BLACKWELL = (
    "cuDNN on {}, causal, 8k to 64k: NVIDIA/cudnn-frontend 3929da2, b372d39 and 0b1577c, "
    "sdpa_benchmark_training; by length: heads of 192 and 128 on GB200; heads of 64: "
    "aiconfigurator 095f58a5, trtllm 1.3.0rc20"
)
_FA2_BLACKWELL = (
    "PyTorch's FlashAttention-2 on B200, causal: NVIDIA/cudnn-frontend 0b1577c, "
    "sdpa_bf16_benchmark_results_NVIDIA_B200.csv"
)
_FA2_ADA = (
    "FlashAttention-2 on {}, forward: aiconfigurator 095f58a5, vllm 0.24.0; backward: slower "
    "by the same factor as on A100"
)
_FLASH2_AMPERE = AttentionRate(
    forward=211 / 312, backward=187 / 312, narrow=174 / 195, half_length=450, source=_FA2
)
_BACK = 187 / 211
_FLASH2_ADA = AttentionRate(
    forward=187 / 362, backward=187 / 362 * _BACK, narrow=0.92, half_length=330,
    source=_FA2_ADA.format("L40S"),
)  # fmt: skip
_FLASH2_RTX = AttentionRate(
    forward=310 / 503.8, backward=310 / 503.8 * _BACK, narrow=0.9, half_length=560,
    source=_FA2_ADA.format("RTX PRO 6000 Blackwell Server"),
)  # fmt: skip
_FLASH2_HOPPER = AttentionRate(
    forward=341 / 989.5, backward=325 / 989.5, narrow=0.863, half_length=500, source=_FA2_HOPPER
)
_FLASH3 = AttentionRate(
    forward=632 / 989.5, backward=1.6 * 325 / 989.5, narrow=0.76, half_length=450, source=_FA3
)
_CUDNN = AttentionRate(
    forward=700 / 989.5, backward=605 / 989.5, narrow=388 / 539, half_length=900,
    source=_CUDNN_HOPPER,
)  # fmt: skip
_FLASH2_BLACKWELL = AttentionRate(
    forward=410 / 2250, backward=336 / 2250, narrow=0.863, half_length=500, source=_FA2_BLACKWELL
)


def _make_cudnn_rate(chip: str, forward: float, backward: float, peak: float) -> AttentionRate:
    return AttentionRate(
        forward=forward / peak, backward=backward / peak, narrow=0.65, half_length=1100,
        source=_CUDNN_BLACKWELL.format(chip),
    )  # fmt: skip


_CUDNN_OF: Mapping[str, AttentionRate] = {
    "GB200": _make_cudnn_rate("GB200", 1760, 1370, 2500),
    "GB300": _make_cudnn_rate("GB300", 2080, 1500, 2500),
    "B300": _make_cudnn_rate("GB300", 2080, 1500, 2500),
}
_WITHOUT_OWN: tuple[Architecture, ...] = ("pascal", "volta", "turing", "ampere", "cdna2")
ATTENTION: Mapping[Architecture, Mapping[AttentionKernel, AttentionRate]] = MappingProxyType(
    {
        **{old: {"flash2": _FLASH2_AMPERE} for old in _WITHOUT_OWN},
        "ada": {"flash2": _FLASH2_ADA},
        "hopper": {"flash2": _FLASH2_HOPPER, "flash3": _FLASH3, "cudnn": _CUDNN},
        "blackwell": {
            "flash2": _FLASH2_BLACKWELL, "cudnn": _make_cudnn_rate("B200", 1450, 1140, 2250)
        },
        "cdna3": {"flash2": _FLASH2_HOPPER},
        "cdna4": {"flash2": _FLASH2_HOPPER},
        "apple": {},  # in training, PyTorch on Metal writes and keeps the scores
    }
)  # fmt: skip

# Attention, too, is slower on boards with a lower power limit.
ATTENTION_POWER_SOURCE = (
    "attention's forward of a second and more mostly draws 970 to 990 of 1,000 W on B200 and 1,050 "
    "to 1,180 of 1,200 W on GB200 (ai-dynamo/aiconfigurator 095f58a5, trtllm 1.3.0rc15 and rc17)"
)

# Share of the rate for operands whose rows are not a multiple of 16 bytes. cuBLAS then uses
# CUTLASS's kernels for Turing, whose instructions are half as deep. The RTX 4090, which has no
# faster instructions for fp32 accumulation, reaches 111.6 of 155.9 TFLOP/s; other chips are assumed
# to reach half of that share.
_UNALIGNED = 111.6 / 155.9
# RTX 4090, bf16, 2055, 2057, 2071 and 2073 against 2040 (pytorch/pytorch issue 181718); half:
# mma.m16n8k8 against m16n8k16 at the same rate of instructions (PTX ISA, CUTLASS); Hopper: outpace
# probe on an H200, bf16, torch 2.11: 4,097 columns take 6.4 times what 4,096 do; Blackwell: taken
# as Hopper, not measured; Apple's GPUs have no tensor cores that require it.
UNALIGNED: Mapping[Architecture, float] = MappingProxyType(
    {
        **dict.fromkeys(("pascal", "volta", "turing", "ada"), _UNALIGNED),
        **dict.fromkeys(("ampere", "cdna2", "cdna3", "cdna4"), _UNALIGNED / 2),
        **dict.fromkeys(("hopper", "blackwell"), 1 / 6.4),
        "apple": 1.0,
    }
)
# The same share for batched matmuls of attention that keeps its scores, forward and backward, on an
# A100 with CUDA 11.6: written attention in fp16 with 197 keys and heads of 64 to 88 (xformers pull
# requests 434, 530 and 587: 0.106 to 0.142 forward, 0.064 to 0.099 backward), and (384, 1024, 1024)
# by (384, 1024, 140) in bf16 (0.088; pytorch/pytorch issue 83272, where fp16 reaches 0.39). Other
# generations: not measured, taken as other matmuls.
UNALIGNED_BATCHES: Mapping[Architecture, tuple[float, float]] = MappingProxyType(
    {"ampere": (0.117, 0.082)}
)

# FlashAttention's first Triton kernels are 1.3 to 2.5 times slower than FlashAttention-2. Dao,
# FlashAttention-2, arXiv 2307.08691, section 4.1.
TRITON_SLOWER = 1.9

# FlexAttention relative to FlashAttention-2; it computes whole blocks of queries and keys.
FLEX_BLOCK = 128
# PyTorch, 'FlexAttention', blog of 7 August 2024: both ways, on an A100.
FLEX_FORWARD, FLEX_BACKWARD = 0.90, 0.85

# Share of the memory bandwidth reached by large triads (two reads, one write).
MEMORY_SHARE: Mapping[Architecture, float] = MappingProxyType(
    {
        **dict.fromkeys(("pascal", "turing", "ampere", "ada", "cdna2"), 1.70 / 2.039),
        "volta": 0.83 / 0.9,
        "hopper": 2.97 / 3.35,
        "blackwell": 2.97 / 3.35,
        "cdna3": 4.09 / 5.3,
        "cdna4": 4.09 / 5.3,
        "apple": 0.83,
    }
)
# Share of the memory's rate (MEMORY_SHARE) that Transformer Engine's cast to MXFP8, along rows and
# columns, reaches: 8,192 × 8,192 numbers of 16 bits take 52.3 us on B200, 5.21 TB/s
# (ROCm/TransformerEngine pull request 598); 5.07 with a bias's gradient (NVIDIA/TransformerEngine
# pull request 3137).
MXFP8_CAST_SHARE = 5.21 / 8 / (2.97 / 3.35)
MEMORY_SOURCE = (
    "BabelStream's triad on A100-80GB SXM 1.70, H100 SXM 2.97, MI300X 4.09 TB/s "
    "(Azure/AI-benchmarking-guide 3bb66cac, 0126c300 and its fork for MI300X); torch's add on V100 "
    "0.83 TB/s; Apple: median of copies on M1 56 of 68, M1 Pro 176 of 200, M2 90 of 100, M2 Ultra "
    "636 of 800 GB/s (chsasank/device-benchmarks 02b8262e) and STREAM on M4 100 of 120 (arXiv "
    "2502.05317); others as the nearest"
)

# Norms are slower than a triad: forwards reach 0.6, backwards 0.34 of the memory's rate. Torch's
# RMSNorm on H200: forward 2.4 to 3.4, backward 1.45 to 1.8 of 4.8 TB/s (NVIDIA/cudnn-frontend
# df73764a, benchmark/norms).
NORM_FORWARD, NORM_BACKWARD = 2.9 / 4.8, 1.62 / 4.8


# Standard deviation of the clocks of equal accelerators under load, relative to their median. The
# study defines variability as the distance between a box plot's whiskers, four interquartile
# ranges, divided by the median (its artifact, plot_script/plot_aggregated.py); the quartiles of a
# normal variable are 1.349 standard deviations apart.
DEVICE_SPREAD = 0.08 / (4 * 1.349)
DEVICE_SPREAD_SOURCE = (
    "8 % on average over programs and five clusters of V100, RTX 5000 and MI60, of more than 90 % "
    "of their GPUs (Sinha et al., Not All GPUs Are Created Equal, SC22, arXiv 2208.11035; "
    "hal-uw/gpu_variability_sc22_artifact bc84e72e)"
)


# Measured slowdown of grouped matmuls whose load over experts follows a power law of 1.2: on one
# rank, and on the slowest of ranks that share the experts. Plans assume an even load. Only
# CUTLASS's kernels count, as in training: medians over all kernels differ between chips because the
# kernels do (1.83 on H100, 1.55 on B200, 1.33 with TensorRT-LLM's own kernels there).
UNEVEN: Mapping[Architecture, tuple[float, float]] = MappingProxyType(
    {
        **dict.fromkeys(("pascal", "volta", "turing", "ampere", "hopper"), (1.1, 1.9)),
        "ada": (1.05, 2.1),
        "blackwell": (1.07, 1.7),
        **dict.fromkeys(("cdna2", "cdna3", "cdna4", "apple"), (1.1, 1.9)),
    }
)
_UNEVEN_RTX_BLACKWELL = (1.07, 1.9)
UNEVEN_SOURCE = (
    "medians of 4 and 36 shapes on H100, L40S, B200 and RTX PRO 6000, 2,048 tokens and more, bf16 "
    "and fp8, power law of 1.2 over balanced (ai-dynamo/aiconfigurator 095f58a5, TensorRT-LLM's "
    "CUTLASS kernels); others as H100"
)

# Slowdown of Triton's grouped matmuls relative to those by tiles, including data movement. Medians
# of 6 shapes on A100 (sglang 0.5.10, fused_moe_triton) and of 13 on H100 (vllm, triton), bf16, a
# balanced load of 64 tokens an expert and more, all experts on one device (ai-dynamo/aiconfigurator
# 095f58a5); others as the nearest.
TRITON_EXPERTS: Mapping[Architecture, float] = MappingProxyType(
    {
        **dict.fromkeys(("pascal", "volta", "turing", "ampere", "cdna2", "apple"), 1 / 0.54),
        **dict.fromkeys(("ada", "hopper", "blackwell", "cdna3", "cdna4"), 1 / 0.78),
    }
)


# Share of the link's rate between host and device: copies from and to pinned memory. PCIe 5: 51 to
# 55 of 63 GB/s (Azure/AI-benchmarking-guide 0126c300).
HOST_LINK_SHARE = 53 / 63
# A process's share of a host's memory bandwidth and of its disks, if not measured. Two sockets of 8
# channels of DDR4-3200, 409.6 GB/s, shared by 8; half of that is reached in practice.
HOST_MEMORY_BYTES_PER_S = 25e9
# 8.2 GB/s written by a host's NVMe array, shared by 8 (Azure/AI-benchmarking-guide).
DISK_BYTES_PER_S = 8.2e9 / 8

# Host time of one operator in eager PyTorch: Python and the launch.
OPERATOR_S = 30e-6
OPERATOR_SOURCE = (
    "EfficientNet-B5's forward on an A100, bound by dispatch: 17.8 ms for 583 operators "
    "(pytorch/pytorch issue 82793)"
)
# Guesses for a CPU that was not measured: its clock under wide vectors, the share of its peak that
# matmuls reach, and its memory. Plans based on them say so.
CPU_CLOCK_HZ = 2.5e9
CPU_SHARE = 0.5
CPU_MEMORY_BYTES_PER_S = 15e9

# Time of one operator that runs on the CPU, with autograd.
CPU_OPERATOR_S = 7e-6
CPU_OPERATOR_SOURCE = "7 µs an operator on small CPU tensors (pytorch/pytorch issue 41383)"
# A guess: time for Python and copies around a unit's gather or reduction in FSDP. A probe's
# measured steps correct it.
CPU_UNIT_S = 1e-3
CUDA_UNIT_S = 1e-4
# Host time of an operator in the backward, which autograd runs without Python, relative to that in
# the forward.
BACKWARD_SHARE = 0.5
BACKWARD_SOURCE = "half of an operator's host time is Python's (pytorch/pytorch issue 41383)"


def matmul_curve(accelerator: Accelerator) -> MatmulCurve:
    """Return the chip's own matmul curve if it has one, else its architecture's."""
    if _is_rtx_blackwell(accelerator):
        return _RTX_BLACKWELL
    if _is_geforce_ada(accelerator):
        return _GEFORCE_ADA
    for start, curve in _MATMULS_OF.items():
        if accelerator.name.startswith(start):
            return curve
    return MATMULS[accelerator.architecture]


def power_share(accelerator: Accelerator) -> float:
    """Return a board's sustained rate relative to an H200's, at most 1, given their power limits.

    Returns 1 if the chip is not an H200's (its bf16 peak differs), or if the board's power is
    unknown.
    """
    board = ACCELERATORS["H200 SXM"]
    same = accelerator.peak.flops_per_s.get("bf16") == board.peak.flops_per_s["bf16"]
    limit_w = accelerator.power_w if same else None
    return 1.0 if limit_w is None else min(1.0, _power_share(limit_w, _power_w(board.name)))


def overlaps_tiles(accelerator: Accelerator) -> bool:
    """Return whether matmuls write a tile's results while they compute the next tile.

    Documented: Blackwell's datacenter chips keep accumulators in tensor memory, and dedicated warps
    write one tile while other warps compute the next into the other half of that memory
    (jax-ml/jax, blackwell_matmul.md of Pallas, "Dedicated epilogue warpgroup"). On Hopper,
    cooperative kernels use all warp groups for one tile; only ping-pong kernels overlap a tile's
    epilogue with another's matmuls (NVIDIA/cutlass, media/docs/cpp/efficient_gemm.md). On Ampere
    the accumulators fill at least half of the registers, so few blocks share a multiprocessor (same
    file). In public traces of H100, names of cuBLAS's largest kernels contain "coopA" or "coopB"
    (nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT).

    Assumed, because cuBLAS's kernels are not public: cuBLAS overlaps the whole epilogue of a tile
    on Blackwell and nothing on other chips, neither with ping-pong kernels on Hopper nor with
    several blocks per multiprocessor on Ampere.
    """
    return _has_tensor_memory(accelerator)


def uneven_load(accelerator: Accelerator) -> tuple[float, float]:
    """Return the factors by which an uneven load of experts slows down matmuls.

    The first factor is for a single rank, the second for the slowest of many ranks.
    """
    if _is_rtx_blackwell(accelerator):
        return _UNEVEN_RTX_BLACKWELL
    return UNEVEN[accelerator.architecture]


def takes_any_fp8_layout(accelerator: Accelerator) -> bool:
    """Return whether fp8 matmuls accept operands that are not transposed (sm100, sm103).

    Hopper and sm120 need transposed copies (NVIDIA/TransformerEngine 0064fbd6,
    nvte_is_non_tn_fp8_gemm_supported).
    """
    return _has_tensor_memory(accelerator)


def attention_rates(accelerator: Accelerator) -> Mapping[AttentionKernel, AttentionRate]:
    """Return the rate of each attention kernel that runs on the accelerator."""
    if _is_rtx_blackwell(accelerator) or _is_geforce_ada(accelerator):
        return {"flash2": _FLASH2_RTX}
    rates = ATTENTION[accelerator.architecture]
    own = [rate for start, rate in _CUDNN_OF.items() if accelerator.name.startswith(start)]
    return {**rates, "cudnn": own[0]} if own else rates


def has_fused_attention(accelerator: Accelerator) -> bool:
    """Return whether the accelerator has a fused attention kernel, which stores no scores."""
    return bool(attention_rates(accelerator))


def _has_tensor_memory(accelerator: Accelerator) -> bool:
    """Return whether this is a data-centre GPU of Blackwell (sm100, sm103)."""
    return accelerator.architecture == "blackwell" and not _is_rtx_blackwell(accelerator)


def _is_rtx_blackwell(accelerator: Accelerator) -> bool:
    """Return whether this is a GPU of Blackwell without tensor memory (sm120, sm121)."""
    return accelerator.architecture == "blackwell" and accelerator.name.startswith(("RTX", "GB10"))


def _is_geforce_ada(accelerator: Accelerator) -> bool:
    """Return whether this is a GeForce GPU of Ada, whose matmuls stay below the power limit.

    Its tensor cores accumulate in fp32 at half of the chip's rate.
    """
    name = accelerator.name
    return accelerator.architecture == "ada" and name.startswith("RTX") and "Ada" not in name
