"""State of a user's module that forwards and losses change, and that checks must restore.

It consists of gradients, buffers, attributes (counters, lists, tensors, and the contents of objects
of the user's classes), variables outside of the module that its functions use (outer_state.py),
training modes, and the generators of torch, Python and NumPy.
"""

import random
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from types import MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from outpace.nn.fingerprint import fingerprint
from outpace.parallel.parity.outer_state import OuterVariable, find_places
from outpace.parallel.plain import random_state, set_random_state

_INTERNAL = frozenset({*vars(nn.Module()), "forward"})
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip
_LIBRARIES = frozenset({"builtins", "functools", "numpy", "outpace", "torch"})
MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
SEQUENCES = (list, deque)
_GENERATORS = (random.Random, torch.Generator, np.random.Generator, np.random.RandomState)
_MOST_ENTRIES = 10_000  # longer containers are compared by length only
_MOST_NUMBERS = 1_000_000  # of larger tensors, only a sample of the values is compared

Undo = Callable[[], None]


class _Array(NamedTuple):
    """A tensor or an array, in a comparable form."""

    dtype: str
    shape: tuple[int, ...]
    fingerprint: int | None


class _GeneratorState(NamedTuple):
    """The state of a random generator, in a comparable form that ranks can send each other."""

    state: Any


class ModuleState:
    """A snapshot of a module's state, which can be restored any number of times.

    `attributes` returns the state at the time of its call, not the snapshot. The snapshot includes
    variables outside of the module that its functions use; these are found once, when the snapshot
    is made.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._places = module, find_places(module)
        self._parameters = list(module.parameters())
        undo = list(_list_undos(module, self._places, self._parameters))
        self._undo = [place.undo() for place in self._places] + [step for _, step in undo]
        self._undo_draws = [step for value, step in undo if isinstance(value, _GENERATORS)]

    @contextmanager
    def preserve(self, device: torch.device) -> Iterator[Callable[[], None]]:
        """Restore the state, all generators, and parameters' gradients and `requires_grad` on exit.

        Call the yielded function to keep the new state instead. Parameters have no gradients at the
        start of the context. Their values are not restored.
        """
        gradients = [(p, p.grad, p.requires_grad) for p in self._parameters]
        drawn = random_state(device)
        for parameter, _, _ in gradients:
            parameter.grad = None
        kept: list[bool] = []
        try:
            yield lambda: kept.append(True)
        finally:
            if not kept:
                with torch.no_grad():
                    for step in self._undo:
                        step()
                set_random_state(drawn, device)
                for parameter, gradient, trains in gradients:
                    if parameter.requires_grad != trains:
                        parameter.requires_grad_(trains)
                    parameter.grad = gradient

    def restore_draws(self) -> None:
        """Restore the random generators that belong to the module, and nothing else."""
        for step in self._undo_draws:
            step()

    def attributes(self, with_buffers: bool = True) -> dict[str, Any]:
        """Return the module's current state, in the form of `kept_attributes`."""
        return _list_attributes(self._module, self._places, with_buffers)


def preserve_state(
    module: nn.Module, device: torch.device
) -> AbstractContextManager[Callable[[], None]]:
    """Return a context that restores the module's state on exit (see `ModuleState.preserve`)."""
    return ModuleState(module).preserve(device)


