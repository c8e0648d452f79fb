"""fp32 master weights: what they begin with, and how gradients and weights pass."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import outpace.optim.master
from outpace.optim.build import begin_step, make_optimizer, step_alone
from outpace.parallel.layout import Layout
from outpace.records.settings import TrainSettings

SHAPES = ((300, 20), (20,), (50, 8), (64, 64))
SETTINGS = TrainSettings(lr=1e-2)


def named(dtype=torch.float32):
    torch.manual_seed(0)
    return {f"w{i}": nn.Parameter(torch.randn(shape).to(dtype)) for i, shape in enumerate(SHAPES)}


def optimizer_of(parameters, name="adamw-foreach", **kept):
    return make_optimizer(parameters.items(), name, SETTINGS, master_weights=True, **kept)


def give_gradients(parameters, seed, dtype=None):
    torch.manual_seed(seed)
    for parameter in parameters.values():
        drawn = torch.randn(parameter.shape).bfloat16()
        parameter.grad = drawn.to(dtype or parameter.dtype)


@pytest.mark.parametrize("name", ["adamw-foreach", "adamw-fused", "adamw-8bit", "muon", "sgd"])
def test_masters_are_stepped_as_fp32_weights_would_be(name):
    """From the fp32 values, by the gradients that there are; weights are what they round to."""
    known, found = named(), named(torch.bfloat16)
    first = make_optimizer(known.items(), name, SETTINGS)
    values = {n: p.detach().clone() for n, p in known.items()}
    second = optimizer_of(found, name, wide_values=values)
    assert not values  # the copies are these, no others
    for step in range(1, 4):
        for parameters, optimizer in ((known, first), (found, second)):
            give_gradients(parameters, step)
            begin_step(optimizer, step, 1e-2)
            optimizer.step()
    for name_, parameter in found.items():
        assert torch.equal(second.state[parameter]["master"], known[name_])
        assert torch.equal(parameter, known[name_].bfloat16())


def test_without_values_masters_begin_as_the_weights_are():
    found = named(torch.bfloat16)
    optimizer = optimizer_of(found)
    give_gradients(found, 1)
    before = {n: p.detach().float() for n, p in found.items()}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for name, parameter in found.items():
        assert torch.equal(optimizer.state[parameter]["master"], before[name])


class Count(TorchDispatchMode):
    """Counts operators."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found.append(str(function))
        return function(*args, **(kwargs or {}))


def test_gradients_and_weights_are_cast_in_one_pass_over_all():
    found = named(torch.bfloat16)
    optimizer = optimizer_of(found, "adamw-fused")
    give_gradients(found, 1)
    optimizer.step()
    give_gradients(found, 2)
    with Count() as count:
        optimizer.step()
    copies = [name for name in count.found if "copy" in name]
    # Of two groups, with decay and without: gradients to fp32, weights from the masters.
    assert copies == ["aten._foreach_copy_.default"] * 4
    assert sum("fused_adamw" in name for name in count.found) == 2


def test_pieces_change_nothing_but_how_much_is_cast_at_a_time(monkeypatch):
    whole, pieces = named(torch.bfloat16), named(torch.bfloat16)
    for parameters in (whole, pieces):
        if parameters is pieces:
            monkeypatch.setattr(outpace.optim.master, "MASTER_PIECE_BYTES", 4 * 64 * 64)
        optimizer = optimizer_of(parameters)
        for step in (1, 2):
            give_gradients(parameters, step)
            optimizer.step()
    for one, other in zip(whole.values(), pieces.values(), strict=True):
        assert torch.equal(one, other)


def test_one_parameter_is_stepped_as_all_would_be():
    """As the optimizer in backward does it."""
    whole, alone = named(torch.bfloat16), named(torch.bfloat16)
    first, second = optimizer_of(whole), optimizer_of(alone)
    give_gradients(whole, 1)
    give_gradients(alone, 1)
    first.step()
    for parameter in alone.values():
        step_alone(second, parameter)
    for one, other in zip(whole.values(), alone.values(), strict=True):
        assert torch.equal(one, other)


def test_gradients_in_fp32_are_taken_as_they_are():
    found = named(torch.bfloat16)
    optimizer = optimizer_of(found)
    for parameter in found.values():
        parameter.grad_dtype = torch.float32
    torch.manual_seed(3)
    fine = {n: torch.randn(p.shape) for n, p in found.items()}
    for name, parameter in found.items():
        parameter.grad = fine[name]
    known = {n: nn.Parameter(p.detach().float()) for n, p in found.items()}
    first = make_optimizer(known.items(), "adamw-foreach", SETTINGS)
    for name, parameter in known.items():
        parameter.grad = fine[name]
    first.step()
    optimizer.step()
    for name, parameter in found.items():
        assert torch.equal(optimizer.state[parameter]["master"], known[name])


def fused_step(found_inf):
    """One step of fused AdamW from the same weights and gradients."""
    found = named(torch.bfloat16)
    optimizer = optimizer_of(found, "adamw-fused")
    give_gradients(found, 1)
    if found_inf is not None:
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(found_inf)
    optimizer.step()
    return found, optimizer


def test_a_fused_optimizer_skips_by_itself_what_a_scaler_skips():
    before = named(torch.bfloat16)
    for found_inf, known in ((1.0, before), (0.0, fused_step(None)[0])):
        found, optimizer = fused_step(found_inf)
        assert all(map(torch.equal, found.values(), known.values()))
        steps = {float(state["step"]) for state in optimizer.state.values()}
        assert steps == {1.0 - found_inf}
        assert not hasattr(optimizer._inner, "found_inf")


@pytest.mark.parametrize(("name", "skips"), [("adamw-fused", True), ("adamw-foreach", False)])
def test_only_fused_optimizers_are_told_what_a_scaler_knows(name, skips):
    assert optimizer_of(named(torch.float16), name)._step_supports_amp_scaling is skips


class Model(nn.Module):
    def __init__(self, parameters):
        super().__init__()
        self.model = nn.ParameterDict(parameters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_clipped_in_fp32(dtype):
    """As those of fp32 weights are; 16 bits are not rounded again, and one operator does it."""
    found, known = named(torch.bfloat16), named()
    values = {n: p.detach().clone() for n, p in known.items()}
    optimizer = optimizer_of(found, "adamw-fused", wide_values=values)
    first = make_optimizer(known.items(), "adamw-fused", SETTINGS)
    layout = Layout(Model(found))
    for step in (1, 2):
        for parameters in (found, known):
            if parameters is found:
                for parameter in found.values():
                    parameter.grad = None
                    parameter.grad_dtype = dtype
            give_gradients(parameters, step, dtype if parameters is found else None)
        norm = layout.clip(0.1, optimizer)
        with Count() as count:
            optimizer.step()
        # Of two groups, with decay and without.
        multiplied = [name for name in count.found if "mul" in name]
        assert multiplied == ["aten._foreach_mul_.Tensor"] * (2 if dtype == torch.bfloat16 else 0)
        torch.testing.assert_close(norm, Layout(Model(known)).clip(0.1))
        first.step()
    for name, parameter in found.items():
        torch.testing.assert_close(optimizer.state[parameter]["master"], known[name].detach())
    assert optimizer.factor is None  # the next step is not scaled by it


def test_a_rank_without_parameters_is_told_as_the_others_are():
    """Or it would skip steps, and what ranks do together after them, by itself."""
    found = named(torch.float16)
    none = optimizer_of(found, "adamw-fused", place=lambda groups, made: made([{"params": []}]))
    assert none._step_supports_amp_scaling
