"""Variables outside of a user's module that its functions and its loss use and may change.

These are globals of the user's files that code refers to, attributes of the user's classes and
functions, closure variables, and default arguments. Installed packages are left out.
"""

import builtins
import dis
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

from torch import nn

_ABSENT = "absent"
# Types of most module attributes, none of which are functions.
_DATA = frozenset({bool, int, float, str, NoneType, dict, OrderedDict, list, tuple, set})
# LOAD_NAME occurs in class bodies; the last one is new in Python 3.12.
_GLOBALS = frozenset(
    {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
)
_PACKAGE = Path(__file__).resolve().parents[2]  # outpace's own package


@dataclass(frozen=True)
class OuterVariable:
    """A variable outside of a module. `kind` is a phrase for messages, and `put` sets its value."""

    name: str
    kind: str
    get: Callable[[], Any]
    put: Callable[[Any], None]

    def undo(self) -> Callable[[], None]:
        """Return a function that restores the current value."""
        return partial(self.put, self.get())


def find_places(module: nn.Module, loss: Callable[..., Any] | None = None) -> list[OuterVariable]:
    """Return all variables that functions of a module, its submodules, hooks and loss can use.

    Pass the `loss` of a user's module; an objective has its loss as an attribute.
    """
    walk = _CodeTraversal()
    walk.visit(loss)
    for part in module.modules():
        walk.visit(type(part))
        for value in list(vars(part).values()):
            if type(value) not in _DATA:
                walk.visit(value)
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            for hook in hooks.values():
                walk.visit(hook)
    return walk.places


class _CodeTraversal:
    """A search for variables in all code that some functions refer to.

    `places` has the variables that were found.
    """

    def __init__(self) -> None:
        self.places: list[OuterVariable] = []
        self._seen: dict[int, Any] = {}  # kept alive, so that ids are not reused
        self._variables: set[tuple[int, str]] = set()

    def visit(self, value: Any) -> None:
        value = value.func if isinstance(value, partial) else value
        if isinstance(value, MethodType):
            self.visit(type(value.__self__))
            value = value.__func__
        if id(value) in self._seen:
            return
        if isinstance(value, FunctionType):
            self._seen[id(value)] = value
            if is_user_file(value.__code__.co_filename):
                self._add_function(value)
        elif isinstance(value, type):
            self._seen[id(value)] = value
            for one in value.__mro__:
                if one is value:
                    self._add_class(one)
                else:
                    self.visit(one)
        elif type(value).__module__ != "builtins" and callable(value):
            self.visit(type(value))

    def _add_class(self, kind: type) -> None:
        functions = list(_list_functions(kind))
        if not any(is_user_file(function.__code__.co_filename) for function in functions):
            return
        for function in functions:
            self.visit(function)
        for name, value in list(vars(kind).items()):
            if not name.startswith("__") and not _is_code(value):
                self._add_attribute(kind, name, f"{kind.__name__}.{name}", "of the class")

    def _add_function(self, function: FunctionType) -> None:
        for name in _globals_in(function.__code__):
            self._add_variable(function.__globals__, name, function.__code__.co_filename)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._add_cell(cell, name, function.__name__)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if not _is_code(value):
                where = f"a default argument of {function.__name__}"
                self.places.append(
                    OuterVariable("state", where, partial(_identity, value), _keep_default)
                )
        for name in list(vars(function)):
            self._add_attribute(function, name, f"{function.__name__}.{name}", "of the function")

    def _add_variable(self, namespace: dict[str, Any], name: str, file: str) -> None:
        """Add a global variable that code refers to.

        If the variable is a Python module of the user, add all of that module's variables. If it is
        a function or a class, visit its code.
        """
        if (id(namespace), name) in self._variables:
            return
        if name not in namespace and hasattr(builtins, name):
            return
        self._variables.add((id(namespace), name))
        value = namespace.get(name, _ABSENT)
        if isinstance(value, ModuleType):
            inside = vars(value)
            if is_user_file(getattr(value, "__file__", None)) and inside is not namespace:
                for one in list(inside):
                    if not one.startswith("__"):
                        self._add_variable(inside, one, str(value.__file__))
        elif _is_code(value):
            self.visit(value)
        elif not name.startswith("__"):
            kind = f"a global of {Path(file).name}"
            get, put = partial(namespace.get, name, _ABSENT), partial(_put_global, namespace, name)
            self.places.append(OuterVariable(name, kind, get, put))

    def _add_cell(self, cell: Any, name: str, function: str) -> None:
        if id(cell) in self._seen:
            return
        self._seen[id(cell)] = cell
        try:
            value = cell.cell_contents
        except ValueError:  # an empty cell
            return
        if _is_code(value):
            self.visit(value)
        else:
            kind = f"a closure variable of {function}"
            get = partial(getattr, cell, "cell_contents")
            self.places.append(
                OuterVariable(name, kind, get, partial(setattr, cell, "cell_contents"))
            )

    def _add_attribute(self, holder: Any, attribute: str, name: str, kind: str) -> None:
        get, put = (
            partial(_get_attribute, holder, attribute),
            partial(_put_attribute, holder, attribute),
        )
        self.places.append(OuterVariable(name, kind, get, put))


def _list_functions(kind: type) -> Iterator[FunctionType]:
    for value in list(vars(kind).values()):
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        for function in (value.fget, value.fset) if isinstance(value, property) else (value,):
            if isinstance(function, FunctionType):
                yield function


def _is_code(value: Any) -> bool:
    described = isinstance(value, staticmethod | classmethod | property)
    return described or isinstance(value, FunctionType | MethodType | type | ModuleType | partial)


@cache
def _globals_in(code: CodeType) -> tuple[str, ...]:
    used = [one.argval for one in dis.get_instructions(code) if one.opname in _GLOBALS]
    inner = [_globals_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return tuple(dict.fromkeys([*used, *(name for names in inner for name in names)]))


def _put_global(namespace: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        namespace.pop(name, None)
    elif namespace.get(name, _ABSENT) is not value:
        namespace[name] = value


def _get_attribute(holder: Any, attribute: str) -> Any:
    return vars(holder).get(attribute, _ABSENT)


def _put_attribute(holder: Any, attribute: str, value: Any) -> None:
    if _get_attribute(holder, attribute) is value:
        return
    if value is _ABSENT:
        delattr(holder, attribute)
    else:
        setattr(holder, attribute, value)


def _identity(value: Any) -> Any:
    return value


def _keep_default(value: Any) -> None:
    """Leave a default argument as it is, because calling a function does not replace it."""


@cache
def is_user_file(name: str | None) -> bool:
    """Return whether a file is the user's, not an installed package's, Python's or outpace's."""
    if name is None or name.startswith(("<frozen", "<string")):
        return False
    paths = sysconfig.get_paths()
    roots = [Path(paths[kind]).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    path = Path(name).resolve()
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(path.is_relative_to(root) for root in [*roots, _PACKAGE])
