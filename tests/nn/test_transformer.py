import math

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outpace.nn.masks import visibility
from outpace.nn.rotary import rotary_frequencies
from outpace.nn.transformer import Transformer
from outpace.records.errors import BadInputError

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "bert")
NORM, BIASED = ["weight"], ["weight", "bias"]


def _names(prefix, parts):
    return [f"{prefix}.{part}" for part in parts]


@pytest.mark.parametrize(
    ("family", "norm", "qkv", "out", "mlp", "extra"),
    [
        ("gpt2", BIASED, BIASED, BIASED, BIASED, []),
        ("llama", NORM, NORM, NORM, NORM, ["head.weight"]),
        ("mistral", NORM, NORM, NORM, NORM, ["head.weight"]),
        ("qwen2", NORM, BIASED, NORM, NORM, []),
        ("qwen3", NORM, NORM, NORM, NORM, ["head.weight"]),
        ("bert", BIASED, BIASED, BIASED, BIASED, ["head_bias"]),
    ],
)
def test_parameter_names_are_what_checkpoints_hold(make_spec, family, norm, qkv, out, mlp, extra):
    wanted = ["embed.tokens.weight", *extra]
    wanted += ["embed.positions.weight"] if family in ("gpt2", "bert") else []
    if family == "bert":
        wanted += ["embed.segments.weight", *_names("embed.norm", norm)]
        wanted += _names("head_transform.dense", BIASED) + _names("head_transform.norm", norm)
    else:
        wanted += _names("final_norm", norm)
    for block in ("blocks.0", "blocks.1"):
        wanted += _names(f"{block}.attention_norm", norm) + _names(f"{block}.mlp_norm", norm)
        for part in "qkv":
            wanted += _names(f"{block}.attention.{part}", qkv)
        wanted += _names(f"{block}.attention.out", out)
        if family == "qwen3":
            wanted += _names(f"{block}.attention", ["q_norm.weight", "k_norm.weight"])
        for part in ("up", "down") if family in ("gpt2", "bert") else ("up", "gate", "down"):
            wanted += _names(f"{block}.mlp.{part}", mlp)
    assert sorted(Transformer(make_spec(family)).state_dict()) == sorted(wanted)


def test_shapes_follow_the_spec(make_spec):
    state = Transformer(make_spec("qwen3")).state_dict()
    assert state["blocks.0.attention.q.weight"].shape == (4 * 12, 32)
    assert state["blocks.0.attention.k.weight"].shape == (2 * 12, 32)
    assert state["blocks.0.attention.out.weight"].shape == (32, 4 * 12)
    assert state["blocks.0.attention.q_norm.weight"].shape == (12,)
    assert state["blocks.1.mlp.gate.weight"].shape == (48, 32)
    assert state["head.weight"].shape == (61, 32)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_depend_on_spec_and_seed_alone(make_spec, family):
    spec = make_spec(family)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = Transformer(spec, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    with torch.device("meta"):
        later = Transformer(spec)
    assert all(parameter.is_meta for parameter in later.parameters())
    later.to_empty(device="cpu").reset_parameters(3)
    other = Transformer(spec, seed=4).state_dict()
    assert all(torch.equal(first[name], value) for name, value in later.state_dict().items())
    assert not torch.equal(first["embed.tokens.weight"], other["embed.tokens.weight"])
    assert all(value.dtype == torch.float32 for value in first.values())


def test_initial_scale_is_gpt2s(make_spec):
    spec = make_spec("gpt2", layers=8, hidden=64, ffn=256)
    state = Transformer(spec).state_dict()
    for name, std in (
        ("embed.tokens.weight", 0.02),
        ("blocks.3.attention.q.weight", 0.02),
        ("blocks.3.attention.out.weight", 0.02 / 4),
        ("blocks.3.mlp.down.weight", 0.02 / 4),
    ):
        assert state[name].std().item() == pytest.approx(std, rel=0.1)
    assert state["blocks.3.mlp.down.bias"].abs().max() == 0
    assert state["blocks.3.mlp_norm.weight"].min() == state["blocks.3.mlp_norm.weight"].max() == 1


def _attend_by_hand(attention, x_BSD, allowed_BSS):
    """Softmax attention written out, a query head at a time."""
    spec, mixed = attention.spec, []
    q, k, v = (part(x_BSD) for part in (attention.q, attention.k, attention.v))
    width = spec.head_dim
    for head in range(spec.heads):
        group = head // (spec.heads // spec.kv_heads)
        query = q[..., head * width : (head + 1) * width]
        key = k[..., group * width : (group + 1) * width]
        value = v[..., group * width : (group + 1) * width]
        scores = query @ key.transpose(1, 2) / math.sqrt(width)
        mixed.append(scores.masked_fill(~allowed_BSS, -math.inf).softmax(-1) @ value)
    return attention.out(torch.cat(mixed, dim=-1))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("documents", [None, [[0] * 5 + [1] * 7, [4] * 12]])
@pytest.mark.parametrize("padded", [None, 9])
def test_attention_is_softmax_over_who_is_seen(make_model, causal, window, documents, padded):
    attention = make_model("gpt2", kv_heads=2).blocks[0].attention
    x_BSD = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))
    mask = None if padded is None else (torch.arange(12) < padded).expand(2, 12)
    given = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    allowed = torch.zeros(2, 12, 12, dtype=torch.bool)
    for b, i, j in torch.cartesian_prod(*(torch.arange(n) for n in allowed.shape)).tolist():
        allowed[b, i, j] = (
            (not causal or j <= i)
            and (window is None or abs(i - j) < window)
            and (documents is None or documents[b][i] == documents[b][j])
            and (padded is None or j < padded or i == j)
        )
    sees = visibility(12, 12, causal, window, given, mask, x_BSD.device)
    assert (sees.mask is None) == (window is None and documents is None and padded is None)
    ours = attention(x_BSD, sees, None, None)
    torch.testing.assert_close(ours, _attend_by_hand(attention, x_BSD, allowed))


