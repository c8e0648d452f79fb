"""Code that torch's compiler leaves out, without loading the compiler, which takes a second.

Parts of torch ask it to skip some of their methods, which has no effect if nothing is compiled. Its
answer is hard-coded here instead.
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
    """Make a method under torch's `_disable_dynamo` callable without the compiler."""
    plain = unwrap(method)
    if plain is not method:
        plain.__dict__.setdefault("__dynamo_disable", plain)


def leave_to_python(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that a forward which is compiled already, or in part, calls in Python.

    A compiler that traces a hook may run what it does to objects once for several calls.
    """
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook


def has_compiled_parts(model: nn.Module) -> bool:
    """Return whether a part of a model, or its forward, went through `torch.compile`."""
    return "torch._dynamo" in sys.modules and any(
        type(part).__name__ == "OptimizedModule"
        or getattr(part, "_compiled_call_impl", None) is not None
        or hasattr(vars(part).get("forward"), "_torchdynamo_orig_callable")
        for part in model.modules()
    )


def run_eagerly(compiled: bool) -> AbstractContextManager[object]:
    """Return a context in which compiled code runs in Python, if any is.

    Code that the compiler meets while a mode observes operators is never compiled afterwards.
    """
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


@contextmanager
def skip_compile_query() -> Iterator[None]:
    """Tell `DistributedDataParallel` the compiler's default mode, without loading the compiler."""
    if "torch._dynamo" in sys.modules:
        yield
        return
    answer = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    stand_in: Any = SimpleNamespace(utils=answer)
    torch._dynamo = stand_in
    try:
        yield
    finally:
        if torch._dynamo is stand_in:  # unless the compiler was loaded meanwhile
            del torch._dynamo
