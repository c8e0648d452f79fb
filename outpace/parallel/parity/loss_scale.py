"""Gradients that do not scale with the loss, because a user's backward adds to or clips them.

Strategies scale the loss before its backward and the gradients after it. For autograd's own
derivatives, the two are equivalent. They are not for a Function that adds an auxiliary loss's
gradient (which ignores the scale of the loss), or for hooks that clip or normalise gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from outpace.parallel.batches import take_first
from outpace.parallel.layout import Batch, StepHooks
from outpace.parallel.parity.comparison import SINGLE, ComparisonLimits, Projection, Taker
from outpace.parallel.parity.trial_forward import trial_forward
from outpace.parallel.parity.user_collectives import NoCollectives
from outpace.parallel.tensors import graph_nodes, is_in_python
from outpace.records.errors import first_names

_FEW = 2  # samples
_SCALE = 0.125  # a power of two, so gradients that scale with the loss are bitwise equal
_LEAST = 1e-3  # tolerated relative difference of a gradient; in 16 bits, `projection` applies


def has_user_backward(loss: Tensor) -> bool:
    """Return whether the graph of a loss contains an autograd Function written in Python."""
    return any(map(is_in_python, graph_nodes(loss)))


def find_unscaled_gradients(
    plain: nn.Module,
    piece: Batch,
    names: Sequence[str],
    projection: Projection,
    divert: Callable[[Taker | None], None],
    hooks: StepHooks,
    drops: bool,
    strategy: str,
    allowed: ComparisonLimits,
) -> list[str]:
    """Return the names of parameters whose gradients do not scale with the loss.

    `plain` is a copy of the user's model with its loss. A few samples of `piece` go through one
    forward of `plain`, then through two or three backwards from the loss, multiplied by different
    factors. `divert` passes the gradients to a function instead of storing them. Returns an empty
    list if the forward or a backward fails.
    """

    def run_backward(loss: Tensor, scale: float) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}

        def take(name: str, gradient: Tensor) -> None:
            product = projection.project(gradient) / scale
            # With reentrant checkpointing, parts of the gradient arrive one after the other.
            found[name] = found[name] + product if name in found else product

        divert(take)
        try:
            loss.backward(torch.full_like(loss, scale), retain_graph=True)
        finally:
            divert(None)
        return found

    with suppress(Exception), trial_forward(plain, drops):  # such as too few samples for a norm
        with hooks.cast(), NoCollectives(strategy):  # other ranks may run no forward
            loss_sum, *_ = plain(take_first(piece, _FEW))
        whole, scaled = run_backward(loss_sum, 1.0), run_backward(loss_sum, _SCALE)
        apart = _list_differing(names, whole, scaled, allowed)
        # a backward that draws random numbers differs each time
        noisy = _list_differing(names, whole, run_backward(loss_sum, 1.0), allowed) if apart else []
        return [name for name in apart if name not in noisy]
    return []


def _list_differing(
    names: Sequence[str],
    some: dict[str, Tensor],
    others: dict[str, Tensor],
    allowed: ComparisonLimits,
) -> list[str]:
    both = [name for name in names if name in some and name in others]
    if not both:
        return []
    sizes = torch.stack([some[name].abs().double() for name in both])
    off = torch.stack([(some[name] - others[name]).abs().double() for name in both])
    least = allowed.floor * sizes.max()
    most = allowed.projection if allowed.projection > SINGLE.projection else _LEAST
    wrong = off > most * sizes.clamp(min=least)
    return [name for name, one in zip(both, wrong.tolist(), strict=True) if one]


@contextmanager
def note_backwards(model: nn.Module, names: set[str]) -> Iterator[None]:
    """Add to `names` the parameters whose gradients are accumulated inside the context."""
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: names.add(name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.is_leaf
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def explain_backwards(names: Sequence[str]) -> str:
    """Return a message about a forward or a loss that itself runs a backward."""
    return (
        "the forward or the loss itself runs a backward, which adds to the gradients of "
        f"{first_names(names)}, but outpace scales the loss before its backward pass and the "
        "gradients after it, so gradients added in between would have the wrong weight. Return "
        "the sum of all losses (over parts of a sequence, for example, with states detached in "
        "between), or compute gradients with torch.autograd.grad, which does not add to .grad."
    )


def explain_unscaled_gradients(names: Sequence[str]) -> str:
    """Return a message about gradients that do not scale with the loss."""
    return (
        f"gradients of {first_names(names)} are not proportional to the loss: a Function or a "
        "hook of the module adds, clips or normalises gradients by a fixed amount in the "
        "backward pass, but the losses of micro-batches are scaled before it. Return an "
        "auxiliary loss from the forward and add it to the loss, and change gradients between "
        "the backward pass and the optimizer's step."
    )
