"""Configs of another model than their model_type says, and what is said of those that are taken."""

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import transformers

from outpace.interop.config import read_spec_with_notes
from outpace.interop.models import open_model
from outpace.interop.outline import read_outline_and_spec
from outpace.interop.outline_readers import READERS
from outpace.planner.model.outline import parameters
from outpace.records.errors import BadInputError

_SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 61,
         "max_position_embeddings": 64}  # fmt: skip
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **_SIZE}
# Of published configs, what makes their models others than Llama.
GRANITE = {"embedding_multiplier": 12.0, "attention_multiplier": 0.015625,
           "residual_multiplier": 0.22, "logits_scaling": 8.0}  # fmt: skip
SMOLLM3 = {"no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4}


def write(directory: Path, values: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def refusals(directory: Path) -> list[str]:
    """What both ways into outpace say: training and planning."""
    found = []
    for read in (read_spec_with_notes, read_outline_and_spec):
        with pytest.raises(BadInputError) as caught:
            read(directory)
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("llama", "GraniteForCausalLM"),
        ("llama", "SmolLM3ForCausalLM"),
        ("llama", "LlamaBidirectionalForSequenceClassification"),
        ("mistral", "MixtralForCausalLM"),
        ("qwen2", "Qwen2MoeForCausalLM"),
        ("qwen2", "Qwen2_5_VLForConditionalGeneration"),
        ("qwen2", "Qwen3ForCausalLM"),
        ("bert", "RobertaForMaskedLM"),
        ("gpt2", "GPTJForCausalLM"),
        ("llama", "AquilaForCausalLM"),
    ],
)
def test_architectures_that_contradict(model_type: str, architecture: str, tmp_path: Path) -> None:
    written = write(tmp_path, {"model_type": model_type, "architectures": [architecture]})
    for said in refusals(written):
        assert f"architectures says {architecture}" in said
        assert "two different models" in said
        assert "do not change model_type" in said


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("gpt2", "GPT2LMHeadModel"),
        ("gpt2", "GPT2DoubleHeadsModel"),
        ("llama", "LLaMAForCausalLM"),
        ("llama", "LlamaForSequenceClassification"),
        ("bert", "BertModel"),
        ("bert", "BertLMHeadModel"),
        ("gemma3_text", "Gemma3ForCausalLM"),
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("mpt", "MPTForCausalLM"),
        ("vit", "ViTForImageClassification"),
        ("deepseek_v3", "DeepseekV3ForCausalLM"),
    ],
)
def test_architectures_that_agree(model_type: str, architecture: str, tmp_path: Path) -> None:
    read_outline_and_spec(
        write(tmp_path, {"model_type": model_type, "architectures": [architecture]})
    )


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        *(("llama", {key: value}) for key, value in {**GRANITE, **SMOLLM3}.items()),
        ("llama", {"rope_interleaved": True}),
        ("llama", {"sliding_window": 16}),
        ("llama", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("llama", {"use_qk_norm": True}),
        ("llama", {"num_experts": 8}),
        ("llama", {"final_logit_softcapping": 30.0}),
        ("llama", {"use_rope": False}),
        ("mistral", {"attention_bias": True}),
        ("mistral", {"text_config": {"hidden_size": 64}}),
        ("qwen2", {"vision_config": {"depth": 32}}),
        ("qwen2", {"audio_encoder_config": {"layers": 32}}),
        ("llama", {"language_model": {"hidden_size": 64}}),
        ("llama", {"block_configs": [{"ffn": {"no_op": True}}]}),
        ("llama", {"attention_chunk_size": 16}),
        ("llama", {"attn_temperature_tuning": True}),
        ("llama", {"use_attention_sinks": True}),
        ("llama", {"embed_scale": 8.0}),
        ("llama", {"bias": True}),
        ("qwen3", {"attn_output_gate": True}),
        ("qwen2", {"use_mrope": True}),
        ("qwen3", {"text_config": {}, "moe_intermediate_size": 64}),
        ("gpt2", {"alibi": True}),
        ("bert", {"embedding_size": 16}),
        ("bert", {"position_embedding_type": "relative_key"}),
    ],
)
def test_keys_that_make_another_model(
    model_type: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """With no architectures to tell by."""
    for said in refusals(write(tmp_path, {"model_type": model_type, **_SIZE, **more})):
        assert next(key for key in more if more[key] != {}) in said
        assert f"transformers' {model_type} does not read" in said


def test_keys_that_say_what_is_so_anyway(tmp_path: Path) -> None:
    """Of SmolLM2, old Llamas, BERT and GPT-2 as published: taken, and nothing said."""
    llama = {
        **LLAMA, "is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1,
        "torch_dtype": "bfloat16", "max_sequence_length": 2048, "sliding_window": None,
        "layer_types": ["full_attention"] * 2, "rope_scaling": None, "rope_theta": 1e5,
        "use_sliding_window": False, "max_window_layers": 28, "residual_multiplier": 1.0,
        "use_rope": True, "auto_map": {"AutoTokenizer": "x.Y"}, "no_rope_layers": [1, 1],
    }  # fmt: skip
    assert read_spec_with_notes(write(tmp_path, llama)).notes == ()
    bert = {
        "model_type": "bert", "type_vocab_size": 2, **_SIZE, "position_embedding_type": "absolute",
        "pooler_type": "first_token_transform", "directionality": "bidi", "embedding_size": 32,
        "gradient_checkpointing": False, "hidden_act": "gelu",
    }  # fmt: skip
    del bert["num_key_value_heads"]
    assert read_spec_with_notes(write(tmp_path, bert)).notes == ()


@pytest.mark.parametrize("model_type", sorted(set(READERS) - {"deepseek_v2"}))
def test_nothing_is_said_of_what_transformers_writes(model_type: str, tmp_path: Path) -> None:
    """DeepSeek-V2's own default lacks the experts of a token."""
    transformers.AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    notes = [
        note for note in read_outline_and_spec(tmp_path)[0].notes if "num_nextn_predict" not in note
    ]
    assert notes == []


def test_keys_that_are_passed_over_are_named(tmp_path: Path) -> None:
    written = write(tmp_path, {**LLAMA, "resid_pdrop": 0.1, "my_setting": {"a": 1}})
    (note,) = read_spec_with_notes(written).notes
    assert "config.json has resid_pdrop 0.1, my_setting {…}, which transformers' llama" in note
    assert open_model(str(written)).notes == (note,)
    assert open_model(str(written), tmp_path / "cache").notes == (note,)
    assert open_model(str(written), tmp_path / "cache").notes == (note,)  # from the cache


def test_configs_of_tools_are_not_of_the_model(tmp_path: Path) -> None:
    """SmolLM2's folder has one of transformers.js, Qwen2.5-1M's one of vLLM: they are read."""
    tools = {
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192},
    }
    written = write(tmp_path, {**LLAMA, **tools, "use_mrope": False, "bias": False})
    reading = read_spec_with_notes(written)
    assert reading.spec == read_spec_with_notes(write(tmp_path / "plain", LLAMA)).spec
    (note,) = reading.notes
    assert "transformers.js_config {…}, dual_chunk_attention_config {…}, which" in note


def test_a_text_config_silences_nothing(tmp_path: Path) -> None:
    written = write(tmp_path, {"model_type": "mistral", "hidden_size": 5120})
    (note,) = read_outline_and_spec(written)[0].notes
    assert "leaves out dimensions, for which transformers' defaults are used" in note
    assert "num_key_value_heads 8" in note and "vocab_size 32000" in note
    for said in refusals(write(tmp_path, {"model_type": "mistral", "text_config": {"a": 1}})):
        assert "text_config {…}" in said


def test_every_dimension_that_is_left_out_is_named(tmp_path: Path) -> None:
    """Of those that the layers have, not of others; not what follows from what is given."""
    qwen = {**_SIZE, "model_type": "qwen3", "num_attention_heads": 32, "head_dim": 8}
    del qwen["num_key_value_heads"]
    note = read_outline_and_spec(write(tmp_path, qwen))[0].notes[0]
    assert note.count(" 32") == 1 and "num_key_value_heads 32" in note
    gemma = {"model_type": "gemma2", "hidden_size": 64, "num_hidden_layers": 2}
    note = read_outline_and_spec(write(tmp_path, gemma))[0].notes[0]
    assert "num_key_value_heads 4" in note and "head_dim 256" in note
    assert "sliding_window 4096" in note
    text = {"hidden_size": 64, "num_hidden_layers": 2}
    note = read_outline_and_spec(write(tmp_path, {"model_type": "gemma3", "text_config": text}))[
        0
    ].notes[0]
    assert "config.json: text_config leaves out" in note and "head_dim 256" in note
    whole = {**LLAMA}
    del whole["num_key_value_heads"]  # as many as heads: Llama's default is no number
    assert read_outline_and_spec(write(tmp_path, whole))[0].notes == ()
    (note,) = read_spec_with_notes(write(tmp_path, {"model_type": "gpt2", "n_layer": 3})).notes
    assert "n_embd 768" in note and "n_head 12" in note and "n_layer" not in note


def test_dropouts_that_differ(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 61,
            "n_positions": 64}  # fmt: skip
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    (note,) = read_spec_with_notes(write(tmp_path, {**gpt2, **drops})).notes
    assert "resid_pdrop 0 is used for all" in note
    assert "embd_pdrop 0.5 and attn_pdrop 0.5 are ignored" in note
    assert "--dropout" in note
    bert = {"model_type": "bert", "num_hidden_layers": 1, "num_attention_heads": 2,
            "hidden_size": 8, "intermediate_size": 8, "vocab_size": 61,
            "max_position_embeddings": 64, "classifier_dropout": 0.5}  # fmt: skip
    note = " ".join(read_spec_with_notes(write(tmp_path, bert)).notes)
    assert "hidden_dropout_prob 0.1 is used" in note and "classifier_dropout 0.5" in note
    same = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    assert read_spec_with_notes(write(tmp_path, {**gpt2, **same})).notes == ()


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling = {'factor': 8.0} has no rope_type"),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 8.0}}, "has no rope_type"),
        ({"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}}, "two types"),
        (
            {"rope_scaling": {"rope_type": "default", "factor": 2.0}},
            "has factor, which transformers does not read for its type",
        ),
        (
            {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
            "has mrope_section, which transformers does not read for its type",
        ),
        ({"rope_scaling": {**_LLAMA3, "attention_factor": 1.2}}, "has attention_factor"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "differs by type of layer",
        ),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta 10000.0 and"),
        (
            {"rope_scaling": _LLAMA3, "rope_parameters": {**_LLAMA3, "factor": 32.0}},
            "factor 8.0 and, in rope_parameters, 32.0",
        ),
    ],
)
def test_rotary_settings_that_contradict(more: dict[str, Any], said: str, tmp_path: Path) -> None:
    for found in refusals(write(tmp_path, {**LLAMA, **more})):
        assert said in found


@pytest.mark.parametrize(
    "more",
    [
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": _LLAMA3},
        {"rope_scaling": {**_LLAMA3, "type": "llama3"}},
        {"rope_parameters": {**_LLAMA3, "rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": _LLAMA3,
         "rope_parameters": {**_LLAMA3, "rope_theta": 5e5}},
        {"rope_scaling": {}},
    ],
)  # fmt: skip
def test_rotary_settings_of_both_spellings(more: dict[str, Any], tmp_path: Path) -> None:
    reading = read_spec_with_notes(write(tmp_path, {**LLAMA, **more}))
    assert reading.notes == ()
    assert (reading.spec.rope_scaling is not None) == ("llama3" in str(more))


def test_code_of_the_folders_own_is_not_run(tmp_path: Path) -> None:
    code = {"AutoConfig": "config.Mine", "AutoModelForCausalLM": "modeling_mine.Mine"}
    (note,) = read_spec_with_notes(write(tmp_path, {**LLAMA, "auto_map": code})).notes
    assert "custom code of the model (modeling_mine.Mine), which outpace does not run" in note


def test_what_a_plan_leaves_out(tmp_path: Path) -> None:
    values = {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1,
              "quantization_config": {"quant_method": "fp8"}}  # fmt: skip
    notes = " ".join(read_outline_and_spec(write(tmp_path, values))[0].notes)
    assert "stored in fp8 (quantization_config)" in notes
    assert "num_nextn_predict_layers 1) are not included in plans" in notes


def test_the_file_says_whether_the_head_is_tied(tmp_path: Path) -> None:
    """transformers 5 ties T5's whatever the file says: Flan-T5's is not tied."""
    values = {"model_type": "t5", "vocab_size": 61, "d_model": 32, "num_layers": 1, "d_ff": 8}
    tied = parameters(
        read_outline_and_spec(write(tmp_path, {**values, "tie_word_embeddings": True}))[0]
    )
    free = parameters(
        read_outline_and_spec(write(tmp_path, {**values, "tie_word_embeddings": False}))[0]
    )
    assert free - tied == 61 * 32
    assert parameters(read_outline_and_spec(write(tmp_path, values))[0]) == tied
    inner = {**_SIZE, "head_dim": 8, "tie_word_embeddings": True}
    both = {"model_type": "gemma3", "tie_word_embeddings": False, "text_config": inner}
    with pytest.raises(BadInputError, match="tie_word_embeddings is false, but true in text_co"):
        read_outline_and_spec(write(tmp_path, both))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
        (b"<!doctype html><html></html>", "web page (HTML)"),
        ("\ufeff{}".encode(), "byte-order mark"),
        ('{"model_type": "llama"}'.encode("utf-16"), "UTF-16"),
        ('{"model_type": "llama"}'.encode("utf-16-le"), "UTF-16"),
        ('{"model_type": "llama"}'.encode("utf-32"), "UTF-32"),
        (gzip.compress(b"{}", mtime=0), "compressed (gzip). Decompress it"),
        (b"PK\x03\x04\x00\x00\x00\x00", "compressed (zip)"),
        (
            b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
            "error message from the",
        ),
        (b"Entry not found\n", "it begins with 'Entry not found'"),
        (b"model_type: llama\nhidden_size: 64\n", "it begins with 'model_type: llama"),
        ('{"a": "é"}'.encode("latin-1"), "it is not UTF-8: byte 0xe9 at position 7"),
        (b"null", "holds a JSON null, not an object"),
    ],
)
def test_files_that_are_no_config(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    for found in refusals(tmp_path):
        assert said in found and str(tmp_path / "config.json") in found


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("params.json", "params.json belongs to the publisher's format"),
        ("model-Q4_K_M.gguf", "GGUF files, which are for inference"),
        ("model_index.json", "a diffusers pipeline"),
        ("model.onnx", "ONNX files, which are for inference"),
        ("saved_model.pb", "a TensorFlow SavedModel"),
        ("model-00001-of-00002.safetensors", "weights, but not their config.json: fetch that"),
        ("pytorch_model.bin", "weights, but not their config.json: fetch that"),
        ("epoch=1.ckpt", "another trainer's checkpoint: export it"),
        ("consolidated.00.pth", "in the publisher's format, or a checkpoint"),
        ("snapshots/abc/config.json", "a folder of the Hub's cache: use {folder}/snapshots/abc"),
        ("checkpoint-500/config.json", "has a config.json: use {folder}/checkpoint-500"),
    ],
)
def test_other_forms_of_a_model(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("{}")
    with pytest.raises(BadInputError) as caught:
        open_model(str(tmp_path))
    assert said.format(folder=tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads = 0; it must be a whole number"),
        ({"intermediate_size": -1}, "intermediate_size = -1"),
        ({"hidden_size": True}, "hidden_size = True"),
        ({"vocab_size": "32000"}, "vocab_size = '32000'"),
    ],
)
def test_dimensions_that_cannot_be_are_named_as_the_file_has_them(
    more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    for found in refusals(write(tmp_path, {**LLAMA, **more})):
        assert said in found


def test_defaults_behind_a_refusal_of_transformers(tmp_path: Path) -> None:
    """A number that is nowhere in the file is explained."""
    values = {**LLAMA, "num_attention_heads": 24}
    del values["hidden_size"]
    for found in refusals(write(tmp_path, values)):
        assert "uses its defaults: hidden_size 4096" in found


def test_defaults_behind_dimensions_that_do_not_go_together(tmp_path: Path) -> None:
    values = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    del values["num_key_value_heads"]  # 32
    values["num_attention_heads"] = 16
    for found in refusals(write(tmp_path, values)):
        assert "is not a multiple of kv_heads 32" in found
        assert "uses its defaults: num_key_value_heads 32" in found


def test_transformers_remarks_stay_out(tmp_path: Path) -> None:
    values = {"model_type": "gpt2", "n_layer": 2}  # each remark is made once in a process
    remarks: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: remarks.append(record.getMessage())  # type: ignore[method-assign]
    logger = transformers.utils.logging.get_logger()
    logger.addHandler(handler)
    try:
        other = write(tmp_path / "other", {**values, "vocab_size": 62})
        transformers.AutoConfig.from_pretrained(other)
        assert any("bos_token_id" in remark for remark in remarks)  # it does have something to say
        remarks.clear()
        read_outline_and_spec(write(tmp_path, {**values, "vocab_size": 61}))
    finally:
        logger.removeHandler(handler)
    assert remarks == []
