"""Exclusion of code from torch.compile without loading the compiler, which takes a second.

torch loads the compiler to exclude some of its own methods, even if nothing is compiled. The
functions here avoid that.
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
    """Let a method of torch that is excluded from compilation run without loading the compiler.

    The compiler is otherwise loaded by `_disable_dynamo`, with which torch wraps the method.
    """
    plain = unwrap(method)
    if plain is not method:
        plain.__dict__.setdefault("__dynamo_disable", plain)


def leave_to_python(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a hook from compilation, so that compiled code calls it in Python.

    A compiled hook may apply its side effects once for several calls.
    """
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook


def has_compiled_parts(model: nn.Module) -> bool:
    """Return whether `torch.compile` has compiled any module of a model, or its forward."""
    return "torch._dynamo" in sys.modules and any(
        type(part).__name__ == "OptimizedModule"
        or getattr(part, "_compiled_call_impl", None) is not None
        or hasattr(vars(part).get("forward"), "_torchdynamo_orig_callable")
        for part in model.modules()
    )


def run_eagerly(compiled: bool) -> AbstractContextManager[object]:
    """Return a context in which compiled functions run eagerly; it has no effect unless `compiled`.

    A function whose first call is under a dispatch mode would otherwise never be compiled.
    """
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


@contextmanager
def skip_compile_query() -> Iterator[None]:
    """Keep `DistributedDataParallel` from loading the compiler, which it asks for its mode.

    It gets the compiler's default mode instead, unless the compiler is already loaded.
    """
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
