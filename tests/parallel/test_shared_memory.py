"""Tensors in the memory of trained parameters are found, and refused where ranks separate them."""

from functools import partial

import pytest
import torch
from torch import nn

from outpace.parallel.plain import to_float64
from outpace.parallel.shared_memory import find_shared_memory, refuse_shared_memory
from outpace.records.errors import BadInputError


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


def transposed():
    made = Pair()
    made.b.weight = nn.Parameter(made.a.weight.t())
    return made


def one_row():
    made = Pair()
    made.b.bias = nn.Parameter(made.a.weight[1])
    return made


def with_buffer():
    made = Pair()
    made.register_buffer("old", made.a.weight.data)
    return made


def with_attribute():
    made = Pair()
    made.old = {"a": [made.a.weight.detach()]}
    return made


@pytest.mark.parametrize(
    ("make", "name", "kind"),
    [
        (transposed, "a.weight", "a parameter"), (one_row, "a.weight", "a parameter"),
        (with_buffer, "old", "a buffer"), (with_attribute, "old", "an attribute"),
    ],
)  # fmt: skip
def test_what_moves_with_a_trained_parameter_is_refused(make, name, kind):
    """Under ddp each rank has whole tensors in one memory, as one process has them."""
    found = find_shared_memory(make())
    assert found is not None and found[:2] == (name, kind)
    for strategy in ("zero1", "zero3", "1f1b", "tp"):
        with pytest.raises(BadInputError, match=rf"{name}, {kind}, shares memory with .*clone"):
            refuse_shared_memory(make(), strategy)
    refuse_shared_memory(make(), "ddp")


def tied():
    made = Pair()
    made.b.weight = made.a.weight
    return made


def parts_of_one_tensor():
    made = Pair()
    rows = torch.randn(8, 4)
    columns = torch.randn(4, 8)
    made.a.weight, made.b.weight = (nn.Parameter(one) for one in rows.chunk(2))
    made.c, made.d = (nn.Parameter(one) for one in columns.chunk(2, 1))
    return made


def frozen():
    made = with_buffer()
    made.a.weight.requires_grad_(False)
    return made


def normalised():
    made = Pair()
    nn.utils.spectral_norm(made.a)
    return made


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


class GatedUnits(nn.GRU):
    def __init__(self, size):
        super().__init__(size, size)
        self.scale = nn.Parameter(torch.ones(()))


def recurrent():
    return nn.Sequential(Recurrent(4, 4, 2), GatedUnits(4))


@pytest.mark.parametrize("make", [tied, parts_of_one_tensor, frozen, normalised, recurrent])
def test_ties_neighbours_in_memory_and_what_nothing_trains_are_right(make):
    assert find_shared_memory(make()) is None
    refuse_shared_memory(make(), "zero3")
    refuse_shared_memory(nn.LSTM(4, 4, 2), "zero3")  # which lists its parameters itself


class Reading(Pair):
    def forward(self, x):
        return self.b(self.a(x)) + self.decayed(x)

    def groups(self):
        return self.unread


def in_a_list(made):
    made.decayed = {"all": [p for p in made.parameters() if p.dim() > 1]}


def as_keys(made):
    made.decayed = dict.fromkeys(made.parameters(), 0.1)


def bound_to_a_function(made):
    made.decayed = partial(torch.nn.functional.linear, weight=made.a.weight)


def enclosed(made):
    weight = made.a.weight
    made.decayed = lambda x: x @ weight


class Holder:
    def __init__(self, made):
        self.optimizer = torch.optim.SGD(made.parameters(), 0.1)


def in_an_object(made):
    made.decayed = Holder(made)


@pytest.mark.parametrize("put", [in_a_list, as_keys, bound_to_a_function, enclosed, in_an_object])
def test_held_parameters_are_refused_where_ranks_train_others(put):
    made = Reading()
    put(made)
    with pytest.raises(BadInputError, match=r"decayed, a plain attribute, holds .* [ab]\.\w+, "):
        refuse_shared_memory(made, "zero2")
    for strategy in ("ddp", "zero1"):
        refuse_shared_memory(made, strategy)


@pytest.mark.parametrize("put", [in_a_list, as_keys, in_an_object])
def test_held_parameters_that_no_step_reads_are_right(put):
    made = Reading()
    put(made)
    made.unread = made.__dict__.pop("decayed")
    refuse_shared_memory(made, "zero2")


def test_parameters_in_a_losss_variables_are_refused():
    made = Reading()
    held, unread = list(made.parameters()), list(made.parameters())

    def loss(module, batch):
        return sum(p.sum() for p in held)

    def unused():
        return unread

    assert unused()
    with pytest.raises(BadInputError, match=r"held, a closure variable of loss, holds"):
        refuse_shared_memory(made, "zero3", loss)
    refuse_shared_memory(made, "zero3", lambda module, batch: module(batch))
    refuse_shared_memory(made, "ddp", loss)


def test_parameters_bound_to_a_loss_are_refused():
    made = Pair()
    bound = partial(lambda module, batch, weight: weight.sum(), weight=made.a.weight)
    with pytest.raises(BadInputError, match=r"an argument bound to the loss, holds .* a\.weight"):
        refuse_shared_memory(made, "zero3", bound)


class Outer(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.own = inner, torch.nn.Linear(2, 2)


def test_a_module_around_the_trained_one_holds_what_ranks_train():
    outer = Outer(Pair())

    def loss(module, batch):
        return outer.own(module(batch)).sum()

    refuse_shared_memory(outer.inner, "zero3", loss)
    outer.register_parameter("again", outer.inner.a.weight)
    with pytest.raises(BadInputError, match=r"outer, a closure variable of loss, holds"):
        refuse_shared_memory(outer.inner, "zero3", loss)


@pytest.mark.parametrize("make", [transposed, one_row, with_buffer])
def test_one_memory_stays_one_in_float64(make):
    made = make()
    values = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    made = to_float64(made)
    assert find_shared_memory(made) is not None
    found = made.state_dict()
    assert found.keys() == values.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.float64 and torch.equal(tensor, values[name].double())


def test_a_buffer_of_two_names_stays_one_in_float64():
    made, table = Pair(), torch.arange(3.0)
    made.a.register_buffer("table", table)
    made.b.register_buffer("table", table)
    made = to_float64(made)
    assert made.a.table is made.b.table and made.a.table.tolist() == [0, 1, 2]
