"""Temporary evaluation mode of a module."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from outpace.records.errors import BadInputError


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put every part of `module` in evaluation mode, and restore each part's mode afterwards.

    A user's own `eval` and `train` methods are called both times: some merge adapters into weights
    for evaluation and unmerge them for training. Parts that were already in evaluation mode, such
    as a frozen BatchNorm, return to it. Parts added in the meantime get the mode of their parent.
    Raises BadInputError if a user's method fails.
    """
    modes = {part: part.training for part in module.modules()}
    _switch(module, training=False)
    try:
        yield
    finally:
        if any(modes.values()):
            _switch(module, training=True)
        for part, mode in modes.items():  # parents first, since their methods change their children
            if part.training != mode:
                _switch(part, mode)


def _switch(module: nn.Module, training: bool) -> None:
    try:
        module.train() if training else module.eval()
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        said = str(e).strip().splitlines() or [""]
        raise BadInputError(
            f"the module's {'train()' if training else 'eval()'} failed with {type(e).__name__}: "
            f"{said[0][:200]}. If it works in one process, it uses parameters of which this rank "
            "holds only a shard, or nothing. Do it in the forward (if self.training), or use "
            "strategy ddp or zero1."
        ) from e
