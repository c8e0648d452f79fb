"""Names that a step can read are those in code that a forward, a hook or a loss can reach."""

import functools
import importlib
import operator

import pytest
from torch import nn

from outpace.parallel.parity.names_in_use import NamesInUse

LISTED = []


def penalty(module):
    return sum(p.sum() for p in module.read_by_a_global)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.read_in_init = [self.linear.weight]
        len(self.read_in_init)

    def groups(self):
        return self.read_by_the_optimizer

    @property
    def total(self):
        return self.read_by_a_property

    def helper(self):
        return self.read_by_a_method

    def forward(self, x):
        inner = [self.helper() for _ in range(2)]
        return self.linear(x) + self.total + penalty(self), inner

    def state_dict(self, *args, **options):
        return self.read_by_state_dict


def loss(module, batch):
    return module(batch).sum() + LISTED[0] + module.read_by_the_loss


@pytest.mark.parametrize(
    "name",
    [
        "read_by_a_global", "read_by_a_property", "read_by_a_method", "read_by_state_dict",
        "read_by_the_loss", "LISTED", "linear",
    ],
)  # fmt: skip
def test_names_in_reachable_code_may_be_read(name):
    in_use = NamesInUse(nn.Sequential(Part()), loss)
    assert in_use.may_read(name) and in_use.mentions(name)


@pytest.mark.parametrize("name", ["read_in_init", "read_by_the_optimizer"])
def test_names_of_other_code_are_not(name):
    assert not NamesInUse(nn.Sequential(Part()), loss).may_read(name)


class Dynamic(Part):
    def forward(self, x):
        return getattr(self, "read" + "_later")


def test_any_name_may_be_read_where_code_looks_names_up():
    in_use = NamesInUse(Dynamic(), None)
    assert in_use.may_read("read_by_the_optimizer")
    assert not in_use.mentions("read_by_the_optimizer")


def test_hooks_and_bound_functions_count():
    module = Part()
    module.linear.register_forward_hook(lambda part, given, made: made * part.read_by_a_hook)
    module.scaled = functools.partial(lambda scale, x: x * scale.read_by_a_partial, module)
    in_use = NamesInUse(module, operator.attrgetter("a"))
    assert in_use.may_read("read_by_a_hook") and in_use.may_read("read_by_a_partial")


class Criterion(nn.Module):
    def forward(self, made):
        return made.sum() * self.read_by_a_criterion


def test_functions_in_other_files_of_the_user_count(tmp_path, monkeypatch):
    (tmp_path / "users_losses.py").write_text(
        "def scale(made):\n    return made * made.read_by_another_file\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    other = importlib.import_module("users_losses")
    scope = {"__name__": "__main__", "users_losses": other, "scale": other.scale}
    for code in ("users_losses.scale(module)", "scale(module)"):
        exec(f"def loss(module, batch):\n    return {code}", scope)
        assert NamesInUse(Part(), scope["loss"]).mentions("read_by_another_file")


def test_criteria_count():
    criterion = Criterion()
    for given in (criterion, lambda module, batch: criterion(module(batch))):
        assert NamesInUse(nn.Linear(2, 2), given).may_read("read_by_a_criterion")
