"""config.json: what is read, what is refused, and that a spec survives it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.catalog.models import PRESETS
from outpace.interop.config import CONFIG_FILE, ConfigReading, read_cached_spec
from outpace.interop.huggingface import hf_config, spec_from_config, spec_from_hf
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec

ROTARY = ("llama", "mistral", "qwen2", "qwen3")
SIZE = {"layers": 3, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 61, "max_positions": 64}


def write(directory: Path, **values: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def refusal(directory: Path) -> str:
    with pytest.raises(BadInputError) as caught:
        spec_from_hf(directory)
    return str(caught.value)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives(name: str) -> None:
    spec = PRESETS[name].spec
    config = hf_config(spec)
    assert config.model_type == spec.family
    assert spec_from_config(config, name) == spec


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    family = draw(st.sampled_from(ROTARY))
    values = {
        **SIZE,
        "kv_heads": draw(st.sampled_from([1, 2, 4])),
        "head_dim": draw(st.sampled_from([8, 12])),
        "tied": draw(st.booleans()),
        "activation": draw(st.sampled_from(["silu", "gelu", "gelu_tanh"])),
        "norm_eps": draw(st.sampled_from([1e-5, 1e-6])),
        "rope_theta": draw(st.sampled_from([1e4, 5e5])),
        "dropout": draw(st.sampled_from([0.0, 0.1])),
    }
    if draw(st.booleans()):
        values["rope_scaling"] = {
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_positions": 32,
        }
    if family != "llama" and draw(st.booleans()):
        values["sliding_window"] = draw(st.integers(1, 9))
        layers = draw(st.sets(st.integers(0, 2), min_size=1))
        if family != "mistral" and len(layers) < SIZE["layers"]:
            values["window_layers"] = tuple(sorted(layers))
    if family in ("llama", "qwen3"):
        bias = draw(st.booleans())
        values |= {"qkv_bias": bias, "out_bias": bias}
    return ModelSpec.model_validate({"family": family, **values})


@given(specs())
def test_a_spec_survives_its_config(spec: ModelSpec) -> None:
    config = hf_config(spec)
    assert config.model_type == spec.family
    assert spec_from_config(config, "here") == spec


@pytest.mark.parametrize(
    ("family", "values", "becomes"),
    [
        ("llama", {"sliding_window": 8}, "mistral"),
        ("llama", {"qkv_bias": True}, "qwen2"),
        ("llama", {"qk_norm": True}, "qwen3"),
        ("mistral", {"sliding_window": 8, "window_layers": (0,), "qkv_bias": True}, "qwen2"),
    ],
)
def test_the_architecture_that_has_the_features(
    family: str, values: dict[str, Any], becomes: str
) -> None:
    spec = ModelSpec.model_validate({"family": family, **SIZE, **values})
    config = hf_config(spec)
    assert config.model_type == becomes
    assert spec_from_config(config, "") == spec.model_copy(update={"family": becomes})


def test_a_padding_token_without_a_row_is_left_out() -> None:
    """transformers would not build the model; GPT-2's and others' ids may be any."""
    spec = ModelSpec.model_validate({"family": "llama", **SIZE})
    config = hf_config(spec, pad_id=61, eos_id=61)
    assert (config.pad_token_id, config.eos_token_id) == (None, 61)
    assert hf_config(spec, pad_id=60).pad_token_id == 60


def test_what_a_spec_lacks_is_kept() -> None:
    spec = ModelSpec.model_validate({"family": "llama", **SIZE})
    given = {"model_type": "llama", "initializer_range": 0.5, "eos_token_id": None, "vocab_size": 9}
    config = hf_config(spec, given=given)
    assert (config.initializer_range, config.vocab_size) == (0.5, 61)
    # Of ids that the file leaves out, transformers takes Llama's; null is none.
    assert (config.bos_token_id, config.eos_token_id) == (1, None)
    assert hf_config(spec, given={**given, "model_type": "qwen2"}).initializer_range == 0.02


def test_no_architecture_has_the_features() -> None:
    spec = ModelSpec.model_validate({"family": "gpt2", **SIZE, "positions": "rotary"})
    with pytest.raises(BadInputError, match="no architecture of transformers has all features"):
        hf_config(spec)


def test_what_a_config_leaves_out_has_the_published_default(tmp_path: Path) -> None:
    spec = spec_from_hf(write(tmp_path, model_type="gpt2", n_layer=3))
    assert (spec.layers, spec.hidden, spec.vocab, spec.ffn) == (3, 768, 50257, 3072)
    assert spec.tied and spec.activation == "gelu_tanh"


def test_older_spelling_of_rotary_settings(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    write(
        tmp_path,
        model_type="llama",
        rope_theta=5e5,
        rope_scaling=scaling,
        max_position_embeddings=128,
    )
    spec = spec_from_hf(tmp_path)
    assert spec.rope_theta == 5e5
    assert spec.rope_scaling is not None and spec.rope_scaling.original_max_positions == 64


def test_older_window_settings_of_qwen(tmp_path: Path) -> None:
    common = {"model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 16}
    off = spec_from_hf(write(tmp_path, **common, use_sliding_window=False))
    assert off.sliding_window is None
    on = write(tmp_path, **common, use_sliding_window=True, max_window_layers=3)
    assert [spec_from_hf(on).layer_window(i) for i in range(4)] == [None, None, None, 16]


LLAMA = {"model_type": "llama"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rotary scaling 'yarn'"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary scaling 'linear'"),
        ({**LLAMA, "hidden_act": "relu"}, "activation 'relu' is not supported; supported: gelu"),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "weights are quantized"),
        ({**LLAMA, "num_attention_heads": 6}, "config.json"),
        ({**LLAMA, "hidden_size": "many"}, "hidden_size = 'many'; it must be a whole number"),
        ({**LLAMA, "rms_norm_eps": "many"}, "not valid for transformers"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention"),
        ({"model_type": "bert", "is_decoder": True}, "is_decoder = True is not supported"),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, "'relative_key'"),
        (
            {"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["chunked_attention"]},
            "layer_types has chunked_attention",
        ),
        (
            {"model_type": "mistral", "num_hidden_layers": 1, "layer_types": ["full_attention"]},
            "the architecture 'ministral' (transformers' reading of a mistral with layer_types)",
        ),
        (
            {"model_type": "qwen2", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
            "layer_types has sliding_attention, but no window is in use",
        ),
        ({**LLAMA, "rope_theta": None}, "rope_theta = None, and transformers cannot build"),
        ({**LLAMA, "pad_token_id": 32000}, "pad_token_id = 32000, but the embedding has 32000"),
        ({"model_type": "bert", "type_vocab_size": 0}, "type_vocab_size = 0"),
        ({"model_type": "gpt2", "num_key_value_heads": 4}, "num_key_value_heads 4, which"),
        ({"model_type": "gemma"}, "does not train the architecture 'gemma'"),
        ({"model_type": "lama"}, "does not train the architecture 'lama'"),
        ({"hidden_size": 8}, "has no model_type"),
    ],
)
def test_what_is_refused(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in refusal(write(tmp_path, **values))


def test_unreadable_files(tmp_path: Path) -> None:
    assert "has no config.json" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "holds an adapter" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json is not JSON" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "holds a JSON list, not an object" in refusal(tmp_path)


def test_what_was_read_is_remembered_until_the_config_is_another(tmp_path: Path) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    config = {"model_type": "gpt2", "n_layer": 3}
    (model / CONFIG_FILE).write_text(json.dumps(config))
    read = read_cached_spec(model, cache)
    assert read.spec == spec_from_hf(model) and "n_embd 768" in read.notes[0]
    (kept,) = (cache / "specs").iterdir()
    other = read.spec.model_copy(update={"layers": 5})
    ConfigReading(spec=other, notes=("kept",)).save(kept)  # to see that it is this
    assert read_cached_spec(model, cache) == ConfigReading(spec=other, notes=("kept",))
    assert read_cached_spec(model, None).spec.layers == 3
    kept.write_text("{")
    assert read_cached_spec(model, cache).spec.layers == 3
    (model / CONFIG_FILE).write_text(json.dumps({**config, "n_layer": 4}))
    assert read_cached_spec(model, cache).spec.layers == 4
    (model / CONFIG_FILE).write_text(json.dumps({"model_type": "gpt3"}))
    with pytest.raises(BadInputError, match=r"architecture 'gpt3', only .*outpace plan and"):
        read_cached_spec(model, cache)
    (tmp_path / "file").touch()  # a cache that cannot be written
    (model / CONFIG_FILE).write_text(json.dumps(config))
    assert read_cached_spec(model, tmp_path / "file").spec.layers == 3
