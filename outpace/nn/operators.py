"""Custom torch operators in Python, each a single operator to tracing and compiling.

They replace `torch.library.custom_op`, whose first call loads torch's compiler, which adds half a
second to the start of a run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.library import Library

_LIBRARY = Library("outpace", "DEF")


@dataclass(frozen=True)
class Operator:
    """An operator: `overload` is registered with torch, and `code` implements it on a CPU."""

    overload: torch._ops.OpOverload
    code: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Call the operator through torch's dispatcher."""
        return self.overload(*args)


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
