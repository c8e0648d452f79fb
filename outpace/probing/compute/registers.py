"""Conversion of a sweep's steps on a CPU to widths of its registers."""

from fractions import Fraction

from outpace.records.hardware import Dtype

_BITS: dict[Dtype, int] = {
    "fp32": 32, "tf32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8,
}  # fmt: skip
# An AMX register has 16 rows of this many bits.
_ROW_BITS = 512


def step_words(step: int, bits: int, dtype: Dtype, dim: str) -> str | None:
    """Describe a `step` of a matmul's dimension as a number of registers of `bits` bits.

    A step is the increment of the dimension at which the time rises. Matmuls accumulate in fp32, so
    a register holds adjacent sums along m and n, and adjacent operands along k. Returns None if the
    step is neither a multiple nor a fraction of a register.
    """
    row = min(bits, _ROW_BITS)
    whole = f"{row}-bit register" if bits == row else f"{row}-bit row of an AMX register"
    order: list[Dtype] = [dtype, "fp32"] if dim == "k" else ["fp32", dtype]
    shares = [(of, Fraction(step * _BITS[of], row)) for of in dict.fromkeys(order)]
    for of, share in shares:
        if share == 1:
            return f"{step} = a {whole} of {of}"
    of, share = shares[0]
    if share.denominator == 1:
        return f"{step} = {share} times a {whole} of {of}"
    if share.numerator == 1:
        return f"{step} = 1/{share.denominator} of a {whole} of {of}"
    return None
