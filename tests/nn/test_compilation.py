"""Which graphs are compiled, and when; with a backend that makes no kernels, but for one test."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from outpace.nn.classifier import ClassificationObjective, Classifier
from outpace.nn.compilation import compile_forwards, is_compiled, without_compilation
from outpace.nn.generate import generate
from outpace.nn.loss import LanguageModelObjective
from outpace.nn.model_options import apply_options
from outpace.nn.transformer import Transformer
from outpace.records.compiled import compiled_region
from outpace.records.plan import Plan

pytestmark = pytest.mark.filterwarnings("default")  # the compiler warns of its own doings
BIG = {"dp_shard": 2, "strategy": "zero3"}


@pytest.fixture
def graphs(monkeypatch):
    """How many graphs have been made since; operators of the graphs run as they are."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    return lambda: counters["stats"]["unique_graphs"]


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _pair(make_spec, family="gpt2", plan=None, **values):
    """An objective, and its copy with the plan's options; both in float64."""
    model = Transformer(make_spec(family, **values))
    plain = LanguageModelObjective(model, "plain", None).double()
    compiled = copy.deepcopy(plain)
    apply_options(compiled.model, plan or Plan(compile=True))
    return plain, compiled


def _gradients(module, *batches):
    module.zero_grad()
    for batch in batches:
        module(batch)[0].backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


def _check_equal(found, wanted, tolerance=1e-6):
    assert len(found) == len(wanted)
    for ours, exact in zip(found, wanted, strict=True):
        assert (ours - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_a_whole_forward_is_one_graph_for_all_of_a_run(make_spec, tokens, graphs, checkpointing):
    """Micro-batches, steps, evaluation and generation make no second one."""
    plan = Plan(compile=True, checkpointing=checkpointing)
    plain, compiled = _pair(make_spec, "qwen3", plan)
    names = list(plain.state_dict())
    batch = {"tokens": tokens, "targets": tokens, "documents": torch.arange(tokens.shape[1]) // 5}
    batch["documents"] = batch["documents"].expand(tokens.shape).contiguous()
    wanted = _gradients(plain, batch, batch)
    for _ in range(2):
        _check_equal(_gradients(compiled, batch, batch), wanted)
    assert list(compiled.state_dict()) == names
    compiled.eval()
    with torch.no_grad(), without_compilation(compiled):
        assert torch.equal(compiled(batch)[0], plain(batch)[0])
    plain.float(), compiled.float()
    prompt = tokens[0, :4].tolist()
    assert generate(compiled.model, prompt, 3) == generate(plain.model, prompt, 3)
    assert graphs() == 1
    assert not counters["graph_break"]


def test_a_classifier_that_reads_one_place_is_one_graph(make_spec, tokens, graphs):
    spec = make_spec("qwen2")
    plain = ClassificationObjective(Classifier(Transformer(spec), 3)).double()
    compiled = copy.deepcopy(plain)
    apply_options(compiled.model, Plan(compile=True))
    last = torch.full((len(tokens),), tokens.shape[1] - 2)
    batch = {"tokens": tokens, "targets": torch.arange(len(tokens)) % 3, "last": last}
    _check_equal(_gradients(compiled, batch), _gradients(plain, batch))
    assert graphs() == 1
    assert not counters["graph_break"]


def test_replicas_compile_the_whole_forward_cut_at_their_buckets(
    make_spec, tokens, graphs, one_rank, monkeypatch
):
    cut = []

    def backend(graph, inputs):
        cut.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile.func, backend=backend))
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 20_000)
    plain, compiled = _pair(make_spec, layers=3)
    wrapped = DistributedDataParallel(compiled, gradient_as_bucket_view=True, bucket_cap_mb=0.05)
    batch = {"tokens": tokens, "targets": tokens}
    wanted = _gradients(plain, batch)
    for _ in range(2):
        _check_equal(_gradients(wrapped, batch), wanted)
    assert graphs() == 1
    assert len(cut) > 2  # so that a bucket is sent while the backward goes on


