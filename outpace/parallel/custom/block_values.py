"""Values that a user's blocks store in attributes, such as an auxiliary loss in `self.aux`.

The model's forward or the loss may read them on another pipeline stage. An inspection with the
first batch finds which attributes and buffers a stage's blocks change (`changes`), and which of
them are read on other stages (`ReadLog`); those are sent along with the hidden states.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from outpace.nn.fingerprint import fingerprint
from outpace.records.errors import BadInputError

Key = tuple[str, str]  # names of a module and of its attribute
_MISSING = object()
_INTERNAL = frozenset({*vars(nn.Module()), "forward"})
_CONSTANTS = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class Form:
    """The structure of a value: the positions of its tensors, and its constants.

    Complex tensors are sent as real tensors, because not every backend supports complex numbers.
    """

    spec: TreeSpec
    constants: tuple[Any, ...]  # None where a tensor belongs
    tensors: tuple[bool, ...]
    complexes: tuple[bool, ...]  # for each tensor

    def join(self, tensors: Sequence[Tensor]) -> Any:
        """Rebuild the value from its tensors."""
        pairs = zip(tensors, self.complexes, strict=True)
        given = iter([torch.view_as_complex(t) if is_complex else t for t, is_complex in pairs])
        leaves = [
            next(given) if is_tensor else constant
            for is_tensor, constant in zip(self.tensors, self.constants, strict=True)
        ]
        return tree_unflatten(leaves, self.spec)


def split(value: Any) -> tuple[Form, list[Tensor]] | None:
    """Split a value into its form and its tensors; return None if part of it cannot be sent."""
    leaves, spec = tree_flatten(value)
    if not all(isinstance(leaf, (Tensor, *_CONSTANTS)) for leaf in leaves):
        return None
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    complexes = tuple(tensor.is_complex() for tensor in tensors)
    form = Form(spec, constants, tuple(isinstance(leaf, Tensor) for leaf in leaves), complexes)
    return form, [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]


def collect_values(modules: Mapping[str, nn.Module]) -> dict[Key, Any]:
    """Return the plain attributes and the buffers of modules, by module and attribute name."""
    found: dict[Key, Any] = {}
    for name, module in modules.items():
        for attribute, value in vars(module).items():
            if attribute not in _INTERNAL:
                found[name, attribute] = value
        for attribute, buffer in module._buffers.items():
            found[name, attribute] = buffer
    return found


Snapshot = dict[Key, tuple[Any, tuple[Any, ...]]]


def snapshot(modules: Mapping[str, nn.Module]) -> Snapshot:
    """Record the modules' attributes and buffers, for `changes` to compare with."""
    return {key: (value, _summarize_state(value)) for key, value in collect_values(modules).items()}


def _summarize_state(value: Any) -> tuple[Any, ...]:
    """Return a summary of a value that differs after a change in place, such as by list.append."""
    if isinstance(value, Tensor | list | tuple | dict):
        return tuple(
            (leaf, _version(leaf), fingerprint(leaf)) if isinstance(leaf, Tensor) else (leaf,)
            for leaf in tree_leaves(value)
        )
    return ()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def changes(before: Snapshot, modules: Mapping[str, nn.Module]) -> list[Key]:
    """List the attributes and buffers that have changed since the snapshot."""
    found: list[Key] = []
    for key, value in collect_values(modules).items():
        old, state = before.get(key, (_MISSING, ()))
        same = old is value or (isinstance(value, _CONSTANTS) and type(old) is type(value))
        if same and isinstance(value, _CONSTANTS):
            same = bool(old == value)
        if not (same and _is_same_state(state, _summarize_state(value))):
            found.append(key)
    return found


def _is_same_state(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    return len(old) == len(new) and all(
        a[0] is b[0] and a[1:] == b[1:] for a, b in zip(old, new, strict=True)
    )


class UnsentValue(Tensor):
    """A NaN placeholder for a block's value that is not sent to this stage.

    Operations on it add its key to `used`.
    """

    key: Key
    used: set[Key]

    @classmethod
    def make(cls, key: Key, used: set[Key]) -> "UnsentValue":
        """Create a placeholder for the value with this key."""
        made: UnsentValue = torch.tensor(math.nan).as_subclass(cls)
        made.key, made.used = key, used
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, cls):
                leaf.used.add(leaf.key)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class ReadLog:
    """A record of which module attributes are read; `found` has the keys of these attributes."""

    def __init__(self) -> None:
        self.found: set[Key] = set()

    @contextmanager
    def record_reads(self, keys: Iterable[Key], modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Record reads of the attributes `keys` inside the context.

        Meanwhile, the modules' classes are replaced by subclasses that record reads.
        """
        wanted: dict[nn.Module, dict[str, list[Key]]] = {}
        for key in keys:
            wanted.setdefault(modules[key[0]], {}).setdefault(key[1], []).append(key)
        classes = {module: type(module) for module in wanted}
        try:
            for module, attributes in wanted.items():
                properties = {
                    name: self._recording_property(name, same) for name, same in attributes.items()
                }
                kind = classes[module]
                module.__class__ = type(kind.__name__, (kind,), properties)
            yield
        finally:
            for module, kind in classes.items():
                module.__class__ = kind

    def _recording_property(self, attribute: str, keys: Sequence[Key]) -> property:
        def get(module: nn.Module) -> Any:
            self.found.update(keys)
            if attribute in vars(module):
                return vars(module)[attribute]
            if attribute in module._buffers:
                return module._buffers[attribute]
            raise AttributeError(f"{type(module).__name__!r} has no attribute {attribute!r}")

        def set_value(module: nn.Module, value: Any) -> None:
            if attribute in module._buffers:
                module._buffers[attribute] = value
            else:
                vars(module)[attribute] = value

        return property(get, set_value)


def set_value(modules: Mapping[str, nn.Module], key: Key, value: Any) -> None:
    """Set a value of a module as a buffer or a plain attribute."""
    module, attribute = modules[key[0]], key[1]
    if attribute in module._buffers:
        module._buffers[attribute] = value
    else:
        vars(module)[attribute] = value


def get(modules: Mapping[str, nn.Module], key: Key) -> tuple[Form, list[Tensor]]:
    """Return the value that a block stored. Raises BadInputError if it cannot be sent."""
    value = _stored_value(modules, key)
    found = split(value)
    if found is None:
        raise BadInputError(
            f"module {key[0]!r} stores a {type(value).__name__} in {key[1]!r}, "
            "which is read outside of its block, but pipeline stages can only send tensors and "
            "numbers, and lists and dicts of them. Store only these, or use zero3."
        )
    return found


def can_travel(modules: Mapping[str, nn.Module], key: Key) -> bool:
    """Return whether a value can be sent between stages: it has only tensors and constants."""
    return split(_stored_value(modules, key)) is not None


def is_constant(value: Any) -> bool:
    """Return whether a value is a number, a string or None."""
    return isinstance(value, _CONSTANTS)


def _stored_value(modules: Mapping[str, nn.Module], key: Key) -> Any:
    module, attribute = modules[key[0]], key[1]
    return vars(module).get(attribute, module._buffers.get(attribute))
