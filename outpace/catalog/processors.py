"""Instruction-set extensions of processors: FLOP per cycle and core (processors.json).

A multiply-add counts as two FLOP. Processors do not report how many units execute an extension, so
each rate is a range over the models sold; multiplied by cores and clock, it bounds the peak rate.
Clocks are not listed: under wide vectors they depend on load, cooling and model.
"""

from collections.abc import Collection
from typing import Any

from outpace.catalog.tables import read_table
from outpace.records.hardware import Dtype, Processor, ValueRange


def _make_processor(
    feature: str, flops_per_cycle: dict[Dtype, list[int]], **values: Any
) -> Processor:
    spans = {d: ValueRange(least=least, most=most) for d, (least, most) in flops_per_cycle.items()}
    return Processor(feature=feature, flops_per_cycle=spans, **values)


# The widest is last: of a processor's extensions, the last one that supports a dtype counts.
PROCESSORS = tuple(
    _make_processor(name, **values) for name, values in read_table("processors").items()
)


def vector_bits(features: Collection[str], dtype: Dtype) -> int | None:
    """Return the register width, in bits, that a core with these features uses for a dtype.

    Returns None if no known extension supports the dtype, or if the width is left to manufacturers.
    """
    known = [p for p in PROCESSORS if p.feature in features and dtype in p.flops_per_cycle]
    return known[-1].vector_bits if known else None


def flops_per_cycle(features: Collection[str], dtype: Dtype) -> ValueRange | None:
    """Return the peak FLOP per cycle of one core with these features (see Machine.cpu_features).

    Returns None if no known feature computes in this dtype. A processor without bf16 matmuls, for
    example, converts to fp32, for which no peak is published.
    """
    rates = (p.flops_per_cycle.get(dtype) for p in PROCESSORS if p.feature in features)
    known = [rate for rate in rates if rate is not None]
    return known[-1] if known else None
