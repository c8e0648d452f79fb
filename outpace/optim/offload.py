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
    """Return `build`, wrapped if the plan offloads the optimizer or keeps parameters on disk."""
    if plan.offload_optimizer == "none" and plan.offload_parameters != "disk":
        return build
    disk = scratch if plan.offload_optimizer == "disk" else None

    def has_twin(parameter: Tensor) -> bool:
        """Return whether a parameter is updated through a copy on the host, its twin.

        A parameter on a CPU has a twin only if the plan offloads the optimizer to host memory and
        does not offload parameters.
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
    """Return the numbers of writes to a parameter and to its local part, which count separately."""
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
        """Return a copy of a tensor in host memory, which is page-locked if the device is a GPU.

        The copy is asynchronous unless `wait` is set.
        """
        memory = torch.empty_like(tensor, device="cpu", pin_memory=self.down is not None)
        return memory.copy_(tensor, non_blocking=not wait)

    def begin(self) -> None:
        """Make copies to the host wait for the work launched so far, which computes gradients."""
        if self.down is not None:
            self.down.wait_stream(torch.cuda.current_stream(self.device))

    def end(self) -> None:
        """Make work that is launched later wait for the new weights."""
        if self.up is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.up)


@dataclass
class _Unit:
    """Parameters that are updated together, by a separate optimizer over their twins.

    A twin is the parameter's copy on the host, or the parameter itself if it has no copy. If
    something else than the last step wrote to a parameter, as far as `versions` tell, or if
    `reads_weights` is set, the parameter is first copied to its twin.
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
        """Prefetch from disk, and start copying gradients and changed weights to the host."""
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
        """Step the twins with the group's settings, and start copying the weights back."""
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
    """The optimizer that `build` creates from `groups`, with its state in host memory or on disk.

    `has_twin` returns whether a parameter is updated through a copy on the host. `disk` stores
    states and copies (None: host memory). `scratch` knows which parameters are on disk. The
    interface is that of the optimizer without offloading: groups have the model's parameters, which
    are also the keys of `state`.
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
        """Add a group of parameters, with its own units, as torch's optimizers do."""
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
        """Update the units one after the other, and transfer the next unit during each update."""
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
        """Make the next step begin with the parameters' present values, whoever wrote them.

        Not all writes are noticed: versions count neither those to a shard that is reached from
        another DTensor, as when a checkpoint is loaded, nor those through `.data`.
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
    """Split parameters into consecutive parts of at least `UNIT_BYTES`, except the last."""
    part: list[Tensor] = []
    for parameter in parameters:
        part.append(parameter)
        if sum(local(p).nbytes for p in part) >= UNIT_BYTES:
            yield part
            part = []
    if part:
        yield part
