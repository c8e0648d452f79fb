"""Modes and plain numbers of a module that a user's loop may set, for copies of the module.

Examples are `module.eval()` for dropout or a frozen BatchNorm, and a temperature that falls from
epoch to epoch.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

_TYPES = (bool, int, float, str)


class LoopSettings:
    """The settings of a user's `module`, which `copies` of it get when the user changes them."""

    def __init__(self, module: nn.Module, copies: Iterable[nn.Module]) -> None:
        self._parts = list(module.modules())
        self._copies = [list(one.modules()) for one in copies]
        self.note()

    def note(self) -> None:
        """Record the current settings as those that the copies have."""
        self._known = [dict(_list_settings(part)) for part in self._parts] if self._copies else []

    def apply(self) -> None:
        """Give the copies the settings that have changed since `note`."""
        for number, known in enumerate(self._known):
            for name, value in _list_settings(self._parts[number]):
                if name not in known or known[name] != value:
                    for copied in self._copies:
                        setattr(copied[number], name, value)


def copy_settings(parts: Sequence[nn.Module], copied: nn.Module) -> None:
    """Give a copy the settings of the `parts` that it was copied from, in order."""
    for part, own in zip(parts, copied.modules(), strict=True):
        for name, value in _list_settings(part):
            if type(vars(own).get(name)) in _TYPES and vars(own)[name] != value:
                setattr(own, name, value)


def _list_settings(part: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in list(vars(part).items()) if type(value) in _TYPES)
