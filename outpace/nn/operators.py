"""Custom torch operators in Python, each a single operator to tracing and compiling.

They replace `torch.library.custom_op`, whose first call loads torch's compiler, which adds half a
second to the start of a run.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.library import Library

Piece = TypeVar("Piece")

_LIBRARY = Library("outpace", "DEF")


@dataclass(frozen=True)
class Operator:
    """An operator: `overload` is registered with torch, and `code` implements it on a CPU."""

    overload: torch._ops.OpOverload
    code: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Call the operator through torch's dispatcher."""
        return self.overload(*args)


def pieces_to_run(
    x: Tensor, pieces: Iterable[Piece], size: Callable[[Piece], Any]
) -> Iterator[Piece]:
    """Yield the pieces of `x` on which an operator computes; of a fake tensor, only some pieces.

    Fake tensors have no values, and the operator runs only to measure its memory. This does not
    change after two pieces of the same `size`, so of successive pieces of equal size, only the
    first two are yielded: a step with a large batch has hundreds of thousands of pieces.
    """
    if not isinstance(x, FakeTensor):
        yield from pieces
        return
    for _, alike in groupby(pieces, size):
        yield from islice(alike, 2)


def chunks_to_run(x: Tensor, total: int, most: int) -> Iterator[slice]:
    """Yield slices of at most `most` entries, which together cover a dimension of `total` entries.

    If `x` is a fake tensor, some slices are left out (see `pieces_to_run`).
    """
    chunks = (slice(begin, min(begin + most, total)) for begin in range(0, total, most))
    return pieces_to_run(x, chunks, lambda chunk: chunk.stop - chunk.start)


def operator(
    code: Callable[..., Any],
    made: Callable[..., Any],
    keep: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Operator:
    """Register `code` as `outpace::NAME`, with its name (without the _) and signature.

    The operator must not write to its arguments. `made` is the fake implementation, which returns
    results without values. `keep` and `backward` are the `setup_context` and `backward` of
    `torch.library.register_autograd`.
    """
    short = code.__name__.strip("_")
    name = f"outpace::{short}"
    _LIBRARY.define(short + torch.library.infer_schema(code, mutates_args=()))
    _LIBRARY.impl(short, code, "CPU")
    torch.library.register_fake(name, made, lib=_LIBRARY)
    if backward is not None:
        # Otherwise, double backward would silently give no gradients.
        backward = once_differentiable(backward)
        torch.library.register_autograd(name, backward, setup_context=keep, lib=_LIBRARY)
    return Operator(getattr(torch.ops.outpace, short).default, code)
