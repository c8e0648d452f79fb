"""Hooks that users register on parameters to change their gradients."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from outpace.records.errors import BadInputError, first_names

Hook = Callable[[Tensor], Any]


def gradient_hooks(parameter: Tensor) -> list[Hook]:
    """Return the hooks registered by `register_hook`, in order."""
    return list((parameter._backward_hooks or {}).values())


def accumulation_hooks(parameter: Tensor) -> list[Hook]:
    """Return the hooks registered by `register_post_accumulate_grad_hook`, in order."""
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def add_hooks(parameter: nn.Parameter, gradient: Iterable[Hook], after: Iterable[Hook]) -> None:
    """Register gradient hooks and post-accumulate hooks on a parameter."""
    for hook in gradient:
        parameter.register_hook(hook)
    for hook in after:
        parameter.register_post_accumulate_grad_hook(hook)


def refuse_hooks(
    named: Iterable[tuple[str, nn.Parameter]], strategy: str, why: str, after_alone: bool = False
) -> None:
    """Raise BadInputError if a parameter has hooks that a strategy would not call.

    `why` is the reason to give. `after_alone`: the strategy calls gradient hooks, but not
    post-accumulate hooks.
    """
    hooked = [
        name
        for name, parameter in named
        if accumulation_hooks(parameter) or (gradient_hooks(parameter) and not after_alone)
    ]
    if hooked:
        kind = "register_post_accumulate_grad_hook" if after_alone else "register_hook"
        raise BadInputError(
            f"{first_names(hooked)} {'has' if len(hooked) == 1 else 'have'} gradient hooks "
            f"({kind}), which strategy {strategy} would not call: {why}. Use strategy ddp or "
            "zero1, or change gradients between the backward and the optimizer's step."
        )
