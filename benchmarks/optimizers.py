"""Time of an optimizer's step by implementation: over many small tensors, and over a model's.

    python benchmarks/optimizers.py
    python benchmarks/optimizers.py --rounds 2 --only small     # a quick check, not recorded

In each round, every implementation runs a step, in an order that changes from round to round, over
separate tensors with the same values. Ratios are relative to the for-loop's step in the same round;
their medians and quartiles are shown.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from recording import save
from torch import nn

from outpace.catalog.models import preset
from outpace.nn.transformer import Transformer
from outpace.optim.build import begin_step, make_optimizer
from outpace.records.optimizers import OptimizerName
from outpace.records.settings import TrainSettings

FIRST = "adamw-for-loop"
NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)
ROUNDS = 40


def small() -> nn.Module:
    """Return 2,000 vectors and matrices of 64 to 4,096 values, which measure kernel launches."""
    shapes = [(64,), (256,), (32, 32), (64, 64)]
    return nn.ParameterList(torch.empty(shapes[i % 4]) for i in range(2000))


def model() -> nn.Module:
    """Return the tensors of outpace-small."""
    return Transformer(preset("outpace-small"))


SETS: Mapping[str, Callable[[], nn.Module]] = {"small": small, "model": model}


class Stepped:
    """A set of tensors with gradients, and an optimizer over them."""

    def __init__(self, make: Callable[[], nn.Module], name: OptimizerName, device: str) -> None:
        module = make().to(device)
        draw = torch.Generator().manual_seed(0)
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw).to(device)
            parameter.grad = torch.randn(parameter.shape, generator=draw).to(device)
        self.values = sum(parameter.numel() for parameter in module.parameters())
        self.tensors = len(list(module.parameters()))
        self._optimizer = make_optimizer(module.named_parameters(), name, TrainSettings(lr=1e-3))
        self._device, self._number = device, 0
        self.step()  # creates states and loads kernels

    def step(self) -> float:
        """Run a step, and return its seconds."""
        self._number += 1
        begin_step(self._optimizer, self._number, 1e-3)
        self._wait()
        began = time.perf_counter()
        self._optimizer.step()
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def measured(
    make: Callable[[], nn.Module],
    rounds: int,
    device: str,
    names: tuple[OptimizerName, ...] = NAMES,
) -> dict[str, Any]:
    """Return the seconds of every step, and each implementation's ratios to the for-loop.

    `names` include the for-loop.
    """
    stepped = {name: Stepped(make, name, device) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turned = names[number % len(names) :] + names[: number % len(names)]
        for name in turned if number % 2 == 0 else reversed(turned):
            seconds[name].append(stepped[name].step())
    cases = {}
    for name, took in seconds.items():
        ratios = [one / first for one, first in zip(took, seconds[FIRST], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cases[name] = {
            "seconds": took, "median_s": statistics.median(took), "ratio": middle,
            "quartiles": [low, high],
        }  # fmt: skip
    any_of = stepped[FIRST]
    return {"tensors": any_of.tensors, "values": any_of.values, "optimizers": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", choices=tuple(SETS), default=None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    asked = parser.parse_args()
    sets = {
        name: measured(make, asked.rounds, asked.device)
        for name, make in SETS.items()
        if asked.only in (None, name)
    }
    for name, found in sets.items():
        for optimizer, case in found["optimizers"].items():
            print(f"{name} {optimizer}: {case['median_s'] * 1e3:.2f} ms, {case['ratio']:.2f}")
    if asked.only is None and asked.rounds == ROUNDS:
        suffix = "" if asked.device == "cpu" else "_gpu"
        result = {"rounds": asked.rounds, "device": asked.device, "sets": sets}
        print(save(f"optimizers{suffix}", result))


if __name__ == "__main__":
    main()
