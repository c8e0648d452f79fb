"""Folders with changed configs: the model that transformers builds from them, or a refusal."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from outpace.interop.config import read_spec_with_notes
from outpace.interop.config_check import quiet_transformers
from outpace.interop.huggingface import read_weights, write_model
from outpace.interop.outline import read_outline_and_spec
from outpace.nn.transformer import Transformer
from outpace.planner.model.outline import parameters
from outpace.records.errors import BadInputError
from tests.interop.conftest import VARIANTS, VOCAB, auto_class

BASES = ("gpt2", "llama-mha", "mistral-window", "qwen2-untied", "qwen3", "bert")
TOKENS = torch.randint(1, VOCAB, (2, 19), generator=torch.Generator().manual_seed(1))
_LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_ROPES = [
    {"rope_type": "default", "rope_theta": 100.0},
    {"rope_theta": 300},
    {"rope_type": "llama3", "rope_theta": 100.0, **_LLAMA3},
    {"type": "llama3", **_LLAMA3},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    {"rope_type": "default", "rope_theta": None},
    {"rope_type": "default", "rope_theta": "100"},
    {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    {"full_attention": {"rope_type": "default", "rope_theta": 100.0}},
    {},
]
_GIVEN = [None, 0, 3]
_KINDS = ["full_attention", "sliding_attention", "chunked_attention"]
_ACTIVATIONS = ["gelu", "gelu_new", "gelu_fast", "gelu_python", "silu", "relu", "quick_gelu"]
# Settings of which some are one family's, some another's; transformers ignores the others.
VALUES: dict[str, list[Any]] = {
    "hidden_act": _ACTIVATIONS, "activation_function": _ACTIVATIONS,
    "tie_word_embeddings": [True, False], "head_dim": [4, 8, 12],
    "num_key_value_heads": [1, 2, 3, 4], "num_attention_heads": [1, 2, 4, 8],
    "intermediate_size": [20], "n_inner": [20, None], "num_hidden_layers": [1, 2, 3],
    "type_vocab_size": [0, 1, 3], "vocab_size": [VOCAB, 64],
    "attention_bias": [True, False], "mlp_bias": [True, False], "qkv_bias": [True],
    "rms_norm_eps": [1e-3, 1], "layer_norm_eps": [1e-3], "layer_norm_epsilon": [1e-3],
    "rope_theta": [50, 1e6, None], "rope_parameters": [*_ROPES, None], "rope_scaling": _ROPES,
    "partial_rotary_factor": [0.5, 1.0], "original_max_position_embeddings": [16],
    "sliding_window": [None, 1, 5, 100, 0], "use_sliding_window": [True, False],
    "max_window_layers": [0, 1], "layer_types": [None],
    "scale_attn_weights": [False], "scale_attn_by_inverse_layer_idx": [True],
    "reorder_and_upcast_attn": [True], "add_cross_attention": [True], "is_decoder": [True],
    "pad_token_id": [*_GIVEN, -1, VOCAB + 9], "eos_token_id": [*_GIVEN, [1, 2]],
    "bos_token_id": _GIVEN, "torch_dtype": ["bfloat16", "float32"],
    "per_layer_config": [{"1": {"intermediate_size": 8}}], "initializer_range": [0.5],
    "attn_pdrop": [0.3], "attention_dropout": [0.3], "hidden_dropout_prob": [0.3],
    "final_logit_softcapping": [5.0], "embedding_multiplier": [2.0], "use_qk_norm": [True],
}  # fmt: skip
# Settings that a spec implies, whichever of several spellings a file has; and dropouts, of which a
# spec has one.
_IMPLIED = {
    "activation_function", "hidden_act", "max_window_layers", "sliding_window", "n_inner",
    "use_sliding_window", "rope_parameters", "embd_pdrop", "attn_pdrop",
    "attention_probs_dropout_prob", "classifier_dropout",
}  # fmt: skip


@st.composite
def folders(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw a config.json, and of its values those that were changed."""
    family, base = VARIANTS[draw(st.sampled_from(BASES))]
    values = transformers.AutoConfig.for_model(family, **base).to_dict()
    own = [key for key in VALUES if key in values or key.startswith(("rope", "layer_types"))]
    keys = st.sampled_from(own) | st.sampled_from(sorted(VALUES))
    changed = {}
    for key in draw(st.lists(keys, min_size=1, max_size=3, unique=True)):
        changed[key] = draw(st.sampled_from(VALUES[key]))
        if key == "layer_types":
            changed[key] = draw(st.lists(st.sampled_from(_KINDS), min_size=2, max_size=2))
    return {"model_type": family, **base, **changed}, changed


def build(folder: Path) -> tuple[Any, Tensor]:
    """Build transformers' model of a folder; write its weights there; return it and its logits."""
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(7)
    model = auto_class(config.model_type).from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.2 * noise if parameter.dim() > 1 else 1 + 0.3 * noise)
        logits = model(input_ids=TOKENS).logits
    shared = getattr(model, "all_tied_weights_keys", {})
    tensors = {name: one for name, one in model.state_dict().items() if name not in shared}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model, logits


def load_model(folder: Path) -> Transformer:
    spec = read_spec_with_notes(folder).spec
    model = Transformer(spec)
    model.load_state_dict(read_weights(folder, spec))
    return model.eval()


@torch.no_grad()
def logits_of(model: Transformer) -> Tensor:
    return model.logits(model(TOKENS))


def names(said: str, changed: dict[str, Any]) -> bool:
    """Whether a refusal names a changed key or its value."""
    values = [one for value in changed.values() for one in (value, *_inner(value))]
    return any(str(one) in said for one in (*changed, *values))


def _is_untied_bert(model: Transformer) -> bool:
    """Whether transformers' model has a second bias over the vocabulary, which it does not add."""
    return model.spec.family == "bert" and not model.spec.tied


def _inner(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else []


@settings(max_examples=40)
@given(folders())
def test_a_changed_config_is_transformers_model_or_refused(
    drawn: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    values, changed = drawn
    with TemporaryDirectory() as made, quiet_transformers():
        folder, out = Path(made) / "in", Path(made) / "out"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(values))
        try:
            theirs, logits = build(folder)
        except Exception:  # whatever it raises on what cannot be
            theirs = None
        try:
            ours = load_model(folder) if theirs is not None else read_spec_with_notes(folder)
        except BadInputError as refused:
            assert names(str(refused), changed)
            return
        assert theirs is not None, "transformers builds no such model"
        assert isinstance(ours, Transformer)
        torch.testing.assert_close(logits_of(ours), logits, rtol=1e-4, atol=1e-4)
        outline, _ = read_outline_and_spec(folder)
        unused = len(theirs.cls.predictions.bias) if _is_untied_bert(ours) else 0
        assert parameters(outline) == theirs.num_parameters() - unused
        with torch.no_grad():
            ours.head_weight.mul_(1.5)
        write_model(out, ours.spec, ours.state_dict(), None, origin=folder)
        back = auto_class(values["model_type"]).from_pretrained(out).eval()
        assert type(back) is type(theirs)
        with torch.no_grad():
            written = back(input_ids=TOKENS).logits
        torch.testing.assert_close(written, logits_of(ours), rtol=1e-4, atol=1e-4)
        before, after = theirs.config.to_dict(), back.config.to_dict()
        fields = type(theirs.config).__dataclass_fields__
        own = fields.keys() - transformers.PreTrainedConfig.__dataclass_fields__.keys() - _IMPLIED
        assert {key: after[key] for key in own} == {key: before[key] for key in own}
