import copy
import gc
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from outpace.nn.compilation import compile_forwards
from outpace.nn.lora import add_adapters
from outpace.nn.loss import LanguageModelObjective
from outpace.nn.model_options import apply_checkpointing, apply_options, find_blocks
from outpace.nn.transformer import Transformer
from outpace.records.errors import BadInputError
from outpace.records.plan import Plan
from outpace.trace.allocations import Allocations

COMPILER = pytest.mark.filterwarnings("default")


class Own(nn.Module):
    """A custom model: blocks in a Sequential, with small ones inside."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(9))
        self.stack = nn.Sequential(
            nn.Linear(8, 8), *(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3))
        )

    def forward(self, x):
        for norm in self.norms:
            x = norm(x)
        return self.stack(x)


def test_blocks_are_the_largest_repeated_class(make_spec):
    model = Transformer(make_spec("llama"))
    assert find_blocks(model) == list(model.blocks)
    assert find_blocks(Transformer(make_spec("gpt2", layers=1)))  # one block is one, too
    own = Own()
    assert find_blocks(own) == list(own.stack)[1:]


def test_a_model_without_blocks_gets_a_sentence():
    with pytest.raises(BadInputError, match="no repeated blocks"):
        apply_checkpointing(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), "full")
    apply_checkpointing(nn.Linear(2, 2), "none")


def _step(objective, tokens, dtype=None):
    """Gradients of one step with the random state of seed 0."""
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss_sum, _ = objective({"tokens": tokens, "targets": tokens})
    loss_sum.backward()
    return {
        name: parameter.grad
        for name, parameter in objective.named_parameters()
        if parameter.grad is not None
    }


def _objective(make_spec, family, **values):
    return LanguageModelObjective(Transformer(make_spec(family, **values)), "auto", None)


@pytest.mark.parametrize("mode", ["selective", "attention", "full", ["full", "none"]])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "values"),
    [("gpt2", {"dropout": 0.2}), ("mistral", {}), ("qwen3", {}), ("bert", {"dropout": 0.2})],
)
def test_checkpointing_leaves_gradients_equal(make_spec, tokens, family, values, mode, dtype):
    plain = _objective(make_spec, family, **values)
    recomputed = copy.deepcopy(plain)
    names = list(recomputed.state_dict())
    apply_checkpointing(recomputed.model, mode)
    assert list(recomputed.state_dict()) == names
    wanted = _step(plain, tokens, dtype)
    for name, grad in _step(recomputed, tokens, dtype).items():
        assert torch.equal(grad, wanted[name]), name


def test_checkpointing_computes_again_what_it_says(make_spec, tokens):
    """Full: the blocks' forward but for its last matmul. Selective: no matmul."""
    counts = {}
    for mode in ("none", "selective", "full"):
        objective = _objective(make_spec, "llama")
        apply_checkpointing(objective.model, mode)
        with FlopCounterMode(display=False) as counter:
            _step(objective, tokens)
        counts[mode] = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        objective.model(tokens)
    last_matmuls = 2 * 2 * tokens.numel() * 48 * 32  # layers, multiply and add, ffn to hidden
    assert counts["selective"] == counts["none"]
    assert counts["full"] - counts["none"] == counter.get_total_flops() - last_matmuls


@pytest.mark.parametrize("drawn_by", ["nothing", "dropout", "an adapter"])
def test_generators_are_kept_for_blocks_that_draw(make_spec, tokens, monkeypatch, drawn_by):
    objective = _objective(make_spec, "gpt2", dropout=0.2 if drawn_by == "dropout" else 0.0)
    if drawn_by == "an adapter":
        plan = {"strategy": "single", "lora_rank": 2, "lora_alpha": 4, "lora_dropout": 0.1}
        add_adapters(objective.model, Plan.parse(plan, "test"), 0)
    apply_checkpointing(objective.model, "full")
    kept, state = [], torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: kept.append(1) or state())
    _step(objective, tokens)
    assert bool(kept) == (drawn_by != "nothing")


def test_a_plans_checkpointing_is_of_all_blocks_each_second_or_block_by_block(make_spec):
    plans = {
        "ffff": Plan(checkpointing="full"),
        "fnfn": Plan(checkpointing="full", checkpoint_every=2),
        "snaf": Plan(checkpoint_layers="selective+none+attention+full"),
        "nnnn": Plan(checkpoint_layers=("none",) * 4),
    }
    for wanted, plan in plans.items():
        assert "".join(mode[0] for mode in plan.modes(4)) == wanted
        model = Transformer(make_spec("llama", layers=4))
        plain = type(model.blocks[0]).forward
        apply_options(model, plan)
        changed = [getattr(block.forward, "__func__", None) is not plain for block in model.blocks]
        assert changed == [letter != "n" for letter in wanted]
        assert plan.recomputes == any(changed)


