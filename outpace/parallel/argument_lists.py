"""Preservation of list and dict arguments that a user's forward passes to sharded blocks.

The hooks of `fully_shard` rebuild a unit's arguments if its inputs require gradients, so the caller
would not see what a block appends to a list argument.
"""

from typing import Any

from torch import nn


def keep_argument_lists(unit: nn.Module) -> None:
    """Make a `fully_shard` module receive the lists and dicts that its caller passes.

    `fully_shard` would pass copies, so the caller would not see what the module adds to them.
    """
    given: list[tuple[Any, Any]] = []

    def remember_arguments(module: nn.Module, args: Any, kwargs: Any) -> None:
        given[:] = [(args, kwargs)]

    def restore_arguments(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not given:
            return None
        first, named = given.pop()
        if not any(isinstance(one, list | tuple | dict) for one in (*first, *named.values())):
            return None
        if len(first) != len(args) or set(named) != set(kwargs):  # changed by a user's hook
            return None
        return (
            tuple(_refill_containers(old, new) for old, new in zip(first, args, strict=True)),
            {name: _refill_containers(named[name], new) for name, new in kwargs.items()},
        )

    unit.register_forward_pre_hook(remember_arguments, prepend=True, with_kwargs=True)
    unit.register_forward_pre_hook(restore_arguments, with_kwargs=True)


def _refill_containers(old: Any, new: Any) -> Any:
    """Put the values of `new` into the lists and dicts of `old`, in place, and return the result.

    Returns `new` itself if the two differ in structure.
    """
    if old is new or type(old) is not type(new):
        return new
    if isinstance(old, list) and len(old) == len(new):
        old[:] = [_refill_containers(a, b) for a, b in zip(old, new, strict=True)]
        return old
    if isinstance(old, dict) and old.keys() == new.keys():
        for key, value in new.items():
            old[key] = _refill_containers(old[key], value)
        return old
    if type(old) is tuple and len(old) == len(new):
        return tuple(_refill_containers(a, b) for a, b in zip(old, new, strict=True))
    return new
