"""An optimizer whose state is in host memory or on disk, and whose step runs on the CPU.

Ren et al., "ZeRO-Offload", arXiv 2101.06840, §4: master weights and moments stay on the host;
gradients are copied to the host, and new weights are copied back. Rajbhandari et al.,
"ZeRO-Infinity", arXiv 2104.07857, §5.2.2: the same with states on NVMe, chunk by chunk. Here, a
chunk is a unit of parameters that are updated together. While one unit is updated, the next unit's
gradients and state and the previous unit's weights are transferred. The arithmetic is that of the
optimizer without offloading, so the results are exactly the same.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from outpace.nn.dtensor import is_spread, local
from outpace.nn.scratch_files import Region, Scratch, prefetch, release
from outpace.optim.build import Build, Groups, fill_state
from outpace.records.errors import BadInputError
from outpace.records.plan import Plan

# Bytes per unit. If units were smaller, launching steps would cost more than transferring data.
UNIT_BYTES = 4 << 20


def with_offloading(build: Build, plan: Plan, scratch: Scratch) -> Build:
    """Return `build`, changed to offload what the plan says.

    If the plan offloads the optimizer or keeps parameters on disk, the result creates an
    `OffloadedOptimizer`.
    """
    if plan.offload_optimizer == "none" and plan.offload_parameters != "disk":
        return build
    disk = scratch if plan.offload_optimizer == "disk" else None

    def has_twin(parameter: Tensor) -> bool:
        """Return whether the optimizer updates a copy of the parameter on the host, its twin.

        A parameter on a GPU always has a twin. A parameter on a CPU has one only if the plan's
        `offload_optimizer` is "cpu" and its `offload_parameters` is "none".
        """
        asked = plan.offload_optimizer == "cpu" and plan.offload_parameters == "none"
        return asked or parameter.device.type != "cpu"

    return lambda groups: OffloadedOptimizer(groups, build, has_twin, disk, scratch)


def _with_local_memory(tensor: Tensor, memory: Tensor) -> Tensor:
    if not is_spread(tensor):
        return memory
    from torch.distributed.tensor import DTensor

    return DTensor(memory, tensor._spec, requires_grad=False)


def _stream_context(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _versions(parameter: Tensor) -> tuple[int, int]:
    """Return torch's version counters (numbers of writes) of a parameter and of its local shard."""
    return parameter._version, local(parameter)._version


@dataclass
class _CopyStreams:
    """Streams for copies to and from the host; None if parameters are not on a GPU."""

    device: torch.device
    down: torch.cuda.Stream | None = None
    up: torch.cuda.Stream | None = None

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            self.down, self.up = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

    def host_copy(self, tensor: Tensor, wait: bool = False) -> Tensor:
        """Copy a tensor to host memory, which is page-locked if the device is a GPU.

        The copy is asynchronous unless `wait` is set.
        """
        memory = torch.empty_like(tensor, device="cpu", pin_memory=self.down is not None)
        return memory.copy_(tensor, non_blocking=not wait)

    def begin(self) -> None:
        """Make later copies to the host wait for work launched so far, which computes gradients."""
        if self.down is not None:
            self.down.wait_stream(torch.cuda.current_stream(self.device))

    def end(self) -> None:
        """Make the GPU's later work wait until the new weights have been copied to the GPU."""
        if self.up is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.up)


