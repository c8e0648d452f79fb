"""Every optimizer by its name: the states it begins with, and what they weigh."""

import copy
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.nn.mixed_precision import weights_dtype
from outpace.nn.transformer import Transformer
from outpace.optim import build
from outpace.optim.adafactor import Adafactor
from outpace.optim.build import begin_step, fill_state, make_optimizer, steps_together
from outpace.optim.muon import MOMENTUM, Muon, is_hidden_matrix
from outpace.planner.memory.optimizer_bytes import optimizer_bytes
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.optimizers import OptimizerName
from outpace.records.precisions import MASTERS
from outpace.records.settings import TrainSettings

RANKS = Path(__file__).with_name("adafactor_ranks.py")
NAMES = OptimizerName.__args__
SPEC = ModelSpec.parse(
    {"family": "gpt2", "layers": 2, "hidden": 64, "heads": 2, "ffn": 192, "vocab": 100,
     "max_positions": 32},
    "test",
)  # fmt: skip
SETTINGS = TrainSettings(lr=1e-2)


def made(name, precision="fp32"):
    model = Transformer(SPEC)
    if precision != "fp32":
        model.to(weights_dtype(precision))
    master = precision in MASTERS
    return model, make_optimizer(model.named_parameters(), name, SETTINGS, master_weights=master)


def train(model, optimizer, steps=3):
    torch.manual_seed(0)
    for number in range(1, steps + 1):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        begin_step(optimizer, number, 1e-2)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_filled_states_are_those_from_which_a_first_step_begins(name):
    known = train(*made(name))
    model, optimizer = made(name)
    fill_state(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(train(model, optimizer), known, strict=True))


