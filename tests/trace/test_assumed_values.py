"""Values of tensors without values are the same in each run."""

import pytest
import torch

from outpace.trace.assumed_values import AssumedValues

aten = torch.ops.aten


@pytest.fixture
def filled_memory():
    """Fill what torch.empty returns with values that nothing else has."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_uninitialised_memory_is_zeros(filled_memory, dtype, device):
    options = {"dtype": dtype, "device": torch.device(device)}
    values = AssumedValues()
    made = values.run(aten.empty.memory_format, ([3, 2],), options)
    strided = values.run(aten.empty_strided.default, ([3], [1]), options)
    assert not made.is_meta and made.shape == (3, 2) and not made.any() and not strided.any()
    again = values.run(aten.new_empty.default, (made, [4]), {})
    assert not again.any()
    ones = values.run(aten.ones.default, ([3],), options)
    assert ones.tolist() == [1, 1, 1]


def test_drawn_numbers_have_no_values():
    meta = torch.device("meta")
    values = AssumedValues()
    assert values.run(aten.randint.default, (9, [3]), {"device": meta}).is_meta
    assert values.run(aten.randperm.default, (9,), {"device": meta}).is_meta
    assert values.run(aten.rand.default, ([3],), {"device": meta}).is_meta
    assert values.run(aten.arange.default, (3,), {"device": meta}).tolist() == [0, 1, 2]
