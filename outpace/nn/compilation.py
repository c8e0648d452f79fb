"""Compilation of forwards by torch.compile: of a whole model, or block by block.

Only `forward` is compiled, so hooks (of `fully_shard`, offloading or tensor parallelism) run
outside the compiled region. Shapes are static: each batch shape is compiled separately, so data is
padded to a few shapes. Evaluation and generation run eagerly (`without_compilation`): a forward
without gradients would be another graph, and compiling it takes longer than a few batches save.
"""

import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import update_wrapper
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from outpace.nn.transformer import use_dense_masks
from outpace.records.errors import error_summary

# Maximum number of input variants for which a function is compiled, instead of torch's default of
# 8; other variants run eagerly.
_COMPILED_MOST = 64


class Compilation:
    """Compiled forwards of one model, with a fallback to eager mode if the compiler fails.

    The first call compiles forward and backward before either computes anything, so a compiler
    failure surfaces before any result is used. After a failure, all forwards run eagerly;
    `on_failure` is called with the reason, which `failure` keeps.
    """

    def __init__(self, on_failure: Callable[[str], None] | None = None) -> None:
        self.failure: str | None = None
        self._on_failure = on_failure or warnings.warn

    def compile(self, module: nn.Module) -> None:
        """Replace the module's forward by the compiled one."""
        module.forward = CompiledForward(module.forward, self)

    def say_failure(self) -> None:
        """Tell `on_failure` why all forwards now run eagerly."""
        self._on_failure(
            f"torch.compile fails on this model ({self.failure}), so it trains uncompiled. "
            "Avoid the attempt with --no-compile."
        )


class CompiledForward:
    """A module's forward, compiled at its first call. Copies of the module are not compiled."""

    def __init__(self, forward: Callable[..., Any], compilation: Compilation) -> None:
        update_wrapper(self, forward)
        self._forward = forward
        self._compilation = compilation
        self._compiled = torch.compile(forward, dynamic=False)
        self._works = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled forward, or the module's own after a failure."""
        if self._compilation.failure is not None:
            return self._forward(*args, **kwargs)
        with _raise_recompile_limit():
            if self._works:
                return self._compiled(*args, **kwargs)
            return self._compile_and_call(*args, **kwargs)

    def _compile_and_call(self, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException
        from torch._functorch import config

        try:
            with config.patch(force_non_lazy_backward_lowering=True):
                output = self._compiled(*args, **kwargs)
        except (TorchDynamoException, AssertionError, NotImplementedError) as error:
            self._compilation.failure = _summarize_compiler_error(error)
            owner = getattr(self._forward, "__self__", None)
            if isinstance(owner, nn.Module):
                use_dense_masks(owner)  # mask blocks need a compiled kernel
            output = self._forward(*args, **kwargs)  # raises the model's own error, if it is one
            self._compilation.say_failure()
            return output
        self._works = torch.is_grad_enabled()
        return output

    @property
    def eager(self) -> Callable[..., Any]:
        """Return the module's own forward."""
        return self._forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the uncompiled forward, bound to the copy of the module."""
        return copy.deepcopy(self._forward, memo)


def find_disabling_variable(environ: Mapping[str, str]) -> str | None:
    """Return the environment variable that disables torch.compile, as "NAME=1"; None if unset."""
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if environ.get(name) == "1":
            return f"{name}=1"
    return None


def compile_forwards(
    modules: Sequence[nn.Module], on_failure: Callable[[str], None] | None = None
) -> Compilation:
    """Compile the forwards of modules in place; equal modules share compiled code.

    If the compiler fails, `on_failure` is called once with the reason (None: warn).
    """
    compilation = Compilation(on_failure)
    for module in modules:
        compilation.compile(module)
    return compilation


def is_compiled(module: nn.Module) -> bool:
    """Return whether any forward in the module is compiled, even if it is wrapped."""
    forwards = [part.forward for part in module.modules()]
    forwards = [getattr(forward, "inner", forward) for forward in forwards]
    return any(isinstance(forward, CompiledForward) for forward in forwards)


def copy_with_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function that has its own recompile count in torch.compile.

    torch counts compilations per code object, over all callers, and gives up after a few.
    """
    assert isinstance(function, FunctionType)
    return FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


@contextmanager
def _raise_recompile_limit() -> Iterator[None]:
    """Raise the recompile limit. (`config.patch` would take 15 µs or more per call.)"""
    from torch._dynamo import config

    limit = config.recompile_limit
    config.recompile_limit = max(limit, _COMPILED_MOST)
    try:
        yield
    finally:
        config.recompile_limit = limit


@contextmanager
def without_compilation(module: nn.Module) -> Iterator[None]:
    """Run compiled forwards eagerly, as in evaluation and generation."""
    if not is_compiled(module):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def compiler_cache(environ: MutableMapping[str, str], folder: Path, used: bool) -> Iterator[None]:
    """Cache compiled code in `folder` for later runs, unless the user has chosen another folder.

    Sets the environment variables for Inductor's graphs and code and for Triton's kernels. Does
    nothing unless `used`.
    """
    if not used:
        yield
        return
    places = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    own = {name: str(folder / place) for name, place in places.items() if name not in environ}
    environ.update(own)
    try:
        yield
    finally:
        for name in own:
            environ.pop(name, None)


def compile_time_s() -> float:
    """Return the seconds that this process has spent in the compiler, without loading it."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0.0
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent().get("total_wall_time", 0.0))


def _summarize_compiler_error(error: Exception) -> str:
    inner: BaseException = getattr(error, "inner_exception", None) or error
    return error_summary(inner)
