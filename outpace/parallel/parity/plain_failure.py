"""Reasons why the plain module's pass over the first global batch did not complete."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from outpace.parallel.batches import RUNS_WHOLE, explain_lengths, move_batch
from outpace.parallel.layout import Batch, StepHooks
from outpace.parallel.parity.module_state import preserve_state
from outpace.parallel.parity.moved_parameters import keep_values
from outpace.parallel.parity.plain_copy import model_of
from outpace.parallel.parity.plain_pieces import Pieces
from outpace.parallel.parity.user_collectives import COLLECTIVE, CollectiveError
from outpace.parallel.rank_objects import gather_objects
from outpace.records.errors import BadInputError

_FAILS = "a copy of the module fails"


@dataclass(frozen=True)
class PlainFailure:
    """The reason why the user's module could not be run as in a single process.

    `by_cut`: the module fails only because the batch is split, so training must not start.
    """

    reason: str
    by_cut: bool = False


def _can_run(plain: nn.Module, batch: Batch, hooks: StepHooks) -> bool | None:
    """Return whether a forward over a batch completes; None if there is not enough memory.

    Gradients are enabled only if the forward fails without them, because some forwards need them.
    """
    model = model_of(plain)
    device = next(model.parameters()).device
    batch = move_batch(batch, device)
    for gradients in (False, True):
        try:
            with (
                preserve_state(plain, device),
                keep_values(model.named_parameters()),
                torch.set_grad_enabled(gradients),
                hooks.cast(),
            ):
                plain(batch)
        except torch.OutOfMemoryError:
            return None
        except Exception:
            continue
        return True
    return False


def describe_failure(error: Exception) -> str:
    """Return the reason why the plain forward and backward did not complete."""
    if isinstance(error, CollectiveError) or _is_advice_to_user(error):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "there is not enough memory for a single process's forward and backward"
    said = str(error).strip().splitlines() or [""]
    return f"{_FAILS} ({type(error).__name__}: {said[0][:200]})"


def _is_advice_to_user(error: Exception) -> bool:
    return isinstance(error, BadInputError) and error.__cause__ is None


def gather_first(reason: str | None) -> str | None:
    """Return the reason of the first rank that has one; None if no rank has. Collective."""
    return next((one for one in gather_objects(reason) if one is not None), None)


def explain_failure(
    plain: nn.Module,
    reason: str,
    passes: Sequence[Batch],
    hooks: StepHooks,
    pieces: Pieces,
    synchronised: bool,
) -> PlainFailure:
    """Find out whether the module fails because the batch is split. Collective.

    The split is the cause if the module runs on the whole batch. If the whole batch cannot be
    tried, the message names, as a possible cause, tensors that stay whole in each part because they
    do not have a row per sample.
    """
    if reason.startswith(COLLECTIVE):
        return PlainFailure(reason, by_cut=True)
    lengths = gather_first((explain_lengths(passes[0]) or None) if passes else None)
    if not reason.startswith(_FAILS):
        return PlainFailure(reason)
    whole = pieces.gather_whole(passes)
    # Ranks may have run unequal numbers of forwards, so collectives of batch statistics would hang.
    asked = bool(passes) and whole is not None and not synchronised
    said = gather_objects(_can_run(plain, whole, hooks) if asked else None)
    known = {one for one in said if one is not None}
    if known == {False} or (lengths is None and known != {True}):
        return PlainFailure(reason)
    if lengths is None:
        lengths = RUNS_WHOLE
    return PlainFailure(f"{reason}: {lengths.removesuffix('.')}", by_cut=known == {True})
