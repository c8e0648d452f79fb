"""Extra state in state dicts: what is written as bytes, what is refused, what is a parameter."""

import threading

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from outpace.nn.extra_state import is_extra_state, pack, require_plain, unpack
from outpace.records.errors import BadInputError


class Part(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.my_extra_state = nn.Parameter(torch.ones(2))
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


def test_a_parameter_whose_name_ends_alike_stays_a_tensor():
    for module in (Part({"calls": 3}), nn.Sequential(Part({"calls": 3}))):
        held = module.state_dict()
        packed = pack(dict(held))
        extra = [name for name in held if is_extra_state(name)]
        assert len(extra) == 1 and type(packed[extra[0]]) is bytes
        assert all(packed[name] is held[name] for name in held if name not in extra)
        assert unpack(packed, torch.device("cpu"))[extra[0]] == {"calls": 3}


@pytest.mark.parametrize("state", [lambda: 0, threading.Lock(), {"lock": [threading.RLock()]}])
def test_what_cannot_be_pickled_is_refused_in_words(state):
    module = nn.Sequential(Part(state))
    for refuse in (require_plain, lambda module: pack(module.state_dict())):
        with pytest.raises(
            BadInputError, match="get_extra_state of 0 returns something other than plain"
        ) as e:
            refuse(module)
        assert "it cannot be pickled" in str(e.value) and "Return tensors, numbers" in str(e.value)


def test_names_that_no_tensor_has_are_refused():
    """Checkpoints find tensors by name, and torch's look for a part of that name."""
    module = nn.Sequential(nn.Linear(2, 2), Part({"calls": 3}))
    require_plain(module)

    def rename(module, state, prefix, metadata):
        state[f"{prefix}w"] = state.pop(f"{prefix}weight")

    module[0].register_state_dict_post_hook(rename)
    with pytest.raises(BadInputError, match=r"buffers: 0\.w\. .* Rename entries where"):
        require_plain(module)


def test_names_without_the_wrappers_of_torch_are_taken():
    layers = nn.Linear(2, 2), nn.Linear(2, 2), Part({"calls": 3})
    recomputed, compiled = checkpoint_wrapper(layers[0]), torch.compile(layers[1], backend="eager")
    inner = nn.ModuleDict({"a": compiled})
    module = nn.Sequential(recomputed, inner, checkpoint_wrapper(layers[2]))
    require_plain(module)
    module[0].register_buffer("steps", torch.zeros(()))
    module[0]._checkpoint_wrapped_module.register_buffer("calls", torch.zeros(()))
    require_plain(module)
