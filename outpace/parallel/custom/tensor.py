"""Tensor parallelism of a custom model, specified by a table of names and layouts.

Shoeybi et al., "Megatron-LM", arXiv 1909.08053, §3. Layouts are named as in the tp plans that
transformers models define. Modules that the table does not name are whole on every rank and compute
the same on all ranks, as does a matrix that two modules share (tied embeddings).
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._pytree import tree_map

from outpace.nn.block import Linear
from outpace.optim.build import Build
from outpace.parallel.gradient_hooks import refuse_hooks
from outpace.parallel.layout import Batch, Layout, LayoutRequest, ShardedLayout, StepHooks
from outpace.parallel.parity.split_messages import SUMS_OUTPUT, SUMS_WEIGHTS
from outpace.parallel.tensor import SplitRows
from outpace.parallel.tensors import all_parameters, meta_copy
from outpace.records.errors import BadInputError, join_or, suggest

# each layout's style, and the dimension of the weight that it splits
_STYLES: Mapping[str, tuple[Callable[[], ParallelStyle], int]] = {
    "colwise": (ColwiseParallel, 0),
    "rowwise": (RowwiseParallel, 1),
    "colwise_gather_output": (lambda: ColwiseParallel(output_layouts=Replicate()), 0),
    "rowwise_split_input": (lambda: RowwiseParallel(input_layouts=Replicate()), 1),
    "embedding_rowwise": (lambda: SplitRows(Replicate()), 0),
}
# Layouts that keep weights whole. In the second, each rank sees some of the heads, so gradients of
# weights are partial sums; in the third, each rank uses the whole output for some of the heads, so
# the output's gradient is a partial sum.
_WHOLE = ("replicate", SUMS_WEIGHTS, SUMS_OUTPUT)
LAYOUTS = (*_STYLES, *_WHOLE)


class CustomTensorParallel(ShardedLayout):
    """A custom model on the ranks of `mesh`, which all read the same samples.

    `shares`: parameters that are whole on each rank, while each rank computes only a part of their
    gradients. These parts are summed over the ranks.
    """

    def __init__(
        self,
        objective: nn.Module,
        whole: nn.Module,
        mesh: DeviceMesh,
        shares: Sequence[nn.Parameter],
    ) -> None:
        super().__init__(objective, whole, mesh.get_group())
        self._tells = mesh.get_local_rank() == 0  # all ranks compute the loss of all samples
        self._shares = shares

    def _list_watched(self) -> set[nn.Module]:
        split = (
            part for part in self.model.modules()
            if any(isinstance(p, DTensor) for p in part.parameters(recurse=False))
        )  # fmt: skip
        return super()._list_watched().union(split)

    def make_optimizer(self, groups: list[dict[str, Any]], build: Build) -> torch.optim.Optimizer:
        """Build the optimizer, with separate groups for plain tensors and DTensors.

        One kernel cannot update both. The groups of a user's loop are not split after `guard`,
        because the loop refers to them by number.
        """
        if self._place is not None:
            return build(groups)
        return build([part for group in groups for part in _split_plain_and_dtensors(group)])

    def gradients(self, batches: Sequence[Batch], hooks: StepHooks) -> Tensor:
        """Compute the step's gradients. All ranks have equal totals, so only one reports them."""
        totals = super().gradients(batches, hooks)
        for parameter in self._shares:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self._group)
        return totals * self._tells

    def evaluate(self, batch: Batch, hooks: StepHooks) -> Tensor:
        """Evaluate a micro-batch. All ranks have equal totals, so only one reports them."""
        return super().evaluate(batch, hooks) * self._tells


