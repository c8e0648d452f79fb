"""Parameters whose values a user's forward changes: clipped weights, teachers, max_norm.

PyTorch counts writes to a tensor in `_version`, but not writes through `.data`, and comparing
values would need a copy of all parameters. So operators are observed as they run, and only tensors
that they write to are copied.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outpace.nn.dtensor import is_spread, local
from outpace.parallel.parity.user_collectives import is_collective
from outpace.parallel.tensors import has_memory
from outpace.records.errors import BadInputError, first_names
from outpace.records.pipelines import SCHEDULES

NEEDED_BEFORE = "other micro-batches in flight need the old value"


class MovedParameters(TorchDispatchMode):
    """A dispatch mode that records writes to named tensors, and their previous values."""

    supports_higher_order_operators = True

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched: dict[int, list[tuple[str, Tensor]]] = {}
        self._tensors: dict[str, tuple[Tensor, Tensor]] = {}  # each tensor, and its local values
        for name, tensor in named:
            held = local(tensor).detach()
            if held.numel() and not held.is_meta:
                self._watched.setdefault(_memory_address(held), []).append((name, held))
                self._tensors[name] = tensor, held
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self._versions = self._count_writes()
        self.replaced: set[str] = set()  # names of tensors whose memory was replaced (p.data = …)
        self.written: set[str] = set()  # including writes that changed no value
        self.written_by_samples: set[str] = set()
        self.communicates = False  # whether a forward called a collective

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_collective(func):
            self.communicates = True
        schema = schema_of_write(func)
        if schema is not None:
            self._record_writes(
                schema, args, kwargs, func is torch.ops.aten.embedding_renorm_.default
            )
        return func(*args, **kwargs)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if isinstance(error, TracedOperatorError):
            torch._dynamo.reset()  # otherwise, code that ran under this mode is never compiled

    def _record_writes(
        self, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any], by_samples: bool
    ) -> None:
        for one in find_written(schema, args, kwargs):
            for name, held in self._watched.get(_memory_address(one), ()):
                self.written.add(name)
                if by_samples:
                    self.written_by_samples.add(name)
                if name not in self._before:
                    self._before[name] = held, held.clone()

    def _record_replaced(self) -> None:
        """Record parameters whose values were replaced (p.data = …), which calls no operator."""
        for name, (tensor, held) in self._tensors.items():
            if not is_spread(tensor) and _memory_address(tensor) != _memory_address(held):
                self.replaced.add(name)
                self.written.add(name)
                self._before.setdefault(name, (held, held.clone()))

    def written_unseen(self) -> list[str]:
        """Return the names of tensors that operators have written to without being observed.

        The mode does not observe operators in other threads, such as those of a backward on CUDA.
        If it was never entered, the result has all tensors that were written to.
        """
        self._record_replaced()
        now = self._count_writes()
        return [n for n, v in self._versions.items() if now[n] != v and n not in self.written]

    def _count_writes(self) -> dict[str, int]:
        """Return each tensor's version counter plus that of its local shard, by name."""
        return {
            name: held._version + tensor._version
            for name, (tensor, held) in self._tensors.items()
            if not (held.is_inference() or tensor.is_inference())
        }

    def put_back(self) -> dict[str, Tensor]:
        """Restore all tensors; return the new values of those that had changed, by name."""
        moved = {name: now.clone() for name, now in self.changes().items()}
        for name in {*moved, *self.replaced} & self._before.keys():
            held, before = self._before[name]
            if name in self.replaced:
                self._tensors[name][0].data = held
            held.copy_(before)
        self._before.clear()
        return moved

    def changes(self) -> dict[str, Tensor]:
        """Return the tensors whose values have changed, by name."""
        self._record_replaced()
        found = {}
        for name, (held, before) in self._before.items():
            now = self._tensors[name][0].detach() if name in self.replaced else held
            if now.shape != before.shape or not torch.equal(now, before):
                found[name] = now
        return found

    @contextmanager
    def put_back_unless(self, kept: Callable[[], bool]) -> Iterator[None]:
        """Restore all values on exit, unless `kept()` returns True."""
        try:
            yield
        finally:
            if not kept():
                self.put_back()


class TracedOperatorError(BadInputError):
    """A call of an operator that torch's compiler must trace, but cannot while a mode is active."""


# Operators with branches or loop bodies that torch's compiler traces.
_TRACED = {"cond": "cond", "while_loop": "while_loop", "map_impl": "map", "scan": "scan",
           "associative_scan": "associative_scan"}  # fmt: skip


@cache
def schema_of_write(operator: Any) -> Any:
    """Return the schema of an operator that writes to its arguments; None for other operators.

    Raises TracedOperatorError for an operator whose branches or loop bodies the compiler has to
    trace (such as `torch.cond`). A dispatch mode prevents that, so parameters in the branches would
    get no gradient.
    """
    if isinstance(operator, HigherOrderOperator) and operator.name() in _TRACED:
        raise TracedOperatorError(
            f"the forward or the loss calls torch's {_TRACED[operator.name()]}, which torch's "
            "compiler has to trace, but cannot while outpace observes operators. Use Python's if "
            "or loops, or torch.where"
        )
    schema = getattr(operator, "_schema", None)
    return schema if schema is not None and schema.is_mutable else None


@contextmanager
def keep_values(named: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
    """Restore the tensors' values on exit."""
    watch = MovedParameters(named)
    try:
        with watch:
            yield
    finally:
        watch.put_back()


def find_written(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator call writes to, except those without memory."""
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for one in tree_leaves(given):
                leaf = local(one) if isinstance(one, Tensor) else one
                if has_memory(leaf):
                    yield leaf


def _memory_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def is_lost_value(error: BaseException) -> bool:
    """Return whether a backward failed because a tensor that it needs was modified in place."""
    return "modified by an inplace operation" in str(error.__cause__ or error)


def explain_lost_value(buffers: Sequence[str], strategy: str) -> str:
    """Return a message about a backward whose values another micro-batch's forward changed.

    `buffers` are the names of buffers that forwards change, if known.
    """
    changed = first_names(buffers) if buffers else "a tensor of the module"
    return (
        f"the module's forward changes {changed} in place, but under strategy {strategy} the "
        "backward of other micro-batches in flight needs the old value. Use a copy where the "
        "loss depends on it (self.average.clone()), or assign a new tensor instead of writing to "
        "it."
    )


def explain_writes(names: Sequence[str], strategy: str, why: str) -> str:
    """Return a message about a forward that writes to parameters, which a strategy forbids."""
    return (
        f"the module's forward changes the values of {first_names(names)}, but under strategy "
        f"{strategy} {why}. {advise_change(strategy)}"
    )


def advise_change(strategy: str) -> str:
    """Return advice on where to change parameters under a strategy."""
    if strategy in SCHEDULES:
        return (
            "Change parameters between steps instead; each rank changes those of its own stages "
            "(named_parameters() of what outpace.parallelize returned)."
        )
    return "Change parameters between steps instead, in the same way on all ranks."
