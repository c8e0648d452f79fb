"""Masks as blocks of FlexAttention, beside the masks that they stand for."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from outpace.nn import kernels
from outpace.nn.cache import KVCache
from outpace.nn.compilation import compile_forwards, without_compilation
from outpace.nn.loss import LanguageModelObjective
from outpace.nn.masks import BLOCK, visibility

CPU = torch.device("cpu")
LONG = 2 * BLOCK + 40


@pytest.fixture
def blocks_on_cpu(monkeypatch):
    """FlexAttention as on a GPU, with its operators run one by one; with gradients on a CPU, too.

    torch refuses those only because its compiler for CPUs has none.
    """
    monkeypatch.setattr("outpace.nn.transformer.takes_blocks",
                        lambda _, *model: kernels.takes_blocks("cuda", *model))  # fmt: skip
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    compiled = kernels._CompiledFlexAttention(
        torch.compile(flex_attention, fullgraph=True, backend="aot_eager")
    )
    monkeypatch.setattr(kernels, "_compiled_flex_attention", lambda: compiled)
    torch._dynamo.reset()


def _documents(draw, batch, length, sorted_numbers):
    numbers = draw(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6),
                            min_size=batch, max_size=batch))  # fmt: skip
    rows = []
    for row in numbers:
        row = sorted(row) if sorted_numbers else row
        lengths = [length // len(row)] * (len(row) - 1)
        lengths.append(length - sum(lengths))
        rows.append(torch.tensor(row).repeat_interleave(torch.tensor(lengths)))
    return torch.stack(rows).int()


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_blocks_are_the_mask(data):
    """Whole blocks are seen as a whole, all that is seen is in a block, and the function is it."""
    draw = data.draw
    length = draw(st.sampled_from([BLOCK, BLOCK + 1, LONG, 4 * BLOCK]))
    batch, causal = draw(st.integers(1, 3)), draw(st.booleans())
    window = draw(st.sampled_from([None, 1, 5, BLOCK, BLOCK + 1, 300]))
    in_order = draw(st.booleans())
    documents = _documents(draw, batch, length, in_order) if draw(st.booleans()) else None
    padding = None
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, length), min_size=batch, max_size=batch))
        padding = torch.arange(length) < torch.tensor(lengths).unsqueeze(1)
    given_ = (length, length, causal, window, documents, padding, CPU)
    dense, sparse = visibility(*given_), visibility(*given_, by_blocks=True)
    if dense.mask is None:
        assert sparse.blocks is None and sparse == dense
        return
    blocks = sparse.blocks
    assert (
        sparse.mask is None
        and max(x.numel() for x in (blocks.kv_indices, blocks.full_kv_indices))
        <= batch * (-(-length // BLOCK)) ** 2
    )
    assert torch.equal(sparse.as_mask().mask.expand_as(dense.mask), dense.mask)
    count = -(-length // BLOCK)
    missing = count * BLOCK - length
    tiles = F.pad(dense.mask[:, 0], (0, missing, 0, missing)).unflatten(2, (count, BLOCK))
    tiles = tiles.unflatten(1, (count, BLOCK)).transpose(2, 3)
    any_seen, all_seen = tiles.any(-1).any(-1), tiles.all(-1).all(-1)
    partly, whole = (
        torch.zeros_like(order[:, 0], dtype=torch.bool).scatter_(
            -1, order[:, 0].long(), torch.arange(count) < numbers[:, 0].unsqueeze(-1)
        )
        for numbers, order in (
            (blocks.kv_num_blocks, blocks.kv_indices),
            (blocks.full_kv_num_blocks, blocks.full_kv_indices),
        )
    )
    assert torch.equal(whole, all_seen)
    assert not (partly & whole).any() and ((partly | whole) >= any_seen).all()
    one_reason = [documents, window, padding].count(None) >= 2
    exact = one_reason and (documents is None or in_order)
    assert not exact or torch.equal(partly | whole, any_seen)
    read = torch.randint(length, (batch,), generator=torch.Generator().manual_seed(0))
    one, its = (sees.of_queries(read, length).mask for sees in (dense, sparse))
    assert torch.equal(one, its.expand_as(one))


KINDS = {
    "documents": ("llama", {"kv_heads": 2}, "documents"),
    "windows": ("mistral", {"kv_heads": 2, "sliding_window": 100}, None),
    "padding": ("bert", {}, "padding_mask"),
}


def _batch(kind, length=LONG, seed=0):
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(61, (2, length + 1), generator=draw)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    if kind == "documents":
        batch[kind] = (torch.rand(2, length, generator=draw) < 0.02).cumsum(1).int()
    if kind == "padding_mask":
        batch[kind] = torch.arange(length) < torch.tensor([[length], [length - 150]])
    return batch


@pytest.mark.filterwarnings("default")  # the compiler warns of its own doings
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_the_same_by_blocks(kind, make_model, blocks_on_cpu, monkeypatch):
    """Losses and gradients, block by block compiled by itself and in a compiled whole."""
    family, changes, given_ = KINDS[kind]
    model = make_model(family, max_positions=512, head_dim=16, **changes)
    objective = LanguageModelObjective(model)

    def taken(batch):
        model.zero_grad()
        loss, _ = objective(batch)
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    by_blocks = [taken(_batch(given_, seed=seed)) for seed in range(2)]
    if kind == "documents":  # which are new at each step
        model.compile(backend="aot_eager", fullgraph=True)
        taken(_batch(given_))
        with torch._dynamo.config.patch(error_on_recompile=True):
            by_blocks.append(taken(_batch(given_, seed=1)))
        model._compiled_call_impl = None
    model.blocks_of_masks = False
    dense = [taken(_batch(given_, seed=seed)) for seed in (0, 1, 1)]
    for (loss, grads), (right, right_grads) in zip(by_blocks, dense, strict=False):
        torch.testing.assert_close(loss, right, rtol=1e-5, atol=1e-5)
        scale = max(grad.abs().max() for grad in right_grads)
        for grad, its in zip(grads, right_grads, strict=True):
            torch.testing.assert_close(grad, its, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize(("device", "head_dim", "dropout", "takes"), [
    ("cuda", 64, 0.0, True), ("cuda", 16, 0.0, True), ("cuda", 8, 0.0, False),
    ("cuda", 64, 0.1, False), ("cpu", 64, 0.0, False),
])  # fmt: skip
def test_where_masks_are_blocks(device, head_dim, dropout, takes):
    assert kernels.takes_blocks(device, head_dim, dropout) == takes


def test_dropout_and_caches_take_a_mask(make_model, blocks_on_cpu, monkeypatch):
    """FlexAttention knows no dropout, and would be compiled for each token that is written."""
    taken = []
    monkeypatch.setattr(
        "outpace.nn.block.attend_by_blocks", lambda q, *_: taken.append(1) or torch.zeros_like(q)
    )
    model = make_model("gpt2", max_positions=512, head_dim=16, dropout=0.5)
    tokens, documents = _batch(None)["tokens"], _batch("documents")["documents"]
    model.train()(tokens, documents)
    model.eval()(tokens, documents, cache=KVCache(2, 400))
    assert not taken
    model(tokens, documents)
    assert taken


@pytest.mark.filterwarnings("default")  # the compiler warns of its own doings
def test_evaluations_take_the_kernel_too(make_model, blocks_on_cpu, monkeypatch):
    """Where forwards are called eagerly FlexAttention is not: it would hold all scores."""
    used = []

    def backend(graph, _):
        used.append(graph)
        return graph.forward

    compiled = kernels._CompiledFlexAttention(
        torch.compile(flex_attention, fullgraph=True, backend=backend)
    )
    monkeypatch.setattr(kernels, "_compiled_flex_attention", lambda: compiled)
    model = make_model(max_positions=512, head_dim=16)
    compile_forwards([model])
    batch = _batch("documents")
    with torch.no_grad(), without_compilation(model):
        model(batch["tokens"], batch["documents"])
        assert len(used) == 1
        for length in range(BLOCK, BLOCK + 12):  # more than torch compiles by its own limit
            model.spec = model.spec.model_copy(update={"sliding_window": length - 100})
            model(batch["tokens"][:, :length], batch["documents"][:, :length])


@pytest.mark.filterwarnings("default")  # the compiler warns of its own doings
@pytest.mark.parametrize("whole", [True, False])
def test_where_the_compiler_fails_masks_are_used(make_model, blocks_on_cpu, monkeypatch, whole):
    def fails(*_):
        raise OSError("no Triton")

    tried, said = [], []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=fails))
    flexible = torch.compile(flex_attention, fullgraph=True)
    compiled = kernels._CompiledFlexAttention(lambda *a, **k: tried.append(1) or flexible(*a, **k))
    monkeypatch.setattr(kernels, "_compiled_flex_attention", lambda: compiled)
    model = make_model(max_positions=512, head_dim=16)
    plain = copy.deepcopy(model)
    plain.blocks_of_masks = False
    compile_forwards([model] if whole else list(model.blocks), said.append)
    batch = _batch("documents")
    for _ in range(2):
        found = model(batch["tokens"], batch["documents"])
        found.sum().backward()
    assert torch.equal(found, plain(batch["tokens"], batch["documents"]))
    assert len(said) == 1 and len(tried) == (not whole)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_on_a_gpu(kind, make_model):
    family, changes, given_ = KINDS[kind]
    model = make_model(family, max_positions=512, head_dim=16, **changes).cuda()
    batch = {name: tensor.cuda() for name, tensor in _batch(given_).items()}
    objective, made = LanguageModelObjective(model), []
    for model.blocks_of_masks in (True, False):
        model.zero_grad()
        loss, _ = objective(batch)
        loss.backward()
        made.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    scale = max(grad.abs().max() for grad in made[1][1:])
    for own, right in zip(*made, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-5 * scale)