def test_checkpointing_that_contradicts_itself_is_refused(make_spec):
    for values, sentence in (
        ({"checkpoint_every": 2}, "no block would be recomputed. Use checkpointing full"),
        ({"checkpointing": "full", "checkpoint_layers": ("full",)}, "Use one of the two"),
    ):
        with pytest.raises(BadInputError, match=sentence):
            Plan.parse(values, "test")
    with pytest.raises(BadInputError, match="has 3 modes, but the model has 2 blocks"):
        apply_options(Transformer(make_spec("llama")), Plan(checkpoint_layers=("full",) * 3))


def test_each_mode_keeps_less_than_the_one_before(make_spec, tokens):
    kept = []
    for plan in (
        Plan(),
        Plan(checkpointing="selective"),
        Plan(checkpointing="attention"),
        Plan(checkpoint_layers="attention+full+attention+full"),
        Plan(checkpointing="full"),
    ):
        objective = _objective(make_spec, "llama", layers=4)
        apply_options(objective.model, plan)
        gc.collect()  # or what the last model held may be freed while this one is counted
        with Allocations() as seen:
            loss_sum, _ = objective({"tokens": tokens, "targets": tokens})
        kept.append(seen.left_bytes)
        del loss_sum
    assert all(more > less for more, less in pairwise(kept)), kept
    assert kept[-1] < 0.5 * kept[0]


def test_checkpointing_takes_a_persons_own_blocks():
    torch.manual_seed(1)
    own, x = Own(), torch.randn(2, 5, 8)
    recomputed = copy.deepcopy(own)
    apply_checkpointing(recomputed, "selective")
    for model in (own, recomputed):
        torch.manual_seed(0)
        model(x).square().sum().backward()
    for ours, exact in zip(recomputed.parameters(), own.parameters(), strict=True):
        assert torch.equal(ours.grad, exact.grad)


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointing_works_under_ddp(make_spec, tokens, one_rank, mode):
    plain = _objective(make_spec, "gpt2", dropout=0.1)
    recomputed = copy.deepcopy(plain)
    apply_checkpointing(recomputed.model, mode)
    wrapped = DistributedDataParallel(recomputed, gradient_as_bucket_view=True)
    wanted = _step(plain, tokens)
    for name, grad in _step(wrapped, tokens).items():
        assert torch.equal(grad, wanted[name.removeprefix("module.")])


@COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_compiled_blocks_are_close(make_spec, tokens, one_rank, mode):
    """One graph for both blocks, no breaks; with checkpointing, autocast and DDP."""
    plain = _objective(make_spec, "qwen3")
    compiled = copy.deepcopy(plain)
    names = list(compiled.state_dict())
    apply_checkpointing(compiled.model, mode)
    compile_forwards(find_blocks(compiled.model))
    assert list(compiled.state_dict()) == names
    torch._dynamo.reset()
    counters.clear()
    wrapped = DistributedDataParallel(compiled, gradient_as_bucket_view=True)
    for dtype, tolerance in ((None, 1e-4), (torch.bfloat16, 0.05)):
        plain.zero_grad()
        wrapped.zero_grad()
        wanted = _step(plain, tokens, dtype)
        for name, grad in _step(wrapped, tokens, dtype).items():
            exact = wanted[name.removeprefix("module.")]
            assert (grad - exact).norm() <= tolerance * exact.norm()
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # one for each dtype, shared by the blocks


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_caches_of_transformers_models_are_left_out_of_what_is_computed_again(mode):
    """T5's decoder appended its keys a second time, and the backward ended in CheckpointError."""
    import transformers

    config = transformers.T5Config(
        vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    tokens = torch.randint(1, 20, (2, 5), generator=torch.Generator().manual_seed(0))

    def gradients():
        model.zero_grad()
        model(input_ids=tokens, labels=tokens.flip(1)).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    apply_checkpointing(model, mode)
    for found, wanted in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_layers_may_be_in_a_dict_whose_names_are_numbered():
    """As in torchtitan; heads, towers and tasks are in dicts, too."""

    class Layer(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.experts = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    model = nn.Module()
    model.layers = nn.ModuleDict({str(number): Layer() for number in range(3)})
    model.heads = nn.ModuleDict({name: nn.Linear(4, 90) for name in ("policy", "value")})
    assert find_blocks(model) == list(model.layers.values())
    with pytest.raises(BadInputError, match="no repeated blocks"):
        find_blocks(nn.ModuleDict({"generator": nn.Linear(2, 2), "critic": nn.Linear(2, 2)}))
    with pytest.raises(BadInputError, match="no repeated blocks"):
        find_blocks(nn.ModuleDict({"0": nn.Linear(2, 2), "1": nn.Identity()}))


def test_members_without_a_forward_stand_for_what_is_in_them():
    """As in x-transformers: lists of a norm and a layer, which nobody calls."""

    def pair():
        return nn.ModuleList([nn.ModuleList([nn.LayerNorm(4)]), nn.Linear(4, 4), None])

    model = nn.ModuleDict({"layers": nn.ModuleList(pair() for _ in range(2))})
    kinds = [type(block) for block in find_blocks(model)]
    assert kinds == [nn.LayerNorm, nn.Linear, nn.LayerNorm, nn.Linear]
    with pytest.raises(BadInputError, match="no repeated blocks"):
        find_blocks(nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleList(), nn.Identity()])}))
