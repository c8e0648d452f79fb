"""Attributes that users set on parameters (`weight.mask`), for parameters that are sharded.

`fully_shard` creates new parameters: shards, and whole parameters that a forward uses.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from outpace.nn.compiler_exclusion import leave_to_python
from outpace.parallel.tensors import user_attributes


class ParameterAttributes:
    """Attributes of a module's parameters, recorded before it is sharded."""

    def __init__(self, module: nn.Module) -> None:
        self._found = {
            part: {n: user_attributes(p) for n, p in part._parameters.items() if p is not None}
            for part in module.modules()
        }

    def keep(self, units: Iterable[nn.Module]) -> None:
        """Set the attributes on the parameters that the forwards of sharded units use.

        Call it after sharding: hooks registered then run when a unit's parameters have been
        gathered.
        """
        for unit in units:
            held = [
                (part._parameters, name, attributes)
                for part in unit.modules()
                for name, attributes in self._found.get(part, {}).items()
                if attributes
            ]
            if held:
                _set(held)
                unit.register_forward_pre_hook(leave_to_python(lambda *_, held=held: _set(held)))


def _set(held: Iterable[tuple[dict[str, Any], str, dict[str, Any]]]) -> None:
    for register, name, attributes in held:
        vars(register[name]).update(attributes)
