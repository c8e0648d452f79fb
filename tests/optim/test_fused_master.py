"""AdamW over master weights in one kernel: torch's numbers, in one pass."""

import json
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

from outpace.optim.build import make_optimizer
from outpace.optim.fused_master import (
    BLOCK,
    FusedMasterAdamW,
    addresses_of,
    aligned_addresses,
    gradient_addresses,
    has_triton,
)
from outpace.records.settings import TrainSettings

SHAPES = ((BLOCK + 3,), (7,), (64, 40), (2 * BLOCK,), (5, 1))

# Triton's interpreter takes the place of its compiler where this is set before Triton is loaded.
_INTERPRET = f"""
import json, os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from torch import nn
from outpace.optim.fused_master import FusedMasterAdamW, addresses_of

def differences(dtype, factor):
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in {SHAPES}]
    masters = [nn.Parameter(w.detach().float() + 1e-4) for w in weights]
    states = [
        dict(master=m.detach().clone(), exp_avg=torch.zeros_like(m), step=torch.tensor(0.0),
             exp_avg_sq=torch.zeros_like(m)) for m in masters
    ]
    options = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    adamw, fused = torch.optim.AdamW(masters, **options), FusedMasterAdamW()
    for _ in range(4):
        for weight, master in zip(weights, masters):
            gradient = torch.randn(weight.shape).to(dtype)
            weight.grad_dtype, weight.grad = dtype, gradient
            master.grad = gradient.float() * (1.0 if factor is None else factor)
        adamw.step()
        weights[1].data = weights[1].detach().clone()  # other memory, which is to be stepped
        at = addresses_of(weights)
        assert fused.step(options, weights, states, factor and torch.tensor(factor), at)
    # The interpreter cuts bits off where a GPU rounds.
    same = all(torch.allclose(w.float(), s["master"], rtol=2**-7) for w, s in zip(weights, states))
    found = [(s["master"] - m.detach()).abs().max().item() for s, m in zip(states, masters)]
    return max(found), same

print(json.dumps([differences(getattr(torch, dtype), factor)
                  for dtype in ("bfloat16", "float32") for factor in (None, 0.37)]))
"""


@pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
def test_interpreted_kernel_steps_as_torch():
    done = subprocess.run([sys.executable, "-c", _INTERPRET], capture_output=True, text=True,
                          check=True)  # fmt: skip
    for difference, same in json.loads(done.stdout):
        assert 0 < difference < 2e-6  # some roundings of fp32, of values up to 4
        assert same


def test_without_the_kernel_torch_steps_and_it_is_said(monkeypatch):
    """As on a machine without a C compiler."""

    def fails() -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr("outpace.optim.fused_master._load_kernel", fails)
    monkeypatch.setattr("outpace.optim.master.gradient_addresses", _addresses_anywhere)
    with pytest.warns(UserWarning, match=r"C compiler\), so torch's own kernels"):
        tried = _trained(torch.device("cpu"), True, 1, False, monkeypatch)
    plain = _trained(torch.device("cpu"), False, 1, False, monkeypatch)
    assert all(map(torch.equal, tried, plain))


def test_other_devices_and_optimizers_are_not_taken():
    parameter = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    parameter.grad = torch.zeros_like(parameter)
    assert gradient_addresses({"fused": True}, [parameter]) is None
    assert gradient_addresses({"fused": False}, [parameter]) is None
    whole = torch.zeros(64)
    assert aligned_addresses([whole, whole[16:]]) == (whole.data_ptr(), whole.data_ptr() + 64)
    for other in (whole[1:], whole.view(8, 8).t(), whole.double()):
        assert aligned_addresses([whole, other]) is None


def _addresses_anywhere(group, parameters):
    """As of a GPU, on any device."""
    return addresses_of(parameters)


def test_gradients_are_asked_once_a_step_where_they_lie(monkeypatch):
    """And states that lie on the host, as a step without the kernel leaves a count, are moved."""
    launched, asked = [], []
    monkeypatch.setattr("outpace.optim.fused_master._load_kernel", lambda: _Launched(launched))
    monkeypatch.setattr("outpace.optim.fused_master._triton_dtype", str)
    real = torch.Tensor.data_ptr
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda one: (asked.append(one), real(one))[1])
    weights = [nn.Parameter(torch.randn(64).bfloat16()) for _ in range(3)]
    names = ("master", "exp_avg", "exp_avg_sq", "step")
    states = [{name: torch.zeros(64 if name != "step" else ()) for name in names} for _ in weights]
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    step = FusedMasterAdamW().step
    for gradients in (kept := [torch.ones(64).bfloat16() for _ in weights], kept):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        asked.clear()
        assert step(group, weights, states, None, _addresses_anywhere(group, weights))
    assert len(asked) == 2 * len(weights) and len(launched) == 2
    assert [float(state["step"]) for state in states] == [2.0, 2.0, 2.0]


class _Launched:
    """Takes a kernel's place, and notes its launches."""

    def __init__(self, launched):
        self._launched = launched

    def __getitem__(self, grid):
        return lambda *arguments, **settings: self._launched.append(grid)


def _trained(device: torch.device, kernel: bool, parts: int, again: bool, monkeypatch) -> list:
    """Weights of 16 bits and masters after some steps."""
    torch.manual_seed(0)
    if not kernel:
        monkeypatch.setattr("outpace.optim.master.gradient_addresses", lambda *_: None)
    layers = nn.Sequential(nn.Linear(70, 90), nn.Linear(90, 33)).to(device, torch.bfloat16)
    settings = TrainSettings(lr=1e-2)
    make = partial(make_optimizer, name="adamw-fused", settings=settings, master_weights=True)
    optimizer = make(layers.named_parameters())
    for step in range(6):
        if again and step == 3:
            saved, optimizer = optimizer.state_dict(), make(layers.named_parameters())
            optimizer.load_state_dict(saved)
        for parameter in layers.parameters():
            gradient = torch.randn(parameter.shape, device=device, dtype=torch.bfloat16)
            if parts > 1:
                parameter.grad_dtype, gradient = torch.float32, gradient.float()
            parameter.grad = gradient
        optimizer.factor = torch.tensor(0.5, device=device)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    states = [optimizer.state[p] for p in layers.parameters()]
    monkeypatch.undo()
    return [
        *(s["master"] for s in states),
        *(s["exp_avg_sq"] for s in states),
        *layers.parameters(),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("again", [False, True])
def test_a_gpu_steps_as_torch(parts, again, monkeypatch):
    device = torch.device("cuda")
    fused = _trained(device, True, parts, again, monkeypatch)
    plain = _trained(device, False, parts, again, monkeypatch)
    for mine, theirs in zip(fused, plain, strict=True):
        tolerance = 1e-5 if mine.dtype == torch.float32 else 2**-7  # one last bit of bf16
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=2e-6)
