"""Hugging Face configs as outlines: parameters and FLOPs as transformers' own models have them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from outpace.catalog.outlines import OUTLINES
from outpace.interop.outline import outline_from_config, read_outline_and_spec
from outpace.interop.outline_readers import READERS
from outpace.planner.model.outline import parameters
from outpace.planner.model.outline_flops import forward_flops
from outpace.records.errors import BadInputError
from outpace.records.outline import Outline

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published.json").read_text(encoding="utf-8")
)
SAMPLES, SEQ_LEN = 2, 24
_WIDTHS = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED = {**_WIDTHS, "num_key_value_heads": 2}
_GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 61, "n_positions": 64,
         "bos_token_id": None, "eos_token_id": None}  # fmt: skip
_EXPERTS = {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {
    **_WIDTHS,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
}
_OPT = {
    **{key: value for key, value in _WIDTHS.items() if key != "intermediate_size"},
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "pad_token_id": 1,
}
_T5 = {"vocab_size": 61, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 3,
       "num_decoder_layers": 2, "num_heads": 4}  # fmt: skip
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 2.0,
    "original_max_position_embeddings": 32,
}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT2),
    "gpt2-relu": ("gpt2", {**_GPT2, "activation_function": "relu", "n_inner": 40}),
    "llama": ("llama", _GROUPED),
    "llama-yarn-biased": (
        "llama",
        {**_GROUPED, "attention_bias": True, "mlp_bias": True, "rope_parameters": _YARN},
    ),
    "mistral": ("mistral", {**_GROUPED, "sliding_window": 7}),
    "mistral-yarn": ("mistral", {**_GROUPED, "sliding_window": 7, "rope_parameters": _YARN}),
    "qwen2": ("qwen2", _GROUPED),
    "qwen2-yarn": ("qwen2", {**_GROUPED, "rope_parameters": _YARN}),
    "qwen3": ("qwen3", {**_GROUPED, "head_dim": 12}),
    "qwen3-yarn": ("qwen3", {**_GROUPED, "head_dim": 12, "rope_parameters": _YARN}),
    "bert": ("bert", _WIDTHS),
    "bert-relu": ("bert", {**_WIDTHS, "hidden_act": "relu"}),
    "gpt_neox": ("gpt_neox", _WIDTHS),
    "gpt_neox-unbiased": ("gpt_neox", {**_WIDTHS, "attention_bias": False}),
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 61}),
    "mpt": ("mpt", {"d_model": 32, "n_layers": 3, "n_heads": 4, "vocab_size": 61,
                    "max_seq_len": 64}),
    "opt": ("opt", _OPT),
    "opt-narrow": ("opt", {**_OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "opt-plain": ("opt", {**_OPT, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    "mixtral": ("mixtral", {**_GROUPED, "num_local_experts": 4}),
    "qwen2_moe": (
        "qwen2_moe",
        {**_EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "head_dim": 12, "decoder_sparse_step": 2}),
    "deepseek_v2": ("deepseek_v2", {**_LATENT, "mlp_bias": True}),
    "deepseek_v3": ("deepseek_v3", _LATENT),
    "deepseek_v3-biased": ("deepseek_v3", {**_LATENT, "attention_bias": True}),
    "deepseek_v3-direct": ("deepseek_v3", {**_LATENT, "q_lora_rank": None}),
    "gemma": ("gemma", {**_GROUPED, "head_dim": 12}),
    "gemma2": ("gemma2", {**_GROUPED, "head_dim": 12, "sliding_window": 5}),
    "gemma3_text": ("gemma3_text", {**_GROUPED, "head_dim": 12, "sliding_window": 5}),
    "phi": ("phi", _GROUPED),
    "phi-normed": ("phi", {**_GROUPED, "qk_layernorm": True}),
    "phi3": ("phi3", {**_GROUPED, "sliding_window": 5}),
    "vit": ("vit", {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 48, "image_size": [32, 16], "patch_size": 8, "num_labels": 7,
    }),
    "t5": ("t5", _T5),
    "t5-gated": ("t5", {**_T5, "feed_forward_proj": "gated-gelu"}),
}  # fmt: skip


def auto_class(model_type: str) -> Any:
    special = {
        "bert": transformers.AutoModelForMaskedLM,
        "vit": transformers.AutoModelForImageClassification,
        "t5": transformers.AutoModelForSeq2SeqLM,
    }
    return special.get(model_type, transformers.AutoModelForCausalLM)


def small(name: str, **values: Any) -> Any:
    model_type, config = SMALL[name]
    return transformers.AutoConfig.for_model(model_type, **{**config, **values})


def on_meta(config: Any) -> int:
    """Parameters of transformers' model."""
    with torch.device("meta"):
        model = auto_class(config.model_type).from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def write(directory: Path, **values: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def refusal(directory: Path) -> str:
    with pytest.raises(BadInputError) as caught:
        read_outline_and_spec(directory)
    return str(caught.value)


def test_every_architecture_is_tried() -> None:
    assert {model_type for model_type, _ in SMALL.values()} == set(READERS) - {"gemma3"}


@pytest.mark.parametrize("name", SMALL)
def test_parameters_are_those_of_transformers(name: str) -> None:
    config = small(name)
    assert parameters(outline_from_config(config, name)) == on_meta(config)


@pytest.mark.parametrize("name", SMALL)
def test_flops_are_those_of_transformers(name: str) -> None:
    """All that is counted: no family computes its positions by a matmul.

    Attention is eager: torch counts no fused attention on the CPU. Experts are looped over: torch
    counts no grouped matmul. Either way each token goes through its own experts alone.
    """
    config = small(name)
    torch.manual_seed(3)
    model = auto_class(config.model_type).from_config(config, attn_implementation="eager").eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    tokens = torch.randint(61, (SAMPLES, SEQ_LEN))
    inputs: dict[str, Any] = {"input_ids": tokens}
    if config.model_type == "vit":
        inputs = {"pixel_values": torch.randn(SAMPLES, 3, 32, 16)}
    if config.model_type == "t5":
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    read = outline_from_config(config, name)
    counted = counter.get_total_flops() - beyond_windows(read)
    assert forward_flops(read, SEQ_LEN, SAMPLES) == counted


def beyond_windows(read: Outline) -> int:
    """What torch counts of masked scores that no window reaches."""
    pairs = [(stack.layers, stack.attention) for stack in read.stacks]
    return sum(
        layers * SAMPLES * 4 * one.heads * one.head_dim * SEQ_LEN * (SEQ_LEN - one.window)
        for layers, one in pairs
        if one is not None and one.window is not None and one.window < SEQ_LEN
    )


@pytest.mark.parametrize("name", SMALL)
def test_keys_of_other_families_change_nothing(name: str) -> None:
    """transformers keeps any key in a config, and its models read their own family's."""
    theirs = small(name)
    foreign = {
        "num_key_value_heads": 1, "head_dim": 4, "attention_bias": True, "mlp_bias": True,
        "layer_types": ["sliding_attention"] * 3, "num_experts": 2,
    }  # fmt: skip
    known = {*theirs.to_dict(), *type(theirs).__dataclass_fields__}
    if name == "phi-normed":  # its norms have the width of hidden / heads: another fails
        known.add("head_dim")
    changed = small(name, **{key: foreign[key] for key in foreign.keys() - known})
    assert parameters(outline_from_config(changed, name)) == on_meta(changed)


def test_an_encoder_of_another_length() -> None:
    config = small("t5")
    model = auto_class("t5").from_config(config, attn_implementation="eager").eval()
    seen, written = torch.randint(61, (1, 9)), torch.randint(61, (1, 5))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=seen, decoder_input_ids=written)
    read = outline_from_config(config, "t5")
    encoder = read.stacks[0].model_copy(update={"seq_len": 9})
    read = read.model_copy(update={"stacks": (encoder, read.stacks[1])})
    assert forward_flops(read, 5, 1) == counter.get_total_flops()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str, tmp_path: Path) -> None:
    """In full size: transformers' count, the paper's, and what the catalog says of the model."""
    (tmp_path / name).mkdir()
    directory = write(tmp_path / name, **PUBLISHED[name]["config"])
    read, spec = read_outline_and_spec(directory)
    assert spec is None and read.name == name
    config = transformers.AutoConfig.from_pretrained(directory)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    assert parameters(read) == on_meta(config)
    stated = PUBLISHED[name].get("stated")
    if stated is not None:
        digits = len(stated.partition("e")[0].replace(".", ""))
        assert float(f"{parameters(read):.{digits - 1}e}") == float(stated)
    if name in OUTLINES:
        kept = {"source": OUTLINES[name].source, "notes": ()}  # notes are of the file
        assert read.model_copy(update=kept) == OUTLINES[name]


