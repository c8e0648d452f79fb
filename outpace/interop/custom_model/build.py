"""Conversion of what a user's function returns to a checked custom model."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from torch import nn

from outpace.interop.custom_model.lazy_parameters import give_shapes
from outpace.interop.custom_model.model import CustomModel
from outpace.interop.user_file import failure
from outpace.records.errors import BadInputError, suggest

_PARTS = tuple(field.name for field in fields(CustomModel))
_IN_ORDER = _PARTS[:4]
_RETURNS = (
    "an nn.Module, (module, loss), (module, loss, dataset), (module, loss, dataset, eval_dataset) "
    f"or a mapping with some of the keys {', '.join(_PARTS)}"
)


def build_custom_model(build: Callable[[], Any]) -> CustomModel:
    """Call a user's function and convert its result to a CustomModel.

    The result may be an nn.Module, a tuple with the first elements of (module, loss, dataset,
    eval_dataset), a mapping with the fields of CustomModel as keys, or a CustomModel. Raises
    BadInputError if the result is invalid or the function fails, with the file and line of the
    failure.
    """
    name = getattr(build, "__name__", "build")
    try:
        returned = build()
    except BadInputError:
        raise
    except (Exception, SystemExit) as error:
        code = getattr(build, "__code__", None)
        raise BadInputError(
            f"{name}() failed at {failure(error, getattr(code, 'co_filename', None))}"
        ) from None
    model = _to_custom_model(returned, name)
    if not isinstance(model.module, nn.Module):
        raise BadInputError(
            f"{name}() returned a {type(model.module).__name__} as the module; it must be an "
            "nn.Module"
        )
    _check_trainable(model, name)
    _check_loss(model.loss, name)
    _check_options(model, name)
    for part in ("dataset", "eval_dataset"):
        value = getattr(model, part)
        if value is not None and not (hasattr(value, "__getitem__") and hasattr(value, "__len__")):
            raise BadInputError(
                f"{name}() returned a {type(value).__name__} as the {part}; it must be a "
                "torch Dataset with a length (__len__ and __getitem__)"
            )
    give_shapes(model, name)
    return model


def _check_trainable(model: CustomModel, name: str) -> None:
    if not any(parameter.requires_grad for parameter in model.module.parameters()):
        raise BadInputError(
            f"{name}() returned a {type(model.module).__name__} without a parameter that requires "
            "gradients, so there is nothing to train"
        )
    if isinstance(model.loss, nn.Module):
        inside = {id(parameter) for parameter in model.module.parameters()}
        if any(id(parameter) not in inside for parameter in model.loss.parameters()):
            raise BadInputError(
                f"{name}() returned a {type(model.loss).__name__} as the loss, with parameters "
                "that the module does not have, but only the module's parameters are trained. Make "
                "the loss an attribute of the module (self.loss = …), and use it in the module's "
                "forward or in the loss function."
            )


def _check_loss(loss: Any, name: str) -> None:
    if loss is not None and not callable(loss):
        raise BadInputError(
            f"{name}() returned a {type(loss).__name__} as the loss; it must be a function "
            "loss(module, batch) that returns the mean loss, or (sum of losses, count)"
        )
    if isinstance(loss, nn.modules.loss._Loss):
        raise BadInputError(
            f"{name}() returned {type(loss).__name__} as the loss, which takes outputs and "
            "targets; give a function loss(module, batch) that calls it"
        )


def _check_options(model: CustomModel, name: str) -> None:
    blocks, layouts, sync = model.blocks, model.layouts, model.sync_batchnorm
    if model.optimizer is not None and not callable(model.optimizer):
        raise BadInputError(
            f"{name}() gave a {type(model.optimizer).__name__} as the optimizer; it must be a "
            "class such as torch.optim.AdamW, or a function that makes an optimizer from parameter "
            "groups (functools.partial(Prodigy, lr=1.0))"
        )
    parts = [] if blocks is None or isinstance(blocks, str) else list(blocks)
    flat = [one for part in parts for one in ([part] if isinstance(part, str) else part)]
    if isinstance(blocks, str) or not all(isinstance(one, str) for one in flat):
        raise BadInputError(
            f"{name}() returned {blocks!r} as blocks; they must be a list of names of "
            "submodules, or a list of such lists, one for each stage of a pipeline"
        )
    if layouts is not None and not isinstance(layouts, Mapping):
        raise BadInputError(
            f"{name}() returned a {type(layouts).__name__} as layouts; they must be a mapping of "
            'patterns of names to layouts, such as {"layers.*.q": "colwise", "layers.*.o": '
            '"rowwise"}'
        )
    if not isinstance(sync, bool):
        raise BadInputError(
            f"{name}() returned {sync!r} as sync_batchnorm; it must be True or False"
        )


def _to_custom_model(returned: Any, name: str) -> CustomModel:
    if isinstance(returned, CustomModel):
        return returned
    if isinstance(returned, nn.Module):
        return CustomModel(returned)
    if isinstance(returned, Mapping):
        unknown = [str(key) for key in returned if key not in _PARTS]
        if unknown:
            raise BadInputError(
                f"{name}() returned the unknown key {unknown[0]!r}."
                f"{suggest(unknown[0], _PARTS)} Keys: {', '.join(_PARTS)}"
            )
        if "module" not in returned:
            raise BadInputError(f"{name}() returned a mapping without 'module'")
        return CustomModel(**returned)
    if isinstance(returned, tuple) and 1 <= len(returned) <= len(_IN_ORDER):
        return CustomModel(*returned)
    raise BadInputError(f"{name}() returned a {type(returned).__name__}; it must be {_RETURNS}")
