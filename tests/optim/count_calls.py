"""Print how many Python functions a step of low-precision AdamW calls, by number of parameters.

python tests/optim/count_calls.py 4 20

In a process of its own: where torch's compiler has run, Python 3.11 never left a step under a
profile function.
"""

import json
import sys

import torch
from torch import nn

from outpace.optim.build import begin_step
from outpace.optim.low_precision_adamw import LowPrecisionAdamW
from outpace.optim.rounding import Noise


def count_calls(parameters: int) -> int:
    """Return the calls of the third step, in which nothing is made for the first time."""
    held = [nn.Parameter(torch.randn(8, 128)) for _ in range(parameters)]
    noise = Noise(3, {one: str(number) for number, one in enumerate(held)})
    optimizer = LowPrecisionAdamW([{"params": held}], "bf16", noise, lr=1e-2, betas=(0.9, 0.95))
    for number in (1, 2):
        for one in held:
            one.grad = torch.randn(one.shape)
        begin_step(optimizer, number, 1e-2)
        optimizer.step()
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return calls


if __name__ == "__main__":
    print(json.dumps([count_calls(int(word)) for word in sys.argv[1:]]))
