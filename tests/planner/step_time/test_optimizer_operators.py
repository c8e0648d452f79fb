"""Operators of optimizers' steps: what the planner counts beside what torch dispatches."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.nn.transformer import Transformer
from outpace.optim.build import begin_step, make_optimizer
from outpace.planner.memory import optimizer_bytes
from outpace.planner.model.outline import outline
from outpace.planner.plan_columns import OPTIMIZERS, of_plans
from outpace.planner.step_time.optimizer_operators import count_operators
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings

# The planner's count may be off by this share; what does not depend on tensors (steps' numbers of
# two groups, the profiler's records) is not in it.
SHARE, BESIDES = 0.05, 30
# Narrow: all is joined on a CPU. Wide: matrices are quantised, the larger ones alone on a CPU.
SHAPES = {
    "narrow": {"layers": 12, "hidden": 24, "heads": 2, "ffn": 96, "vocab": 64},
    "wide": {"layers": 4, "hidden": 256, "heads": 2, "ffn": 1024, "vocab": 2048},
}


class Operators(TorchDispatchMode):
    """Counts the operators that are dispatched while it is entered, but for reads of one number.

    Those are of steps' numbers, which lie in the host's memory: nothing is launched for them.
    """

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class NoFunction:
    """In the place of a compiled function: two operators of it, its guards and its kernel."""

    calls = 0

    def __call__(self, *_):
        NoFunction.calls += 1


def count_dispatched(spec, name, compiled):
    model = Transformer(spec, 0)
    settings = TrainSettings(lr=1e-3)
    optimizer = make_optimizer(model.named_parameters(), name, settings, compiled=compiled)
    if compiled:
        optimizer._compiled = NoFunction()
    for number in (1, 2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        begin_step(optimizer, number, 1e-3)
        NoFunction.calls = 0
        with Operators() as seen:
            optimizer.step()
    return seen.count + 2 * NoFunction.calls


def planned_operators(spec, name, kind, compiled):
    plan = Plan.parse({"optimizer": name, "compile": compiled}, "test")
    shape = outline(spec, "test")
    columns = of_plans([plan], 1, shape.layers)
    return float(count_operators(shape, kind, columns, np.array([compiled]))[0])


@pytest.fixture(params=["cpu", "cuda"])
def kind(request, monkeypatch):
    """A device whose way optimizers take here, on a CPU."""
    if request.param == "cuda":
        for values in (optimizer_bytes.JOINED_VALUES, optimizer_bytes.COUNTED_VALUES):
            monkeypatch.setitem(values, "cpu", values["cuda"])
        monkeypatch.setattr("outpace.optim.build.steps_together", lambda _: True)
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "sgd"])
def test_the_planner_counts_the_operators_of_a_real_step(name, shape, kind):
    spec = ModelSpec.parse({"family": "gpt2", "max_positions": 16, **SHAPES[shape]}, "test")
    counted = count_dispatched(spec, name, False)
    assert abs(counted - planned_operators(spec, name, kind, False)) <= SHARE * counted + BESIDES


def test_sgd_is_single_operators_on_a_cpu():
    """On a GPU it is one kernel, which is `optimizer_s`'s to say."""
    spec = ModelSpec.parse({"family": "gpt2", "max_positions": 16, **SHAPES["narrow"]}, "test")
    counted = count_dispatched(spec, "sgd", False)
    assert abs(counted - planned_operators(spec, "sgd", "cpu", False)) <= 0.02 * counted


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["adamw-bf16", "adamw-8bit", "adamw-4bit", "adafactor"])
@pytest.mark.parametrize("kind", ["cuda"], indirect=True)
def test_the_planner_counts_what_is_around_compiled_functions(name, shape, kind):
    spec = ModelSpec.parse({"family": "gpt2", "max_positions": 16, **SHAPES[shape]}, "test")
    counted = count_dispatched(spec, name, True)
    assert abs(counted - planned_operators(spec, name, kind, True)) <= SHARE * counted + BESIDES
