"""Detection of forwards that start to write to parameters after the check of the first batch.

An embedding with max_norm in a branch that is taken later, or weights that are clipped from some
step on, would silently train differently under most strategies. In every step, a tensor's
`_version` shows whether it was written to, except through `.data`. To detect these writes too,
operators are observed in steps whose number is a power of two. Compiled code does not call these
operators, so its writes through `.data` go unnoticed.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.nn.compiler_exclusion import has_compiled_parts
from outpace.nn.dtensor import is_spread, local
from outpace.nn.fingerprint import fingerprint
from outpace.nn.torch_versions import fsdp_param_groups
from outpace.parallel.ddp import Replicas
from outpace.parallel.layout import Batch, Layout, StepHooks
from outpace.parallel.parity.moved_parameters import (
    advise_change,
    explain_lost_value,
    find_written,
    is_lost_value,
    schema_of_write,
)
from outpace.parallel.rank_objects import gather_objects
from outpace.parallel.refusals import has_other_cause
from outpace.parallel.tensors import storage_id
from outpace.records.errors import BadInputError, first_names
from outpace.records.plan import Plan

_TORCH = str(Path(torch.__file__).parent)
_FULLY_SHARD = str(Path(_TORCH, "distributed", "fsdp"))
# Namespaces of operators that fill gathered tensors.
_COLLECTIVES = ("fsdp", "c10d", "_c10d_functional", "outpace")


class LaterWrites:
    """A monitor of writes to a layout's parameters in the forwards and backwards of later steps.

    `known` are the parameters to which the check of the first batch has allowed writes. `steps` is
    the number of steps already done. ddp and zero1 also allow later writes if all ranks write the
    same values; otherwise, the rank that finds a write raises BadInputError.
    """

    def __init__(
        self, layout: Layout, plan: Plan, known: Iterable[str], ways_out: str, steps: int = 1
    ) -> None:
        self._layout, self._plan, self._ways_out = layout, plan, ways_out
        self._known = set(known)
        self._gradients = layout.gradients
        self._compiled = plan.compile or has_compiled_parts(layout.objective)
        # Ranks that hold whole parameters tell each other of writes.
        self._use = layout.use if isinstance(layout, Replicas) else None
        self._step = steps
        self._held: list[tuple[str, Tensor]] = []
        self._before: list[int] = []
        self._written: set[str] = set()
        self._observes = False
        self._recorder: _WriteRecorder | None = None

    def begin(self) -> None:
        """Start monitoring with the next step, unless the layout itself writes to parameters."""
        plan = self._plan
        if plan.optimizer_in_backward or plan.offload_parameters != "none":
            return
        self._layout.gradients = self.gradients  # type: ignore[method-assign]
        if self._use is not None:
            self._use.find_writes = self._find_new_writes

    def gradients(self, batches: Sequence[Batch], hooks: StepHooks) -> Tensor:
        """Run the layout's `gradients`. Raises BadInputError for new writes to parameters."""
        self._step += 1
        self._observes = self._step & (self._step - 1) == 0
        if self._observes:
            self._held = list(self._list_tensors())
        self._before = [tensor._version for _, tensor in self._held]
        observes = self._observes and not self._compiled
        self._recorder = _WriteRecorder(self._held) if observes else None
        try:
            with self._recorder or nullcontext():
                totals = self._gradients(batches, hooks)
        except RuntimeError as error:
            if not has_other_cause(error) and self._find_new_writes():
                raise self._make_refusal(sorted(self._written)) from error
            if is_lost_value(error) and self._plan.pp > 1:
                said = explain_lost_value((), self._plan.strategy)
                raise BadInputError(f"{said} {self._ways_out}") from error
            raise
        if self._find_new_writes():
            self._require_equal_writes()
        return totals

    def _list_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's parameters and the tensors that `fully_shard` gathers, with names."""
        names: dict[Any, str] = {}
        for name, parameter in self._layout.named_parameters():
            names[parameter] = name
            yield name, parameter
        for part in self._layout.objective.modules():
            state = getattr(part, "_get_fsdp_state", None)
            for group in [] if state is None else fsdp_param_groups(state()):
                for one in group.fsdp_params:
                    gathered = getattr(one, "_unsharded_param", None)
                    if gathered is not None:
                        yield names[one.sharded_param], gathered

    def _find_new_writes(self) -> bool:
        """Set `_written` to the parameters that this step wrote to; return whether there are any.

        Most steps leave out parameters to which writes have been accepted.
        """
        pairs = zip(self._held, self._before, strict=True)
        written = {name for (name, tensor), before in pairs if tensor._version != before}
        if self._recorder is not None:
            written |= self._recorder.written_names()
        # In observed steps, accepted writes are compared again, since ranks may differ by now.
        self._written = (
            written if self._observes and self._use is not None else written - self._known
        )
        return bool(self._written)

    def _require_equal_writes(self) -> None:
        """Raise BadInputError unless all ranks have written the same values.

        Collective, but only if every rank has written to a parameter.
        """
        names = sorted(self._written)
        if self._use is None or not self._use.all_wrote:
            raise self._make_refusal(names)
        prints = {n: fingerprint(p) for n, p in self._layout.named_parameters() if n in names}
        if any(one != prints for one in gather_objects(prints)):
            error = self._make_refusal(names)
            error.on_all_ranks = True
            raise error
        self._known.update(names)

    def _make_refusal(self, names: Sequence[str]) -> BadInputError:
        named = dict(self._layout.named_parameters())
        if any(name in named and is_spread(named[name]) for name in names):
            why = "what it writes is lost, because ranks hold shards"
        elif self._plan.pp > 1:
            why = "other micro-batches in flight may need the old values"
        else:
            why = "ranks may change them differently, each by its own samples"
        return BadInputError(
            f"the module's forward changes the values of {first_names(names)} in step "
            f"{self._step} of this process, but did not in its first step, which was compared with "
            f"the plain module. Under strategy {self._plan.strategy}, {why}. "
            f"{advise_change(self._plan.strategy)} {self._ways_out}"
        )


class _WriteRecorder(TorchDispatchMode):
    """A dispatch mode that records which of the named tensors operators write to.

    Writes by collectives and by `fully_shard` itself, which fill gathered tensors, are left out.
    """

    supports_higher_order_operators = True

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched: dict[int, list[str]] = {}
        self._tensors: list[tuple[str, Tensor, torch.UntypedStorage]] = []
        for name, tensor in named:
            if not tensor.is_meta:
                # Kept alive, so that its address is not reused.
                storage = local(tensor).untyped_storage()
                self._tensors.append((name, tensor, storage))
                self._watched.setdefault(int(storage._cdata), []).append(name)
        self._names: set[str] = set()

    def written_names(self) -> set[str]:
        for name, tensor, storage in self._tensors:
            if storage_id(local(tensor)) != storage._cdata:
                self._names.add(name)
        return self._names

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = schema_of_write(func)
        if schema is not None and func.namespace not in _COLLECTIVES:
            for one in find_written(schema, args, kwargs):
                names = self._watched.get(storage_id(one))
                if names and not _is_called_by_fully_shard():
                    self._names.update(names)
        return func(*args, **kwargs)


def _is_called_by_fully_shard() -> bool:
    frame = sys._getframe(1)
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back  # skip the mode's frame
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_code.co_filename.startswith(_FULLY_SHARD):
            return True
        frame = frame.f_back
    return False