CASES = [(name, "fp32") for name in NAMES] + [
    ("adamw-bf16", "bf16-pure"), ("adamw-4bit", "bf16-pure"), ("adamw-fused", "fp16-master"),
    ("muon", "fp16-master"), ("adamw-fused", "bf16-master"), ("adamw-8bit", "bf16-master"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_states_weigh_what_the_formula_says(name, precision):
    model, optimizer = made(name, precision)
    train(model, optimizer, steps=1)
    found = sum(
        tensor.nbytes
        for state in optimizer.state.values()
        for kind, tensor in state.items()
        if kind != "step"
    )
    assert found == sum(
        optimizer_bytes(p.shape, name, precision, hidden=is_hidden_matrix(n, p))
        for n, p in model.named_parameters()
    )


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_a_step_can_be_traced_without_memory(name, precision, request):
    """No value is looked at: a trace under fake tensors has none."""
    torch.set_default_dtype(weights_dtype(precision) or torch.float32)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
        master = precision in MASTERS
        optimizer = make_optimizer(model.named_parameters(), name, SETTINGS, master_weights=master)
        train(model, optimizer, steps=2)
    assert len(optimizer.state) == len(list(model.parameters()))


@pytest.mark.parametrize("shape", [(6, 10), (12,), (2, 3, 4)])
def test_adafactor_is_torchs(shape):
    torch.manual_seed(0)
    known = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    found = nn.Parameter(known.detach().clone())
    theirs = torch.optim.Adafactor([known], lr=0.02, weight_decay=0.1)
    ours = Adafactor([found], lr=0.02, weight_decay=0.1)
    for _ in range(4):
        known.grad = torch.randn_like(known)
        found.grad = known.grad.clone()
        theirs.step()
        ours.step()
    torch.testing.assert_close(found, known, rtol=1e-6, atol=1e-8)
    for name, tensor in theirs.state[known].items():
        torch.testing.assert_close(ours.state[found][name], tensor, rtol=1e-5, atol=1e-8)


def test_adafactor_stacks_parameters_of_one_shape(monkeypatch):
    """On a GPU, in few operators, of which none is a matmul, since TF32 would round that."""
    shapes = [(6, 10)] * 5 + [(12,)] * 6 + [(2, 3, 4)] * 3 + [()] * 2 + [(10, 6), (40, 12)]

    def trained(together):
        monkeypatch.setattr(build, "steps_together", lambda groups: together)
        torch.manual_seed(0)
        module = nn.ParameterList(torch.randn(shape, dtype=torch.float64) for shape in shapes)
        optimizer = make_optimizer(module.named_parameters(), "adafactor", SETTINGS)
        counts = Counter()

        class Operators(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                counts[function.overloadpacket] += 1
                return function(*args, **(kwargs or {}))

        for step in (1, 2, 3):
            for number, one in enumerate(module):
                drawn = torch.randn_like(one)
                one.grad = None if (step, number) == (2, 1) else drawn
            begin_step(optimizer, step, 1e-2)
            with Operators():
                optimizer.step()
        states = [value for one in module for value in optimizer.state[one].values()]
        return [*module, *states], counts

    (known, counted), (found, fewer) = trained(False), trained(True)
    for one, other in zip(found, known, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert fewer.total() < 0.6 * counted.total()
    assert not {torch.ops.aten.mm, torch.ops.aten.bmm} & {*fewer, *counted}


@pytest.mark.gloo
def test_adafactor_stacks_tensors_that_are_spread(on_ranks):
    """As whole ones are stepped; a stack asks as often as one tensor for the others' sums."""
    found = on_ranks(2, RANKS)
    assert found["apart"] < 1e-12
    # Two root mean squares of each, and of matrices sums over rows and of these: of six that are
    # split there are two in one stack, three matrices by themselves or stacked, and two others.
    assert found["all_reduces"] == 3 * 4 + 2 * 2


def test_muon_is_torchs_on_hidden_matrices_and_adamw_on_the_rest():
    model, optimizer = made("muon")
    assert isinstance(optimizer, Muon)
    other = copy.deepcopy(model)
    hidden = {n for n, p in model.named_parameters() if is_hidden_matrix(n, p)}
    assert "blocks.0.mlp.up.weight" in hidden
    assert not {n for n in hidden if n.startswith("embed") or n.endswith("bias") or "norm" in n}
    named = dict(other.named_parameters())
    matrices = [p for n, p in named.items() if n in hidden]
    rest = [
        {"params": [p for n, p in named.items() if n not in hidden and p.ndim > 1],
         "weight_decay": SETTINGS.weight_decay},
        {"params": [p for n, p in named.items() if p.ndim < 2], "weight_decay": 0.0},
    ]  # fmt: skip
    muon = torch.optim.Muon(matrices, lr=1e-2, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=1e-2, betas=(SETTINGS.beta1, SETTINGS.beta2), foreach=False)
    found = train(model, optimizer)
    torch.manual_seed(0)
    for _ in range(3):
        for parameter in other.parameters():
            parameter.grad = torch.randn_like(parameter)
        muon.step()
        adamw.step()
    for one, known in zip(found, other.parameters(), strict=True):
        torch.testing.assert_close(one, known.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(48, 96), (96, 48)])
def test_matrices_turned_as_a_batch_are_those_turned_one_by_one(shape):
    """By the same matmuls in bf16, whose sums may be in another order."""
    torch.manual_seed(0)
    alone = [nn.Parameter(torch.randn(shape)) for _ in range(5)]
    batch = [nn.Parameter(one.detach().clone()) for one in alone]
    both = [
        Muon(
            [{"params": parameters, "weight_decay": 0.1, "orthogonal": True}],
            lr=1e-2, betas=(0.9, 0.95), together=together,
        )
        for parameters, together in ((alone, False), (batch, True))
    ]  # fmt: skip
    for _ in range(3):
        for one, other in zip(alone, batch, strict=True):
            one.grad = torch.randn(shape)
            other.grad = one.grad.clone()
        for optimizer in both:
            optimizer.step()
    for one, other in zip(alone, batch, strict=True):
        buffers = [o.state[p]["momentum_buffer"] for o, p in zip(both, (one, other), strict=True)]
        torch.testing.assert_close(*buffers)
        # Orthogonal matrices in bf16, 15 roundings: 15 · 2⁻⁸ of a step of 0.2 · lr · √96 / √48.
        torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=3 * 1.7e-4)


def test_batches_of_matrices_are_few_matmuls():
    """Three a step of the iteration, whatever the number of matrices."""
    parameters = [nn.Parameter(torch.randn(32, 64)) for _ in range(6)]
    groups = [{"params": parameters, "weight_decay": 0.1, "orthogonal": True}]
    optimizer = Muon(groups, lr=1e-2, betas=(0.9, 0.95), together=True)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    with torch.profiler.profile(acc_events=True) as profile:
        optimizer.step()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::bmm"] + counts["aten::baddbmm"] == 15
    assert "aten::mm" not in counts and "aten::addmm" not in counts


def test_what_muon_leaves_is_one_fused_operator_a_group_on_a_gpu(monkeypatch):
    """With AdamW's numbers; operators over lists ask each tensor for the number of its step."""
    monkeypatch.setattr(build, "steps_together", lambda groups: True)
    torch.manual_seed(0)
    module = nn.ParameterDict({name: torch.randn(8, 16) for name in ("a", "b")})
    module["c"] = nn.Parameter(torch.randn(16))
    wanted = [nn.Parameter(one.detach().clone()) for one in module.parameters()]
    groups = [{"params": wanted[:2], "weight_decay": SETTINGS.weight_decay},
              {"params": wanted[2:], "weight_decay": 0.0}]  # fmt: skip
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(SETTINGS.beta1, SETTINGS.beta2))
    optimizer = make_optimizer(module.named_parameters(), "muon", SETTINGS)
    counts = Counter()

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            counts[function] += 1
            return function(*args, **(kwargs or {}))

    for step in (1, 2):
        for one, known in zip(module.parameters(), wanted, strict=True):
            one.grad = torch.randn_like(one)
            known.grad = one.grad.clone()
        begin_step(optimizer, step, 1e-2)
        with Operators():
            optimizer.step()
        adamw.step()
    assert counts[torch.ops.aten._fused_adamw_.default] == 4  # two groups, twice
    assert counts[torch.ops.aten._local_scalar_dense.default] == 0
    for one, known in zip(module.parameters(), wanted, strict=True):
        torch.testing.assert_close(one.detach(), known.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_complex_parameters_are_stepped_by_themselves_or_refused(name):
    module = nn.Module()
    module.real, module.complex = (nn.Parameter(torch.ones(2, 2, dtype=dtype))
                                   for dtype in (torch.float32, torch.complex64))  # fmt: skip
    if name not in ("adamw-fused", "adamw-foreach", "adamw-for-loop", "sgd"):
        with pytest.raises(BadInputError, match=f"complex parameters, which optimizer {name}"):
            make_optimizer(module.named_parameters(), name, SETTINGS)
        return
    optimizer = make_optimizer(module.named_parameters(), name, SETTINGS)
    (module.real.sum() + module.complex.real.sum()).backward()
    begin_step(optimizer, 1, 1e-2)
    optimizer.step()
    assert torch.allclose(module.complex.real, module.real) and module.real.max() < 1


def test_only_parameters_of_a_gpu_are_stepped_together():
    """A CPU's sums stay as they are, to the last bit."""
    parameter = nn.Parameter(torch.zeros(2, 2))
    assert not steps_together([{"params": [parameter]}])


@pytest.mark.parametrize("master", [False, True])
def test_a_first_step_that_fp16_skips_leaves_no_momentum(monkeypatch, master):
    """Fused SGD's, which on a GPU all parameters are stepped by."""
    monkeypatch.setattr(build, "steps_together", lambda groups: True)
    model = nn.Linear(8, 4)
    model.half() if master else None
    optimizer = make_optimizer(model.named_parameters(), "sgd", SETTINGS, master_weights=master)
    known = {p: nn.Parameter(p.detach().float()) for p in model.parameters()}
    first = torch.optim.SGD(known.values(), lr=1e-2, momentum=SETTINGS.beta1)
    for group in first.param_groups:
        group["weight_decay"] = 0.0
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    for skips in (True, False, False):
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
            parameter.grad = torch.randn(parameter.shape)
            known[parameter].grad = parameter.grad / scaler.get_scale()
        if skips:
            next(model.parameters()).grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if skips:
            assert all(map(torch.equal, model.parameters(), before))
            assert not any(s["momentum_buffer"].any() for s in optimizer.state.values())
        else:
            first.step()
    for parameter, fine in known.items():
        found = optimizer.state[parameter].get("master", parameter)
        torch.testing.assert_close(found.detach(), fine.detach())
        assert torch.equal(parameter, found.to(parameter.dtype))


def test_updates_of_tall_matrices_are_as_their_weights_lie():
    """Of others torch adds one at a time on a GPU."""
    parameters = [nn.Parameter(torch.randn(64, 32)) for _ in range(3)]
    groups = [{"params": parameters, "weight_decay": 0.1, "orthogonal": True}]
    optimizer = Muon(groups, lr=1e-2, betas=(0.9, 0.95), together=True)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    strides = []

    class Added(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._foreach_add_.List:
                strides.extend(update.stride() for update in args[1])
            return function(*args, **(kwargs or {}))

    with Added():
        optimizer.step()
    assert strides == [(32, 1)] * 3


def test_master_weights_remember_what_fp16_rounds_away():
    """300 updates of 1e-5, each less than half of the last bit of 1 in fp16 (4.9e-4)."""
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.float16))
    settings = TrainSettings(lr=1e-5, weight_decay=0.0)
    optimizer = make_optimizer([("w", weight)], "adamw-foreach", settings, master_weights=True)
    for number in range(1, 301):
        weight.grad = torch.ones_like(weight)
        begin_step(optimizer, number, 1e-5)
        optimizer.step()
    assert weight.dtype == torch.float16
    assert float(weight.detach().float().mean()) == pytest.approx(0.997, abs=5e-4)


@pytest.mark.parametrize(("name", "precision"), [("adamw-8bit", "bf16-pure"),
                                                 ("adamw-bf16", "fp32"),
                                                 ("adamw-fused", "fp16-master"),
                                                 ("adamw-fused", "bf16-master")])  # fmt: skip
def test_loaded_states_keep_their_dtypes(name, precision):
    model, optimizer = made(name, precision)
    train(model, optimizer, steps=2)
    again, other = copy.deepcopy(model), None
    master = precision in MASTERS
    other = make_optimizer(again.named_parameters(), name, SETTINGS, master_weights=master)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        for kind, tensor in optimizer.state[mine].items():
            assert torch.equal(other.state[theirs][kind], tensor)
            assert other.state[theirs][kind].dtype == tensor.dtype
    assert all(
        torch.equal(a, b) for a, b in zip(train(model, optimizer), train(again, other), strict=True)
    )
