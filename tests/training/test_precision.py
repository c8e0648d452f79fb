"""Autocast's weight-cast cache: one cast per weight and forward, made anew for each forward."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.nn.mixed_precision import fp32_matmuls, make_mixed
from outpace.probing.hardware.machine import identify
from outpace.records.errors import BadInputError
from outpace.records.machine import Machine
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.training.precision import default_precision, float8_hints, shape_hints


class CastsOf(TorchDispatchMode):
    """Counts the casts of tensors of one shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.casts = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.casts += 1
        return func(*args, **(kwargs or {}))


class UsesTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 24, bias=False)

    def forward(self, x):
        return self.linear(self.linear(x))


@pytest.mark.parametrize(("cache", "casts_per_forward"), [(True, 1), (False, 2)])
def test_weight_casts_live_for_one_forward(cache, casts_per_forward):
    model, x = UsesTwice(), torch.randn(3, 24)
    mixed = make_mixed("bf16", torch.device("cpu"), cache)
    for _ in range(3):
        with CastsOf(torch.Size((24, 24))) as counted, mixed.cast():
            out = model(x)
        assert counted.casts == casts_per_forward
        out.float().sum().backward()


def test_a_cast_is_made_anew_after_the_weights_change():
    model, x = UsesTwice(), torch.randn(3, 24)
    mixed = make_mixed("bf16", torch.device("cpu"), True)
    with mixed.cast():
        before = model(x)
    with torch.no_grad():
        model.linear.weight.mul_(2)
    with mixed.cast():
        after = model(x)
    torch.testing.assert_close(after, before * 4)


@pytest.mark.parametrize(
    ("cpu", "features", "chosen"),
    [
        ("AMD EPYC 9645", ("avx2", "avx512f", "avx512_bf16"), "bf16"),
        ("AMD EPYC 7763", ("avx2",), "fp32"),
        ("Intel(R) Xeon(R)", ("avx2", "avx512f", "avx512_bf16"), "fp32"),
        ("Intel(R) Xeon(R)", ("avx2", "avx512f", "avx512_bf16", "amx_bf16"), "bf16"),
    ],
)
def test_bf16_is_the_default_where_a_cpu_multiplies_faster_in_it(cpu, features, chosen):
    machine = Machine(
        host_cores=2, host_memory_bytes=1 << 30, cpu=cpu, cpu_features=features, devices=(),
        system="Linux 6",
    )  # fmt: skip
    assert default_precision(torch.device("cpu"), machine) == chosen


def test_only_fp16_has_a_scaler():
    cpu = torch.device("cpu")
    assert make_mixed("fp32", cpu, True).dtype is None
    assert make_mixed("bf16", cpu, True).scaler is None
    assert make_mixed("fp16", cpu, True).scaler is not None


def test_hints_name_the_nearest_better_size():
    spec = ModelSpec(family="gpt2", layers=1, hidden=96, heads=8, vocab=50257, max_positions=64)
    hints = shape_hints(Plan(precision="bf16", micro_batch=3), spec, 64)
    assert any("50257" in hint and "50264" in hint for hint in hints)
    assert any("head_dim 12" in hint and "16" in hint for hint in hints)
    assert any("micro-batch 3" in hint and "8" in hint for hint in hints)
    assert shape_hints(Plan(precision="fp32", micro_batch=3), spec, 64) == []


@pytest.mark.parametrize(
    ("bf16", "keeps_masters", "chosen"),
    [(True, True, "bf16-master"), (True, False, "bf16"), (False, True, "fp32")],
)
def test_a_gpu_with_bf16_keeps_weights_in_it_over_masters(monkeypatch, bf16, keeps_masters, chosen):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    machine = identify(lambda name, memory: None)
    assert default_precision(torch.device("cuda"), machine, keeps_masters) == chosen


def test_shards_are_the_master_weights():
    """Nothing else is kept of weights, and no autocast is needed: what is gathered is bf16."""
    plain = make_mixed("bf16-master", torch.device("cpu"), False)
    shards = make_mixed("bf16-master", torch.device("cpu"), False, fully_shards=True)
    assert plain.weights == torch.bfloat16 and plain.keeps_masters
    assert shards.weights is None and not shards.keeps_masters
    with shards.cast():
        assert not torch.is_autocast_enabled("cpu")


def test_float8_without_a_compiler_is_said_to_be_slow():
    (sentence,) = float8_hints(Plan(precision="fp8"))
    assert "--compile" in sentence and "--precision bf16" in sentence
    assert not float8_hints(Plan(precision="fp8", compile=True))
    assert not float8_hints(Plan(precision="bf16"))


def test_tf32_is_set_for_a_run_on_cuda_alone_and_put_back():
    before = torch.backends.cuda.matmul.fp32_precision
    with fp32_matmuls("tf32", torch.device("cuda")):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == before
    with fp32_matmuls("fp32", torch.device("cpu")):
        assert torch.backends.cuda.matmul.fp32_precision == before
    refused = fp32_matmuls("tf32", torch.device("cpu"))
    with pytest.raises(BadInputError, match="the device is cpu, which computes in full fp32"):
        refused.__enter__()
