"""Initialisation of torch's lazy modules, whose parameters get shapes from a first batch."""

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import default_collate

from outpace.interop.custom_model.model import CustomModel
from outpace.interop.custom_model.objective import CustomObjective
from outpace.nn.evaluation_mode import evaluation_mode
from outpace.records.errors import BadInputError

_SAMPLES = 2


def has_lazy_parameters(module: nn.Module) -> bool:
    """Return whether any parameter or buffer is lazy, so that it has no shape yet."""
    return any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))


def give_shapes(custom: CustomModel, name: str) -> None:
    """Run two samples of the user's data through a module to initialise its lazy parameters.

    The samples run in evaluation mode, without gradients. Raises BadInputError if there is no data,
    or if some parameters are still lazy; `name` is the builder's name.
    """
    if not has_lazy_parameters(custom.module):
        return
    why = "it has no dataset from which to take a batch"
    if custom.dataset is not None:
        why = _run_samples(custom) or "a batch of its dataset does not reach all of them"
    if has_lazy_parameters(custom.module):
        raise BadInputError(
            f"{name}() returned a {type(custom.module).__name__} with lazy parameters, which have "
            f"no shape yet, and {why}. Run a batch through the module in {name}()."
        )


def _run_samples(custom: CustomModel) -> str | None:
    """Run two samples through the module; return the reason if that fails, else None."""
    assert custom.dataset is not None
    try:
        samples = [custom.dataset[number] for number in range(min(_SAMPLES, len(custom.dataset)))]  # type: ignore[arg-type]
        with evaluation_mode(custom.module), torch.no_grad():
            CustomObjective(custom)(default_collate(samples))
    except Exception as error:
        return f"the module fails on a batch of its dataset ({type(error).__name__}: {error})"
    return None
