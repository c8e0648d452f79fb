"""Workarounds for parts of torch that load its compiler, which takes a second, without using it.

They ask the compiler to skip some of their methods, which has no effect if nothing is compiled. Its
answer is hard-coded here instead.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from types import SimpleNamespace
from typing import Any

import torch


def leave_alone(method: Callable[..., Any]) -> None:
    """Make a method under torch's `_disable_dynamo` callable without the compiler."""
    plain = unwrap(method)
    if plain is not method:
        plain.__dict__.setdefault("__dynamo_disable", plain)


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