@pytest.mark.parametrize("family", FAMILIES)
def test_only_a_causal_model_is_blind_to_the_future(make_model, tokens, family):
    model = make_model(family)
    changed = tokens.clone()
    changed[:, 15] = (changed[:, 15] + 1) % 61
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :15], after[:, :15]) == (family != "bert")
    assert not torch.allclose(before[:, 15:], after[:, 15:])


def test_a_window_forgets(make_model, tokens):
    model = make_model("mistral", layers=1)
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 61
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, 4 + 7 :], after[:, 4 + 7 :])
    assert not torch.allclose(before[:, 4 + 6], after[:, 4 + 6])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_document_is_read_as_if_alone(make_model, tokens, family):
    model = make_model(family)
    documents = torch.tensor([0] * 9 + [1] * 4 + [2] * 11).expand(3, 24)
    packed = model(tokens, documents)
    for part in (slice(0, 9), slice(9, 13), slice(13, 24)):
        torch.testing.assert_close(packed[:, part], model(tokens[:, part]), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(packed[:, 9:], model(tokens)[:, 9:], atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_nothing(make_model, tokens, family):
    model = make_model(family)
    mask = torch.ones_like(tokens)
    mask[:, 17:] = 0
    padded = model(tokens, padding_mask_BS=mask)
    assert padded.isfinite().all()
    torch.testing.assert_close(padded[:, :17], model(tokens[:, :17]), rtol=1e-4, atol=1e-4)


def test_segments_default_to_the_first(make_model, tokens):
    model = make_model("bert")
    plain = model(tokens)
    assert torch.equal(plain, model(tokens, segments_BS=torch.zeros_like(tokens)))
    assert not torch.allclose(plain, model(tokens, segments_BS=torch.ones_like(tokens)))


def test_logits_are_hidden_times_the_heads_weight(make_model, tokens):
    for family, owner in (("gpt2", "embed.tokens.weight"), ("llama", "head.weight")):
        model = make_model(family)
        assert model.head_weight is dict(model.named_parameters())[owner]
        assert model.head_bias is None
    model = make_model("bert")
    with torch.no_grad():
        model.head_bias.fill_(0.5)
    hidden = model(tokens)
    torch.testing.assert_close(
        model.logits(hidden), F.linear(hidden, model.embed.tokens.weight) + 0.5
    )


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_positions": 8192,
        },
    ],
)
def test_rotary_frequencies_are_transformers(make_spec, scaling):
    spec = make_spec(
        "llama", head_dim=64, rope_theta=500_000.0, max_positions=131072, rope_scaling=scaling
    )
    theirs = {"rope_type": "default", "rope_theta": 500_000.0}
    if scaling is not None:
        renamed = {k: v for k, v in scaling.items() if k != "original_max_positions"}
        theirs |= {"rope_type": "llama3", "original_max_position_embeddings": 8192, **renamed}
    config = LlamaConfig(
        head_dim=64, hidden_size=256, num_attention_heads=4, max_position_embeddings=131072,
        rope_parameters=theirs,
    )  # fmt: skip
    torch.testing.assert_close(
        rotary_frequencies(spec, torch.device("cpu")), LlamaRotaryEmbedding(config).inv_freq
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_stays_near_fp32(make_model, tokens, family, dtype):
    model = make_model(family)
    exact = model(tokens)
    with torch.autocast("cpu", dtype=dtype):
        rough = model(tokens)
    error = (rough.float() - exact).norm() / exact.norm()
    assert 0 < error < (0.1 if dtype == torch.bfloat16 else 0.02)


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama"])
def test_dropout_acts_in_training_only(make_model, tokens, family):
    model = make_model(family, dropout=0.3)
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.allclose(model(tokens), model(tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_too_long_a_sequence_is_refused(make_model, family):
    model = make_model(family)
    assert model(torch.zeros(1, 40, dtype=torch.int64)).shape == (1, 40, 32)
    with pytest.raises(BadInputError, match=r"41 tokens .* 40 positions"):
        model(torch.zeros(1, 41, dtype=torch.int64))
