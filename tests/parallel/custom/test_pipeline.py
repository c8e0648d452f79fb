"""Stages of a user's forward, one process after the other: right, or caught."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import _backward

from outpace.interop.custom_model import CustomModel, CustomObjective, build_custom_model
from outpace.nn import torch_versions
from outpace.parallel.custom.block_values import split
from outpace.parallel.custom.pipeline import _group_parameters
from outpace.parallel.custom.stage import CustomStage
from outpace.parallel.custom.stage_failure import explain_cut_graph
from outpace.parallel.tensors import drop_all_but
from outpace.records.errors import BadInputError
from tests.parallel.parity.first_batch_cases import Stack, run_first_step

RANKS = Path(__file__).parent.parent / "custom_pipeline_ranks.py"
RIGHT = {"loss", "gradient", "norm", "state", "evaluation"}


class Chain(nn.Module):
    """Three layers between an embedding and a head; `kind` says what else the forward does."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embed = nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        x = start = self.embed(x)
        for layer in reversed(self.layers) if self.kind == "reversed" else self.layers:
            y = torch.relu_(layer(x))  # between the blocks, in place
            if self.kind == "residual":
                y = x + y
            if self.kind == "repeated":
                y = layer(y)
            if self.kind == "scaled":
                y = y * self.scale
            x = y
        return self.head(x + start if self.kind == "skips" else x)


def loss(module, batch):
    return module(batch).square().mean()


def through(kind, ends):
    """The loss of stages that end before each of `ends`, and of one process."""
    torch.manual_seed(0)
    objective = CustomObjective(CustomModel(Chain(kind), loss))
    names = ["layers.0", "layers.1", "layers.2"]
    batch, hidden = torch.randn(5, 3), None
    for begin, end in zip([0, *ends], [*ends, 3], strict=True):
        stage = CustomStage(objective, names, range(begin, end), begin == 0 or end == 3)
        hidden = stage.run(batch, hidden)
    return hidden[0].item(), objective(batch)[0].item()


@pytest.mark.parametrize("ends", [[1], [2], [1, 2]])
def test_what_is_between_blocks_is_done_by_the_stage_that_follows(ends):
    found, expected = through("plain", ends)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["scaled", "skips"])
def test_the_ends_have_all_that_is_outside_of_the_blocks(kind):
    found, expected = through(kind, [1])
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("kind", "ends"), [("residual", [2]), ("scaled", [1, 2])])
def test_what_a_stage_cannot_know_is_never_a_number(kind, ends):
    found, expected = through(kind, ends)
    assert found != found and expected == expected


def test_blocks_out_of_order_are_refused():
    with pytest.raises(BadInputError, match=r"'layers\.2' where 'layers\.0' was expected"):
        through("reversed", [1])


def test_a_block_that_is_called_twice_is_refused_with_what_can_be_done():
    """Naming blocks cannot help, whatever their order."""
    with pytest.raises(BadInputError, match=r"'layers\.0' is called again") as refusal:
        through("repeated", [1])
    assert "one larger module" in str(refusal.value) and "torch.cat" in str(refusal.value)


def test_a_split_backward_runs_uses_that_overlap_in_turn_together(monkeypatch):
    """Two groups met a third only by what lies between the uses of both together."""
    a, b, c = (nn.Parameter(torch.randn(3, 3, dtype=torch.float64)) for _ in range(3))
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    h = torch.tanh(x @ b)
    output = torch.tanh((torch.tanh(h @ c) + torch.tanh(torch.tanh(h @ a) @ b)) @ a)
    grad = torch.randn_like(output)
    expected = torch.autograd.grad(output, (a, b, c, x), grad, retain_graph=True)
    monkeypatch.setattr(_backward, "get_param_groups", _group_parameters)
    with monkeypatch.context() as older, pytest.raises(BadInputError, match="adds twice"):
        older.setattr(torch_versions, "torch_release", lambda: (2, 12))
        _backward.stage_backward_input([output], [grad], [x], iter([a, b, c]))
    if torch_versions.nested_split_refusal():
        return
    (of_input,), groups = _backward.stage_backward_input([output], [grad], [x], iter([a, b, c]))
    _backward.stage_backward_weight(iter([a, b, c]), groups)
    for one, right in zip((a.grad, b.grad, c.grad, of_input), expected, strict=True):
        torch.testing.assert_close(one, right)


