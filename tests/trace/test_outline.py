"""Outlines of modules that are run once: parameters and FLOPs exactly, repeated parts as stacks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from outpace.interop.outline import outline_from_config
from outpace.planner.model.outline import parameters
from outpace.planner.model.outline_flops import forward_flops
from outpace.records.errors import BadInputError
from outpace.trace.outline import outline_from_module

SAMPLES, SEQ_LEN, WIDTH, VOCAB = 2, 24, 32, 61


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x  # a cache that would outlive the trace
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


class Model(nn.Module):
    """A language model with a tied head."""

    def __init__(self, times: int = 1, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(128, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.times = times

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for _ in range(self.times):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


class Routed(nn.Module):
    """Experts by a loop that looks at where tokens go."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        chosen = self.router(flat).argmax(-1)
        out = torch.zeros_like(flat)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().flatten()
            out = out.index_add(0, rows, self.experts[number](flat[rows]))
        return out.view_as(x)


@contextmanager
def plain() -> Iterator[FlopCounterMode]:
    """Attention as matmuls, which torch counts on the CPU too; LSTMs as well."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            yield counter
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def tokens() -> Tensor:
    return torch.randint(VOCAB, (SAMPLES, SEQ_LEN), generator=torch.Generator().manual_seed(1))


def exact(module: nn.Module, inputs: Any) -> Any:
    """The outline, whose parameters and FLOPs are the module's."""
    made = outline_from_module(module, inputs)
    assert parameters(made) == sum(parameter.numel() for parameter in module.parameters())
    with plain() as counter:
        if isinstance(inputs, dict):
            module(**inputs)
        else:
            module(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    assert forward_flops(made, SEQ_LEN, SAMPLES) == counter.get_total_flops()
    return made


def test_a_language_model() -> None:
    model = Model()
    made = exact(model, tokens())
    (stack,) = made.stacks
    assert (stack.name, stack.layers, stack.seq_len) == ("blocks", 3, None)
    assert stack.attention.heads == 4 and stack.attention.head_dim == 8
    assert not stack.attention.projected and stack.cross_attention is None
    assert [matmul.name for matmul in stack.other] == [
        "attention.in_proj_weight", "attention.out_proj.weight", "mlp.0.weight", "mlp.2.weight",
    ]  # fmt: skip
    assert (made.hidden, made.vocab, made.outputs, made.tied) == (WIDTH, VOCAB, VOCAB, True)
    assert made.outside_parameters == 128 * WIDTH and made.predicted is None
    assert made.untrained is None and made.source == "traced"
    # Nothing of the trace is left in it, and it scales with the sequence.
    assert model.blocks[0].kept is not None and type(model.blocks[0].kept) is Tensor
    with plain() as counter:
        model(torch.zeros((1, 50), dtype=torch.int64))
    assert forward_flops(made, 50, 1) == counter.get_total_flops()


def test_a_trace_leaves_the_module_alone() -> None:
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    outline_from_module(model, tokens())
    assert model.blocks[0].kept is None and model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.blocks[0]._forward_hooks


def test_on_meta_nothing_has_to_exist() -> None:
    with torch.device("meta"):
        model = Model(layers=5)
    made = outline_from_module(model, tokens())
    assert made == outline_from_module(Model(layers=5), tokens())


def test_layers_that_are_used_again() -> None:
    made = exact(Model(times=3, layers=2), tokens())
    assert [stack.layers for stack in made.stacks] == [2]
    assert {matmul.uses for matmul in made.stacks[0].other if matmul.weighted} == {3}


def test_experts_that_values_decide_on() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Routed() for _ in range(3)))
    x = torch.randn(1, SEQ_LEN, WIDTH)
    made = outline_from_module(model, x)
    assert parameters(made) == 3 * (4 * WIDTH + 4 * WIDTH * WIDTH)
    assert forward_flops(made, SEQ_LEN, 1) == 3 * 2 * SEQ_LEN * (4 * WIDTH + WIDTH * WIDTH)
    with pytest.raises(BadInputError, match="parameters are on the meta device"):
        outline_from_module(model.to("meta"), x)


