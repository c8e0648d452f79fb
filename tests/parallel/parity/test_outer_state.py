"""What of a module's surroundings counts as the user's own."""

from types import SimpleNamespace

from torch import nn

from outpace.interop.custom_model.objective import CustomObjective
from outpace.parallel.parity.outer_state import find_places

CALLS = 0


def loss(module, batch):
    return module(batch).square().mean() + 0 * CALLS


def test_globals_of_the_users_files_count_and_those_of_outpace_do_not():
    objective = CustomObjective(SimpleNamespace(module=nn.Linear(2, 2), loss=loss))
    assert [place.name for place in find_places(objective)] == ["CALLS"]
