"""parallelize: other people's modules are laid out as they are, and equal one process."""

from pathlib import Path

import pytest
import torch
from torch import nn

import outpace
from outpace.experiment.module_verify import plan_for_module
from outpace.launch.forked_job import run_forked
from outpace.parallel.blocks import found_blocks, named_blocks
from outpace.parallel.custom.tensor import layouts_of
from outpace.records.errors import BadInputError

RANKS = Path(__file__).with_name("parallelize_ranks.py")
KINDS = {"gradient", "norm", "loss", "state", "evaluation"}


@pytest.mark.gloo
@pytest.mark.parametrize(
    "cases",
    [
        ("mlp:ddp", "mlp:ring", "mlp:zero2", "mlp:zero3", "mlp:tp"),
        pytest.param(
            ("mlp:gpipe", "mlp:mp", "mlp:1f1b", "mlp:interleaved", "mlp:zb", "mlp:zbv"),
            marks=pytest.mark.slow,
        ),
        ("cnn_synchronised:ddp", "cnn_synchronised:zero3", "cnn:gpipe", "cnn:1f1b", "cnn:zbv"),
        pytest.param(
            ("llama:ddp", "llama_tied:zero3", "llama:gpipe", "llama_tied:1f1b"),
            marks=pytest.mark.slow,
        ),
        ("llama:tp", "llama_tied:tp", "qwen:tp"),
    ],
    ids=lambda cases: cases[0].partition(":")[0],
)
def test_modules_of_others_equal_one_process(cases, on_ranks, runnable):
    for case, found in on_ranks(2, RANKS, *runnable(cases)).items():
        assert set(found["worst"]) == KINDS
        wrong = {kind: worst for kind, worst in found["worst"].items() if not worst <= 1e-9}
        assert not wrong, case
        if case.partition(":")[2] not in ("ddp", "ring", "zero2"):
            assert max(found["held"]) < found["all"], case


@pytest.mark.gloo
@pytest.mark.parametrize(
    "cases",
    [
        ("mlp:zero3:bf16", "cnn_synchronised:zero2:bf16"),
        pytest.param(("llama_tied:zero3:bf16",), marks=pytest.mark.slow),
    ],
    ids=["norms", "transformer"],
)
def test_modules_of_others_are_gathered_in_16_bits_beside_inputs_that_keep_their_dtype(
    cases, on_ranks
):
    """Norms take fp32 beside weights of 16 bits, and so do an embedding's sums and rotations."""
    for case, found in on_ranks(2, RANKS, *cases).items():
        worst = found["worst"]
        # A gradient's scale is a tenth of the largest at least; bf16 rounds by 2^-8.
        assert worst["gradient"] < 20 * 2**-8, case
        assert max(worst["loss"], worst["norm"], worst["evaluation"]) < 2**-7, case


@pytest.mark.gloo
@pytest.mark.slow
def test_middle_stages_have_no_parameters_outside_of_the_blocks(on_ranks):
    found = on_ranks(4, RANKS, "deep_llama:1f1b", "cnn:gpipe")
    for case in found.values():
        assert max(case["worst"].values()) <= 1e-9
    first, *middle, last = found["deep_llama:1f1b"]["held"]
    assert max(middle) < min(first, last)


def test_one_process_needs_no_group():
    module = nn.Linear(3, 1)
    before = module.weight.detach().clone()
    laid = outpace.parallelize(
        module,
        outpace.Plan(micro_batch=2),
        loss=lambda module, batch: module(batch).square().mean(),
    )
    optimizer = laid.make_optimizer(torch.optim.SGD, lr=0.1)
    batch = torch.randn(4, 3)
    expected = (batch @ before.T + module.bias.detach()).square().mean()
    assert torch.allclose(laid.forward_backward(laid.share(batch)).float(), expected)
    assert laid.clip_grad_norm(1e9) > 0
    optimizer.step()
    state = laid.state_dict()
    assert set(state) == {"weight", "bias"} and not torch.equal(state["weight"], before)


def _make_groups(named):
    """Weight decay for matrices alone."""
    held = list(named)
    return [
        {"params": [p for _, p in held if p.dim() > 1], "weight_decay": 0.5},
        {"params": (p for _, p in held if p.dim() == 1), "lr": 0.2},
    ]


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_an_optimizer_has_the_users_parameter_groups(tmp_path, strategy):
    def loss(module, batch):
        return module(batch).square().mean()

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))

    batch = torch.arange(12.0).view(4, 3) / 12

    def act(rank):
        plan = plan_for_module(strategy, 2, 4)
        model = outpace.parallelize(make(), plan, loss=loss)
        groups = _make_groups(model.named_parameters())
        optimizer = model.make_optimizer(torch.optim.SGD, groups, lr=0.1)
        model.forward_backward(model.share(batch))
        optimizer.step()
        state = model.state_dict()
        if state is not None:
            torch.save(state, tmp_path / "state.pt")

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), [end.said for end in ends]
    alone = make()
    optimizer = torch.optim.SGD(_make_groups(alone.named_parameters()), lr=0.1)
    loss(alone, batch).backward()
    optimizer.step()
    found = torch.load(tmp_path / "state.pt")
    for name, wanted in alone.state_dict().items():
        torch.testing.assert_close(found[name], wanted)


