"""Steps of low-memory AdamW as compiled functions, on a CPU by inductor's C++."""

import re

import pytest
import torch
from torch import nn

from outpace.optim.adafactor import Adafactor
from outpace.optim.build import begin_step
from outpace.optim.low_precision_adamw import LowPrecisionAdamW
from outpace.optim.rounding import Noise

RATES = (1e-2, 5e-3, 1e-3)


def stepped(shapes, compiled, rows=slice(None)):
    """Parameters and states after a step at each rate."""
    torch.manual_seed(0)
    drawn = [torch.randn(shape) for shape in shapes]
    gradients = [[torch.randn(shape) for shape in shapes] for _ in RATES]
    parameters = [nn.Parameter(one[rows].clone()) for one in drawn]
    groups = [{"params": parameters, "weight_decay": 0.1}]
    optimizer = LowPrecisionAdamW(
        groups, "8bit", Noise(), lr=1.0, betas=(0.9, 0.95), compiled=compiled
    )
    for step, (rate, given) in enumerate(zip(RATES, gradients, strict=True), 1):
        for parameter, gradient in zip(parameters, given, strict=True):
            parameter.grad = gradient[rows].clone()
        begin_step(optimizer, step, rate)
        optimizer.step()
    return parameters, [optimizer.state[parameter] for parameter in parameters]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_one_compiled_function_serves_all_sizes_and_rates():
    """Fused: what is moved between kernels, and how many there are, is what a GPU's time is.

    On a CPU looking codes up among a table's values is no part of a kernel, on a GPU it is.
    """
    from torch._dynamo.utils import counters
    from torch._inductor.utils import run_and_get_code

    shapes = [(64, 256), (32, 512), (128, 256)]
    known, known_states = stepped(shapes, compiled=False)
    counters.clear()
    (found, states), (code,) = run_and_get_code(stepped, shapes, compiled=True)
    assert counters["stats"]["unique_graphs"] == 1
    # Up to what is looked up, and from there.
    assert len(re.findall(r"^ +cpp_fused\w+\(", code, re.MULTILINE)) == 2
    assert code.count("= torch.ops.aten.bucketize.Tensor(") == 2
    assert "extern_kernels." not in code.split("def call", 1)[1]
    for one, other in zip(found, known, strict=True):
        # Products and sums are fused or not: an ulp of an update, or a code beside.
        torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=2e-3)
    for one, other in zip(states, known_states, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(one[f"{name}_scale"], other[f"{name}_scale"])
            apart = (one[name].int() - other[name].int()).abs()
            assert int(apart.max()) <= 1 and float((apart > 0).float().mean()) < 1e-3
    # What a rank has of rows is stepped as it is where one rank has all.
    half, _ = stepped(shapes, compiled=True, rows=slice(16))
    for part, whole in zip(half, found, strict=True):
        assert torch.equal(part, whole[:16])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_adafactor_is_one_compiled_function_for_matrices_of_a_width():
    from torch._dynamo.utils import counters

    def trained(compiled):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape)) for shape in ((64, 32), (48, 32), (40,))]
        optimizer = Adafactor(
            [{"params": parameters, "weight_decay": 0.1}], lr=1.0, compiled=compiled
        )
        for step, rate in enumerate(RATES, 1):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape)
            begin_step(optimizer, step, rate)
            optimizer.step()
        states = [optimizer.state[parameter] for parameter in parameters]
        return parameters, [state[name] for state in states for name in state]

    known, known_states = trained(compiled=False)
    counters.clear()
    found, states = trained(compiled=True)
    assert counters["stats"]["unique_graphs"] == 2  # of matrices, and of vectors
    for one, other in zip([*found, *states], [*known, *known_states], strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-5, atol=1e-6)
