"""Blocks of a model: the submodules that the user names, or else its repeated layers."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from outpace.nn.model_options import find_blocks
from outpace.parallel.layout import LayoutRequest
from outpace.records.errors import BadInputError, suggest

Blocks = Sequence[str] | Sequence[Sequence[str]]  # in the second form, one list per stage


def blocks_of(request: LayoutRequest) -> list[nn.Module]:
    """Return the blocks of a request's model.

    Raises BadInputError if the model has no blocks, or no submodule with one of the given names.
    """
    model: nn.Module = request.objective.model  # type: ignore[assignment]
    if request.blocks is None:
        return found_blocks(model)
    return named_blocks(model, flatten_blocks(request.blocks))


def found_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model. Raises BadInputError with advice if it has none."""
    try:
        return find_blocks(model)
    except BadInputError:
        raise BadInputError(
            f"{type(model).__name__} has no repeated blocks (members of an nn.ModuleList or "
            "nn.Sequential) to split it at. Put its layers into such a container, or name its "
            "blocks, to parallelize or in what build returns. For ZeRO, blocks=[] treats the model "
            "as one block."
        ) from None


def refuse_scripted(model: nn.Module, strategy: str) -> None:
    """Raise BadInputError for torch.jit modules, whose class and forward cannot be changed."""
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise BadInputError(
                f"{name or type(model).__name__} is compiled by torch.jit, but strategy "
                f"{strategy} must change its forward. Pass the module that it was compiled from, "
                "or use ddp or zero1."
            )


def flatten_blocks(blocks: Blocks) -> list[str]:
    """Return the names of all blocks as one list.

    If `blocks` has one list per stage, these are joined in the order of the stages.
    """
    return [name for part in blocks for name in ([part] if isinstance(part, str) else part)]


def named_blocks(model: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """Return the modules with these names. Raises BadInputError for an unknown name."""
    known = dict(model.named_modules())
    for name in names:
        if name not in known or not name:
            raise BadInputError(
                f"blocks names {name!r}, but {type(model).__name__} has no submodule of that name."
                f"{suggest(name, known)} Use names of named_modules()."
            )
    return [known[name] for name in names]


def parameters_outside(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the model's parameters outside `blocks`, by name."""
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) not in inside}