def test_encoder_and_decoder() -> None:
    model = nn.Transformer(WIDTH, 4, 2, 3, 64, batch_first=True)
    made = exact(model, (torch.randn(SAMPLES, 7, WIDTH), torch.randn(SAMPLES, 5, WIDTH)))
    assert [(s.layers, s.seq_len, s.cross_attention is None) for s in made.stacks] == [
        (2, 7, True),
        (3, 5, False),
    ]


def test_images() -> None:
    grouped = (nn.Conv2d(8, 8, 3, padding=1, groups=4) for _ in range(3))
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Sequential(*grouped),
        nn.ConvTranspose2d(8, 4, 2, 2), nn.Flatten(), nn.Linear(4 * 256, 10),
    )  # fmt: skip
    made = exact(model, torch.randn(SAMPLES, 3, 8, 8))
    assert [(s.layers, s.seq_len) for s in made.stacks] == [(3, 64)]
    assert made.hidden == 8 and made.outputs == 0


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.Linear(4, 3), torch.randn(SAMPLES, 4)),
        (nn.LSTM(16, 24, 2, batch_first=True), torch.randn(SAMPLES, 5, 16)),
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(SAMPLES, 8)),
        (nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True), 3
        ), torch.randn(SAMPLES, 7, WIDTH)),
        (nn.GRU(16, 24, bidirectional=True, batch_first=True), torch.randn(SAMPLES, 5, 16)),
        (nn.Conv1d(4, 6, 3, stride=2), torch.randn(SAMPLES, 4, 11)),
    ],
)  # fmt: skip
def test_other_modules(module: nn.Module, inputs: Any) -> None:
    exact(module, inputs)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}),
        ("qwen3", {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 12}),
        ("phi", {"num_hidden_layers": 2}),
    ],
)
def test_a_trace_agrees_with_the_config(
    family: str, values: dict[str, Any], attention: str
) -> None:
    common = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    sizes = {} if family == "gpt2" else common
    tokens_of = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(
        family, vocab_size=VOCAB, **tokens_of, **sizes, **values
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    traced = outline_from_module(model, {"input_ids": tokens(), "use_cache": False})
    read = outline_from_config(config, family)
    assert parameters(traced) == parameters(read)
    assert forward_flops(traced, 40, 3) == forward_flops(read, 40, 3)
    assert (traced.layers, traced.hidden, traced.vocab, traced.tied) == (
        read.layers, read.hidden, read.vocab, read.tied,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (transformers.SwinConfig(
            image_size=64, window_size=4, embed_dim=12, depths=[2, 4], num_heads=[3, 6]
        ), [2, 4]),
        (transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[16, 32], depths=[3, 2], num_labels=5
        ), [1, 2, 1, 1]),
    ],
)  # fmt: skip
def test_architectures_that_no_reader_knows(config: Any, layers: list[int]) -> None:
    """Windows of an image are attended to on their own: matmuls of a fixed size."""
    model = transformers.AutoModelForImageClassification.from_config(config)
    made = exact(model, {"pixel_values": torch.randn(SAMPLES, 3, 64, 64)})
    assert [stack.layers for stack in made.stacks] == layers


def test_mixtures_are_really_run() -> None:
    config = transformers.AutoConfig.for_model(
        "mixtral", hidden_size=32, num_hidden_layers=3, num_attention_heads=4, vocab_size=VOCAB,
        num_key_value_heads=2, intermediate_size=48, num_local_experts=4,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    traced = outline_from_module(model, {"input_ids": tokens(), "use_cache": False})
    read = outline_from_config(config, "mixtral")
    assert parameters(traced) == parameters(read)
    assert forward_flops(traced, SEQ_LEN, SAMPLES) == forward_flops(read, SEQ_LEN, SAMPLES)
    assert traced.stacks[0].attention is not None and traced.layers == 3


def test_what_cannot_be_traced() -> None:
    with pytest.raises(BadInputError, match="Linear failed on the example: RuntimeError"):
        outline_from_module(nn.Linear(4, 3), torch.randn(2, 5))
    with pytest.raises(BadInputError, match="has no matmul with a weight"):
        outline_from_module(nn.LayerNorm(4), torch.randn(2, 4))
    with pytest.raises(BadInputError, match="no tensor of samples"):
        outline_from_module(nn.Linear(4, 3), {"x": 3})
