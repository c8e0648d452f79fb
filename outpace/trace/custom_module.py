"""Memory of a custom model, traced from its forward, loss and batch under fake tensors.

The user's function builds the real module once; the trace uses copies without memory.
"""

import copy
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from outpace.interop.custom_model import CustomModel, CustomObjective
from outpace.nn.mixed_precision import MixedPrecision, keeps_casts, lower_weights, make_mixed
from outpace.nn.scratch_files import Scratch
from outpace.parallel import Layout, LayoutRequest, StepHooks
from outpace.parallel.custom.pipeline import CustomPipeline
from outpace.parallel.parallel_module import apply_plan_options, synchronise_statistics
from outpace.parallel.plain import has_dropout, random_state, set_random_state
from outpace.parallel.tensors import meta_copy
from outpace.records.errors import BadInputError, OutpaceError
from outpace.records.hardware import Accelerator
from outpace.records.memory import MemoryAccount
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.trace.account import MOST_PASSES, record_parts, summarise_parts
from outpace.trace.allocation_tracer import AllocationTracer
from outpace.trace.device import Rules
from outpace.trace.offloading import offload_to_disk
from outpace.trace.steps import CPU, LayOut

_SMALL = 32  # buffers with at most this many elements keep their values, since forwards read them
_READS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
_MEASURE = "Measure memory in a run instead: outpace train --memory --steps 5."
_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[1])


@dataclass(frozen=True)
class ModuleWorkload:
    """Training of a custom model, in steps of `accumulation` passes.

    `build` constructs the module with its loss. `samples` returns a batch with a given number of
    samples; a pass reads `plan.samples_read`.
    """

    build: Callable[[], CustomModel]
    samples: Callable[[int], Any]
    plan: Plan
    accumulation: int
    settings: TrainSettings
    drops: bool = False  # whether the module has dropout
    value_free: bool = False  # whether tensors have no values

    def batch(self) -> Any:
        """Return the batch of one pass on a rank that reads data."""
        return self.samples(self.plan.samples_read)

    def dropout_context(self, rules: Rules) -> AbstractContextManager[object]:
        """Return a context in which dropout saves what it saves on the traced device."""
        return rules.dropout_context(self.drops, self.plan)

    def make_mixed(self) -> MixedPrecision:
        """Return the mixed precision that the plan and the settings describe."""
        plan, cache = self.plan, keeps_casts(self.settings.autocast_cache, True)
        return make_mixed(plan.precision, CPU, cache, True, plan.fully_shards)

    def lay_out_model(
        self, mixed: MixedPrecision, ranks: Ranks, watch: AllocationTracer, lay_out: LayOut,
        rules: Rules, scratch: Scratch,
    ) -> Layout:  # fmt: skip
        """Apply the plan to the module on this rank."""
        own, plan = self.build(), self.plan
        objective = (_ValueFreeObjective if self.value_free else CustomObjective)(own)
        lower_weights(objective, mixed)
        watch.allocate_permanently(rules.workspaces(), "workspaces")
        synchronise_statistics(own, plan)
        apply_plan_options(own, plan, CPU, scratch)
        if plan.compile:
            from outpace.trace.compiled_region import trace_compiled

            trace_compiled(objective.model, plan, watch)
        request = LayoutRequest(objective, plan, ranks, CPU, own.blocks, own.layouts, scratch)
        layout = lay_out(request, None)
        if self.value_free and isinstance(layout, CustomPipeline):
            with watch.ignore():
                whole, given = _ValueFreeObjective(self.build()), StepHooks(mixed.cast)
                lower_weights(whole, mixed)
                layout.learn_forms_alone(whole, self.batch(), given)
        return layout


def account_of_module(
    model: CustomModel,
    samples: Callable[[int], Any],
    plan: Plan,
    *,
    accumulation: int,
    rank: int,
    settings: TrainSettings,
    accelerator: Accelerator | None,
    ranks_per_host: int,
) -> MemoryAccount:
    """Trace the first two steps of `rank` and return the memory they use, as `account` does.

    `model` is not changed. Raises BadInputError if the plan cannot be applied, or if the module
    cannot run without values.
    """
    rules = Rules(accelerator)
    passes = min(accumulation, MOST_PASSES)
    batch = samples(plan.samples_read)
    small = [b for b in model.module.buffers() if b.numel() <= _SMALL]
    kept = {id(b): b.detach().clone() for b in small}
    structure = meta_copy(model.module, kept)
    work = ModuleWorkload(
        build=lambda: CustomModel(
            _fake_copy(structure),
            model.loss,
            blocks=model.blocks,
            layouts=model.layouts,
            sync_batchnorm=model.sync_batchnorm,
        ),
        samples=lambda count: tree_map(_zeros_like, batch),
        plan=offload_to_disk(plan, rules),
        accumulation=passes,
        settings=settings,
        drops=has_dropout(model.module),
        value_free=True,
    )
    drawn = random_state(CPU)  # inspecting pipeline stages seeds the generator
    try:
        # torch warns about scalars received by pipeline stages, because they are real tensors
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            traces = record_parts(work, rank, rules, ranks_per_host)
    except OutpaceError:
        raise
    except Exception as error:
        raise BadInputError(_explain_failure(model.module, error, plan.compile)) from error
    finally:
        set_random_state(drawn, CPU)
    return summarise_parts(traces, plan, rank, rules, accumulation / passes)


class _ValueFreeObjective(CustomObjective):
    """Objective whose forward raises BadInputError if it reads the value of a tensor."""

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        with _ReadRefusal(self.model):
            return super().forward(batch)


class _ReadRefusal(TorchDispatchMode):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._module = module

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and isinstance(args[0], FakeTensor):
            raise BadInputError(
                f"{type(self._module).__name__} or its loss reads a computed value at "
                f"{_user_line(traceback.extract_stack())}, but tensors have no values in a trace. "
                f"{_MEASURE}"
            )
        return func(*args, **(kwargs or {}))


def _user_line(frames: traceback.StackSummary) -> str:
    """Return file and line of the innermost frame outside torch and outpace."""
    user_frames = [frame for frame in frames if not _is_library(Path(frame.filename))]
    return f"{user_frames[-1].filename}:{user_frames[-1].lineno}" if user_frames else "within torch"


def _is_library(file: Path) -> bool:
    return any(file.is_relative_to(folder) for folder in _LIBRARIES)


def _explain_failure(module: nn.Module, error: Exception, compiled: bool) -> str:
    said = (str(error).strip().splitlines() or [""])[0][:200]
    where = _user_line(traceback.extract_tb(error.__traceback__))
    eager = (
        "A trace of a compiled forward ignores, among others, attributes that it sets on modules "
        "(self.aux = …): leave out --compile for an upper bound. "
    )
    return (
        f"{type(module).__name__} cannot be traced without values: at {where}, "
        f"{type(error).__name__}: {said}. {eager if compiled else ''}{_MEASURE}"
    )


def _fake_copy(structure: nn.Module) -> nn.Module:
    """Return a copy of a meta module with parameters and buffers created in the current mode."""
    held = [*structure.parameters(), *structure.buffers()]
    memo: dict[int, Any] = {}
    for tensor in held:
        if tensor.is_meta:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    return copy.deepcopy(structure, memo)


def _zeros_like(leaf: Any) -> Any:
    return torch.zeros(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf
