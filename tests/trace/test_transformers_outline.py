"""Families without a reader: their parameters and FLOPs are those of transformers' own models."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from outpace.interop.outline import needs_trace, outline_from_config, read_outline_and_spec
from outpace.interop.transformers_build import build_on_meta
from outpace.jobs.planning.model_outline import find_outline
from outpace.planner.model.flops import keys_reached
from outpace.planner.model.outline import parameters
from outpace.planner.model.outline_flops import forward_flops
from outpace.records.errors import BadInputError
from outpace.records.outline import Outline
from outpace.trace.transformers_outline import outline_from_folder, outline_of_builds

SEQ_LEN = 64
_WIDTHS: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": SEQ_LEN,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_BERT = {**{k: v for k, v in _WIDTHS.items() if k not in ("num_key_value_heads", "head_dim")},
         "pad_token_id": 0}  # fmt: skip
_EXPERTS = {**_WIDTHS, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8,
            "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "n_shared_experts": 1, "shared_expert_intermediate_size": 20}  # fmt: skip
# Recurrent layers fill up chunks, so that short sequences cost what a chunk does.
LONG = 256
_LONG = {"max_position_embeddings": 2 * LONG}
RECURRENT = {"qwen3_next": LONG, "qwen3_5_text": LONG, "minimax": LONG, "mamba2": 512,
             "falcon_h1": LONG}  # fmt: skip
_LINEAR = {**_LONG, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
           "linear_key_head_dim": 8, "linear_value_head_dim": 8}  # fmt: skip
_SSM = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 8}
_BART = {"vocab_size": 61, "d_model": 32, "encoder_layers": 3, "decoder_layers": 3,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
         "decoder_ffn_dim": 40, "max_position_embeddings": SEQ_LEN, "pad_token_id": None,
         "bos_token_id": None, "eos_token_id": None}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "gemma4_text": {**_WIDTHS, "global_head_dim": 8, "sliding_window": 16,
                    "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 4,
                    "num_kv_shared_layers": 0},
    "gpt_oss": {**_EXPERTS, "sliding_window": 16},
    "olmo2": _WIDTHS,
    "olmo3": {**_WIDTHS, "sliding_window": 16},
    "smollm3": _WIDTHS,
    "glm4": _WIDTHS,
    "glm4_moe": {**_EXPERTS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "granite": _WIDTHS,
    "starcoder2": _WIDTHS,
    "qwen3_next": {**_EXPERTS, **_LINEAR},
    "qwen3_5_text": {**_WIDTHS, **_LINEAR},
    "llama4_text": {**_EXPERTS, "intermediate_size_mlp": 40, "attention_chunk_size": 16},
    "minimax": {**_EXPERTS, **_LONG, "block_size": 32},
    "minimax_m2": _EXPERTS,
    "modernbert": {**_BERT, "local_attention": 16},
    "deberta-v2": _BERT,
    "roberta": {**_BERT, "max_position_embeddings": SEQ_LEN + 2, "pad_token_id": 1},
    "mamba2": {**_SSM, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 32},
    "falcon_h1": {**_WIDTHS, **_LONG, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8,
                  "mamba_d_state": 8, "mamba_chunk_size": 32},
    # A table of relative positions that each head multiplies by.
    "inkling2_text": {**_EXPERTS, "unpadded_vocab_size": 60, "num_key_value_heads": 4,
                      "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 8,
                      "sliding_window_size": 16, "d_rel": 4, "rel_extent": 16,
                      "n_layers_per_attn_res_block": 2},
    # Experts in loops that read where the tokens go: each with a part of a weight, or its own.
    "jetmoe": {**_WIDTHS, "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "longcat_flash": {**_WIDTHS, "n_routed_experts": 8, "num_layers": 4, "q_lora_rank": 12,
                      "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
                      "v_head_dim": 6, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 24,
                      "moe_topk": 3, "num_key_value_heads": 4, "head_dim": 4, "zero_expert_num": 4},
    "switch_transformers": {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4,
                            "num_layers": 4, "num_decoder_layers": 4, "num_experts": 4,
                            "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2},
    "bart": {**_BART, "forced_eos_token_id": None},
    "m2m_100": {**_BART, "pad_token_id": 1},  # its decoder reads a mask of its own
}  # fmt: skip


# transformers sends every token through every expert, trainers through those it is routed to.
_RUNS_EVERY_EXPERT = ("llama4_text",)
# Of its choices some are no experts, as the values of a router have it.
_DEPENDS_ON_VALUES = ("longcat_flash",)


# Of Inkling, outpace counts the rows of the head beyond `unpadded_vocab_size`, which transformers
# leaves out, and not the three positions by which its convolutions are longer.
SPREADS = {"inkling2_text": 0.016}

# The rest is counted where slow tests run.
OFTEN = ("gpt_oss", "glm4_moe", "modernbert", "qwen3_5_text", "jetmoe", "switch_transformers")


def test_parameters_are_those_of_transformers(subtests: pytest.Subtests) -> None:
    for model_type, values in SMALL.items():
        with subtests.test(model_type):
            config = CONFIG_MAPPING[model_type](**values)
            found = traced(config)
            assert parameters(found) == numel(auto_class(config), config)
            if model_type in OFTEN:
                assert_flops(config, found)


@pytest.mark.slow
def test_flops_are_those_of_transformers(subtests: pytest.Subtests) -> None:
    for model_type in sorted(set(SMALL) - {*OFTEN, *_RUNS_EVERY_EXPERT, *_DEPENDS_ON_VALUES}):
        with subtests.test(model_type):
            config = CONFIG_MAPPING[model_type](**SMALL[model_type])
            assert_flops(config, traced(config))


def traced(config: Any) -> Outline:
    name = config.model_type
    return outline_of_builds(lambda dtype: build_on_meta(config, "x", dtype), name)[1]


def assert_flops(config: Any, found: Outline) -> None:
    """Exactly as torch counts them; of recurrent layers but for what fills a chunk up."""
    length = RECURRENT.get(config.model_type, SEQ_LEN)
    counted = flops(auto_class(config), config, found, length)
    spread = 1e-3 if config.model_type in RECURRENT else SPREADS.get(config.model_type, 0)
    assert forward_flops(found, length, 1) == pytest.approx(counted, rel=spread)


def auto_class(config: Any) -> Any:
    kind = type(config)
    if kind in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForSeq2SeqLM
    if kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING:
        return transformers.AutoModelForMaskedLM
    return transformers.AutoModelForCausalLM


def numel(auto: Any, config: Any) -> int:
    with torch.device("meta"):
        model = auto.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def flops(auto: Any, config: Any, found: Outline, length: int) -> int:
    """As torch counts the matmuls of a real model, but for masked scores beyond windows."""
    model = auto.from_config(config, attn_implementation="eager").eval().float()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    tokens = torch.zeros((1, length), dtype=torch.int64)
    more = {"decoder_input_ids": tokens} if auto is transformers.AutoModelForSeq2SeqLM else {}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, **more)
    pairs = [(stack.layers, stack.attention) for stack in found.stacks]
    beyond = sum(
        layers * 4 * one.heads * one.head_dim * length
        * max(0, length - keys_reached(length, one.window, one.causal))
        for layers, one in pairs if one is not None
    )  # fmt: skip
    return counter.get_total_flops() - beyond


def test_experts_in_loops_are_told_apart() -> None:
    """A third of LongCat's choices are identities, and each layer has two attentions."""
    found = traced(CONFIG_MAPPING["longcat_flash"](**SMALL["longcat_flash"]))
    (stack,) = found.stacks
    assert stack.mlp is not None and stack.attention is not None
    assert (stack.mlp.experts, stack.mlp.active, stack.mlp.gated) == (8, 2, True)
    assert stack.attention == stack.cross_attention and stack.attention.kv_rank == 16
    found = traced(CONFIG_MAPPING["jetmoe"](**SMALL["jetmoe"]))
    (mlp,) = (stack.mlp for stack in found.stacks)
    assert mlp is not None and (mlp.experts, mlp.active, mlp.width) == (4, 2, 48)


def test_a_model_that_hears_has_its_encoder() -> None:
    """Whisper's: 3000 frames are 1500 positions, which the decoder's cross-attention reads."""
    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=40, vocab_size=61,
        max_source_positions=20, max_target_positions=SEQ_LEN, pad_token_id=0,
        decoder_start_token_id=1, num_mel_bins=8,
    )  # fmt: skip
    built, found = outline_of_builds(lambda dtype: build_on_meta(config, "x", dtype), "whisper")
    encoder, decoder = found.stacks
    assert parameters(found) == numel(transformers.AutoModelForSpeechSeq2Seq, config)
    assert (encoder.seq_len, decoder.seq_len, found.max_positions) == (20, None, SEQ_LEN)
    assert decoder.cross_attention is not None and decoder.cross_attention.projected
    assert decoder.mlp is not None and decoder.mlp.width == 40
    assert any(
        "its encoder reads input_features of 8 × 40 per sample" in one for one in built.notes
    )
    model = transformers.AutoModelForSpeechSeq2Seq.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    tokens = torch.ones((1, SEQ_LEN), dtype=torch.int64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(input_features=torch.zeros(1, 8, 40), decoder_input_ids=tokens)
    assert forward_flops(found, SEQ_LEN, 1) == counter.get_total_flops()


def test_the_architecture_that_a_config_names_is_built() -> None:
    values = {name: value for name, value in SMALL["bart"].items() if "token_id" not in name}
    for name, decodes in (("PegasusForCausalLM", False), ("PegasusForConditionalGeneration", True)):
        config = CONFIG_MAPPING["pegasus"](architectures=[name], **values)
        built = build_on_meta(config, "x")
        assert (type(built.module).__name__, built.decodes) == (name, decodes)


def folder(directory: Path, **values: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def test_the_answer_says_how_a_family_was_read(tmp_path: Path) -> None:
    values = {**given(_WIDTHS), "architectures": ["Olmo2ForCausalLM"], "n_odd_experts": 7}
    del values["num_key_value_heads"], values["max_position_embeddings"]
    assert needs_trace(folder(tmp_path, model_type="olmo2", **values))
    _, found, spec = find_outline(str(tmp_path))
    assert spec is None and found.untrained == "outpace has no olmo2"
    traced, defaults, unknown = found.notes
    assert "no reader for olmo2. transformers" in traced and "one forward pass was traced" in traced
    assert "max_position_embeddings 2048" in defaults
    assert "n_odd_experts 7, which transformers' olmo2 does not read" in unknown
    assert found.max_positions == 2048
    (stack,) = found.stacks
    assert stack.attention is not None and stack.attention.projected
    assert not needs_trace(folder(tmp_path, model_type="llama"))


def test_a_mistral_with_kinds_of_layers_is_a_ministral(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"] * 2
    values = {**given(_WIDTHS), "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 128}
    values |= {"architectures": ["MistralForCausalLM"], "layer_types": kinds}
    _, found, _ = find_outline(str(folder(tmp_path, model_type="mistral", **values)))
    windows = [(stack.layers, getattr(stack.attention, "window", None)) for stack in found.stacks]
    assert windows == [(2, None), (2, 128)]
    assert found.untrained == "outpace has no ministral"


def test_a_window_both_ways_reaches_as_far_as_transformers_mask() -> None:
    """As a real ModernBERT's positions attend: 8 to each side of local_attention 16, and itself."""
    config = CONFIG_MAPPING["modernbert"](**SMALL["modernbert"])
    model = transformers.AutoModelForMaskedLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        found = model(
            input_ids=torch.zeros((1, SEQ_LEN), dtype=torch.int64), output_attentions=True
        )
    reached = {int((weights[0, 0, SEQ_LEN // 2] > 0).sum()) for weights in found.attentions}
    outlined = {
        keys_reached(SEQ_LEN, stack.attention.window, stack.attention.causal)
        for stack in traced(config).stacks if stack.attention
    }  # fmt: skip
    assert reached == outlined == {SEQ_LEN, 17}


def test_a_window_of_all_layers_is_read_from_the_config() -> None:
    """Where neither modules nor kinds of layers have it, as of StarCoder 2."""
    for model_type in ("starcoder2", "ministral3"):
        for window in (16, None):
            config = CONFIG_MAPPING[model_type](**{**_WIDTHS, "sliding_window": window})
            windows = {
                stack.attention and stack.attention.window for stack in traced(config).stacks
            }
            assert windows == {window}, model_type


def test_a_default_behind_what_cannot_be_built_is_named(tmp_path: Path) -> None:
    """Falcon's 71 heads are nowhere in the file."""
    folder(tmp_path, model_type="falcon", hidden_size=64, num_hidden_layers=2)
    with pytest.raises(BadInputError) as caught:
        outline_from_folder(tmp_path)
    said = str(caught.value)
    assert "uses its defaults: " in said and "num_attention_heads 71" in said
    assert ".." not in said


def test_contradictions_are_refused(tmp_path: Path) -> None:
    values = given(_WIDTHS)
    folder(tmp_path, model_type="olmo2", architectures=["LlamaForCausalLM"], **values)
    with pytest.raises(BadInputError, match="two different models"):
        outline_from_folder(tmp_path)
    folder(tmp_path, model_type="olmo2", **{**values, "num_key_value_heads": 3})
    with pytest.raises(BadInputError, match=r"--model file\.py:build"):
        outline_from_folder(tmp_path)
    folder(tmp_path, model_type="olmo2", **{**values, "num_hidden_layers": 10**6})
    with pytest.raises(BadInputError, match="num_hidden_layers = 1000000; it must be"):
        outline_from_folder(tmp_path)


def test_an_unknown_family_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path, model_type="of_tomorrow", **given(_WIDTHS))
    with pytest.raises(BadInputError, match=r"nor does transformers 5.* \(a newer"):
        find_outline(str(tmp_path))
    folder(tmp_path, model_type="olmo2", **given(_WIDTHS))
    for name in ("transformers", "transformers.models.auto.configuration_auto"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BadInputError, match="without transformers, which supports more"):
        find_outline(str(tmp_path))


def test_the_text_part_of_a_model_that_also_sees(tmp_path: Path) -> None:
    text = {**given(_WIDTHS), "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                  "mrope_section": [2, 1, 1]}}  # fmt: skip
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4}
    folder(tmp_path, model_type="qwen2_vl", text_config=text, vision_config=vision)
    found = outline_from_folder(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        whole = transformers.AutoModelForImageTextToText.from_config(config)
    seen = {name: p.numel() for name, p in whole.named_parameters()}
    assert parameters(found) == sum(n for name, n in seen.items() if ".visual." not in name)
    assert parameters(found) < sum(seen.values())
    assert any("only the text part (qwen2_vl_text) of qwen2_vl" in note for note in found.notes)


def test_a_folder_with_code_of_its_own_and_the_layers_of_a_family(tmp_path: Path) -> None:
    values = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 2}
    folder(tmp_path, model_type="deepseek_v3", **values)
    known, _ = read_outline_and_spec(tmp_path)
    folder(tmp_path, model_type="kimi_k2", **values)
    _, found, _ = find_outline(str(tmp_path))
    assert found.stacks == known.stacks
    assert "kimi_k2 is read as deepseek_v3" in found.notes[0]


def test_keys_of_a_text_config_and_of_one_level(tmp_path: Path) -> None:
    """What the class of the text part reads is not said to be passed over, nor left out."""
    text = {**given(_EXPERTS), **_LINEAR, "model_type": "qwen3_5_moe_text",
            "layer_types": ["linear_attention", "full_attention"] * 2, "n_odd_experts": 7,
            "mtp_num_hidden_layers": 1,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}  # fmt: skip
    folder(tmp_path, model_type="qwen3_5_moe", text_config=text, tie_word_embeddings=False)
    _, *notes = outline_from_folder(tmp_path).notes
    assert any("n_odd_experts 7, which transformers' qwen3_5_moe_text" in note for note in notes)
    assert not any(" num_experts 8" in note or "layer_types" in note for note in notes)
    assert any(
        "further tokens (mtp_num_hidden_layers 1) are not included" in note for note in notes
    )

    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    folder(tmp_path, model_type="qwen2_5_vl", rope_scaling=rope, sliding_window=32,
           use_sliding_window=False, tie_word_embeddings=False, **given(_WIDTHS))  # fmt: skip
    _, text_part, *more = outline_from_folder(tmp_path).notes
    assert "only the text part" in text_part and not more


def test_a_head_of_which_nothing_says_whether_it_is_tied(tmp_path: Path) -> None:
    text = {**given(_WIDTHS), "model_type": "qwen2"}
    folder(tmp_path, model_type="internvl", text_config=text)
    found = outline_from_folder(tmp_path)
    assert not found.tied
    assert any("does not say whether the head is tied" in note for note in found.notes)
    folder(tmp_path, model_type="internvl", text_config=text, tie_word_embeddings=True)
    found = outline_from_folder(tmp_path)
    assert found.tied and not any("head is tied" in note for note in found.notes)


def test_rotary_positions_that_read_the_length(tmp_path: Path) -> None:
    """transformers' longrope and dynamic compare the positions with those of training."""
    rope = {"type": "longrope", "original_max_position_embeddings": 32, "short_mscale": 1.2,
            "long_mscale": 1.2, "long_factor": [1.0] * 4, "short_factor": [1.0] * 4}  # fmt: skip
    values = {**given(_EXPERTS), "rope_scaling": rope}
    found = outline_from_folder(folder(tmp_path, model_type="phimoe", **values))
    assert parameters(found) == numel(
        transformers.AutoModelForCausalLM, transformers.AutoConfig.from_pretrained(tmp_path)
    )
    text = {**given(_WIDTHS), "model_type": "qwen2",
            "rope_scaling": {"type": "dynamic", "factor": 2.0}}  # fmt: skip
    folder(tmp_path, model_type="internvl", text_config=text, tie_word_embeddings=False)
    assert outline_from_folder(tmp_path).layers == 4


def test_configs_as_published(tmp_path: Path) -> None:
    """Widths by layer, names that a family's class turns into its own, and other spellings."""
    more = {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 8,
                                   "num_heads": 4, "short_conv_kernel_size": 4},
            "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
            "v_head_dim": 8, "first_k_dense_replace": 1, "pad_token_id": 0}  # fmt: skip
    values = {**given(_EXPERTS), "num_key_value_heads": 4, **more}
    found = outline_from_folder(folder(tmp_path, model_type="kimi_linear", **values))
    assert sum(s.layers for s in found.stacks if s.attention is not None) == 1
    assert not any("linear_" in note.replace("kimi_linear", "") for note in found.notes)
    values = {**given(_WIDTHS), "intermediate_size": [48, 40, 48, 40], "altup_num_inputs": 3,
              "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 4,
              "num_kv_shared_layers": 2, "laurel_rank": 4, "sliding_window": 16,
              "activation_sparsity_pattern": [0.0] * 4,
              "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
    found = outline_from_folder(folder(tmp_path, model_type="gemma3n_text", **values))
    assert {stack.mlp.width for stack in found.stacks if stack.mlp} == {40, 48}
    values = {**given(_WIDTHS), "architectures": ["Ernie4_5_ForCausalLM"]}
    assert outline_from_folder(folder(tmp_path, model_type="ernie4_5", **values)).layers == 4
    values = {**given(_WIDTHS), "architectures": ["Phi4MMForCausalLM"], "vision_lora": {"r": 256}}
    _, found, _ = find_outline(str(folder(tmp_path, model_type="phi4mm", **values)))
    assert "phi4mm is read as phi3" in found.notes[0]
    assert any("vision_lora {…}, which transformers' phi3" in note for note in found.notes)


def test_widths_by_layer_of_a_family_without_them(tmp_path: Path) -> None:
    folder(tmp_path, model_type="llama", **{**given(_WIDTHS), "intermediate_size": [48, 40]})
    with pytest.raises(BadInputError, match="it must be a whole number"):
        read_outline_and_spec(tmp_path)


_READ: dict[str, dict[str, Any]] = {
    "mixtral": {**_EXPERTS, "head_dim": None},
    "deepseek_v3": {**_EXPERTS, "num_key_value_heads": 4, "head_dim": 4, "first_k_dense_replace": 1,
                    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
                    "qk_rope_head_dim": 4, "v_head_dim": 6, "n_group": 2, "topk_group": 1},
    "gemma2": {**_WIDTHS, "sliding_window": 5},
    "gpt_neox": _BERT,
    "t5": {"vocab_size": 61, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 3,
           "num_decoder_layers": 3, "num_heads": 4},
}  # fmt: skip


def test_readers_and_the_trace_agree(subtests: pytest.Subtests) -> None:
    """What the trace tells apart is what the readers say of the same config."""
    for model_type in _READ:
        with subtests.test(model_type):
            config = CONFIG_MAPPING[model_type](**_READ[model_type])
            assert kinds(traced(config)) == kinds(outline_from_config(config, "x"))


def kinds(found: Outline) -> set[Any]:
    """Attention and MLP of the layers, however they are grouped."""
    ignored = {"qk_norm": False, "qkv_bias": False, "out_bias": False}
    return {
        (
            stack.attention and stack.attention.model_copy(update=ignored),
            stack.cross_attention and stack.cross_attention.model_copy(update=ignored),
            stack.mlp,
            stack.norms,
        )
        for stack in found.stacks
    }


# Families whose forward cannot be traced in their default size, and what they are refused with:
# transformers' own forward fails on these defaults, wants other inputs than tokens, or reads
# values.
NOT_TRACED = {
    "blt": "no attribute 'num_hidden_layers'",  # entropies of another model decide its patches
    "deepseek_v2": "argument 'k' must be int, not NoneType",
    "glm46v": "split_with_sizes expects split_sizes",
    "glm4v": "split_with_sizes expects split_sizes",
    "glm4v_moe": "split_with_sizes expects split_sizes",
    "glm5_next": "DynamicOutputShapeException",
    "glmga": "split_with_sizes expects split_sizes",
    "idefics": "Exactly 1 of pixel_values",
    "kosmos-2": "must have same reduction dim",
    "kosmos-2.5": "must have same reduction dim",
    "pi0": "missing 1 required positional argument: 'state'",
    "pix2struct": "You have to specify flattened_patches",
    "pp_formulanet": "exactly one of encoder_outputs or pixel_values",
    "prophetnet": "is invalid for input of size",  # its own tables lack the last position
    "qwen3_omni_moe_thinker": "Attempting to broadcast a dimension",
    "step3p7": "Could not find a `sliding_window` argument",
    "udop": "Bbox is required",
    "vision-encoder-decoder": "You have to specify pixel_values",
    "voxtral_realtime": "must be Tensor, not NoneType",
    "xlnet": "expected scalar type torch.bfloat16",
    "xmod": "Input language unknown",
}


def families() -> set[str]:
    """Model types with a head over a vocabulary, by transformers' own tables."""
    return set().union(
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )


@pytest.mark.slow
def test_every_family_with_its_default_config(subtests: pytest.Subtests) -> None:
    """All families of language models, in the size that transformers takes where none is said."""
    for model_type in sorted(families()):
        with subtests.test(model_type):
            try:
                config = CONFIG_MAPPING[model_type]()
                build_on_meta(config, "x")
            except (BadInputError, StrictDataclassError) as error:  # of transformers' defaults
                pytest.skip(str(error))
            if model_type in NOT_TRACED:
                refused = f"the forward of .*{re.escape(NOT_TRACED[model_type])}.*--model file.py"
                with pytest.raises(BadInputError, match=refused):
                    outline_of_builds(
                        lambda dtype, config=config: build_on_meta(config, "x", dtype), model_type
                    )
                continue
            built, found = outline_of_builds(
                lambda dtype, config=config: build_on_meta(config, "x", dtype), model_type
            )
            assert parameters(found) == sum(p.numel() for p in built.module.parameters())
            assert found.outside_parameters >= 0
