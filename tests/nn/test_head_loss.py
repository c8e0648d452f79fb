"""The accelerator's loss, on a CPU: numbers, what is compiled, what is held and what is padded."""

import subprocess
import sys
import warnings
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.nn import head_loss, logits_functions, torch_versions
from outpace.nn.head_loss import chunk_rows, padded_width
from outpace.nn.logits_functions import EAGER, CompiledPass, compiled_passes
from outpace.nn.loss import LanguageModelObjective, linear_loss_sum
from outpace.nn.transformer import Transformer

# The compiler warns of its own code.
pytestmark = pytest.mark.filterwarnings("default")
VOCAB = 97  # as odd as GPT-2's: 31 columns of padding
DTYPES = (None, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def compiled():
    return compiled_passes()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(head_loss, "CHUNK_ROWS", 512)
    monkeypatch.setattr(logits_functions, "BLOCK_BYTES", 4 * 128 * 200)  # blocks of 200 rows


def operands_of(rows=1300, bias=False, dtype=torch.float32, width=24):
    """More rows than two chunks hold, and a third of them without a target."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=draw)
    weight = torch.randn(VOCAB, width, generator=draw) / 4
    targets = torch.randint(VOCAB, (rows,), generator=draw)
    targets[torch.rand(rows, generator=draw) < 0.3] = -100
    tensors = [hidden, weight] + ([torch.randn(VOCAB, generator=draw)] if bias else [])
    return [tensor.to(dtype).requires_grad_() for tensor in tensors], targets


def loss_of(operands, targets, kind, dtype, passes=EAGER, device="cuda"):
    hidden, weight, bias = (*operands, None)[:3]
    return linear_loss_sum(hidden, weight, bias, targets, kind, dtype, device, passes)


def reference(operands, targets):
    """Sum of losses and gradients in float64, by the definition."""
    exact = [operand.detach().double().requires_grad_() for operand in operands]
    loss = F.cross_entropy(F.linear(*exact), targets, reduction="sum")
    return loss.detach(), torch.autograd.grad(loss, exact)


def error(ours, exact):
    return ((ours.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "chunked", "auto"])
def test_loss_and_gradients_are_as_exact_as_autograds(kind, dtype, bias):
    operands, targets = operands_of(bias=bias)
    exact_loss, exact_grads = reference(operands, targets)
    plain = loss_of(operands, targets, "plain", dtype, device="cpu")
    plain_grads = torch.autograd.grad(3.7 * plain, operands)
    loss = loss_of(operands, targets, kind, dtype)
    grads = torch.autograd.grad(3.7 * loss, operands)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert error(loss, exact_loss) < 1.5 * error(plain, exact_loss) + 1e-6
    for ours, theirs, exact in zip(grads, plain_grads, exact_grads, strict=True):
        assert ours.dtype == torch.float32 and ours.shape == exact.shape
        assert error(ours, 3.7 * exact) < 1.2 * error(theirs, 3.7 * exact)
    with torch.no_grad():
        assert error(loss_of(operands, targets, kind, dtype), loss) < 1e-6


@pytest.mark.parametrize("dtype", [pytest.param(None, marks=pytest.mark.slow), torch.bfloat16])
def test_compiled_passes_give_the_eager_ones_numbers(compiled, dtype):
    """Padding has bias −∞ nowhere: what is masked by column alone is compared, too."""
    for bias in (False, True):
        operands, targets = operands_of(bias=bias)
        for kind in ("plain", "chunked"):
            loss = loss_of(operands, targets, kind, dtype, compiled)
            grads = torch.autograd.grad(loss, operands)
            eager = loss_of(operands, targets, kind, dtype)
            eager_grads = torch.autograd.grad(eager, operands)
            assert error(loss, eager) < 1e-6
            for ours, theirs in zip(grads, eager_grads, strict=True):
                assert error(ours, theirs) < (1e-6 if dtype is None else 1e-3)


def test_targets_logits_are_read_before_a_compiler_that_writes_first(monkeypatch):
    """On torch 2.11 the compiled gather itself would find the gradient where logits were."""
    monkeypatch.setattr(torch_versions, "torch_release", lambda: (2, 11))
    operands, targets = operands_of()
    passes = compiled_passes()
    with torch.profiler.profile(acc_events=True) as profile:
        loss = loss_of(operands, targets, "chunked", None, passes)
    gathers = [event for event in profile.events() if event.name == "aten::gather"]
    assert len(gathers) == 3  # one for each chunk, none of them within compiled code
    assert error(loss, loss_of(operands, targets, "chunked", None)) < 1e-6


def test_large_negative_logits_stay_finite(compiled):
    """A padded logit is 0: its exp, with log Σ exp far below, would be infinite."""
    hidden = torch.full((64, 8), 100.0, requires_grad=True)
    weight = torch.full((VOCAB, 8), -1.0, requires_grad=True)
    targets = torch.arange(64)
    for passes in (EAGER, compiled):
        for kind in ("plain", "chunked"):
            loss = loss_of([hidden, weight], targets, kind, torch.bfloat16, passes)
            grads = torch.autograd.grad(loss, [hidden, weight])
            assert loss.item() == pytest.approx(64 * torch.tensor(97.0).log().item(), rel=1e-5)
            assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("kind", ["plain", "chunked"])
@pytest.mark.parametrize("rows", [1, 7])
def test_few_rows_and_no_targets(kind, rows):
    operands, targets = operands_of(rows)
    targets.fill_(-100)
    loss = loss_of(operands, targets, kind, torch.bfloat16)
    assert loss.item() == 0
    assert all(not grad.any() for grad in torch.autograd.grad(loss, operands))
    targets[0] = 5
    loss = loss_of(operands, targets, kind, None)
    exact_loss, exact_grads = reference(operands, targets)
    assert error(loss, exact_loss) < 1e-6
    for ours, exact in zip(torch.autograd.grad(loss, operands), exact_grads, strict=True):
        assert error(ours, exact) < 1e-6


@pytest.mark.parametrize("kind", ["plain", "chunked"])
def test_weights_in_16_bits_get_gradients_in_16_bits(kind):
    operands, targets = operands_of(dtype=torch.bfloat16)
    _, exact = reference(operands, targets)
    loss = loss_of(operands, targets, kind, torch.bfloat16)
    assert loss.dtype == torch.float32
    for ours, theirs in zip(torch.autograd.grad(loss, operands), exact, strict=True):
        assert ours.dtype == torch.bfloat16 and error(ours, theirs) < 5e-3


def test_gradients_may_be_asked_for_one_after_the_other():
    """As schedules with split backwards do; of all logits the gradient is made once."""
    operands, targets = operands_of(bias=True)
    whole = torch.autograd.grad(loss_of(operands, targets, "plain", None), operands)
    loss = loss_of(operands, targets, "plain", None)
    with Matmuls() as seen:
        parts = [torch.autograd.grad(loss, [one], retain_graph=True)[0] for one in operands]
    assert all(map(torch.equal, parts, whole)) and len(seen.shapes) == 2
    with pytest.raises(RuntimeError, match="a single backward"):
        torch.autograd.grad(loss, operands)


@pytest.mark.parametrize(
    ("kind", "message"), [("plain", "a single backward"), ("chunked", "one backward")]
)
def test_a_second_backward_and_a_second_derivative_are_refused(kind, message):
    operands, targets = operands_of()
    loss = loss_of(operands, targets, kind, torch.bfloat16)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=message):
        loss.backward()
    scaled = loss_of(operands, targets, kind, None) * torch.ones((), requires_grad=True)
    (grad,) = torch.autograd.grad(scaled, operands[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


class Matmuls(TorchDispatchMode):
    """Shapes of the matmuls within."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            self.shapes.append(tuple(tuple(a.shape) for a in args if a.dim() == 2)[-2:])
        return out


@pytest.mark.parametrize(("kind", "chunks"), [("plain", [1300]), ("chunked", [512, 512, 276])])
def test_matmuls_are_padded_and_the_head_has_one_for_each_chunk(kind, chunks):
    operands, targets = operands_of()
    with Matmuls() as seen:
        torch.autograd.grad(loss_of(operands, targets, kind, torch.bfloat16), operands)
    wanted = []
    for rows in chunks:
        wanted += [((rows, 24), (24, 128)), ((rows, 128), (128, 24)), ((128, rows), (rows, 24))]
    assert seen.shapes == wanted


@pytest.mark.parametrize("kind", ["plain", "chunked"])
def test_a_frozen_head_has_no_matmul_for_its_gradient(kind):
    """As beside adapters."""
    (hidden, weight), targets = operands_of(rows=512)
    (exact,) = torch.autograd.grad(loss_of([hidden, weight], targets, kind, None), [hidden])
    with Matmuls() as seen:
        frozen = loss_of([hidden, weight.detach()], targets, kind, None)
        (grad,) = torch.autograd.grad(frozen, [hidden])
    assert torch.equal(grad, exact) and len(seen.shapes) == 2


def allocations(work):
    """The sizes of what is allocated."""
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        work()
    events = profile.profiler.kineto_results.experimental_event_tree()
    return [event.extra_fields.alloc_size for event in _flat(events) if event.name == "[memory]"]


def _flat(events):
    for event in events:
        yield event
        yield from _flat(event.children)


@pytest.mark.usefixtures("native_bf16")
@pytest.mark.parametrize("which", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_logits_are_held_once_in_16_bits(monkeypatch, compiled, which):
    """Their gradient takes their place. (The CPU's fp32 matmul for the head is frozen away.)"""
    passes = compiled if which == "compiled" else EAGER
    (hidden, weight), targets = operands_of(rows=4096, width=8)
    weight = weight.detach()
    logits = 4096 * 128 * 2

    def step():
        loss_of([hidden, weight], targets, "plain", torch.bfloat16, passes).backward()

    step()  # what is compiled is compiled here
    large = [size for size in allocations(step) if size >= logits]
    assert large == [logits]


def test_one_graph_for_each_pass_and_none_more_for_a_second_step_or_evaluation():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    passes = compiled_passes()
    operands, targets = operands_of()

    def step():
        torch.autograd.grad(loss_of(operands, targets, "plain", torch.bfloat16, passes), operands)

    def graphs():
        return counters["stats"]["unique_graphs"]

    before = graphs()
    step()
    assert graphs() == before + 2  # the scores of the forward, and the backward's gradient
    step()
    with torch.no_grad():
        loss_of([one[:100] if one.shape[0] == 1300 else one for one in operands], targets[:100],
                "plain", torch.bfloat16, passes)  # fmt: skip
    assert graphs() == before + 2
    assert not counters["graph_break"]


def test_kernels_over_the_logits_are_few(compiled):
    """Two: one reads them, one reads and writes them (Inductor's code, for C++ here)."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    operands, targets = operands_of(rows=300)

    def step():
        return torch.autograd.grad(
            loss_of(operands, targets, "plain", torch.bfloat16, compiled_passes()), operands
        )

    _, codes = run_and_get_code(step)
    assert len(codes) == 2
    scores, gradient = (code[code.index("def call(") :] for code in codes)
    assert "empty_strided_cpu((300, 128)" not in scores + gradient
    assert gradient.count("cpp_fused") == 1


def test_what_the_compiler_cannot_do_is_done_eagerly_with_one_sentence(monkeypatch):
    from torch._dynamo.exc import BackendCompilerFailed

    def fails(*args):
        raise BackendCompilerFailed(torch.compile, RuntimeError("no compiler here"), None)

    operands, targets = operands_of()
    eager = loss_of(operands, targets, "chunked", torch.bfloat16)
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: fails)
    passes = compiled_passes()
    with pytest.warns(UserWarning, match="torch.compile fails on the loss.*--no-compile") as told:
        loss = loss_of(operands, targets, "chunked", torch.bfloat16, passes)
        loss_of(operands, targets, "chunked", torch.bfloat16, passes)
    assert torch.equal(loss, eager) and len(told) == 1


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=1)
def test_more_shapes_than_torch_compiles_are_eager():
    torch._dynamo.reset()
    passes = compiled_passes()
    warnings.simplefilter("error", UserWarning)  # it is no failure of the compiler
    for rows in (64, 128, 64, 128):
        operands, targets = operands_of(rows=rows)
        loss = loss_of(operands, targets, "plain", None, passes)
        grads = torch.autograd.grad(loss, operands)
        eager = torch.autograd.grad(loss_of(operands, targets, "plain", None), operands)
        assert all(error(one, other) < 1e-6 for one, other in zip(grads, eager, strict=True))


@torch._dynamo.config.patch(recompile_limit=1)
def test_each_objectives_shapes_are_counted_apart(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for rows in (64, 128):
        scores = compiled_passes().scores
        assert isinstance(scores, CompiledPass)
        monkeypatch.setattr(scores, "_eager", lambda *_: pytest.fail("not compiled"))
        scores(torch.zeros(rows, VOCAB), torch.zeros(rows, dtype=torch.long), VOCAB)


def test_auto_makes_all_logits_of_a_batch_that_is_not_too_large():
    assert padded_width(50257) == 50304 and padded_width(128256) == 128256
    assert chunk_rows(16384, 128256, 2) == 16384  # 3.9 GiB
    assert chunk_rows(16384, 128256, 4) == 4096
    assert chunk_rows(32768, 128256, 2) == 8192
    assert chunk_rows(20000, 262144, 2) == 4032  # no less than 5 equal parts: 4,096 each at most
    assert chunk_rows(40960, 50257, 2) == 40960
    assert chunk_rows(1, 50257, 2) == 1


def test_the_objective_chooses_by_the_device_and_loads_no_compiler_on_a_cpu(make_spec):
    model = Transformer(make_spec("llama", vocab=VOCAB, max_positions=64))
    tokens = torch.randint(VOCAB, (2, 64), generator=torch.Generator().manual_seed(2))
    objective = LanguageModelObjective(model, "auto", torch.bfloat16, compiles=True)
    assert objective.functions_for("cpu") is EAGER and objective.passes is None
    loss, count = objective({"tokens": tokens, "targets": tokens})
    objective.runs_on = "cuda"
    assert objective.functions_for("cpu") is objective.passes is not None
    with torch.no_grad():  # an evaluation compiles nothing more
        assert objective.functions_for("cpu") is EAGER
    objective.passes = EAGER
    with Matmuls() as seen:
        same, _ = objective({"tokens": tokens, "targets": tokens})
        same.backward(inputs=list(model.blocks.parameters()))
    assert count.item() == 128 and error(same, loss) < 1e-4
    assert {((128, 32), (32, 128)), ((128, 128), (128, 32))} <= set(seen.shapes)


FIRST = """
import sys, torch
from outpace.nn.loss import LanguageModelObjective, linear_loss_sum
hidden, weight = torch.randn(1024, 16), torch.randn(9000, 16, requires_grad=True)
linear_loss_sum(hidden, weight, None, torch.zeros(1024, dtype=torch.int64), runs_on="cuda")
print("torch._dynamo" in sys.modules)
"""


def test_the_eager_path_does_not_load_torchs_compiler():
    said = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False"]