TRAPS = (
    "aux_on_blocks:gpipe", "aux_in_dicts_of_inner_modules:zb", "activation_penalty:1f1b",
    "loss_by_closure:zb", "checkpoints_in_forward:1f1b", "reentrant_checkpoints_in_forward:gpipe",
    "reentrant_checkpoints_in_forward:zb", "checkpoints_over_several_blocks:zb",
    "blocks_that_transpose:zb", "blocks_that_return_dicts:zbv", "moving_buffer_in_stem:zb",
    "own_loss_with_terms:gpipe", "running_averages_in_the_forward:1f1b",
    "buffers_moved_without_a_version:mp", "parameters_in_a_ring:zb",
    "parts_used_again_in_a_block:zb",
)  # fmt: skip
REFUSED = {
    "norm_of_all_parameters:gpipe": "the loss uses all parameters",
    "lists_as_arguments:1f1b": "single process .* is not sent between stages",
    "hooks_inside_of_blocks:zb": "single process .* is not sent between stages",
    "faint_hooks_inside_of_blocks:gpipe": "would lose a part of layers",
    "lists_of_lists:gpipe": "turns its input into NaN",
    "forces_by_gradients:1f1b": "computes gradients in the forward.*ddp or zero1",
    "state_for_eight_samples:gpipe": "a single process fails on these 2.*refers to other.*mp",
    "teacher_moved_by_the_forward:mp": "writes to teacher.*from parameters of blocks.*use ddp",
}
STRATEGIES = ("mp", "gpipe", "1f1b", "interleaved", "loopedbfs", "zb", "zbv", "dualpipev")


@pytest.mark.gloo
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(TRAPS, id="subset"),
        *(pytest.param([f"all:{one}"], marks=pytest.mark.slow, id=one) for one in STRATEGIES),
    ],
)
def test_modules_with_a_trap_equal_one_process_in_pipelines(cases, on_ranks, runnable):
    for case, (first, *others) in on_ranks(2, RANKS, *runnable(cases)).items():
        assert set(first["worst"]) == RIGHT, (case, first)
        for one in (first, *others):
            wrong = {kind: worst for kind, worst in one["worst"].items() if not worst <= 1e-6}
            assert not wrong, case


@pytest.mark.gloo
def test_what_does_not_travel_is_refused_by_every_rank(on_ranks, runnable):
    for case, told in on_ranks(2, RANKS, *runnable(REFUSED)).items():
        for one in told:
            assert re.search(REFUSED[case], one.get("refused", "")), (case, one)


class ExpandedStack(Stack):
    """Writes to a tensor whose elements share memory, which fails on one process, too."""

    def forward(self, x):
        x.new_zeros(1).expand(3).add_(1)
        return super().forward(x)


@pytest.mark.gloo
def test_errors_that_one_process_has_too_are_not_explained_by_the_pipeline(tmp_path):
    for said in run_first_step(tmp_path, "gpipe", ExpandedStack):
        assert "a single process fails on these" in said["refused"]


def test_only_a_graph_that_a_stage_cuts_is_explained_by_the_pipeline():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError) as cut:
        torch.autograd.grad(torch.ones(()), x)
    assert "computes gradients in the forward" in explain_cut_graph(cut.value)
    with pytest.raises(RuntimeError) as other:
        torch.autograd.grad(x.sum(), x, grad_outputs=torch.ones(3))
    assert explain_cut_graph(other.value) is None


def test_complex_values_travel_as_real_ones():
    value = {"wave": torch.randn(3, 2, dtype=torch.complex128).mT, "x": torch.ones(2), "n": 3}
    form, tensors = split(value)
    assert not any(tensor.is_complex() for tensor in tensors)
    joined = form.join([tensor.contiguous() for tensor in tensors])
    assert torch.equal(joined["wave"], value["wave"]) and joined["n"] == 3
    assert torch.equal(joined["x"], value["x"])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch.func's own
def test_derivatives_in_forward_mode_over_all_blocks_are_refused():
    def slope(module, batch):
        made, velocity = torch.func.jvp(module, (batch,), (torch.ones_like(batch),))
        return (made - velocity).square().mean()

    objective = CustomObjective(build_custom_model(lambda: CustomModel(Chain("plain"), slope)))
    names = [f"layers.{n}" for n in range(3)]
    stage = CustomStage(objective, names, range(2), True)
    with pytest.raises(BadInputError, match=r"block .layers.1. runs inside a torch.func transform"):
        stage.run(torch.ones(2, 3), None)


class Saving(nn.Linear):
    """Saves its bias by code of its own, as torch's FakeQuantize does, and a number."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}bias"] = self.bias

    def get_extra_state(self):
        return len(self.bias)

    def set_extra_state(self, state):
        raise AssertionError


def test_what_lost_tensors_saves_and_loads_what_is_left():
    module = nn.Sequential(Saving(2, 2), Saving(2, 2))
    drop_all_but([module[0].weight, *module[1].parameters()], module)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied[0].weight.fill_(3)
    for part in (module, copied):
        state = part.state_dict()
        assert set(state) == {"0.weight", "1.weight", "1.bias", "1._extra_state"}
        assert torch.equal(state["0.weight"], part[0].weight)
    copied[0].load_state_dict({"weight": torch.ones(2, 2)})
    assert torch.equal(copied[0].weight, torch.ones(2, 2))
    with pytest.raises(RuntimeError, match=r"Missing key.* .weight"):
        copied[0].load_state_dict({})
