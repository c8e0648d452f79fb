"""The state of a user's module that a look must leave as it was: what forwards and losses change.

That is gradients, buffers, attributes (counters, lists, tensors, what is inside of objects of the
user's own classes), training modes, and the generators of torch, Python and NumPy.
"""

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outpace.nn.fingerprint import fingerprint
from outpace.parallel.plain import random_state, set_random_state

_INTERNAL = frozenset({*vars(nn.Module()), "forward"})
_LIBRARIES = frozenset({"builtins", "functools", "numpy", "outpace", "torch"})
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, deque)

Undo = Callable[[], None]


@contextmanager
def preserved(module: nn.Module, device: torch.device) -> Iterator[Callable[[], None]]:
    """Afterwards a module's state, and all generators, are as they were before.

    Unless what is yielded was called, by which all stays as it has become. Gradients of before are
    out of the way in the meantime. Parameters' values are not looked after.
    """
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    undo = _undo_all(module)
    drawn = random_state(device)
    for parameter, _ in gradients:
        parameter.grad = None
    kept: list[bool] = []
    try:
        yield lambda: kept.append(True)
    finally:
        if not kept:
            with torch.no_grad():
                for step in undo:
                    step()
            set_random_state(drawn, device)
            for parameter, gradient in gradients:
                parameter.grad = gradient


def moves_buffers(module: nn.Module, device: torch.device, run: Callable[[], None]) -> bool:
    """Whether `run` changes any of a module's buffers, which are put back."""
    held = [(part._buffers, name, buffer) for part in module.modules()
            for name, buffer in part._buffers.items() if buffer is not None]  # fmt: skip
    before = [(buffer._version, fingerprint(buffer)) for _, _, buffer in held]
    with preserved(module, device):
        run()
        return any(
            register.get(name) is not buffer or (buffer._version, fingerprint(buffer)) != seen
            for (register, name, buffer), seen in zip(held, before, strict=True)
        )


def _undo_all(module: nn.Module) -> list[Undo]:
    """What puts back all that is reached from a module's buffers and attributes."""
    waiting: list[Any] = list(module.modules())
    seen: dict[int, Any] = {id(p): p for p in module.parameters()}  # held, so that ids stay theirs
    undo: list[Undo] = []
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, str | int | float | bool | None | nn.Parameter):
            continue
        seen[id(value)] = value
        found = _undo(value)
        if found is not None:
            undo.append(found)
        waiting.extend(_inside(value))
    return undo


def _inside(value: Any) -> Iterable[Any]:
    """What a value holds that may change."""
    if isinstance(value, nn.Module):
        attributes = [one for name, one in vars(value).items() if name not in _INTERNAL]
        return [*attributes, *value._buffers.values()]
    if type(value) in _MAPPINGS:
        return list(value.values())
    if isinstance(value, tuple) or type(value) in _SEQUENCES:
        return list(value)
    if isinstance(value, MethodType):
        return [value.__self__]
    return list(vars(value).values()) if _is_own(value) else ()


def _undo(value: Any) -> Undo | None:
    """What puts a value back to how it is now; None for what does not change in place."""
    if isinstance(value, nn.Module):
        return _undo_module(value)
    if isinstance(value, Tensor):
        return _undo_tensor(value)
    if type(value) in (*_MAPPINGS, *_SEQUENCES, set):
        return _undo_container(value, list(value.items() if type(value) in _MAPPINGS else value))
    if isinstance(value, np.ndarray):
        return _undo_array(value, value.copy())
    if isinstance(value, random.Random):
        drawn = value.getstate()
        return lambda: value.setstate(drawn)
    if isinstance(value, torch.Generator):
        return partial(_undo_generator, value, value.get_state())
    if isinstance(value, np.random.Generator):
        return _undo_bits(value.bit_generator, value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        numbers = value.get_state()
        return lambda: value.set_state(numbers)
    return _undo_attributes(value) if _is_own(value) else None


def _is_own(value: Any) -> bool:
    """Whether it is an object of a class that is not of one of the libraries beneath."""
    if isinstance(value, type | ModuleType) or hasattr(value, "__code__"):
        return False
    library = type(value).__module__.partition(".")[0]
    return library not in _LIBRARIES and isinstance(getattr(value, "__dict__", None), dict)


def _undo_attributes(value: Any) -> Undo:
    before = dict(vars(value))

    def undo() -> None:
        held = vars(value)
        for name in held.keys() - before.keys():
            del held[name]
        held.update(before)

    return undo


def _undo_module(module: nn.Module) -> Undo:
    attributes, buffers = _undo_attributes(module), dict(module._buffers)

    def undo() -> None:
        attributes()
        module._buffers.clear()
        module._buffers.update(buffers)

    return undo


def _undo_tensor(tensor: Tensor) -> Undo | None:
    """Values are written only where they have changed: who watches versions sees no change else."""
    if tensor.is_meta or tensor.is_inference():
        return None
    values, version, gradient = tensor.detach().clone(), tensor._version, _gradient(tensor)

    def undo() -> None:
        if tensor._version != version or fingerprint(tensor) != fingerprint(values):
            tensor.detach().copy_(values)
        if _gradient(tensor) is not gradient:
            tensor.grad = gradient

    return undo


def _gradient(tensor: Tensor) -> Tensor | None:
    return tensor.grad if tensor.is_leaf else None


def _undo_container(value: Any, content: list[Any]) -> Undo:
    def undo() -> None:
        value.clear()
        if isinstance(value, dict):
            value.update(dict(content))
        else:
            (value.update if isinstance(value, set) else value.extend)(content)

    return undo


def _undo_array(array: Any, values: Any) -> Undo:
    def undo() -> None:
        if array.flags.writeable:
            array[...] = values

    return undo


def _undo_generator(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _undo_bits(bits: Any, state: Any) -> Undo:
    def undo() -> None:
        bits.state = state

    return undo
