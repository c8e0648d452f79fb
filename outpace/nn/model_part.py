"""A part of a transformer, as in a pipeline stage: blocks, with or without embedding and head."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outpace.nn.transformer import Transformer


@dataclass(frozen=True)
class Part:
    """A part of a model: blocks by number, the embedding if `first`, and the head if `last`."""

    blocks: Collection[int]
    first: bool
    last: bool


class AbsentModule(nn.Module):
    """Placeholder for a module on another rank; returns its first argument."""

    def forward(self, x: Tensor, *_: object) -> Tensor:
        """Return the first argument."""
        return x


def take_part(model: Transformer, part: Part) -> Transformer:
    """Return a transformer with only the modules of a part, which it shares with `model`.

    Parameters keep their names. Parts after the first map hidden states (B, S, D) instead of
    tokens. The last part has a tied embedding, too, as its head.
    """
    with torch.device("meta"):
        taken = Transformer(model.spec)
    for number, block in enumerate(model.blocks):
        taken.blocks[number] = block if number in part.blocks else AbsentModule()
    modules = {
        "embed": _embedding_of_part(model, part),
        "final_norm": _module_of_last_part(model.final_norm, part),
        "head_transform": _module_of_last_part(model.head_transform, part),
        "head": model.head if part.last else None,
        "head_bias": model.head_bias if part.last else None,
    }
    for name, held in modules.items():
        setattr(taken, name, held)
    taken.blocks_of_masks, taken.runs_on = model.blocks_of_masks, model.runs_on
    return taken


def _module_of_last_part(module: nn.Module | None, part: Part) -> nn.Module | None:
    return module if module is None or part.last else AbsentModule()


def _embedding_of_part(model: Transformer, part: Part) -> nn.Module:
    if part.first:
        return model.embed
    absent = AbsentModule()
    if part.last and model.head is None:
        absent.add_module("tokens", model.embed.tokens)
    return absent
