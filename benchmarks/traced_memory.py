"""Memory of training on a CUDA device, derived without one from fake tensors and stated rules.

A model's real code runs under `FakeTensorMode`, so tensors have sizes but no memory. `Tracker`
records each storage's creation and release in order; `reserved` simulates these with the rules of
torch's CUDA allocator, which gives what the driver sees: reserved memory, not only allocated
memory.

Tensors are on the CPU here, so `CudaRules` applies the rules in which CUDA's dispatch differs:
- autocast's lists (torch 1.8, aten/src/ATen/autocast_mode.cpp): matmuls in half precision;
  softmax, layer norm, losses and, until 2021, GELU in fp32 (pytorch/pytorch#59639 names it);
- autocast's cache: a half copy of each weight until autocast exits. The graph holds it longer;
- dropout keeps a mask of one byte per element;
- until torch 1.10 softmax kept its input in addition to its output (pytorch/pytorch#49600, #64000).

Left out: kernels' own allocations, NCCL's buffers, and CUDA's context.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from outpace.trace.device import masked_dropout
from outpace.trace.reserve import peak_reserved_bytes
from outpace.trace.tracker import Tracker

MIB = 2**20
Softmax = Callable[[Tensor], Tensor]

_LOWERED = frozenset({F.linear, torch.matmul, torch.bmm, torch.addmm})
_RAISED = frozenset({F.softmax, F.layer_norm, F.cross_entropy})


class SoftmaxOfOld(torch.autograd.Function):
    """Softmax over the last dimension that also keeps its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Compute F.softmax."""
        y = torch._softmax(x, -1, False)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Compute softmax's own backward, which does not read the input."""
        x, y = ctx.saved_tensors
        return torch._softmax_backward_data(grad, y, -1, x.dtype)


class CudaRules(TorchFunctionMode):
    """Context that applies CUDA's rules to a forward. `low` is autocast's dtype, or None.

    `of_2021`: the rules of torch 1.8 instead of today's.
    """

    def __init__(self, low: torch.dtype | None, of_2021: bool) -> None:
        super().__init__()
        self._low = low
        self._of_2021 = of_2021
        self._casts: dict[int, Tensor] = {}
        self._raised = _RAISED | ({F.gelu} if of_2021 else set())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return masked_dropout(*args, **kwargs)
        if self._low is not None:
            if func in _LOWERED:
                args = [self._lowered(arg) for arg in args]
                kwargs = {key: self._lowered(value) for key, value in kwargs.items()}
            elif func in self._raised:
                args = [arg.float() if _is(arg, self._low) else arg for arg in args]
        if func is F.softmax and self._of_2021:
            return SoftmaxOfOld.apply(args[0])
        return func(*args, **kwargs)

    def _lowered(self, value: Any) -> Any:
        if not _is(value, torch.float32):
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(self._low)  # each matmul casts activations again
        if id(value) not in self._casts:
            self._casts[id(value)] = value.to(self._low)
        return self._casts[id(value)]

    def __exit__(self, *error: Any) -> None:
        self._casts.clear()
        super().__exit__(*error)


def _is(value: Any, dtype: torch.dtype | None) -> bool:
    return isinstance(value, Tensor) and value.dtype == dtype


@dataclass(frozen=True)
class Case:
    """A run to trace: the batch of each step, autocast's dtype, and other uses of memory.

    `of_2021`: rules of torch 1.8 and transformers 4.3: gradients are zeroed and not freed. `ddp`:
    with its buckets, in addition to the gradients.
    """

    batches: Sequence[int]
    low: torch.dtype | None
    of_2021: bool
    ddp: bool = False


@dataclass(frozen=True)
class Traced:
    """Peaks of a run: of its tensors, and of what the allocator reserved for them."""

    allocated_bytes: int
    reserved_bytes: int


def trace_training(
    build: Callable[[], nn.Module], batch_of: Callable[[int], dict[str, Tensor]], case: Case
) -> Traced:
    """Train a model whose forward returns an output with `.loss`, under fake tensors."""
    tracker = Tracker()
    with FakeTensorMode(), tracker:
        model = build()
        parameters = list(model.parameters())
        tracker.record(parameters)
        buckets = ddp_buckets(parameters) if case.ddp else []
        state: dict[int, tuple[Tensor, Tensor]] = {}
        for size in case.batches:
            with CudaRules(case.low, case.of_2021):
                loss = model(**batch_of(size)).loss
            loss.backward()
            del loss
            adamw_step(parameters, state)
            for parameter in parameters:
                if case.of_2021:
                    parameter.grad.zero_()
                else:
                    parameter.grad = None
        del buckets
    return Traced(tracker.peak_bytes, peak_reserved_bytes(tracker.events))


def ddp_buckets(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return DDP's buffers in the order of parameters: 1 MiB for the first, then 25 MiB.

    Before them, DDP broadcasts all weights in buffers of 250 MiB (Li et al., VLDB 2020, §3-4).
    """
    broadcast = _flat(parameters, 250 * MIB, 250 * MIB)
    del broadcast
    return _flat(parameters, MIB, 25 * MIB)


def _flat(parameters: Sequence[nn.Parameter], first: int, cap: int) -> list[Tensor]:
    made, size = [], 0
    for parameter in parameters:
        size += parameter.nbytes
        if size >= (cap if made else first):
            made.append(torch.empty(size, dtype=torch.uint8))
            size = 0
    return [*made, torch.empty(size, dtype=torch.uint8)] if size else made


@torch.no_grad()
def adamw_step(parameters: Sequence[nn.Parameter], state: dict[int, tuple[Tensor, Tensor]]) -> None:
    """Run AdamW as a loop with one temporary per parameter, as in transformers 4.3."""
    for number, parameter in enumerate(parameters):
        if number not in state:
            state[number] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        first, second = state[number]
        first.mul_(0.9).add_(parameter.grad, alpha=0.1)
        second.mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
        parameter.addcdiv_(first, second.sqrt().add_(1e-8), value=-2e-5)
