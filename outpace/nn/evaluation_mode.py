"""Evaluation mode of modules: a context, and an explanation of the modes that a user has set."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from outpace.records.errors import BadInputError, first_names


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put all of `module` in evaluation mode, and restore the mode of each submodule afterwards.

    Calls the `eval` and `train` methods of custom modules, since some merge adapters into weights
    for evaluation and unmerge them for training. Submodules that were already in evaluation mode,
    such as a frozen BatchNorm, return to it. Submodules added in the meantime get the mode of their
    parent. Raises BadInputError if a user's method fails.
    """
    modes = {part: part.training for part in module.modules()}
    _set_mode(module, training=False)
    try:
        yield
    finally:
        if any(modes.values()):
            _set_mode(module, training=True)
        for part, mode in modes.items():  # parents first, since their methods change their children
            if part.training != mode:
                _set_mode(part, mode)


def explain_modes(module: nn.Module) -> str | None:
    """Explain that a custom module is not in the modes that `module.train()` would set.

    Returns None if it is, or if a `train` method does not set a mode. Submodules in evaluation mode
    that `train()` would put in training mode are not reported: the user has frozen them.
    """
    if not module.training:
        return (
            "the module is in evaluation mode, as given, and is trained in it: dropout is off, and "
            "BatchNorm uses its moving averages. Call module.train() for training mode"
        )
    parts = list(module.modules())
    own = [part for part in parts if type(part).train is not nn.Module.train]
    if not own or not all(map(_has_mode_argument, own)):
        return None
    modes = {part: part.training for part in parts}
    trained = {parameter: parameter.requires_grad for parameter in module.parameters()}
    try:
        _set_mode(module, training=True)
        frozen = [n for n, p in module.named_modules() if modes.get(p, False) and not p.training]
    except BadInputError:
        return None
    finally:
        for part, mode in modes.items():
            part.training = mode
        for parameter, is_trained in trained.items():
            parameter.requires_grad_(is_trained)
    if not frozen:
        return None
    return (
        f"module.train() would put {first_names(frozen)} in evaluation mode, but has not been "
        "called, so they are trained in training mode. Call it before you return the module, as "
        "training loops do"
    )


def _has_mode_argument(part: nn.Module) -> bool:
    try:
        first, *others = inspect.signature(part.train).parameters.values()
    except (TypeError, ValueError):  # without a signature, or without parameters
        return False
    takes_mode = first.name == "mode" or isinstance(first.default, bool)
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return takes_mode and all(
        one.kind in optional or one.default is not inspect.Parameter.empty for one in others
    )


def _set_mode(module: nn.Module, training: bool) -> None:
    try:
        module.train() if training else module.eval()
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        said = str(e).strip().splitlines() or [""]
        raise BadInputError(
            f"the module's {'train()' if training else 'eval()'} failed with {type(e).__name__}: "
            f"{said[0][:200]}. If it works in one process, it uses parameters of which this rank "
            "holds only a shard, or nothing. Do this work in forward (if self.training), or use "
            "strategy ddp or zero1."
        ) from e
