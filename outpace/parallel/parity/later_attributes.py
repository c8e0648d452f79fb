"""Values that a module's attributes may have many steps later: larger counters, longer lists."""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from outpace.parallel.parity.module_state import MAPPINGS, SEQUENCES, is_constant
from outpace.parallel.parity.outer_state import find_places

_MOST_COUNTERS = 100  # in longer containers, entries are not considered counters
_VARIED = 1.125  # the factor of a list's new entries
_MOST_ADDED_BYTES = 1 << 28  # limit on the size of tensors in a list's new entries together


def change_counters(module: nn.Module, name: str, change: Callable[[Any], Any]) -> bool:
    """Apply `change` to the integers in an attribute; return whether there are any.

    `name` is as in `kept_attributes`. Single-element tensors and arrays, floats without a fraction,
    and entries of dicts and lists count as well.
    """
    return bool(
        sum(_change_integers(value, put, change) for value, put in _find_values(module, name))
    )


def has_lists(module: nn.Module, name: str) -> bool:
    """Return whether the attribute `name` is a list or may contain lists."""
    values = (value for value, _ in _find_values(module, name))
    return any(type(value) in (*SEQUENCES, *MAPPINGS) for value in values)


def lengthen_lists(module: nn.Module, name: str, entries: int) -> bool:
    """Append copies of the last entry to the lists in an attribute; return whether there are any.

    Floating-point numbers and tensors are slightly larger in the copies. Of large tensors, fewer
    than `entries` copies are appended.
    """
    values = [value for value, _ in _find_values(module, name)]
    values += [one for value in values if type(value) in MAPPINGS for one in value.values()]
    lists = [one for one in values if type(one) in SEQUENCES and one]
    for one in lists:
        tensors = [leaf for leaf in tree_leaves(one[-1]) if isinstance(leaf, Tensor)]
        most = _MOST_ADDED_BYTES // max(sum(leaf.nbytes for leaf in tensors), 1)
        one.extend([_enlarge(one[-1])] * min(entries, most))
    return bool(lists)


def _enlarge(entry: Any) -> Any:
    floating = isinstance(entry, Tensor) and entry.is_floating_point()
    return entry * _VARIED if floating or type(entry) is float else entry


def _find_values(module: nn.Module, name: str) -> list[tuple[Any, Callable[[Any], None]]]:
    """Return the values called `name` in `kept_attributes`, each with a function to replace it."""
    places = [p for p in find_places(module) if name == f"{p.name} ({p.kind})"]
    if places:
        return [(place.get(), place.put) for place in places]
    *holders, attribute = name.partition(" (")[0].split(".")
    holder: Any = module
    for one in holders:
        holder = vars(holder).get(one, getattr(holder, one, None))
    return [(getattr(holder, attribute, None), partial(setattr, holder, attribute))]


def _change_integers(value: Any, put: Callable[[Any], None], change: Callable[[Any], Any]) -> bool:
    """Apply `change` to all integers in a value; return whether there are any.

    A container or tensor is changed in place; a number is replaced by calling `put`.
    """
    if type(value) in (*MAPPINGS, *SEQUENCES):
        keys = list(value) if type(value) in MAPPINGS else range(len(value))
        if len(value) > _MOST_COUNTERS:
            return False
        return bool(
            sum(_change_integers(value[k], partial(value.__setitem__, k), change) for k in keys)
        )
    if isinstance(value, Tensor | np.ndarray):
        if isinstance(value, nn.Parameter) or math.prod(value.shape) != 1:
            return False
        number = value.item()
        if not _is_whole(number) or (isinstance(value, np.ndarray) and is_constant(value)):
            return False
        with torch.no_grad(), suppress(RuntimeError, OverflowError):  # too large for uint8
            value[...] = change(number)
            return True
        return False
    if not (_is_whole(value) or isinstance(value, np.integer)):
        return False
    put(type(value)(change(value)))
    return True


def _is_whole(value: Any) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())
