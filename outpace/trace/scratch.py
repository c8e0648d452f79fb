"""Offloading in a trace: what leaves the device's memory, without a disk or a second device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from outpace.nn.scratch import Region, Scratch
from outpace.optim import offload
from outpace.records.plan import Plan
from outpace.trace.device import Rules
from outpace.trace.watch import Watch


class _Nowhere(Region):
    """Takes no memory, and is never waited for."""

    def __init__(self) -> None:
        pass

    def prefetch(self) -> None:
        """Nothing is read."""

    def release(self) -> None:
        """Nothing is held."""


class Elsewhere(Scratch):
    """Memory that `watch` counts as offloaded, not as the device's."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def place(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Region]:
        """The tensors themselves, whose memory counts elsewhere from now on."""
        self._watch.move_away(tensors)
        return list(tensors), _Nowhere()

    def region_of(self, tensor: Tensor) -> Region | None:
        """Nothing has to be read ahead."""
        return None

    def lend(self, tensor: Tensor) -> tuple[Tensor, Region]:
        """A copy that lies elsewhere."""
        copied = torch.empty_like(tensor)
        self._watch.move_away([copied])
        return copied, _Nowhere()


def as_traced(plan: Plan, rules: Rules) -> Plan:
    """The plan with what the CPU refuses, since it is for a device: activations to the host."""
    if rules.device == "cpu" or plan.offload_activations != "cpu":
        return plan
    return plan.model_copy(update={"offload_activations": "disk"})


@contextmanager
def host_apart(watch: Watch, rules: Rules) -> Iterator[None]:
    """Within, what an offloaded optimizer copies to the host is no memory of the device."""
    if rules.device == "cpu":
        yield
        return

    def host_copy(lanes: Any, tensor: Tensor, wait: bool = False) -> Tensor:
        memory = torch.empty_like(tensor)
        watch.move_away([memory])
        return memory.copy_(tensor)

    with patch.object(offload._Lanes, "host_copy", host_copy):
        yield
