"""What benchmarks count and derive, against numbers counted by hand."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of benchmarks/ import each other by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_bytes_moved_by_element_wise_operators():
    from forward_backward import Residual, moved

    shape = (32, 16)
    gelu = moved(nn.GELU(), shape)
    assert gelu["input_bytes"] == 4 * 32 * 16
    read, write, backward_read, backward_write = (
        gelu[f"{side}_{way}"] for side in ("forward", "backward") for way in ("read", "written")
    )
    assert (read, write, backward_read, backward_write) == (1, 1, 2, 1)
    # x * 0.5 reads x and writes; the sum reads both and writes.
    sums = moved(Residual(), shape)
    assert (sums["forward_read"], sums["forward_written"]) == (3, 2)
    # torch's dropout on CPU: draws the mask, divides it in place, multiplies.
    dropped = moved(nn.Dropout(0.5), shape)
    assert (dropped["forward_read"], dropped["forward_written"]) == (3, 3)


def test_views_move_nothing():
    from forward_backward import Moved

    x = torch.zeros(4, 4)
    with Moved() as counted:
        x.t().reshape(2, 8)[0].unsqueeze(0)
        torch.empty(100)
    assert counted.read_bytes == counted.written_bytes == 64  # reshape of a transpose copies
    with Moved() as counted:
        x.add_(1.0)
        x.zero_()
    assert (counted.read_bytes, counted.written_bytes) == (64, 128)


def test_formats_follow_from_their_bits():
    from low_precision import FORMATS, agrees

    assert all(agrees(name) for name in FORMATS)
    assert FORMATS["fp16"].largest == 65504 and FORMATS["fp8 e4m3"].largest == 448
    for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        for value in (1e-7 if name == "fp16" else 1e-40, 0.3, 1.0, 2047.0, 2048.0):
            at = torch.tensor(value, dtype=dtype)
            step = torch.nextafter(at, torch.tensor(torch.inf, dtype=dtype)).double() - at.double()
            assert FORMATS[name].spacing(at.item()) == step.item(), (name, value)


def test_numbers_are_swamped():
    from low_precision import swamping

    found = swamping()
    assert found["fp16"]["2048 + 0.5"] == 2048 and found["fp32"]["2048 + 0.5"] == 2048.5
    assert found["bf16"]["stuck_at"] == 256
    assert all(one["stuck"] and one["grew_until"] for one in found.values())


def test_loss_scale_backs_off_and_grows():
    from low_precision import loss_scale

    found = loss_scale(30, 8)
    assert found["skipped"][0]
    scales = found["scale"]
    assert min(scales) < scales[0]
    assert any(later == 2 * earlier for earlier, later in itertools.pairwise(scales))
    assert found["loss"][-1] < found["loss"][0]


class Scorer(nn.Module):
    """What CUDA's rules treat apart: a matmul, GELU, dropout, softmax, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(256, 1024)

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        seen = F.softmax(F.dropout(F.gelu(self.wide(x)), 0.1), dim=-1)
        return SimpleNamespace(loss=F.cross_entropy(seen, torch.zeros(len(x), dtype=torch.int64)))


def traced_peak(rows: int, low: torch.dtype | None, of_2021: bool) -> int:
    from traced_memory import Case, trace_training

    case = Case([rows] * 2, low, of_2021)
    return trace_training(Scorer, lambda size: {"x": torch.empty(size, 256)}, case).allocated_bytes


def test_savings_of_16_bits_grow_with_the_batch():
    few, some, many = (
        traced_peak(rows, None, False) - traced_peak(rows, torch.float16, False)
        for rows in (2**10, 2**12, 2**13)
    )
    assert few < some < many
    # GELU in fp32 keeps an fp32 copy of its input, and in fp32 nothing changes.
    rows = 2**12
    old, new = (traced_peak(rows, torch.float16, of_2021) for of_2021 in (True, False))
    assert old - new >= rows * 1024 * 2
    # Softmax kept its input, (rows, 1024) in fp32.
    old, new = (traced_peak(rows, None, of_2021) for of_2021 in (True, False))
    assert old - new >= rows * 1024 * 4


def test_units_for_16_bits():
    from mixed_precision_memory import bf16_units, fp16_units

    assert bf16_units(("avx2",), None) is None
    assert bf16_units(("avx512_bf16", "amx_bf16"), None) == "AMX tiles"
    assert bf16_units((), (7, 5)) is None and fp16_units((), (7, 5)) == "tensor cores"
    assert bf16_units((), (9, 0)) == "tensor cores" and fp16_units((), (6, 1)) is None


def test_casts_are_counted():
    from autocast_cache import Casts

    layer = nn.Linear(4, 4)
    for cached, casts in ((True, 2), (False, 4)):
        with Casts(layer) as counted, torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            layer(layer(torch.ones(1, 4)))
        assert counted.count == casts
        assert counted.cast_bytes == casts // 2 * (16 + 4) * 2
