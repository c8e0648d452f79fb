"""Table of optimizers: their states, memory traffic and features.

The planner, training and messages take optimizer-specific facts from here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from outpace.records.precisions import PURE, Precision

OptimizerName = Literal[
    "adamw-fused", "adamw-foreach", "adamw-for-loop", "adamw-bf16", "adamw-8bit", "adamw-4bit",
    "adafactor", "muon", "sgd",
]  # fmt: skip
# Formats of moments that are not in fp32.
Kept = Literal["bf16", "8bit", "4bit"]


class Operators(NamedTuple):
    """Number of torch operators that an optimizer calls to update a parameter, or several at once.

    `matrix` and `vector` are for a single parameter, `matrices` and `vectors` for a stack of
    parameters, to which `each` is added per parameter. Stochastic rounding adds `counted` if its
    random numbers come from a counter; otherwise, it adds `drawn` per stacked parameter.
    """

    matrix: float
    vector: float
    matrices: float = 0
    vectors: float = 0
    each: float = 0
    counted: float = 0
    drawn: float = 0


class StepTensors(NamedTuple):
    """Memory of an update's temporary fp32 tensors, by the dtype of the weights.

    The unit is the memory of the largest parameter in fp32. `fp32` includes master weights; `bf16`
    is for weights that are rounded stochastically, without master weights.
    """

    fp32: float
    fp16: float
    bf16: float


@dataclass(frozen=True)
class OptimizerTraits:
    """Traits of an optimizer.

    `moments`: the number of state tensors with a parameter's shape, in the format `kept` if given.
    `factored`: matrices have sums over rows and columns as state. `exact`: the result is the same
    for any number of processes and does not depend on random numbers, so `verify` can prove it.
    `lr_factor`: the default learning rate relative to AdamW's, since updates differ in size.
    `steps_complex`: complex parameters are supported.

    Eager mode: `bytes` moved per parameter, `operators` launched by the host, temporary `tensors`,
    and `copies`, the number of temporary copies of all updated parameters. On a GPU:
    `compiled_bytes` and `compiled_operators` of code that outpace compiles (`compiles_parts`: also
    for sharded tensors), and `kernel_bytes` moved by torch's single kernel if no tensor is sharded.
    """

    bytes: float
    operators: Operators
    tensors: StepTensors
    moments: Literal[1, 2]
    kept: Kept | None = None
    factored: bool = False
    is_adamw: bool = False
    exact: bool = False
    lr_factor: float = 1.0
    steps_complex: bool = False
    copies: float = 0.0
    compiled_bytes: float | None = None
    compiled_operators: Operators | None = None
    compiles_parts: bool = True
    kernel_bytes: float | None = None


# A compiled function counts as two operators: its guards and its kernel. Operators around it
# (arguments and copies of results) were counted with an empty function. Stacks are not compiled.
_FUNCTION = 2


def _adamw(nbytes: float, operators: Operators, tensors: float, copies: float) -> OptimizerTraits:
    return OptimizerTraits(
        nbytes, operators, StepTensors(tensors, tensors, tensors), moments=2, is_adamw=True,
        exact=True, steps_complex=True, copies=copies,
    )  # fmt: skip


def _low_bit_adamw(
    kept: Kept, nbytes: float, operators: Operators, tensors: StepTensors, moments_bytes: float,
    compiled: Operators,
) -> OptimizerTraits:  # fmt: skip
    """Return the traits of outpace's own AdamW with moments in the format `kept`.

    `moments_bytes` is what an update reads and writes of the moments, in bytes per parameter.
    """
    return OptimizerTraits(
        nbytes, operators, tensors, moments=2, kept=kept, is_adamw=True,
        compiled_bytes=12 + moments_bytes, compiled_operators=compiled,
    )  # fmt: skip


# `bytes` are counted from the source code, with weights, gradients and arithmetic in fp32. Eager
# operators read their inputs from memory and write their outputs to it: torch/optim/adam.py of 2.13
# (fused: weight and moments read and written, gradient read; otherwise decay 8, mean 12, square 20,
# root 24, update 16), sgd.py (decay 12, momentum 20, update 12), and optim/low_precision_adamw.py,
# adafactor.py and muon.py of outpace. In LowPrecisionAdamW, fp32 arithmetic moves 96 bytes; the
# rest reads each moment (bf16 6, 8 bits 21, 4 bits 25) and writes it (bf16 with stochastic rounding
# 34, 8 bits 35 and 4 bits 37, with the largest magnitude of each block). What outpace compiles on a
# GPU (optim.compiled) reads and writes each number once: 12 bytes for weight and gradient, and for
# moments 8 (bf16), 4 (8 bits) or 2 (4 bits), plus their scales. Random bits for rounding to bf16
# are computed within the kernel. Adafactor reads matrices again for its sums (counted as another
# read of the gradients and of the update). `operators` are counted as torch dispatches them
# (2.13) in steps over one to three tensors of a kind, with weights in fp32;
# tests/planner/step_time/test_optimizer_operators.py counts those of whole models. Step counts are
# left out: Python reads them from host memory, so nothing is launched. Muon orthogonalises matrices
# one by one on a CPU, and in batches of equal shapes on a GPU; Adafactor's updates do the same.
# `tensors` of LowPrecisionAdamW: moments in fp32, random bits, and the rounded values.
OPTIMIZER_TRAITS: Mapping[OptimizerName, OptimizerTraits] = {
    "adamw-fused": _adamw(28, Operators(0, 0), 0.0, 0.0),
    "adamw-foreach": _adamw(80, Operators(0, 0), 0.0, 1.0),
    "adamw-for-loop": _adamw(80, Operators(9, 8), 2.0, 0.0),
    "adamw-bf16": _low_bit_adamw(
        "bf16", 176, Operators(30, 30, 41, 39, each=1, counted=22, drawn=4),
        StepTensors(3.5, 4.5, 5.5), 8,
        Operators(3 + _FUNCTION, 3 + _FUNCTION, 12 + _FUNCTION, 10 + _FUNCTION, each=1),
    ),
    "adamw-8bit": _low_bit_adamw(
        "8bit", 208, Operators(48, 14, 65, 23, each=1), StepTensors(4.25, 5.25, 5.5), 4 + 16 / 256,
        Operators(2 + _FUNCTION, 2 + _FUNCTION, 17 + _FUNCTION, 9 + _FUNCTION, each=1),
    ),
    "adamw-4bit": _low_bit_adamw(
        "4bit", 220, Operators(64, 14, 81, 23, each=1), StepTensors(4.25, 5.25, 5.5), 2 + 16 / 128,
        Operators(2 + _FUNCTION, 2 + _FUNCTION, 17 + _FUNCTION, 9 + _FUNCTION, each=1),
    ),
    # Updates are proportional to the size of the weights.
    "adafactor": OptimizerTraits(
        108, Operators(42, 30, 52, 37), StepTensors(2.0, 2.0, 2.0), moments=1, factored=True,
        exact=True, lr_factor=30.0, compiled_bytes=12 + 4 + 8,
        compiled_operators=Operators(5 + _FUNCTION, 5 + _FUNCTION), compiles_parts=False,
    ),
    # Only for hidden matrices; other parameters are updated like AdamW's.
    "muon": OptimizerTraits(
        62, Operators(30, 9, 56), StepTensors(2.0, 2.0, 2.0), moments=2,
    ),
    # Updates are proportional to the size of the gradients. The kernel reads and writes weight and
    # momentum, and reads the gradient.
    "sgd": OptimizerTraits(
        44, Operators(4, 3), StepTensors(1.0, 1.0, 1.0), moments=1, exact=True, lr_factor=100.0,
        steps_complex=True, kernel_bytes=20,
    ),
}  # fmt: skip


def optimizers_that(has: Callable[[OptimizerTraits], bool]) -> tuple[OptimizerName, ...]:
    """Return the optimizers whose traits satisfy `has`, in the order of OPTIMIZER_TRAITS."""
    return tuple(name for name, traits in OPTIMIZER_TRAITS.items() if has(traits))


EXACT = optimizers_that(lambda traits: traits.exact)
ADAMW = optimizers_that(lambda traits: traits.is_adamw)
# Compute in fp32, regardless of the dtypes of weights and states; round bf16 weights
# stochastically.
LOW = optimizers_that(lambda traits: traits.kept is not None)
# AdamW with moments in fp32, by torch.
PLAIN_ADAMW = tuple(name for name in ADAMW if name not in LOW)


def default_optimizer(precision: Precision) -> OptimizerName:
    """Return the default optimizer for a precision, a variant of AdamW."""
    return "adamw-bf16" if precision in PURE else "adamw-fused"
