"""Exclusion of code from torch.compile without loading the compiler, which takes a second.

Parts of torch ask the compiler to skip some of their methods, which has no effect if nothing is
compiled. Here, nothing asks the compiler.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import unwrap
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


def leave_alone(method: Callable[..., Any]) -> None:
    """Make a method that `_disable_dynamo` wraps callable without loading the compiler."""
    plain = unwrap(method)
    if plain is not method:
        plain.__dict__.setdefault("__dynamo_disable", plain)


def leave_to_python(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that compiled code calls in Python instead of compiling it.

    A compiler that traces a hook may apply its side effects once for several calls.
    """
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook


def has_compiled_parts(model: nn.Module) -> bool:
    """Return whether a part of a model, or its forward, was compiled by `torch.compile`."""
    return "torch._dynamo" in sys.modules and any(
        type(part).__name__ == "OptimizedModule"
        or getattr(part, "_compiled_call_impl", None) is not None
        or hasattr(vars(part).get("forward"), "_torchdynamo_orig_callable")
        for part in model.modules()
    )


def run_eagerly(compiled: bool) -> AbstractContextManager[object]:
    """Return a context in which compiled code runs in Python, if any is.

    Otherwise, code first called while a dispatch mode is active would never be compiled later.
    """
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


@contextmanager
def skip_compile_query() -> Iterator[None]:
    """Give `DistributedDataParallel` the compiler's default mode, without loading the compiler."""
    if "torch._dynamo" in sys.modules:
        yield
        return
    answer = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    stand_in: Any = SimpleNamespace(utils=answer)
    torch._dynamo = stand_in
    try:
        yield
    finally:
        if torch._dynamo is stand_in:  # unless the compiler has been loaded meanwhile
            del torch._dynamo
