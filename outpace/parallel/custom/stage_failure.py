"""Advice about forwards that cannot run in pipeline stages."""

import traceback
from collections.abc import Sequence
from types import CodeType

import torch

from outpace.parallel.batches import NEEDS_WHOLE, explain_lengths, samples_in
from outpace.parallel.layout import Batch
from outpace.records.errors import first_names

_SHARED_MEMORY = "more than one element of the written-to tensor refers to a single memory"
_CUT_GRAPH = ("does not require grad", "not have been used in the graph")
_OTHERWISE = "Use strategy ddp or zero1."


def explain_known(error: Exception) -> str | None:
    """Return advice about an error that only pipeline stages raise; None if it is unknown."""
    return explain_writes_outside() if _SHARED_MEMORY in str(error) else None


def explain_cut_graph(error: Exception) -> str | None:
    """Return advice if `torch.autograd.grad` failed in the forward of a stage, else None.

    It fails because the autograd graph of a stage covers only the stage's blocks.
    """
    cut = any(words in str(error) for words in _CUT_GRAPH)
    if cut and _was_raised_under(error, torch.autograd.grad.__code__):
        return (
            "the module or its loss computes gradients in the forward (torch.autograd.grad, for "
            "example for forces or gradient penalties), but a pipeline stage runs only its own "
            f"blocks. {_OTHERWISE}"
        )
    return None


EXPLAIN_COPY = (
    "the module or one of its blocks is copied (copy.deepcopy) after outpace.parallelize, but a "
    "pipeline stage has only its own blocks. Copy the module before outpace.parallelize, and on "
    "rank 0 load the state_dict() of what parallelize returned into the copy, or use strategy ddp "
    "or zero1."
)


def _was_raised_under(error: Exception, code: CodeType) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is code for frame, _ in frames)


def explain_writes_outside(names: Sequence[str] = ()) -> str:
    """Return a message about a forward that writes to parameters of other stages.

    `names` are the parameters that it writes to, if known.
    """
    if not names:
        return (
            "the forward or the loss writes to parameters of blocks from outside of them (masks "
            "over all weights, or an EMA teacher, for example), or to parameters outside of all "
            "blocks (a first layer that masks its weight), but each pipeline stage has only the "
            "parameters of its own blocks, and the first and the last stage also those outside. "
            "Write to a block's parameters in the forward of that block, add such a layer to "
            "`blocks`, or use ddp."
        )
    return (
        f"the forward or the loss writes to {first_names(names)} from parameters of blocks (masks "
        "over all weights, or an EMA teacher, for example), but each pipeline stage has only the "
        "parameters of its own blocks. Write to a block's parameters in the forward of that block, "
        "or use ddp."
    )


def explain_failure(rank: int, error: str, alone: bool, batch: Batch, cuts: bool) -> str:
    """Return a message about a forward that failed on a rank for a micro-batch.

    `alone`: the forward fails in a single process, too. `cuts`: the strategy splits batches.
    """
    said = f"rank {rank} failed in the forward: {error}"
    if not alone:
        return (
            f"{said}. The forward of a stage needs values that blocks of other stages return or "
            "hold. Name other submodules as `blocks`, or use zero3."
        )
    same = f"{said}, and a single process fails on these {samples_in(batch)} samples, too"
    if not cuts:
        return f"{same}. Run the module on them by itself to find the cause."
    why = explain_lengths(batch) or f"{NEEDS_WHOLE}."
    return f"{same}. If it does not fail on a whole batch, {why}"
