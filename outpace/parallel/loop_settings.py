"""Settings of a module that a user's loop changes, passed on to copies of the module.

Examples are `module.eval()` for dropout or a frozen BatchNorm, and a temperature that falls from
epoch to epoch.
"""

from collections.abc import Iterable, Iterator
from types import NoneType
from typing import Any

from torch import nn

_TYPES = (bool, int, float, str, NoneType)
_INTERNAL = frozenset({*vars(nn.Module()), "_compiled_call_impl"}) - {"training"}


class LoopSettings:
    """The settings of a user's `module`, whose changes its `copies` get."""

    def __init__(self, module: nn.Module, copies: Iterable[nn.Module]) -> None:
        self._parts = list(module.modules())  # those that the copies have, in the same order
        self._copies = [list(one.modules()) for one in copies]
        self.note()

    def note(self) -> None:
        """Record the current settings as those that the copies have."""
        self._known = [dict(_list_settings(part)) for part in self._parts] if self._copies else []

    def apply(self) -> None:
        """Give the copies the settings that have changed since `note`."""
        for number, known in enumerate(self._known):
            part = self._parts[number]
            for name, value in _list_settings(part):
                if known[name] != value if name in known else _is_of_user(part, name):
                    for copied in self._copies:
                        setattr(copied[number], name, value)


def _is_of_user(part: nn.Module, name: str) -> bool:
    """Return whether a new attribute of a module is not one of torch's own flags."""
    return not name.startswith("_") or hasattr(type(part), name)


def _list_settings(part: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(part).items()):
        if type(value) in _TYPES and name not in _INTERNAL:
            yield name, value