def kept_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the state of a module with its loss that is in no checkpoint, by name.

    The state covers plain attributes, which are not parameters, buffers or submodules (numbers,
    tensors, generators, and the contents of containers and of objects of the user's classes). It
    also covers buffers that are not in checkpoints, and globals, class attributes and closure
    variables that functions in the user's files use. Values are in a comparable form. Unless a
    value is in a plain attribute, its name ends with its kind in parentheses.
    """
    return _list_attributes(module, find_places(module))


def _list_attributes(
    module: nn.Module, places: Iterable[OuterVariable], with_buffers: bool = True
) -> dict[str, Any]:
    parts = list(module.named_modules())
    seen = {id(part) for _, part in parts}
    found: dict[str, Any] = {}
    for name, part in parts:
        _add_attributes(part, name, found, seen)
        for buffer, tensor in part._buffers.items() if with_buffers else ():
            kind = unsaved_kind(module, name, part, buffer)
            if kind is not None:
                path = f"{name}.{buffer}" if name else buffer
                found[f"{path} ({kind})"] = _to_comparable(tensor, seen)
    for place in places:
        inside: dict[str, Any] = {}
        _add_value(place.get(), place.name, inside, seen)
        for name, value in inside.items():
            found[f"{name} ({place.kind})"] = value
    return found


def hidden_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of modules that are not registered as submodules, by name.

    An example is a teacher model in a list, which torch does not search for parameters.
    """
    known = {id(parameter) for _, parameter in nn.Module.named_parameters(module)}
    found = {}
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            if attribute in _INTERNAL or not isinstance(value, list | tuple | dict | nn.Module):
                continue
            for one in tree_leaves(value, is_leaf=lambda leaf: isinstance(leaf, nn.Module)):
                for path, parameter in one.named_parameters() if _is_eager_module(one) else ():
                    if id(parameter) not in known:
                        found[".".join(filter(None, (name, attribute, path)))] = parameter
    return found


def parameter_versions(named: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return each tensor's address and version counter, by name."""
    return {name: (one.data_ptr(), one._version) for name, one in named.items()}


def _is_eager_module(value: Any) -> bool:
    return isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule)


def buffer_versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the `id` and the version counter of each buffer, by name."""
    return {name: _buffer_version(one) for name, one in module.named_buffers()}


def _buffer_version(buffer: Tensor) -> tuple[int, int]:
    return id(buffer), -1 if buffer.is_inference() else buffer._version


def unsaved_kind(objective: nn.Module, name: str, part: nn.Module, buffer: str) -> str | None:
    """Return a phrase for why a buffer of an objective is not saved; None if it is saved.

    `part` is the module called `name` in the objective.
    """
    if buffer in part._non_persistent_buffers_set:
        return "a buffer with persistent=False"
    of_model = "model" not in objective._modules or name == "model" or name.startswith("model.")
    return None if of_model else "a buffer of the loss"


def _add_attributes(holder: Any, name: str, found: dict[str, Any], seen: set[int]) -> None:
    inherent = _INTERNAL if isinstance(holder, nn.Module) else ()
    for attribute, value in [one for one in vars(holder).items() if one[0] not in inherent]:
        _add_value(value, f"{name}.{attribute}" if name else attribute, found, seen)


def _add_value(value: Any, path: str, found: dict[str, Any], seen: set[int]) -> None:
    value = value.__self__ if isinstance(value, MethodType) else value
    if not (isinstance(value, nn.Module) or is_user_object(value)):
        found[path] = _to_comparable(value, seen)
    elif id(value) not in seen:
        seen.add(id(value))
        _add_attributes(value, path, found, seen)


def _to_comparable(value: Any, seen: set[int]) -> Any:
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return repr(value)
    if isinstance(value, nn.Parameter):
        return "a parameter"
    if isinstance(value, Tensor):
        return _Array(str(value.dtype), tuple(value.shape), fingerprint(_sample_elements(value)))
    if isinstance(value, np.ndarray):
        # not `hash`, which differs in each process
        found = None if is_constant(value) else zlib.crc32(_sample_elements(value).tobytes())
        return _Array(str(value.dtype), value.shape, found)
    if isinstance(value, random.Random):
        return _GeneratorState(zlib.crc32(repr(value.getstate()).encode()))  # see above
    if isinstance(value, torch.Generator):
        return _GeneratorState(fingerprint(value.get_state()))
    if isinstance(value, np.random.Generator):
        return _GeneratorState(repr(value.bit_generator.state))
    if isinstance(value, np.random.RandomState):
        return _GeneratorState(repr(value.get_state(legacy=False)))
    if isinstance(value, tuple) or type(value) in (*MAPPINGS, *SEQUENCES, set):
        return _container_to_comparable(value, seen)
    return type(value).__name__


def _sample_elements(value: Any) -> Any:
    """Return a tensor or an array, or evenly spaced elements of it if it is large.

    The stride is odd, so that the sample covers all columns of a table with 2^n columns.
    """
    size = value.numel() if isinstance(value, Tensor) else value.size
    if size <= _MOST_NUMBERS or (isinstance(value, Tensor) and value.layout != torch.strided):
        return value
    return value.reshape(-1)[:: size // _MOST_NUMBERS + 1 | 1]


def is_constant(array: Any) -> bool:
    """Return whether an array is never written to: memory-mapped or read-only."""
    return isinstance(array, np.memmap) or not array.flags.writeable


def is_generator(comparable: Any) -> bool:
    """Return whether a value in `kept_attributes` belongs to a random generator."""
    return isinstance(comparable, _GeneratorState)


def is_numeric(comparable: Any) -> bool:
    """Return whether a value in `kept_attributes` is a number, a tensor or an array."""
    if isinstance(comparable, str):
        with suppress(ValueError):
            complex(comparable)
            return True
    return isinstance(comparable, _Array)


def shapes_in(comparable: Any) -> Any:
    """Return the shapes of the tensors in the result of `kept_attributes`."""
    if isinstance(comparable, dict):
        return {name: shapes_in(one) for name, one in comparable.items()}
    if isinstance(comparable, _Array):
        return comparable.shape
    return tuple(map(shapes_in, comparable)) if isinstance(comparable, tuple) else None


def _container_to_comparable(value: Any, seen: set[int]) -> Any:
    if id(value) in seen or len(value) > _MOST_ENTRIES:
        return type(value).__name__, len(value)
    seen.add(id(value))
    if type(value) in MAPPINGS:
        # In brackets, so that a key that is a number is not mistaken for a value.
        return tuple((f"[{key!r}]", _entry_to_comparable(one, seen)) for key, one in value.items())
    if type(value) is set:
        return frozenset(map(repr, value))
    return tuple(_entry_to_comparable(one, seen) for one in value)


def _entry_to_comparable(value: Any, seen: set[int]) -> Any:
    if not (isinstance(value, nn.Module) or is_user_object(value)):
        return _to_comparable(value, seen)
    if id(value) in seen:
        return type(value).__name__
    seen.add(id(value))
    inside: dict[str, Any] = {}
    _add_attributes(value, "", inside, seen)
    return tuple(inside.items())


def _list_undos(
    module: nn.Module, places: Iterable[OuterVariable], parameters: Iterable[nn.Parameter]
) -> Iterator[tuple[Any, Undo]]:
    waiting: list[Any] = [*module.modules(), *(place.get() for place in places)]
    # Kept alive, so that ids are not reused.
    seen: dict[int, Any] = {id(p): p for p in parameters}
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, str | int | float | bool | None | nn.Parameter):
            continue
        seen[id(value)] = value
        found = _make_undo(value)
        if found is not None:
            yield value, found
        waiting.extend(_list_children(value))


def _list_children(value: Any) -> Iterable[Any]:
    if isinstance(value, nn.Module):
        attributes = [one for name, one in vars(value).items() if name not in _INTERNAL]
        return [*attributes, *value._buffers.values()]
    if type(value) in MAPPINGS:
        return list(value.values())
    if isinstance(value, tuple) or type(value) in SEQUENCES:
        return list(value)
    if isinstance(value, MethodType):
        return [value.__self__]
    return list(vars(value).values()) if is_user_object(value) else ()


def _make_undo(value: Any) -> Undo | None:
    """Return a function that restores the current content of a value.

    Returns None if the value cannot change in place.
    """
    if isinstance(value, nn.Module):
        return _make_module_undo(value)
    if isinstance(value, Tensor):
        return _make_tensor_undo(value)
    if type(value) in (*MAPPINGS, *SEQUENCES, set):
        return _make_items_undo(value, list(value.items() if type(value) in MAPPINGS else value))
    if isinstance(value, np.ndarray):
        return None if is_constant(value) else _make_array_undo(value, value.copy())
    if isinstance(value, random.Random):
        drawn = value.getstate()
        return lambda: value.setstate(drawn)
    if isinstance(value, torch.Generator):
        return partial(_set_generator_state, value, value.get_state())
    if isinstance(value, np.random.Generator):
        return _make_bits_undo(value.bit_generator, value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        numbers = value.get_state()
        return lambda: value.set_state(numbers)
    return _make_attributes_undo(value) if is_user_object(value) else None


def is_user_object(value: Any) -> bool:
    """Return whether an object's class is the user's, not one of the underlying libraries'."""
    if isinstance(value, type | ModuleType) or hasattr(type(value), "__code__"):
        return False
    library = type(value).__module__.partition(".")[0]
    return library not in _LIBRARIES and isinstance(getattr(value, "__dict__", None), dict)


def _make_attributes_undo(value: Any) -> Undo:
    before = dict(vars(value))

    def undo() -> None:
        held = vars(value)
        for name in held.keys() - before.keys():
            del held[name]
        held.update(before)

    return undo


def _make_module_undo(module: nn.Module) -> Undo:
    attributes, buffers = _make_attributes_undo(module), dict(module._buffers)
    if isinstance(module, torch.jit.ScriptModule):  # whose set of buffers is fixed
        return attributes
    hooks = [(held, dict(held)) for held in (getattr(module, name) for name in _HOOKS)]

    def undo() -> None:
        attributes()
        for held, before in hooks:  # hooks that a forward registers
            if held.keys() != before.keys():
                held.clear()
                held.update(before)
        module._buffers.clear()
        module._buffers.update(buffers)

    return undo


def _make_tensor_undo(tensor: Tensor) -> Undo | None:
    """Return a function that restores a tensor, without a write if it has not changed."""
    if tensor.is_meta or tensor.is_inference():
        return None
    values, version, gradient = tensor.detach().clone(), tensor._version, _leaf_gradient(tensor)

    def undo() -> None:
        nonlocal version
        if tensor._version != version or _is_changed(tensor, values):
            restore_values(tensor, values)
            version = tensor._version
        if _leaf_gradient(tensor) is not gradient:
            tensor.grad = gradient

    return undo


def restore_values(tensor: Tensor, values: Tensor) -> None:
    """Write values back to a tensor that a forward may have resized in place."""
    if tensor.shape != values.shape:
        tensor.resize_(values.shape)
    tensor.detach().copy_(values)


def _is_changed(tensor: Tensor, values: Tensor) -> bool:
    """Return whether a tensor's values differ from `values`, an earlier copy of them.

    This is for a tensor whose version counter has not changed, because writes through `.data` do
    not change it. The fingerprints of a few elements are compared first, then all elements.
    """
    some, some_before = fingerprint(_sample_elements(tensor)), fingerprint(_sample_elements(values))
    if tensor.numel() <= _MOST_NUMBERS or some is None or some != some_before:
        return some != some_before
    return not torch.equal(tensor, values)


def _leaf_gradient(tensor: Tensor) -> Tensor | None:
    return tensor.grad if tensor.is_leaf else None


def _make_items_undo(value: Any, content: list[Any]) -> Undo:
    def undo() -> None:
        value.clear()
        if isinstance(value, dict):
            value.update(dict(content))
        else:
            (value.update if isinstance(value, set) else value.extend)(content)

    return undo


def _make_array_undo(array: Any, values: Any) -> Undo:
    def undo() -> None:
        if array.flags.writeable:
            array[...] = values

    return undo


def _set_generator_state(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _make_bits_undo(bits: Any, state: Any) -> Undo:
    def undo() -> None:
        bits.state = state

    return undo
