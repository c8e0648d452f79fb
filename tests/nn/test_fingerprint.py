"""Numbers by which is seen whether values are others than before."""

import pytest
import torch
from torch.nn import functional as F

from outpace.nn.fingerprint import fingerprint

DTYPES = (
    torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_values_and_other_places_give_other_numbers(dtype):
    rows = [[0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1]]
    found = [fingerprint(torch.tensor(row).to(dtype)) for row in rows]
    assert len(set(found)) == len(rows) and None not in found


def test_the_same_values_give_the_same_number_however_they_lie():
    values = torch.randn(700, 500)  # more than one piece
    values[3, 4] = torch.nan
    apart = values.t().contiguous().t()
    assert fingerprint(apart) == fingerprint(values) == fingerprint(values.clone())
    apart[699, 499] += 1
    assert fingerprint(apart) != fingerprint(values)
    assert fingerprint(torch.ones(1).expand(5)) == fingerprint(torch.ones(5))


def test_what_versions_do_not_count_is_seen():
    mean, variance = torch.zeros(3), torch.ones(3)
    before = fingerprint(mean), mean._version
    F.batch_norm(torch.randn(4, 3), mean, variance, training=True)
    assert mean._version == before[1] and fingerprint(mean) != before[0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_has_no_dense_values_has_no_number():
    assert fingerprint(torch.empty(3, device="meta")) is None
    assert fingerprint(torch.eye(3).to_sparse()) is None
    assert isinstance(fingerprint(torch.empty(0)), int)
    rows = [torch.ones(2), torch.ones(3)]
    for layout in (torch.strided, torch.jagged):
        assert fingerprint(torch.nested.nested_tensor(rows, layout=layout)) is None


class Packed(torch.Tensor):
    """Supports no operation but detach, as quantised weights of libraries."""

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.detach.default:
            return cls._make_subclass(cls, torch.empty(0))
        raise NotImplementedError(op)


def test_subclasses_that_cannot_be_reinterpreted_have_no_number():
    assert fingerprint(torch.Tensor._make_subclass(Packed, torch.ones(3))) is None
