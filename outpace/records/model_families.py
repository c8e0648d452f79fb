"""Table of model families: their architecture, and their names in `transformers`.

Specs, configs, weights and exports take family-specific facts from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Family = Literal["gpt2", "llama", "mistral", "qwen2", "qwen3", "bert"]


@dataclass(frozen=True)
class FamilyTraits:
    """Traits of a model family. Its name is the `model_type` in config.json.

    `defaults`: defaults of ModelSpec's fields. `classes`: prefix of the family's class names in
    transformers; the language model's class ends with `head`, and a layer's class with `block`.
    `form`: the naming scheme of its settings and tensors. `dropouts` and `biases`: the names of its
    settings for dropout and for optional biases. `has_head_dim`: its settings include the width of
    a head. `windows`: which of its layers can have sliding windows.
    """

    classes: str
    defaults: Mapping[str, Any]
    head: str = "ForCausalLM"
    block: str = "DecoderLayer"
    form: Literal["gpt2", "llama", "bert"] = "llama"
    dropouts: tuple[str, ...] = ("attention_dropout",)
    biases: tuple[str, ...] = ()
    has_head_dim: bool = True
    windows: Literal["none", "all", "some"] = "some"

    @property
    def language_model(self) -> str:
        """Class name of the model with a language-modelling head."""
        return self.classes + self.head

    @property
    def classifier(self) -> str:
        """Class name of the model with a classification head."""
        return f"{self.classes}ForSequenceClassification"

    @property
    def config(self) -> str:
        """Class name of the config."""
        return f"{self.classes}Config"

    @property
    def block_class(self) -> str:
        """Class name of a layer."""
        return self.classes + self.block


_GPT_LIKE: Mapping[str, Any] = {
    "norm": "layernorm",
    "positions": "learned",
    "activation": "gelu_tanh",
    "gated": False,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "tied": True,
}
_LLAMA_LIKE: Mapping[str, Any] = {
    "norm": "rmsnorm",
    "positions": "rotary",
    "activation": "silu",
    "gated": True,
    "qkv_bias": False,
    "out_bias": False,
    "mlp_bias": False,
    "tied": False,
}
FAMILY_TRAITS: Mapping[Family, FamilyTraits] = {
    "gpt2": FamilyTraits(
        "GPT2", {**_GPT_LIKE, "norm_eps": 1e-5}, head="LMHeadModel", block="Block", form="gpt2",
        dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    "llama": FamilyTraits(
        "Llama", {**_LLAMA_LIKE, "norm_eps": 1e-5}, biases=("attention_bias", "mlp_bias"),
        windows="none",
    ),
    "mistral": FamilyTraits("Mistral", {**_LLAMA_LIKE, "norm_eps": 1e-5}, windows="all"),
    "qwen2": FamilyTraits(
        "Qwen2", {**_LLAMA_LIKE, "qkv_bias": True, "norm_eps": 1e-6, "rope_theta": 1e6},
        has_head_dim=False,
    ),
    "qwen3": FamilyTraits(
        "Qwen3", {**_LLAMA_LIKE, "qk_norm": True, "norm_eps": 1e-6, "rope_theta": 1e6},
        biases=("attention_bias",),
    ),
    "bert": FamilyTraits(
        "Bert",
        {
            **_GPT_LIKE, "activation": "gelu", "causal": False, "norm_first": False, "segments": 2,
            "norm_eps": 1e-12,
        },
        head="ForMaskedLM", block="Layer", form="bert",
        dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    ),
}  # fmt: skip
FAMILIES: tuple[Family, ...] = get_args(Family)
