"""Division of a custom model's blocks among pipeline stages, refused where it is impossible."""

from collections.abc import Sequence

from torch import nn
from torch._dynamo import OptimizedModule

from outpace.parallel.batchnorm import batch_norms
from outpace.parallel.blocks import (
    Blocks,
    flatten_blocks,
    found_blocks,
    named_blocks,
    parameters_outside,
)
from outpace.parallel.gradient_hooks import refuse_hooks
from outpace.parallel.tensors import all_parameters
from outpace.planner.pipeline.stages import spread_by_cost
from outpace.records.errors import BadInputError
from outpace.records.pipelines import SCHEDULES
from outpace.records.strategies import Strategy


def stages_of(model: nn.Module, given: Blocks | None, strategy: str, ranks: int) -> list[list[str]]:
    """Return the names of each stage's blocks, in order.

    Raises BadInputError if there are too few blocks.
    """
    count = ranks * SCHEDULES[strategy].stages_per_rank
    if given and not isinstance(given[0], str):
        if len(given) != count:
            raise BadInputError(
                f"blocks has lists for {len(given)} stages, but {strategy} on {ranks} ranks has "
                f"{count} stages. Give a list of names for each stage, or one list for outpace to "
                "divide."
            )
        return [list(stage) for stage in given]
    names = flatten_blocks(given) if given is not None else _find_stage_blocks(model)
    if len(names) < count:
        one_each = "gpipe or 1f1b, which have one stage on each rank"
        raise BadInputError(
            f"{strategy} on {ranks} ranks has {count} stages, but the model has "
            f"{len(names)} blocks ({', '.join(names)}). Use "
            f"{one_each if len(names) >= ranks else 'zero3, or fewer ranks'}, or name smaller "
            "blocks."
        )
    costs = [sum(p.numel() for p in all_parameters(block)) for block in named_blocks(model, names)]
    begins = spread_by_cost(costs, count)
    return [names[part.start : part.stop] for part in begins]


def _find_stage_blocks(model: nn.Module) -> list[str]:
    """Return the names of the children of an nn.Sequential, or of the container of blocks."""
    inside = set(model.children())
    if not isinstance(model, nn.Sequential):
        inside = set(found_blocks(model))
        kinds = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
        containers = (part for part in model.modules() if isinstance(part, kinds))
        around = next((m for m in containers if inside <= set(m.children())), None)
        inside = inside if around is None else set(around.children())
    return [name for name, part in model.named_modules() if part in inside]


def require_separate_blocks(
    model: nn.Module, stages: Sequence[Sequence[str]], blocks: Sequence[nn.Module]
) -> None:
    """Refuse blocks that cannot be on separate stages.

    This is the case if stages share a parameter, if a stage other than the last ends with a block
    that has a backward hook, or if a BatchNorm is outside of the blocks.
    """
    where: dict[int, int] = {}
    everything = [id(p) for p in parameters_outside(model, blocks).values()]
    numbered = iter(blocks)
    for number, names in enumerate(stages):
        for name in names:
            for parameter in all_parameters(next(numbered)):
                if where.setdefault(id(parameter), number) != number or id(parameter) in everything:
                    raise BadInputError(
                        f"block {name!r} shares a parameter with a block of stage "
                        f"{where[id(parameter)]}, but a parameter can be on only one stage. Put "
                        "both blocks on the same stage, with a list of names for each stage, or "
                        "use zero3."
                    )
    ends = [names[-1] for names in stages[:-1]]
    for name, block in zip(ends, named_blocks(model, ends), strict=True):
        if block._backward_hooks or block._backward_pre_hooks:
            raise BadInputError(
                f"block {name!r} has a backward hook and is the last of a pipeline stage, which "
                "ends before the hook is set. Register the hook on the output within the block's "
                "forward (tensor.register_hook), or use zero3."
            )
    inside = {part for block in blocks for part in block.modules()}
    for name, part in batch_norms(model).items():
        if part not in inside:
            raise BadInputError(
                f"{name} is a BatchNorm outside of the pipeline's blocks, and would see different "
                "batches on each stage. Add it, or the module that contains it, to the blocks."
            )


def require_split_backward(model: nn.Module, strategy: Strategy) -> None:
    """Refuse modules that cannot compute weight gradients separately."""
    why = "it computes gradients of weights separately"
    refuse_hooks(model.named_parameters(), strategy, why, after_alone=True)
    for name, part in model.named_modules():
        if isinstance(part, OptimizedModule):
            raise BadInputError(
                f"{name or 'the model'} is compiled by torch.compile, and strategy {strategy} "
                "computes gradients of weights separately, which a compiled module does not "
                "support. Pass the uncompiled module, or use 1f1b."
            )
