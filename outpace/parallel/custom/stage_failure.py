"""Advice about forwards that cannot run in the stages of a pipeline."""

import copy
import traceback
from collections.abc import Sequence
from types import CodeType

import torch

from outpace.parallel.batches import NEEDS_WHOLE, explain_lengths, samples_in
from outpace.parallel.layout import Batch
from outpace.records.errors import BadInputError, first_names

_SHARED_MEMORY = "more than one element of the written-to tensor refers to a single memory"
_OTHERWISE = "Use strategy ddp or zero1."


def explain_known(error: Exception) -> BadInputError | None:
    """Return advice about an error whose cause is known wherever it is raised; None for others."""
    if _SHARED_MEMORY in str(error):  # as only stubs of parameters do that a stage lacks
        return BadInputError(explain_writes_outside())
    if _is_raised_in(error, torch.autograd.grad.__code__):
        return BadInputError(
            "the module or its loss computes gradients within the forward (torch.autograd.grad, as "
            "for forces or gradient penalties), but a stage of a pipeline runs only its own "
            f"blocks. {_OTHERWISE}"
        )
    if _is_raised_in(error, copy.deepcopy.__code__):
        return BadInputError(
            "the module or its loss copies the module (copy.deepcopy) in training, but a stage of "
            f"a pipeline has only its own blocks. {_OTHERWISE}"
        )
    return None


def _is_raised_in(error: Exception, code: CodeType) -> bool:
    """Return whether an error comes from within a function, or from what it calls."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is code for frame, _ in frames)


def explain_writes_outside(names: Sequence[str] = ()) -> str:
    """Return a message about a forward that needs other stages' parameters to write to some.

    `names` are those that it writes to, if known.
    """
    to = f"{first_names(names)} by" if names else "parameters of"
    what = "parameters of blocks" if names else "blocks from outside of them"
    return (
        f"the forward or the loss writes to {to} {what} (masks over all weights, a teacher that "
        "follows), and each stage of a pipeline has those of its own blocks alone. Write to a "
        "block's parameters in the forward of that block, or between steps, or use ddp."
    )


def explain_failure(rank: int, error: str, alone: bool, batch: Batch, cuts: bool) -> str:
    """Return a message about a forward that failed on a rank with a micro-batch.

    `alone`: a single process fails on it, too. `cuts`: the strategy splits batches.
    """
    said = f"rank {rank} failed in the forward: {error}"
    if not alone:
        return (
            f"{said}. The forward needs values on each stage that blocks of other stages return or "
            "hold. Name other parts as `blocks`, or use zero3."
        )
    same = f"{said}, and so does a single process on these {samples_in(batch)} samples"
    if not cuts:
        return f"{same}. Run the module on them by itself to find the cause."
    why = explain_lengths(batch) or f"{NEEDS_WHOLE}."
    return f"{same}. If it does not on a whole batch, {why}"
