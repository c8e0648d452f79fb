"""Propagation of module settings that a user's loop changes to copies of the module.

For example, the loop may call `eval()` on dropout or a frozen BatchNorm, or lower a temperature in
each epoch.
"""

from collections.abc import Iterable, Iterator
from types import NoneType
from typing import Any

from torch import nn

_TYPES = (bool, int, float, str, NoneType)
_INTERNAL = frozenset({*vars(nn.Module()), "_compiled_call_impl"}) - {"training"}


class LoopSettings:
    """Copies settings that a user's loop changes on its `module` to the module's `copies`."""

    def __init__(self, module: nn.Module, copies: Iterable[nn.Module]) -> None:
        self._parts = list(module.modules())  # the copies have them too, in the same order
        self._copies = [list(one.modules()) for one in copies]
        self.note()

    def note(self) -> None:
        """Record the current settings, which must equal those of the copies."""
        self._known = [dict(_list_settings(part)) for part in self._parts] if self._copies else []

    def apply(self) -> None:
        """Set the copies' settings to those of the module that have changed since `note`."""
        for number, known in enumerate(self._known):
            part = self._parts[number]
            for name, value in _list_settings(part):
                if known[name] != value if name in known else _is_set_by_user(part, name):
                    for copied in self._copies:
                        setattr(copied[number], name, value)


def _is_set_by_user(part: nn.Module, name: str) -> bool:
    return not name.startswith("_") or hasattr(type(part), name)


def _list_settings(part: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(part).items()):
        if type(value) in _TYPES and name not in _INTERNAL:
            yield name, value