def test_gradients_are_those_of_a_mean_over_weights_that_sum_to_less_than_one():
    def loss(module, batch):
        return (module(batch["x"])[:, 0].square() * batch["w"]).sum(), batch["w"].sum()

    module = nn.Linear(3, 1)
    weights = torch.tensor([0.25, 0.0, 0.125, 0.0])
    batch = {"x": torch.randn(4, 3), "w": weights}
    total, count = loss(module, batch)
    (expected,) = torch.autograd.grad(total / count, module.weight)
    laid = outpace.parallelize(module, outpace.Plan(micro_batch=2), loss=loss)
    found = laid.forward_backward(batch)
    torch.testing.assert_close(found.float(), (total / count).detach())
    torch.testing.assert_close(module.weight.grad, expected)


def test_a_batch_that_does_not_divide_is_refused_with_the_numbers():
    laid = outpace.parallelize(nn.Linear(3, 1), outpace.Plan(micro_batch=4))
    with pytest.raises(BadInputError, match="6 samples does not divide into micro-batches of 4"):
        laid.forward_backward(torch.randn(6, 3))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"strategy": "ps", "servers": 1}, "strategy ps.*Use ddp"),
        ({"strategy": "cp", "cp": 2}, "strategy cp"),
        ({"precision": "fp16"}, "loss scaler"),
        ({"loss": "chunked"}, "loss chunked"),
        ({"strategy": "ddp", "dp_replicate": 2}, "torchrun --nproc-per-node 2"),
    ],
)
def test_what_does_not_work_is_refused(changes, why):
    with pytest.raises(BadInputError, match=why):
        outpace.parallelize(nn.Linear(3, 1), outpace.Plan(**changes))


@pytest.mark.parametrize(("strategy", "cure"), [("zero2", "or strategy ddp"), ("ddp", None)])
def test_sparse_gradients_are_refused_where_none_are_added_up(strategy, cure):
    module = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    axis = {"zero2": "dp_shard", "ddp": "dp_replicate"}[strategy]
    why = f"0.weight has sparse gradients.*sparse=False, {cure}" if cure else "Start them with"
    with pytest.raises(BadInputError, match=why):
        outpace.parallelize(module, outpace.Plan(strategy=strategy, **{axis: 2}))


def test_checkpointing_with_batch_normalisation_is_refused():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    with pytest.raises(BadInputError, match="runs a BatchNorm twice"):
        outpace.parallelize(module, outpace.Plan(checkpointing="full"))


def test_blocks_are_found_or_named():
    module = nn.ModuleDict({"up": nn.Linear(2, 3), "down": nn.Linear(3, 2)})
    assert named_blocks(module, ["down"]) == [module["down"]]
    with pytest.raises(BadInputError, match="Did you mean 'down'"):
        named_blocks(module, ["dwn"])
    with pytest.raises(BadInputError, match="ModuleDict has no repeated blocks"):
        found_blocks(module)


def test_layouts_are_checked_before_anything_is_split():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(4, 6)}) for _ in range(2))
    assert set(layouts_of(model, {"layers.*.q": "colwise"}, 2)) == {"layers.0.q", "layers.1.q"}
    with pytest.raises(BadInputError, match="no tp_plan"):
        layouts_of(model, None, 2)
    with pytest.raises(BadInputError, match="Did you mean 'colwise'"):
        layouts_of(model, {"layers.*.q": "colwize"}, 2)
    with pytest.raises(BadInputError, match=r"'layers.\*.k'.*no such module"):
        layouts_of(model, {"layers.*.k": "colwise"}, 2)
    with pytest.raises(BadInputError, match="6 rows, which 4 ranks"):
        layouts_of(model, {"layers.*.q": "colwise"}, 4)


def test_what_cannot_be_split_is_left_out_of_the_plan_that_a_model_brings():
    """Mixtral's experts are one parameter, Gemma's embedding scales; both were refused."""
    import transformers

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    attention = {f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"}
    mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    # transformers 5.17 has no embedding in these plans.
    ends = {"lm_head", "model.embed_tokens"} & set(mixtral.tp_plan)
    assert "lm_head" in ends
    assert set(layouts_of(mixtral, None, 2)) == attention | ends
    gemma = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(head_dim=4, **sizes))
    mlp = {f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")}
    assert set(layouts_of(gemma, None, 2)) == attention | mlp
    # 24 columns are not shared by 5 ranks: neither is split what comes before them.
    config = transformers.LlamaConfig(**{**sizes, "hidden_size": 20, "num_attention_heads": 5,
                                         "num_key_value_heads": 5, "head_dim": 4})  # fmt: skip
    found = layouts_of(transformers.LlamaForCausalLM(config), None, 5)
    assert set(found) == attention | ends
    with pytest.raises(BadInputError, match=r"which requires an nn\.Linear"):
        layouts_of(gemma, {"model.embed_tokens": "colwise"}, 2)


@pytest.mark.gloo
def test_a_process_may_leave_its_group_before_it_gives_up_its_layout(on_ranks):
    """Once in a while it hung: gloo's threads waited for Python's lock, and it for them."""
    assert on_ranks(2, RANKS.with_name("ddp_end_ranks.py"), 60) == "left"
