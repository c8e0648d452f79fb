"""Compiled optimizer updates for a GPU, where each uncompiled operator is a pass over memory.

Values that change from step to step are passed as tensors, so that they cause no recompilation. The
update is compiled once for each kind of tensor (dtypes, size of quantized blocks). Its first
dimension is dynamic, so a model has few kinds.
"""

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from outpace.nn.compilation import copy_with_code
from outpace.records.errors import error_summary


class CompiledStep:
    """An update function that is compiled once for each kind of arguments.

    Calls of one kind share compiled code, so their tensors may differ only in the size of the first
    dimension. If compilation fails, the function runs without it from then on.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._compiled: dict[Hashable, Callable[..., None]] = {}
        self._fails = False

    def __call__(self, kind: Hashable, *arguments: Any) -> None:
        """Call the function compiled for this `kind`, which changes tensors in `arguments`."""
        if self._fails:
            self._function(*arguments)
        elif kind in self._compiled:
            self._compiled[kind](*arguments)
        else:
            self._compile_and_call(kind, *arguments)

    def _compile_and_call(self, kind: Hashable, *arguments: Any) -> None:
        from torch._dynamo import maybe_mark_dynamic
        from torch._dynamo.exc import TorchDynamoException

        for tensor in tree_leaves(arguments):
            if isinstance(tensor, Tensor) and tensor.ndim and tensor.shape[0] > 1:
                maybe_mark_dynamic(tensor, 0)
        self._compiled[kind] = torch.compile(copy_with_code(self._function), fullgraph=True)
        try:
            self._compiled[kind](*arguments)  # compiles before it changes any tensor
        except TorchDynamoException as error:
            self._fails = True
            inner = getattr(error, "inner_exception", None) or error
            reason = error_summary(inner)
            warnings.warn(
                f"torch.compile fails on the optimizer's step ({reason}), so the step runs "
                "uncompiled. Avoid the attempt with --no-compile.",
                stacklevel=2,
            )
            self._function(*arguments)
