"""Names that a training step can read: those in the code of a module's forward and of its loss.

Code tells what is never read without running it: an attribute whose name is in no function that a
forward, a hook or the loss can reach is read by none of them. Where code looks names up while it
runs (`getattr`, `vars`), any name may be read.
"""

from collections.abc import Callable, Collection, Iterator
from functools import cached_property, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

_DYNAMIC = frozenset({"getattr", "vars", "__dict__", "__getattribute__", "eval", "exec", "locals"})
# Overridden methods of nn.Module that no step of training calls.
_NOT_CALLED = frozenset(
    {"__init__", "__repr__", "extra_repr", "__dir__", "__doc__", "__setattr__", "__delattr__"}
)
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip


class NamesInUse:
    """Names in the functions that a module's forward, its hooks and its loss can call.

    A function counts as called if its name occurs in one that does, whatever it belongs to.
    """

    def __init__(self, module: nn.Module, loss: Callable[..., Any] | None = None) -> None:
        self._module, self._loss = module, loss

    def may_read(self, name: str) -> bool:
        """Return whether any of the functions may read a variable or an attribute of this name."""
        return bool(self._names & _DYNAMIC) or name in self._names

    def mentions(self, name: str) -> bool:
        """Return whether any of the functions has this name in its code."""
        return name in self._names

    @cached_property
    def _names(self) -> set[str]:
        names: set[str] = set()
        methods = self._list_methods()
        waiting = [*self._list_first(), *(f for f in methods if _is_called_by_torch(f.__name__))]
        seen: dict[int, FunctionType] = {}
        while waiting:
            function = waiting.pop()
            if id(function) in seen:
                continue
            seen[id(function)] = function
            inside = set(_names_in(function.__code__))
            names |= inside
            waiting += [one for one in methods if one.__name__ in inside]
            waiting += _functions_among(
                [*_list_globals(function, inside), *_list_enclosed(function)]
            )
        return names

    def _list_first(self) -> list[FunctionType]:
        """Return the loss, the hooks, and the functions in attributes of parts."""
        first: list[Any] = [self._loss]
        for part in self._module.modules():
            first += list(vars(part).values())
            first += [hook for kind in _HOOKS for hook in getattr(part, kind, {}).values()]
        return _functions_among(first)

    def _list_methods(self) -> list[FunctionType]:
        """Return the functions of the parts' classes, except of torch's own."""
        kinds = {kind for part in self._module.modules() for kind in type(part).__mro__}
        return [
            function
            for kind in kinds
            if kind is not object and kind.__module__.partition(".")[0] != "torch"
            for value in list(vars(kind).values())
            for function in _functions_in(value)
        ]


def _is_called_by_torch(name: str) -> bool:
    return name == "forward" or (hasattr(nn.Module, name) and name not in _NOT_CALLED)


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """Yield the functions of a method, a property, or a function with arguments bound to it."""
    if isinstance(value, property):
        parts: Collection[Any] = (value.fget, value.fset)
    elif isinstance(value, staticmethod | classmethod | MethodType):
        parts = (value.__func__,)
    elif isinstance(value, partial):
        parts = (value.func,)
    else:
        parts = ()
        if isinstance(value, FunctionType):
            yield value
            inner = getattr(value, "__wrapped__", None)  # of a decorator
            parts = (inner,) if inner is not None else ()
    for part in parts:
        yield from _functions_in(part)


def _functions_among(values: Collection[Any]) -> list[FunctionType]:
    """Return functions, and those of objects that are called like functions."""
    found = [function for value in values for function in _functions_in(value)]
    for value in values:
        if isinstance(value, nn.Module | type) or not callable(value):
            continue
        call = getattr(type(value), "__call__", None)  # noqa: B004
        found += _functions_in(call)
        if isinstance(value, MethodType):
            found += [f for one in vars(type(value.__self__)).values() for f in _functions_in(one)]
    return found


def _list_globals(function: FunctionType, names: Collection[str]) -> list[Any]:
    package = (function.__module__ or "").partition(".")[0]
    found = []
    for name in names:
        value = function.__globals__.get(name)
        # A library's function does not know the attributes of the user's classes.
        if (getattr(value, "__module__", None) or "").partition(".")[0] == package:
            found.append(value)
    return found


def _list_enclosed(function: FunctionType) -> list[Any]:
    found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # nothing in it yet
            continue
    return found


def _names_in(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars, *code.co_cellvars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str):
            yield constant