def _split_plain_and_dtensors(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for kind in (False, True):
        held = [p for p in group["params"] if isinstance(p, DTensor) == kind]
        if held:
            yield {**group, "params": held}


def layouts_of(model: nn.Module, given: Mapping[str, str] | None, ranks: int) -> dict[str, str]:
    """Return how tensor parallelism splits each module ("colwise", …), by the module's full name.

    `given` are layouts by patterns of names; None: those of the model's `tp_plan`. Raises
    BadInputError if a module cannot be split as its layout says.
    """
    table = given if given is not None else getattr(model, "tp_plan", None)
    if not isinstance(table, Mapping) or not table:
        raise BadInputError(
            f"strategy tp does not know which matrices of {type(model).__name__} to split: it has "
            'no tp_plan. Pass layouts, such as {"layers.*.q": "colwise", "layers.*.o": '
            '"rowwise"}, or use zero3, which splits any parameters.'
        )
    found = (
        _resolve_layouts(model, table, ranks)
        if given is not None
        else _resolve_model_plan(model, table, ranks)
    )
    _require_divisible_heads(model, ranks)
    return found


def _resolve_layouts(model: nn.Module, table: Mapping[str, str], ranks: int) -> dict[str, str]:
    modules, holders = dict(model.named_modules()), _count_holders(model)
    found: dict[str, str] = {}
    for pattern, layout in table.items():
        if layout not in LAYOUTS:
            raise BadInputError(
                f"layouts maps {pattern!r} to {layout!r}, which is not a layout."
                f"{suggest(layout, LAYOUTS)} Use {join_or(LAYOUTS)}, or strategy zero3."
            )
        names = [name for name in modules if _matches_pattern(name, pattern)]
        if not names and layout == SUMS_WEIGHTS:
            names = [
                name for name, _ in model.named_parameters() if _matches_pattern(name, pattern)
            ]
        if not names:
            raise BadInputError(
                f"layouts names {pattern!r}, but {type(model).__name__} has no such "
                f"module.{suggest(pattern, modules)}"
            )
        for name in names:
            if layout in _WHOLE or _can_split(name, modules[name], layout, ranks, holders):
                found[name] = layout
    return found


def _resolve_model_plan(model: nn.Module, table: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Resolve a transformers model's plan, except for modules with a child that cannot be split.

    The children of a module belong together, because each expects the previous one to be split.
    Embeddings and heads do not depend on other children, because their inputs and outputs are
    whole.
    """
    modules, holders = dict(model.named_modules()), _count_holders(model)
    found: dict[str, str] = {}
    left_out: set[str] = set()
    for pattern, layout in table.items():
        for name in [name for name in modules if _matches_pattern(name, pattern)]:
            try:
                fits = layout in _WHOLE or _can_split(name, modules[name], layout, ranks, holders)
            except BadInputError:
                fits = False
                left_out.add(_parent_name(name))
            if fits:
                found[name] = layout
    alone = ("embedding_rowwise", "colwise_gather_output", "rowwise_split_input")
    kept = {n: lay for n, lay in found.items() if lay in alone or _parent_name(n) not in left_out}
    if not any(layout in _STYLES for layout in kept.values()):
        raise BadInputError(
            f"strategy tp cannot split any matrix of {type(model).__name__} by its own tp_plan. "
            "Pass layouts, or use zero3, which splits any parameters."
        )
    return kept


def _count_holders(model: nn.Module) -> Counter[int]:
    return Counter(id(p) for part in model.modules() for p in part._parameters.values())


def _parent_name(name: str) -> str:
    return name.rpartition(".")[0]


def _matches_pattern(name: str, pattern: str) -> bool:
    """Match a name with a pattern; `*` stands for all or part of one component of the name."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _can_split(
    name: str, module: nn.Module, layout: str, ranks: int, holders: Counter[int]
) -> bool:
    """Return whether to split a module's weight: False if it is tied or has a padding row.

    Raises BadInputError for an unknown layout, or for a weight that the layout cannot split.
    """
    if layout not in _STYLES:
        raise BadInputError(f"{name} has layout {layout!r}, which outpace does not know")
    wanted = nn.Embedding if layout == "embedding_rowwise" else nn.Linear
    if type(module) not in (wanted, Linear if wanted is nn.Linear else wanted):
        raise BadInputError(
            f"layouts has {name!r}: {layout!r}, which requires an nn.{wanted.__name__}, not a "
            f"{type(module).__name__}. Leave the entry out; the module then stays whole on every "
            "rank."
        )
    weight = module.get_parameter("weight")
    if holders[id(weight)] > 1:
        return False  # a tied weight
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        return False  # a shard cannot tell which row is the padding row, which has no gradient
    dim = _STYLES[layout][1]
    if weight.shape[dim] % ranks:
        raise BadInputError(
            f"{name} has {weight.shape[dim]} {('rows', 'columns')[dim]}, which {ranks} ranks "
            "cannot share evenly. Use fewer ranks, or leave the module out of layouts."
        )
    return True


def _require_divisible_heads(model: nn.Module, ranks: int) -> None:
    names = ("num_attention_heads", "num_key_value_heads", "heads", "kv_heads")
    for holder, name in itertools.product(("config", "spec"), names):
        heads = getattr(getattr(model, holder, None), name, None)
        if isinstance(heads, int) and heads % ranks:
            raise BadInputError(
                f"{ranks} tensor-parallel ranks cannot share {heads} heads ({name}) evenly. Use "
                f"a number of ranks that divides {heads}, or zero3."
            )


def apply(request: LayoutRequest) -> Layout:
    """Split the model over all ranks as the layouts specify.

    Raises BadInputError if they do not fit the model.
    """
    plan = request.plan
    model: nn.Module = request.objective.model  # type: ignore[assignment]
    layouts = layouts_of(model, request.layouts, plan.tp)
    mesh = init_device_mesh(request.device.type, (plan.tp,), mesh_dim_names=("tp",))
    split = {name for name, layout in layouts.items() if layout in _STYLES}
    named = ((n, p) for n, p in model.named_parameters() if _parent_name(n) in split)
    refuse_hooks(named, plan.strategy, "ranks hold parts of these parameters")
    copied = meta_copy(model)
    for name, layout in layouts.items():
        if layout in _STYLES:
            style = _STYLES[layout][0]()
            parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
        elif layout == SUMS_OUTPUT:
            model.get_submodule(name).register_forward_hook(partial(_sum_output_gradient, mesh))
    shares = [
        p
        for name, lay in layouts.items()
        if lay == SUMS_WEIGHTS
        for p in _parameters_named(model, name)
    ]
    unique = list(dict.fromkeys(shares))  # a module and its parameter may both be named
    return CustomTensorParallel(request.objective, copied, mesh, unique)


def _parameters_named(model: nn.Module, name: str) -> list[nn.Parameter]:
    alone = dict(model.named_parameters()).get(name)
    return list(all_parameters(model.get_submodule(name))) if alone is None else [alone]


def _sum_output_gradient(mesh: DeviceMesh, module: nn.Module, inputs: Any, output: Any) -> Any:
    """Return a module's output, whose gradient the backward sums over ranks."""

    def with_summed_gradient(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        spread = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
        return spread.to_local(grad_placements=[Partial()])

    return tree_map(with_summed_gradient, output)
