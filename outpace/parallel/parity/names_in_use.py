"""Names in the code that a training step can reach: a module's forward, its hooks and its loss.

They reveal unused attributes without running code: a step does not read an attribute whose name
occurs in none of these functions. If the code looks up names dynamically (`getattr`, `vars`), it
may read any name.
"""

from collections.abc import Callable, Collection, Iterator
from functools import cached_property, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from outpace.parallel.parity.outer_state import is_user_file

_DYNAMIC = frozenset({"getattr", "vars", "__dict__", "__getattribute__", "eval", "exec", "locals"})
# Methods of nn.Module that no training step calls, even if overridden.
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

    A method counts as called if its name occurs in a called function, on whatever object.
    """

    def __init__(self, module: nn.Module, loss: Callable[..., Any] | None = None) -> None:
        self._loss = loss
        self._parts = [*module.modules(), *(loss.modules() if isinstance(loss, nn.Module) else ())]

    def may_read(self, name: str) -> bool:
        """Return whether any of the functions may read a variable or an attribute of this name."""
        return bool(self._names & _DYNAMIC) or name in self._names

    def mentions(self, name: str) -> bool:
        """Return whether this name occurs in the code of any of the functions."""
        return name in self._names

    @cached_property
    def _names(self) -> set[str]:
        names: set[str] = set()
        methods = self._list_methods()
        waiting = [*self._list_roots(), *(f for f in methods if _is_called_by_torch(f.__name__))]
        seen: dict[int, FunctionType] = {}
        while waiting:
            function = waiting.pop()
            if id(function) in seen:
                continue
            seen[id(function)] = function
            inside = set(_names_in(function.__code__))
            names |= inside
            waiting += [one for one in methods if one.__name__ in inside]
            waiting += _find_global_functions(function, inside)
            waiting += _find_functions(_list_defaults_and_closure(function))
        return names

    def _list_roots(self) -> list[FunctionType]:
        first: list[Any] = [self._loss]
        for part in self._parts:
            first += list(vars(part).values())
            first += [hook for kind in _HOOKS for hook in getattr(part, kind, {}).values()]
        return _find_functions(first)

    def _list_methods(self) -> list[FunctionType]:
        kinds = {kind for part in self._parts for kind in type(part).__mro__}
        return [
            function
            for kind in kinds
            if kind is not object and _package_of(kind) != "torch"
            for value in list(vars(kind).values())
            for function in _unwrap(value)
        ]


def _is_called_by_torch(name: str) -> bool:
    return name == "forward" or (name in vars(nn.Module) and name not in _NOT_CALLED)


def _unwrap(value: Any) -> Iterator[FunctionType]:
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
            inner = getattr(value, "__wrapped__", None)  # the function inside a decorator
            parts = (inner,) if inner is not None else ()
    for part in parts:
        yield from _unwrap(part)


def _find_functions(values: Collection[Any]) -> list[FunctionType]:
    """Return the functions among values, including the `__call__` of callable objects."""
    found = [function for value in values for function in _unwrap(value)]
    for value in values:
        if isinstance(value, nn.Module):  # such as a criterion
            kinds = {type(part) for part in value.modules() if _package_of(type(part)) != "torch"}
            found += [function for kind in kinds for function in _unwrap(kind.forward)]
            continue
        if isinstance(value, type) or not callable(value):
            continue
        call = getattr(type(value), "__call__", None)  # noqa: B004
        found += _unwrap(call)
        if isinstance(value, MethodType):
            found += [f for one in vars(type(value.__self__)).values() for f in _unwrap(one)]
    return found


def _find_global_functions(function: FunctionType, names: Collection[str]) -> list[FunctionType]:
    """Return the functions that these names refer to among a function's globals.

    The names are also looked up in modules of the user's files that the globals contain. Functions
    of other packages are left out: they do not refer to attributes of the user's classes.
    """
    values = [function.__globals__.get(name) for name in names]
    for value in list(values):
        if isinstance(value, ModuleType) and is_user_file(getattr(value, "__file__", None)):
            values += [vars(value).get(name) for name in names]
    return [
        one
        for one in _find_functions(values)
        if _package_of(one) == _package_of(function) or is_user_file(one.__code__.co_filename)
    ]


def _package_of(value: Any) -> str:
    return (value.__module__ or "").partition(".")[0]


def _list_defaults_and_closure(function: FunctionType) -> list[Any]:
    found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
    return found


def _names_in(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars, *code.co_cellvars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str):
            yield constant