def test_hooks_of_blocks_are_outside_of_what_is_compiled(make_spec, tokens, graphs):
    plain, compiled = _pair(make_spec, plan=Plan())
    compile_forwards(list(compiled.model.blocks))
    called = []

    def hook(module, inputs):
        called.append(torch.compiler.is_compiling())

    for block in compiled.model.blocks:
        block.register_forward_pre_hook(hook)
    batch = {"tokens": tokens, "targets": tokens}
    wanted = _gradients(plain, batch)
    for _ in range(2):
        _check_equal(_gradients(compiled, batch), wanted)
    assert called == [False] * 4
    assert graphs() == 1  # both blocks share it
    assert not counters["graph_break"]


def test_a_copy_is_not_compiled(make_spec, tokens):
    _, compiled = _pair(make_spec)
    twin = copy.deepcopy(compiled)
    assert is_compiled(compiled) and not is_compiled(twin)
    assert twin.model.forward.__self__ is twin.model


def _fails(*_):
    raise OSError("no C++ compiler\nand a long story")


class Own(nn.Module):
    """A custom model, with a part that no compiler takes in one piece."""

    def __init__(self):
        super().__init__()
        self.ins, self.outs = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        x = self.ins(x)
        return self.outs(x * float(x.sum() > 0))


def test_a_run_of_many_shapes_stays_compiled(graphs):
    model = nn.Linear(8, 2)
    compile_forwards([model])
    for rows in range(2, 12):
        model(torch.rand(rows, 8)).sum().backward()
    assert graphs() == 10
    assert torch._dynamo.config.recompile_limit == 8


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_model_on_which_the_compiler_fails_is_trained_eagerly(graphs, monkeypatch, where):
    """Also where only its backward fails, which is known before anything was computed."""
    backend = _fails if where == "forward" else aot_autograd(
        fw_compiler=lambda graph, _: graph, bw_compiler=_fails
    )  # fmt: skip
    monkeypatch.setattr(torch, "compile", partial(torch.compile.func, backend=backend))
    plain, x, said = Own(), torch.rand(4, 8), []
    compiled = copy.deepcopy(plain)
    compilation = compile_forwards([compiled], said.append)
    for model in (plain, compiled):
        for _ in range(2):
            model(x).sum().backward()
    for ours, exact in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, exact.grad)
    assert "OSError: no C++ compiler" in compilation.failure
    (sentence,) = said
    assert "trains uncompiled" in sentence and "--no-compile" in sentence and "\n" not in sentence


def test_a_model_that_breaks_graphs_is_compiled_in_pieces(graphs):
    plain, x = Own(), torch.rand(4, 8)
    compiled = copy.deepcopy(plain)
    compilation = compile_forwards([compiled])
    for model in (plain, compiled):
        model(x).sum().backward()
    for ours, exact in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, exact.grad)
    assert compilation.failure is None
    assert graphs() >= 2


def test_an_error_of_the_model_itself_is_raised_as_it_is(graphs):
    model, said = Own(), []
    compile_forwards([model], said.append)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.rand(4, 7))
    assert not said


@pytest.mark.parametrize(
    ("values", "region"),
    [
        ({}, "whole"),
        ({"dp_replicate": 2, "strategy": "ddp"}, "whole"),
        ({"dp_replicate": 2, "strategy": "ring"}, "blocks"),
        (BIG, "blocks"),
        ({"optimizer_in_backward": True}, "blocks"),
        ({"offload_parameters": "cpu"}, "blocks"),
        ({"pp": 2, "strategy": "1f1b", "pp_microbatches": 2}, "blocks"),
    ],
)
def test_a_region_ends_where_something_comes_between_blocks(values, region):
    assert compiled_region(Plan.parse({"compile": True, **values}, "test")) == region


@pytest.mark.slow
@pytest.mark.timeout(1200)  # g++ takes its time
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_compiled_kernels_train_alike(make_spec, tokens, dtype):
    """Inductor's own kernels, in float64 and under autocast."""
    torch._dynamo.reset()
    plain, compiled = _pair(make_spec, "qwen3")
    batch = {"tokens": tokens, "targets": tokens}
    low = dtype == torch.bfloat16
    if low:
        plain.float(), compiled.float()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
        wanted = _gradients(plain, batch)
        _check_equal(_gradients(compiled, batch), wanted, 0.05 if low else 1e-6)
