"""Dispatch mode that records allocations and frees per operator, and what the memory is for."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from outpace.records.memory import Kind, Part
from outpace.trace.device import Rules
from outpace.trace.operator_workspace import FLOPS, TemporaryBytes

_SHAPES = "_propagate_tensor_meta_non_cached"
_CASTS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)
# Namespaces of operators that allocate memory for communication between ranks.
_COMMUNICATION = ("c10d", "_c10d_functional", "fsdp")


@dataclass(eq=False, slots=True)
class TrackedStorage:
    """A storage from its allocation to its release. `kind` is the use of its memory."""

    nbytes: int
    module: str
    kind: Kind | None = None
    lives: bool = True


@dataclass(slots=True)
class Change:
    """Memory allocated (`sign` 1) or freed (-1) by an operator in a module."""

    sign: int
    storage: TrackedStorage
    operator: str
    module: str


@dataclass
class Segment:
    """Memory changes, FLOPs and bytes moved in one part of a step."""

    step: int
    part: Part
    changes: list[Change] = field(default_factory=list)
    flops: int = 0
    bytes_moved: int = 0


class AllocationTracer(TorchDispatchMode):
    """Dispatch mode that records every storage from its allocation until it is freed.

    It covers the thread that enters it, including backward passes that run in this thread, as they
    do on a CPU. It cannot see memory that a kernel allocates and frees internally; `rules` supply
    that for some kernels. `freed_elsewhere` is called with the address of memory that another
    thread frees, such as a collective's thread that holds the last reference to a buffer.
    """

    def __init__(
        self, rules: Rules | None = None, freed_elsewhere: Callable[[int], None] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._freed_elsewhere = freed_elsewhere
        self._thread = threading.get_ident()
        self.segments: list[Segment] = []
        self._rules = rules or Rules()
        self._now = Segment(0, "prepare")
        self._step = 0
        self._tracked: dict[int, tuple[TrackedStorage, Any]] = {}
        self._names: dict[int, str] = {}
        self._entered: list[str] = []
        self._operator_bytes = TemporaryBytes(self._rules.accelerator is None)
        self._operator = self._module = ""
        self._ignores = self._on_host = False
        self._parameters: list[nn.Parameter] = []

    def register(self, root: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        """Register modules by their names within `root`, and track the given parameters."""
        self._names |= {id(module): name for name, module in root.named_modules() if name}
        self._parameters = list(parameters)
        self.classify(self._parameters, "weights")
        for name, module in root.named_modules():
            for parameter in module.parameters(recurse=False):
                for storage in _storages(parameter):
                    self._track(storage).module = name

    def begin_step(self, number: int) -> None:
        """Begin step `number`. Work since the last mark is counted as preparation."""
        self.mark("prepare")
        self._step = self._now.step = number

    def mark(self, part: str) -> None:
        """Attribute the work since the last mark to `part`."""
        self._now.part = part  # type: ignore[assignment]
        if part == "forward":  # the backward uses the forward's results
            for change in self._now.changes:
                if change.storage.lives and change.storage.kind is None:
                    change.storage.kind = "activations"
        self.classify((parameter.grad for parameter in self._parameters), "gradients")
        self.segments.append(self._now)
        self._now = Segment(self._step, "other")

    def classify(self, tensors: Iterable[Tensor | None], kind: Kind) -> None:
        """Record that the tensors' memory is of this kind, unless they are offloaded."""
        for tensor in tensors:
            for storage in _storages(tensor):
                tracked = self._track(storage)
                if tracked.kind != "offloaded":
                    tracked.kind = kind

    def mark_offloaded(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors as offloaded from now on."""
        for tensor in tensors:
            for storage in _storages(tensor):
                self._release(storage._cdata)
                self._track(storage).kind = "offloaded"

    def allocate_permanently(self, sizes: Iterable[int], kind: Kind) -> None:
        """Count memory that a library allocates permanently, outside of operators."""
        for nbytes in sizes:
            tracked = TrackedStorage(self._round_up(nbytes), "", kind)
            self._now.changes.append(Change(1, tracked, "", ""))

    def __enter__(self) -> "AllocationTracer":
        register = nn.modules.module
        self._hooks = [
            register.register_module_forward_pre_hook(self._enter_module),
            register.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        self._patched = [
            # FSDP resizes storages when it gathers weights, which is not a dispatched operator.
            patch.object(torch.UntypedStorage, "resize_", self._wrap_resize()),
            # DTensor first runs each operator without data, to infer the shapes of its results.
            patch.object(ShardingPropagator, _SHAPES, self._wrap_propagation()),
        ]
        for patched in self._patched:
            patched.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for patched in self._patched:
            patched.stop()
        for hook in self._hooks:
            hook.remove()
        self._tracked.clear()

    @contextmanager
    def ignore(self, wanted: bool = True) -> Iterator[None]:
        """Do not record operators in the context.

        With `wanted=False`, record them, even inside another `ignore`.
        """
        before, self._ignores = self._ignores, wanted
        try:
            yield
        finally:
            self._ignores = before

    @contextmanager
    def on_host(self, wanted: bool = True) -> Iterator[None]:
        """Count allocations in the context as host memory, if `wanted`."""
        before, self._on_host = self._on_host, wanted
        try:
            yield
        finally:
            self._on_host = before

    def _wrap_resize(self) -> Any:
        resize = torch.UntypedStorage.resize_

        def resize_storage(storage: torch.UntypedStorage, size: int) -> Any:
            self._release(storage._cdata, "unsharded")
            resize(storage, size)
            if size:
                self._track(storage).kind = "unsharded"
            return storage

        return resize_storage

    def _wrap_propagation(self) -> Any:
        propagate = getattr(ShardingPropagator, _SHAPES)

        def propagate_unrecorded(propagator: Any, schema: Any) -> Any:
            with self.ignore():
                return propagate(propagator, schema)

        return propagate_unrecorded

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        known = self._entered[-1] if self._entered else ""
        self._entered.append(self._names.get(id(module), known))

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        with suppress(IndexError):  # entered before tracing started
            self._entered.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # a shortcut: torch asks twice per operator
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls the operator again with local tensors
        kwargs = kwargs or {}
        waits = func is torch.ops._c10d_functional.wait_tensor.default
        if waits and isinstance(args[0], FakeTensor):
            return args[0]  # the gradient keeps its tensor, as in a real run
        if self._ignores:
            return func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._operator = f"{func.namespace}.{func._schema.name.rpartition('::')[2]}"
        self._module = self._entered[-1] if self._entered else self._guess_module(given)
        made = func(*args, **kwargs)
        self._record(func, args, kwargs, given, made)
        return made

    def _record(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        known = {storage._cdata for tensor in inputs for storage in _storages(tensor)}
        fresh = [s for t in outputs for s in _storages(t) if s._cdata not in known]
        for storage in fresh:
            self._track(storage)
        within = self._operator_bytes(func, args) + self._rules.temporary_bytes(func, args)
        if within:
            tracked = TrackedStorage(self._round_up(within), self._module, self._kind())
            for sign in (1, -1):
                self._now.changes.append(Change(sign, tracked, self._operator, self._module))
        if func in _CASTS and fresh:
            self._classify_copy(inputs[0], fresh[0])
        if func.namespace in _COMMUNICATION:
            for tensor in [*inputs, *outputs]:
                self._mark_communication(tensor)
        packet = func._overloadpacket
        if func in FLOPS:
            self._now.flops += FLOPS[func](*args, **kwargs)
        elif packet in flop_registry:
            self._now.flops += int(flop_registry[packet](*args, **kwargs, out_val=result))
        if fresh or func._schema.is_mutable:
            moved = {id(tensor): tensor.nbytes for tensor in [*inputs, *outputs]}
            self._now.bytes_moved += sum(moved.values())

    def _classify_copy(self, source: Tensor, copy: torch.UntypedStorage) -> None:
        sources = [self._track(storage) for storage in _storages(source)]
        if isinstance(source, nn.Parameter):
            for tracked in sources:  # a parameter's unclassified storage holds gathered weights
                tracked.kind = tracked.kind or "unsharded"
        if any(tracked.kind in ("weights", "unsharded") for tracked in sources):
            self._track(copy).kind = self._kind() or "weight copies"

    def _mark_communication(self, tensor: Tensor) -> None:
        for storage in _storages(tensor):
            tracked = self._track(storage)
            tracked.kind = tracked.kind or "communication"

    def _guess_module(self, tensors: list[Tensor]) -> str:
        """Return the module that owns the first known input, or else the current module.

        A backward pass does not call modules, so the current one says nothing about it.
        """
        for tensor in tensors:
            for storage in _storages(tensor):
                held = self._tracked.get(storage._cdata)
                if held is not None and held[0].kind in ("activations", "weights", "unsharded"):
                    return held[0].module
        return self._module

    def _track(self, storage: torch.UntypedStorage) -> TrackedStorage:
        """Return the record of a storage; record its allocation if the storage is new."""
        key = storage._cdata
        held = self._tracked.get(key)
        if held is None:
            tracked = TrackedStorage(self._round_up(storage.nbytes()), self._module, self._kind())
            address = storage.data_ptr() if self._freed_elsewhere else 0
            self._tracked[key] = tracked, weakref.ref(storage, partial(self._on_free, key, address))
            self._now.changes.append(Change(1, tracked, self._operator, self._module))
            return tracked
        return held[0]

    def _kind(self) -> Kind | None:
        return "offloaded" if self._on_host else None

    def _round_up(self, nbytes: int) -> int:
        unit = self._rules.round_to
        return -(-nbytes // unit) * unit

    def _on_free(self, key: int, address: int, _: Any) -> None:
        if self._freed_elsewhere and threading.get_ident() != self._thread:
            self._freed_elsewhere(address)
        self._release(key)

    def _release(self, key: int, kind: Kind | None = None) -> None:
        held = self._tracked.pop(key, None)
        if held is not None:
            tracked = held[0]
            tracked.lives = False
            tracked.kind = kind or tracked.kind
            self._now.changes.append(Change(-1, tracked, self._operator, self._module))


def _storages(tensor: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor; for wrapper subclasses, those of their inner tensors."""
    if not isinstance(tensor, Tensor):
        return
    # DTensor, quantized tensors and other wrapper subclasses
    parts: Any = getattr(tensor, "__tensor_flatten__", None)
    if parts is not None:
        for name in parts()[0]:
            yield from _storages(getattr(tensor, name))
    elif tensor.layout is torch.strided and tensor.device.type != "meta":
        yield tensor.untyped_storage()
