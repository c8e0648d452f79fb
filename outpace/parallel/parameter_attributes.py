"""Preserve attributes that users set on parameters (`weight.mask`) when parameters are sharded.

`fully_shard` replaces each parameter with new ones: a shard, and a gathered one for the forward.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from outpace.nn.compiler_exclusion import leave_to_python
from outpace.parallel.tensors import user_attributes


class ParameterAttributes:
    """Attributes that the user has set on a module's parameters, recorded before it is sharded."""

    def __init__(self, module: nn.Module) -> None:
        self._found = {
            part: {n: user_attributes(p) for n, p in part._parameters.items() if p is not None}
            for part in module.modules()
        }

    def keep(self, units: Iterable[nn.Module]) -> None:
        """Set the attributes on a unit's gathered parameters before each of its forwards.

        Call this after sharding, so that these hooks run after those that gather parameters.
        """
        for unit in units:
            held = [
                (part._parameters, name, attributes)
                for part in unit.modules()
                for name, attributes in self._found.get(part, {}).items()
                if attributes
            ]
            if held:
                _set_attributes(held)
                unit.register_forward_pre_hook(
                    leave_to_python(lambda *_, held=held: _set_attributes(held))
                )


def _set_attributes(held: Iterable[tuple[dict[str, Any], str, dict[str, Any]]]) -> None:
    for register, name, attributes in held:
        vars(register[name]).update(attributes)
