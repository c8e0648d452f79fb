"""Differences of tensors of any dtype."""

import pytest
import torch

from outpace.parallel.parity.comparison import largest, relative

WIDE = (torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.bfloat16, torch.complex64)


@pytest.mark.parametrize("dtype", [*WIDE, torch.float8_e4m3fn])
def test_tensors_of_any_dtype_are_compared_by_value(dtype):
    """Numbers without a sign do not wrap, and torch lacks operators for some dtypes."""
    some, others = (torch.tensor(values).to(dtype) for values in ([3.0, 8.0], [5.0, 8.0]))
    assert largest(some) == 8.0
    assert relative(some, others, largest(others)) == relative(others, some, 8.0) == 0.25
    assert relative(some, some.clone(), 8.0) == 0.0 and relative(some, None, 0.0) is None


def test_large_whole_numbers_and_flags_are_equal_or_not():
    some = torch.tensor([2**62, 1])
    assert relative(some, some.clone(), 1.0) == 0.0 and relative(some, some + 1, 1.0) == 1.0
    flags = torch.tensor([True, False])
    assert relative(flags, ~flags, 0.0) == 1.0 and largest(flags) == 0.0
