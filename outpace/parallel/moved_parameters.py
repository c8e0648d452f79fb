"""Parameters whose values a user's forward changes: clipped weights, teachers, max_norm.

torch counts a tensor's changes in `_version`, but not those through `.data`; and to look at all
values would need a copy of them. Here what operators write to is noticed as they run, and only
tensors that are written to are copied.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from outpace.nn.spread import local


class MovedParameters(TorchDispatchMode):
    """Notes which of named tensors are written to within it, and what they were before."""

    supports_higher_order_operators = True

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched: dict[int, list[tuple[str, Tensor]]] = {}
        for name, tensor in named:
            held = local(tensor).detach()
            if held.numel() and not held.is_meta:
                self._watched.setdefault(_memory(held), []).append((name, held))
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self.written: set[str] = set()  # also where the values have stayed as they were
        self.written_by_samples: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            self._keep(schema, args, kwargs, func is torch.ops.aten.embedding_renorm_.default)
        return func(*args, **kwargs)

    def _keep(
        self, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any], by_samples: bool
    ) -> None:
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for one in tree_leaves(given):
                leaf = local(one) if isinstance(one, Tensor) else one
                if _has_memory(leaf):
                    for name, held in self._watched.get(_memory(leaf), ()):
                        self.written.add(name)
                        if by_samples:
                            self.written_by_samples.add(name)
                        if name not in self._before:
                            self._before[name] = held, held.clone()

    def put_back(self) -> dict[str, Tensor]:
        """Let all be as before; returns the values that were there in between, by name."""
        moved = {name: held.clone() for name, held in self.changes().items()}
        for name in moved:
            held, before = self._before[name]
            held.copy_(before)
        self._before.clear()
        return moved

    def changes(self) -> dict[str, Tensor]:
        """Return the tensors that have other values than before, by name."""
        return {
            name: held
            for name, (held, before) in self._before.items()
            if not torch.equal(held, before)
        }

    @contextmanager
    def put_back_unless(self, kept: Callable[[], bool]) -> Iterator[None]:
        """Let all be as before afterwards, unless it is kept."""
        try:
            yield
        finally:
            if not kept():
                self.put_back()


@contextmanager
def keep_values(named: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
    """Let tensors have the values of before afterwards."""
    watch = MovedParameters(named)
    try:
        with watch:
            yield
    finally:
        watch.put_back()


def _has_memory(value: object) -> bool:
    """Whether it is a tensor of its own memory, which wrappers of tensors are not."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_meta
        and not is_traceable_wrapper_subclass(value)
    )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
