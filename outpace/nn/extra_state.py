"""Extra state of modules (`get_extra_state`), as bytes that checkpoints can store.

DCP would otherwise save a dict entry by entry, and load only the entries that a newly built module
has.
"""

import io
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from outpace.records.errors import BadInputError, first_names

EXTRA_STATE = "_extra_state"  # last component of an extra state's name in a state dict
# Names under which checkpoint_wrapper (offload_wrapper) and torch.compile hold the wrapped module.
_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})


def is_extra_state(name: str) -> bool:
    """Return whether a name in a state dict is that of extra state, not of a tensor."""
    return name.rpartition(".")[2] == EXTRA_STATE


def saved_name(name: str) -> str:
    """Return the name of a parameter or buffer in checkpoints, without torch's wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def parts_with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules that define `get_extra_state`, with their names."""
    for name, part in module.named_modules(remove_duplicate=True):
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield name, part


def pack(state: dict[str, Any]) -> dict[str, Any]:
    """Convert each extra state in a state dict to bytes of torch.save; return the dict.

    Works in place, since a state dict also has attributes (`_metadata`). Raises BadInputError for
    values that cannot be pickled.
    """
    for name, value in state.items():
        if is_extra_state(name):
            state[name] = _serialize(value, name)
    return state


def unpack(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Undo `pack` in place; return the dict. Tensors from a GPU are loaded to `device`.

    Entries that are not bytes stay unchanged. Raises BadInputError for values that are not plain.
    """
    for name, value in state.items():
        if is_extra_state(name) and type(value) is bytes:
            state[name] = from_bytes(value, name, device)
    return state


def require_plain(module: nn.Module) -> None:
    """Refuse extra state that cannot be saved or loaded safely, and tensors under unknown names.

    Loading extra state must not run code. A name is unknown if no parameter or buffer has it.
    """
    for name, part in parts_with_extra_state(module):
        shown = name or type(part).__name__
        from_bytes(_serialize(part.get_extra_state(), shown), shown)
    known = {saved_name(name) for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {saved_name(name) for name, _ in module.named_buffers(remove_duplicate=False)}
    saved = [name for name in module.state_dict() if not is_extra_state(name)]
    others = [name for name in saved if saved_name(name) not in known]
    if others:
        raise BadInputError(
            f"state_dict() of {type(module).__name__} contains entries that are not parameters or "
            f"buffers: {first_names(others)}. A hook or an overridden state_dict() renames or adds "
            "them, but checkpoints look up tensors by name. Rename entries where you export the "
            "model, and use get_extra_state to save anything else."
        )


def from_bytes(data: bytes, name: str, device: torch.device | None = None) -> Any:
    """Load a value from bytes that `pack` produced. Raises BadInputError if it is not plain."""
    place = partial(_load_storage_to, device=device or torch.device("cpu"))
    try:
        return torch.load(io.BytesIO(data), map_location=place, weights_only=True)
    except pickle.UnpicklingError:
        raise _extra_state_error(name, "and loading such a file could run code") from None


def _extra_state_error(name: str, why: str) -> BadInputError:
    of = name.removesuffix(f".{EXTRA_STATE}")
    return BadInputError(
        f"get_extra_state of {of} returns something other than plain values, {why}. Return "
        "tensors, numbers, strings, and lists and dicts of them."
    )


def _serialize(value: Any, name: str) -> bytes:
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # a lambda, a lock
        raise _extra_state_error(name, f"and it cannot be pickled ({error})") from None
    return file.getvalue()


def _load_storage_to(storage: Any, location: str, device: torch.device) -> Any:
    return storage if location == "cpu" or device.type == "cpu" else storage.to(device=device)