def test_every_outline_of_the_catalog_is_published() -> None:
    assert set(OUTLINES) <= set(PUBLISHED)


def test_what_outpace_builds_comes_with_its_spec(tmp_path: Path) -> None:
    values = {key: value for key, value in _GROUPED.items() if value is not None}
    read, spec = read_outline_and_spec(write(tmp_path, model_type="llama", **values))
    assert spec is not None and spec.layers == 3
    assert read.untrained is None and read.name == tmp_path.name


def test_what_outpace_cannot_build_says_why(tmp_path: Path) -> None:
    assert outline_from_config(small("mixtral"), "x").untrained == "outpace has no Mixtral"
    yarn = outline_from_config(small("llama-yarn-biased"), "x")
    assert "the rotary scaling 'yarn' is not supported" in str(yarn.untrained)


def test_kinds_of_layers() -> None:
    read = outline_from_config(small("gemma2", num_hidden_layers=5), "x")
    assert [(s.layers, s.attention and s.attention.window) for s in read.stacks] == [
        (3, 5),
        (2, None),
    ]
    read = outline_from_config(small("deepseek_v3"), "x")
    assert [(s.layers, s.mlp and s.mlp.experts) for s in read.stacks] == [(1, 0), (2, 4)]
    assert read.experts == 4 and read.layers == 3
    assert outline_from_config(small("gpt_neox"), "x").stacks[0].parallel
    assert not outline_from_config(small("bert-relu"), "x").stacks[0].attention.causal


