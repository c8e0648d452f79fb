"""Tiny transformers models of every family, with weights large enough for attention to matter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from outpace.interop.huggingface import read_weights, spec_from_hf
from outpace.nn.transformer import Transformer

VOCAB = 61
_SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_ROTARY = {**_SIZE, "num_key_value_heads": 2}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": VOCAB,
    "n_positions": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
_WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "num_hidden_layers": 3}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT2),
    "gpt2-untied-gelu-inner": (
        "gpt2",
        {**_GPT2, "tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 40},
    ),
    "llama-mha": ("llama", {**_ROTARY, "num_key_value_heads": 4}),
    "llama-gqa-scaled": ("llama", {**_ROTARY, "rope_parameters": _LLAMA3}),
    "llama-tied-biased": (
        "llama",
        {**_ROTARY, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral-window": ("mistral", {**_ROTARY, "sliding_window": 7}),
    "mistral-full": ("mistral", {**_ROTARY, "sliding_window": None, "head_dim": 12}),
    "qwen2-tied": ("qwen2", {**_ROTARY, "tie_word_embeddings": True}),
    "qwen2-untied": ("qwen2", _ROTARY),
    "qwen2-window": ("qwen2", {**_ROTARY, **_WINDOWED, "max_window_layers": 1}),
    "qwen3": ("qwen3", {**_ROTARY, "head_dim": 12}),
    "qwen3-tied-window": (
        "qwen3",
        {**_ROTARY, **_WINDOWED, "max_window_layers": 0, "tie_word_embeddings": True},
    ),
    "bert": ("bert", _SIZE),
    "bert-untied": ("bert", {**_SIZE, "tie_word_embeddings": False}),
}


def auto_class(family: str) -> Any:
    if family == "bert":
        return transformers.AutoModelForMaskedLM
    return transformers.AutoModelForCausalLM


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    """Each variant of each family."""
    return str(request.param)


@pytest.fixture
def load_theirs() -> Callable[[Path], Any]:
    """What a person does with a directory: the Auto class, offline, with nothing amiss."""

    def load(directory: Path) -> Any:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        found, info = auto_class(config.model_type).from_pretrained(
            directory, local_files_only=True, output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        return found.eval()

    return load


@pytest.fixture
def load_ours() -> Callable[[Path], Transformer]:
    """Our model from a directory."""

    def load(directory: Path) -> Transformer:
        spec = spec_from_hf(directory)
        model = Transformer(spec, seed=99)
        model.load_state_dict(read_weights(directory, spec))
        return model.eval()

    return load


@pytest.fixture
def make_theirs() -> Callable[..., Any]:
    """A transformers model of a variant, its config changed by the values given."""

    def make(variant: str, **values: Any) -> Any:
        family, config = VARIANTS[variant]
        torch.manual_seed(7)
        made = transformers.AutoConfig.for_model(family, **{**config, **values})
        model = auto_class(family).from_config(made, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                # Biases and norms too: zeros and ones would hide a mix-up.
                noise = torch.randn_like(parameter)
                parameter.copy_(0.2 * noise if parameter.dim() > 1 else 1 + 0.3 * noise)
        return model.eval()

    return make


@pytest.fixture
def tokens() -> Tensor:
    """(3, 24) token numbers; longer than the windows."""
    return torch.randint(VOCAB, (3, 24), generator=torch.Generator().manual_seed(1))