@dataclass
class _Unit:
    """Parameters that are updated together, by a separate optimizer over their twins.

    The twin of a parameter is its copy on the host, or the parameter itself if it has no copy.
    `versions` are the parameters' version counters after the last step. If a counter has changed
    since, or if `reads_weights` is set, the parameter is copied to its twin before the next step.
    """

    parameters: Sequence[Tensor]
    twins: Sequence[Tensor]
    inner: torch.optim.Optimizer
    streams: _CopyStreams
    regions: Sequence[Region]
    versions: list[tuple[int, int]] = field(default_factory=list)
    reads_weights: bool = False
    _arrived: torch.cuda.Event | None = None

    def fetch(self) -> None:
        """Start the transfers that the unit's next step needs.

        These read the unit's data on disk, and copy gradients and changed weights to the host.
        """
        prefetch(self.regions)
        with _stream_context(self.streams.down):
            for number, (parameter, twin) in enumerate(self._pairs_with_twins()):
                if self.reads_weights or _versions(parameter) != self.versions[number]:
                    local(twin).copy_(local(parameter), non_blocking=True)
                gradient = parameter.grad
                if gradient is not None:
                    memory = self.streams.host_copy(local(gradient))
                    twin.grad = _with_local_memory(gradient, memory)
        self.reads_weights = False
        if self.streams.down is not None:
            self._arrived = self.streams.down.record_event()

    def step(self, group: dict[str, Any]) -> None:
        """Update the twins with the settings of `group`, and start copying them to parameters."""
        for own in self.inner.param_groups:
            own.update({name: value for name, value in group.items() if name != "params"})
        if self._arrived is not None:
            self._arrived.synchronize()
        self.inner.step()
        with _stream_context(self.streams.up):
            for number, (parameter, twin) in enumerate(self._pairs_with_twins()):
                if twin.grad is not None:
                    local(parameter).copy_(local(twin), non_blocking=True)
                    twin.grad = None
                self.versions[number] = _versions(parameter)
        release(self.regions)

    def _pairs_with_twins(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield (parameter, twin) for the parameters that have a separate twin."""
        both = zip(self.parameters, self.twins, strict=True)
        return ((p, twin) for p, twin in both if p is not twin)


class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is in host memory or on disk.

    `build` creates the optimizers that compute the updates. `has_twin` returns whether a parameter
    is updated through a copy on the host, its twin. `disk` stores states and twins (None: host
    memory). `scratch` tells which parameters are on disk. To its user, this is the optimizer
    without offloading: the groups have the model's parameters, which are also the keys of `state`.
    """

    def __init__(
        self,
        groups: Groups,
        build: Build,
        has_twin: Callable[[Tensor], bool],
        disk: Scratch | None,
        scratch: Scratch,
    ) -> None:
        like = build(groups)  # fills in options that are missing in the groups
        closure = inspect.signature(type(like).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise BadInputError(
                f"{type(like).__name__} evaluates the loss in its step, with all weights, but an "
                "offloaded optimizer steps some parameters at a time. Leave out offload_optimizer "
                "and offload_parameters, or use another optimizer."
            )
        held = list(chain.from_iterable(group["params"] for group in like.param_groups))
        self._streams = _CopyStreams(held[0].device if held else torch.device("cpu"))
        self._build, self._has_twin = build, has_twin
        self._disk, self._scratch = disk, scratch
        self._units: list[list[_Unit]] = []  # of each group
        super().__init__(like.param_groups, like.defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch's optimizers do, and split it into units."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        self._units.append([self._make_unit(added, part) for part in _units_of(added["params"])])

    @torch.no_grad()
    def _make_unit(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> _Unit:
        twins = [self._make_twin(p) if self._has_twin(p) else p for p in parameters]
        inner = self._build([{**group, "params": twins}])
        regions = [r for p in parameters if (r := self._scratch.region_of(local(p)))]
        fill_state(inner)
        if self._disk is not None:
            regions.append(self._move_to_disk(parameters, twins, inner, self._disk))
        for parameter, twin in zip(parameters, twins, strict=True):
            self.state[parameter] = inner.state[twin]
        release(regions)
        versions = [_versions(p) for p, twin in zip(parameters, twins, strict=True)
                    if twin is not p]  # fmt: skip
        return _Unit(parameters, twins, inner, self._streams, regions, versions)

    def _make_twin(self, parameter: Tensor) -> Tensor:
        memory = self._streams.host_copy(local(parameter), wait=True)
        return nn.Parameter(_with_local_memory(parameter.detach(), memory))

    def _move_to_disk(
        self,
        parameters: Sequence[Tensor],
        twins: Sequence[Tensor],
        inner: torch.optim.Optimizer,
        disk: Scratch,
    ) -> Region:
        states = [
            (state, key, tensor)
            for state in inner.state.values()
            for key, tensor in state.items()
            if isinstance(tensor, Tensor) and tensor.ndim
        ]
        copies = [t for p, t in zip(parameters, twins, strict=True) if t is not p]
        old = [local(tensor) for tensor in (*copies, *(tensor for *_, tensor in states))]
        placed, region = disk.copy_permanently(old)
        for twin, memory in zip(copies, placed, strict=False):
            local(twin).data = memory
        for (state, key, tensor), memory in zip(states, placed[len(copies) :], strict=True):
            state[key] = _with_local_memory(tensor, memory)
        return region

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update one unit of parameters after the other, and transfer the next one meanwhile."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        waiting = [
            (unit, group)
            for group, units in zip(self.param_groups, self._units, strict=True)
            for unit in units
            if any(parameter.grad is not None for parameter in unit.parameters)
        ]
        self._streams.begin()
        if waiting:
            waiting[0][0].fetch()
        for number, (unit, group) in enumerate(waiting, 1):
            if number < len(waiting):
                waiting[number][0].fetch()
            unit.step(group)
        self._streams.end()
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the loaded values into this optimizer's memory."""
        groups = state_dict["param_groups"]
        for own, saved in zip(self.param_groups, groups, strict=True):
            own.update({name: value for name, value in saved.items() if name != "params"})
            for parameter, number in zip(own["params"], saved["params"], strict=True):
                for key, value in state_dict["state"].get(number, {}).items():
                    self._load_value(self.state[parameter], key, value)
        release(region for units in self._units for unit in units for region in unit.regions)
        self.read_weights()  # checkpoints are loaded into shards without a new version

    def read_weights(self) -> None:
        """Make the next step copy all weights to their twins first, whoever has changed them.

        Without this call, a step copies only the weights whose version counter has changed. This
        misses writes through `.data`, and writes to a shard through another DTensor (as in loading
        a checkpoint).
        """
        for unit in chain.from_iterable(self._units):
            unit.reads_weights = True

    def _load_value(self, state: dict[str, Any], key: str, value: Any) -> None:
        mine = state.get(key)
        if not isinstance(mine, Tensor):
            state[key] = value.to("cpu", copy=True) if isinstance(value, Tensor) else value
        elif mine is not value:
            mine.copy_(value)


def _units_of(parameters: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Split parameters into consecutive units of at least `UNIT_BYTES`; the last may be smaller."""
    part: list[Tensor] = []
    for parameter in parameters:
        part.append(parameter)
        if sum(local(p).nbytes for p in part) >= UNIT_BYTES:
            yield part
            part = []
    if part:
        yield part
