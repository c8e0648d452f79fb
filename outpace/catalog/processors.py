"""Processors by the vector and matrix extensions that they report: FLOP per cycle of a core.

A multiply-add is two FLOP. Processors do not report how many units execute an extension, so rates
are ranges over the models sold. Multiplied by cores and clock, they are bounds of a peak rate.
Clocks are not listed: under wide vectors they depend on load, cooling and model.
"""

from collections.abc import Collection

from outpace.records.hardware import Dtype, Processor, ValueRange


def _span(least: int, most: int) -> ValueRange:
    return ValueRange(least=least, most=most)


_INTEL = "Intel 64 and IA-32 Architectures Optimization Reference Manual"
_AMX = "Intel AMX product brief: {} operations per cycle and core"

# The widest is last: of a processor's extensions, the last one that supports a dtype counts.
PROCESSORS: tuple[Processor, ...] = (
    Processor(
        feature="asimd", vector_bits=128, flops_per_cycle={"fp32": _span(8, 32)},
        source="Arm software optimization guides, throughput of FMLA: Cortex-A55 one of 128 bits, "
        "Neoverse N1 two, Neoverse V2 four",
    ),
    Processor(
        feature="sve", vector_bits=None, flops_per_cycle={"fp32": _span(16, 64)},
        source="Arm software optimization guides: Neoverse N2 two FMLA of 128 bits, V1 two of 256; "
        "Fujitsu A64FX microarchitecture manual: two of 512",
    ),
    Processor(
        feature="avx2", vector_bits=256, flops_per_cycle={"fp32": _span(16, 32)},
        source=f"{_INTEL}: two FMA units of 256 bits since Haswell; AMD software optimization "
        "guide for family 17h: two of 128 in the first Zen, of 256 in Zen 2",
    ),
    Processor(
        feature="avx512f", vector_bits=512, flops_per_cycle={"fp32": _span(32, 64)},
        source=f"{_INTEL}: one or two FMA units of 512 bits, by model; AMD software optimization "
        "guide for Zen 4: two of 256",
    ),
    Processor(
        feature="avx512_vnni", vector_bits=512, flops_per_cycle={"int8": _span(128, 256)},
        source=f"{_INTEL}: VPDPBUSD, 64 products, on one or two units of 512 bits, by model",
    ),
    Processor(
        feature="avx512_bf16", vector_bits=512, flops_per_cycle={"bf16": _span(64, 128)},
        source=f"{_INTEL}: VDPBF16PS, 32 products, on one or two units of 512 bits, by model",
    ),
    Processor(
        feature="amx_bf16", vector_bits=8192, flops_per_cycle={"bf16": _span(1024, 1024)},
        source=_AMX.format("1,024 bf16"),
    ),
    Processor(
        feature="amx_int8", vector_bits=8192, flops_per_cycle={"int8": _span(2048, 2048)},
        source=_AMX.format("2,048 int8"),
    ),
)  # fmt: skip


def vector_bits(features: Collection[str], dtype: Dtype) -> int | None:
    """Return the register width in bits with which a core with these features computes in a dtype.

    None if no known extension supports the dtype, or if manufacturers choose the width.
    """
    known = [p for p in PROCESSORS if p.feature in features and dtype in p.flops_per_cycle]
    return known[-1].vector_bits if known else None


def flops_per_cycle(features: Collection[str], dtype: Dtype) -> ValueRange | None:
    """Return the peak FLOP per cycle of one core with these features (as in Machine.cpu_features).

    None if no known feature computes in this dtype: a processor without bf16 matmuls converts them
    to fp32, and no peak is published for that.
    """
    rates = (p.flops_per_cycle.get(dtype) for p in PROCESSORS if p.feature in features)
    known = [rate for rate in rates if rate is not None]
    return known[-1] if known else None
