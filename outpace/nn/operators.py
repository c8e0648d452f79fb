"""Custom torch operators in Python; tracing and compiling see each as one operator.

This replaces `torch.library.custom_op`, whose first call loads torch's compiler, which adds half a
second to a run's start.
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
    """An operator: `overload` is called by torch; `code` is its implementation on a CPU."""

    overload: torch._ops.OpOverload
    code: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Call the operator like one of torch's own."""
        return self.overload(*args)


def operator(
    code: Callable[..., Any],
    made: Callable[..., Any],
    keep: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Operator:
    """Register `code` as `outpace::NAME`, with its name (without the _) and signature.

    The operator must not write to its arguments. `made` returns results without values (the fake
    implementation). `keep` and `backward` are as in `torch.library.register_autograd`.
    """
    short = code.__name__.strip("_")
    name = f"outpace::{short}"
    _LIBRARY.define(short + torch.library.infer_schema(code, mutates_args=()))
    _LIBRARY.impl(short, code, "CPU")
    torch.library.register_fake(name, made, lib=_LIBRARY)
    if backward is not None:
        # a second backward would silently give no gradients
        backward = once_differentiable(backward)
        torch.library.register_autograd(name, backward, setup_context=keep, lib=_LIBRARY)
    return Operator(getattr(torch.ops.outpace, short).default, code)
