"""A stage of a person's own model: their forward, run from its beginning and left after a block.

It runs on the batch that every rank of the pipeline has read. So masks, positions and whatever else
blocks are given are there on every stage, and nothing needs to be known of the forward but that it
calls its blocks once each, in order. What was received is returned by the block before the stage's
first; after its last block the forward is left.

Parameters that a stage does not have are NaN without memory, and NaN is what blocks of earlier
stages return: whatever a stage cannot know shows at once, in a look at the first batch.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outpace.parallel.api import Batch
from outpace.parallel.blocks import named_blocks, outside
from outpace.records.errors import BadInputError


class Leaving(BaseException):
    """Raised out of a person's forward, with what the stage's last block has returned.

    No Exception, so that theirs do not catch it.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class OwnStage(nn.Module):
    """The objective from block `mine.start` to block `mine.stop`, of all `names`.

    `holds_rest` says that parameters outside of blocks are real here. Parameters and buffers are
    shared with the objective that this is made of.
    """

    def __init__(
        self, objective: nn.Module, names: Sequence[str], mine: range, holds_rest: bool
    ) -> None:
        super().__init__()
        tensors = [*objective.parameters(), *objective.buffers()]
        self.objective = copy.deepcopy(objective, {id(tensor): tensor for tensor in tensors})
        self._names, self._mine = names, mine
        self.first, self.last = mine.start == 0, mine.stop == len(names)
        self.batches: Sequence[Batch] = ()
        self._received: Tensor | None = None
        self._next = 0
        blocks = named_blocks(self.objective.model, names)  # type: ignore[arg-type]
        kept = [p for number in mine for p in blocks[number].parameters()]
        if holds_rest:
            kept += outside(self.objective.model, blocks).values()  # type: ignore[arg-type]
        _forget_all_but(kept, self.objective)
        for number, block in enumerate(blocks):
            block.forward = partial(self._visit, number, block.forward)

    def forward(self, received: Tensor, number: Tensor) -> Tensor:
        """Hidden states of the micro-batch of this number; of the last stage the totals."""
        return self.run(self.batches[int(number)], None if self.first else received)

    def run(self, batch: Batch, received: Tensor | None) -> Tensor:
        """As `forward`, given the micro-batch."""
        self._received, self._next = received, 0
        try:
            loss_sum, *others = self.objective(batch)
        except Leaving as leaving:
            hidden = leaving.hidden
            # A split backward detaches it in place, which a view (nn.Flatten) does not let it.
            return hidden.clone() if hidden._is_view() else hidden
        finally:
            self._received = None
        if self._next < len(self._names):
            raise BadInputError(
                f"the forward ended without calling block {self._names[self._next]!r}. Name only "
                "blocks that it calls, once each."
            )
        return torch.cat([part.to(loss_sum.dtype).view(-1) for part in (loss_sum, *others)])

    def _visit(self, number: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What a block does when the person's forward calls it."""
        self._follow(number)
        if number + 1 == self._mine.start:
            assert self._received is not None
            return self._received.clone()  # which may be changed in place
        if number < self._mine.start:
            return _unknown(args, kwargs)
        output = forward(*args, **kwargs)
        if number + 1 == self._mine.stop and not self.last:
            raise Leaving(_sole(output, self._names[number]))
        return output

    def _follow(self, number: int) -> None:
        if number != self._next:
            expected = repr(self._names[self._next]) if self._next < len(self._names) else "no more"
            raise BadInputError(
                f"the forward calls block {self._names[number]!r} where {expected} was to come. "
                "Name the blocks in the order in which it calls them, each once."
            )
        self._next += 1


def _unknown(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """NaN in the form of a block's first input."""
    given = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), torch.empty(()))
    return given.new_full(given.shape, math.nan, dtype=_floating(given.dtype))


def _floating(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def _sole(output: Any, name: str) -> Tensor:
    if isinstance(output, Tensor):
        return output
    raise BadInputError(
        f"block {name!r} returns a {type(output).__name__}, and stages of a pipeline hand on one "
        "tensor. Let it return its hidden states alone, or cut elsewhere."
    )


def _forget_all_but(kept: Sequence[Tensor], module: nn.Module) -> None:
    """Put NaN, or 0 for whole numbers, without memory, in the place of other parameters."""
    ids = {id(tensor) for tensor in kept}
    for part in module.modules():
        for name, tensor in list(part._parameters.items()):
            if tensor is not None and id(tensor) not in ids:
                nothing: Any = math.nan if tensor.is_floating_point() else 0
                del part._parameters[name]
                stub = tensor.new_full((), nothing).expand(tensor.shape)
                object.__setattr__(part, name, stub)


class Staged(nn.Module):
    """This rank's stages of an objective; `model` has their parameters, by their own names."""

    def __init__(self, model: nn.Module, stages: Mapping[int, OwnStage]) -> None:
        super().__init__()
        self.model = model
        self.stages = nn.ModuleList(stages.values())

    @property
    def sums(self) -> Sequence[str]:
        """The objective's further sums in an evaluation."""
        return getattr(self.stages[0].objective, "sums", ())

    def metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """As the objective's."""
        found: dict[str, float] = self.stages[0].objective.metrics(sums, count)  # type: ignore[operator,union-attr]
        return found