def test_the_text_of_a_model_that_also_sees(tmp_path: Path) -> None:
    text = {key: value for key, value in _GROUPED.items() if value is not None}
    directory = write(tmp_path, model_type="gemma3", text_config={**text, "head_dim": 12})
    read, _ = read_outline_and_spec(directory)
    assert parameters(read) == on_meta(small("gemma3_text"))
    assert "whose vision tower is not included" in str(read.untrained)


@pytest.mark.parametrize("model_type", ["mamba", "minimax_m2", "gptj", "lama", "granitemoe"])
def test_no_architecture_is_proposed_by_its_spelling(model_type: str, tmp_path: Path) -> None:
    """To write another model_type trains another model."""
    said = refusal(write(tmp_path, model_type=model_type, hidden_size=32, vocab_size=61))
    assert f"does not support the architecture {model_type!r}" in said
    assert "Did you mean" not in said and "write" not in said and "If its layers" not in said


def test_an_unknown_architecture(tmp_path: Path) -> None:
    said = refusal(write(tmp_path, model_type="mixtrl", hidden_size=32, vocab_size=61))
    assert "outpace does not support the architecture 'mixtrl'" in said
    assert "file.py:build" in said
    assert "has no model_type, so the architecture is unknown" in refusal(write(tmp_path))
    with pytest.raises(BadInputError, match="architecture 'falcon'"):
        outline_from_config(transformers.AutoConfig.for_model("falcon"), "x")


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("mixtral", {"num_attention_heads": 0}, "num_attention_heads = 0; it must be a whole"),
        ("mixtral", {"num_attention_heads": -4}, "num_attention_heads = -4"),
        ("mixtral", {"num_attention_heads": 5}, "hidden width 32 is not a multiple of the 5 heads"),
        ("mixtral", {"num_key_value_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ("mixtral", {"num_experts_per_tok": 9}, "active is 9, but there are only 4 experts"),
        ("mixtral", {"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ("mixtral", {"hidden_size": "wide"}, "hidden_size"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank = 0"),
        ("deepseek_v3", {"n_routed_experts": 0}, "n_routed_experts = 0"),
        ("gemma2", {"layer_types": ["full_attention"]}, "must be equal to the number of"),
        ("gemma2", {"layer_types": ["other"] * 3}, "layer_types"),
        ("vit", {"patch_size": 64}, "patch_size = (64, 64); the image has (32, 16)"),
        ("vit", {"patch_size": 0}, "patch_size = 0"),
        ("t5", {"num_heads": 0}, "num_heads = 0"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads = 0"),
        ("gpt2-relu", {"add_cross_attention": True}, "add_cross_attention = True"),
        ("bert-relu", {"is_decoder": True}, "is_decoder = True"),
    ],
)
def test_what_cannot_be(name: str, values: dict[str, Any], said: str, tmp_path: Path) -> None:
    model_type, config = SMALL[name]
    given = {key: value for key, value in config.items() if value is not None}
    found = refusal(write(tmp_path, model_type=model_type, **{**given, **values}))
    assert said in found
    assert str(tmp_path) in found
