"""Fake tensors without memory; small ones are real, since programs read them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
# Largest number of elements of a small tensor, by dtype: ranks of a mesh, sizes of parameters, step
# counts, flags. Tokens and positions are also int64, but have more elements.
_FEW = {torch.int32: 2**20, torch.int64: 32}
_FEW_OTHERS = 2


class RealSmallTensors(TorchDispatchMode):
    """Mode on top of FakeTensorMode that gives small tensors values.

    Some code reads values that do not depend on weights or data: optimizers read step counts,
    device meshes read ranks, and DDP reads the sizes of parameters. Tensors computed from fake ones
    stay fake. Reading one returns 1, which means "true" for the flags that are read: a gradient
    exists, or a stage knows its shapes.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, (DTensor, FakeTensor)) for kind in types):
            if func in _READS:
                return 1.0 if args[0].dtype.is_floating_point else 1
            if func is torch.ops.aten.nonzero.default:  # assume that all elements are nonzero
                return args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
            return func(*args, **kwargs)
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            made = func(*args, **kwargs)
            if not isinstance(made, Tensor) or made.numel() > _FEW.get(made.dtype, _FEW_OTHERS):
                return made
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def fake_tensor_mode() -> FakeTensorMode:
    """Return torch's fake tensor mode, after making sure that forked processes can run backwards.

    If torch is built for an accelerator that the host lacks, the mode pretends that there is one.
    The first backward pass under the mode would then start threads for it, and torch refuses
    backward passes in processes forked later. This runs a backward pass before the mode, which
    makes torch record that there is no accelerator.
    """
    if not torch.accelerator.is_available():
        torch.zeros((), requires_grad=True).backward()
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make tensors created in the context fake, except small ones."""
    with fake_tensor_mode(), RealSmallTensors():  # type: ignore[no-untyped-call]
        yield
