"""Tools to run a user's module as a reference: without dropout, reproducibly, in float64."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outpace.parallel.tensors import has_memory, storage_id

# functions that return their first argument if dropout is off
_DROPS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_,
    torch.feature_dropout, torch.feature_dropout_, torch.native_dropout,
}  # fmt: skip
# functions with a dropout rate: the rate's name, and its position among the arguments
_RATES: Mapping[Any, tuple[str, int]] = {
    F.scaled_dot_product_attention: ("dropout_p", 4),
    F.multi_head_attention_forward: ("dropout_p", 10),
}
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


class NoDropout(TorchFunctionMode):
    """A mode that replaces torch's dropout functions with the identity.

    `would_drop` becomes True if any of them would have dropped values.
    """

    def __init__(self, would_drop: bool = False) -> None:
        super().__init__()
        self.would_drop = would_drop

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPS:
            self.would_drop |= _drops_values(args, kwargs)
            given = args[0] if args else kwargs["input"]
            return (given, torch.ones_like(given)) if func is torch.native_dropout else given
        if func in _RATES:
            name, place = _RATES[func]
            if name in kwargs:
                self.would_drop |= bool(kwargs[name])
                kwargs = {**kwargs, name: 0.0}
            elif len(args) > place:
                self.would_drop |= bool(args[place])
                args = (*args[:place], 0.0, *args[place + 1 :])
        elif func in _RECURRENT:  # the only float is the dropout rate
            self.would_drop |= any(isinstance(one, float) and one > 0 for one in args)
            args = tuple(0.0 if isinstance(one, float) else one for one in args)
        return func(*args, **kwargs)


def _drops_values(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    return bool(rate) and bool(training)


def _dropout_rates(module: nn.Module) -> Iterator[tuple[nn.Module, str, float]]:
    """Yield (submodule, attribute name, rate) for each of torch's modules with a dropout rate."""
    for part in module.modules():
        if isinstance(part, _DropoutNd):
            yield part, "p", part.p
        elif isinstance(part, nn.MultiheadAttention | nn.RNNBase):
            yield part, "dropout", part.dropout


def has_dropout(module: nn.Module) -> bool:
    """Return whether any of torch's dropout modules in `module` has a rate above 0."""
    return any(rate > 0 for _, _, rate in _dropout_rates(module))


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[NoDropout]:
    """Disable dropout in a module, so that passes can be compared.

    Yields a `NoDropout`, whose `would_drop` says whether dropout would have changed values. The
    rates of dropout modules are also set to 0, because the mode acts only in this thread, and a
    backward may recompute activations in another thread.
    """
    rates = list(_dropout_rates(module))
    for part, name, _ in rates:
        setattr(part, name, 0.0)
    try:
        with NoDropout(any(rate > 0 and part.training for part, _, rate in rates)) as nothing:
            yield nothing
    finally:
        for part, name, rate in rates:
            setattr(part, name, rate)


def random_state(device: torch.device) -> tuple[Any, ...]:
    """Return the states of all generators that a module may draw from."""
    numpy_state = np.random.get_state()
    states: list[Any] = [random.getstate(), numpy_state, torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return tuple(states)


def set_random_state(states: Sequence[Any], device: torch.device) -> None:
    """Restore all generators to `states`, a result of `random_state`."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[3], device)


def same_random_state(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether no random numbers were drawn between the two states."""
    numpy_same = all(np.array_equal(a, b) for a, b in zip(one[1], other[1], strict=True))
    tensors = zip(one[2:], other[2:], strict=True)
    return one[0] == other[0] and numpy_same and all(torch.equal(a, b) for a, b in tensors)


class NarrowResults(TorchDispatchMode):
    """A mode that records the dtypes of all floating-point results narrower than float64."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.itemsize < 8:
                self.dtypes.add(leaf.dtype)
        return made


def to_float64(module: nn.Module) -> nn.Module:
    """Convert floating-point parameters and buffers to float64, and complex ones to complex128.

    Tensors that share memory still share it afterwards.
    """
    found: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        if has_memory(tensor) and _double_dtype(tensor) != tensor.dtype:
            key = storage_id(tensor), tensor.dtype
            found.setdefault(key, []).append(tensor)
    wide_storages = {key: _convert_storage(some[0]) for key, some in found.items() if len(some) > 1}
    done: dict[Tensor, Tensor] = {}  # a buffer may have several names

    def wide(tensor: Tensor) -> Tensor:
        flat = wide_storages.get((storage_id(tensor), tensor.dtype)) if has_memory(tensor) else None
        if tensor not in done:
            made = tensor.to(_double_dtype(tensor))
            if flat is not None:
                made = flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
            if isinstance(tensor, nn.Parameter):
                return made  # this becomes the tensor's data
            done[tensor] = made
        return done[tensor]

    changed: nn.Module = module._apply(wide)
    return changed


def _double_dtype(tensor: Tensor) -> torch.dtype:
    if tensor.is_complex():
        return torch.complex128
    return torch.float64 if tensor.is_floating_point() else tensor.dtype


def _convert_storage(tensor: Tensor) -> Tensor:
    """Return all elements of a tensor's storage as a flat copy in float64 or complex128."""
    numbers = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((numbers,), (1,), 0).to(_double_dtype(tensor))


def floating_dtypes(tensors: Iterable[Tensor]) -> set[torch.dtype]:
    """Return the floating-point and complex dtypes of the tensors."""
    return {t.dtype for t in tensors if t.is_floating_point() or t.is_complex()}
