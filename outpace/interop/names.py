"""Names of outpace's tensors in Hugging Face files, by family.

Tables map outpace's modules to those in files; `*` stands for the layer's number.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from outpace.interop.config import OWN_TYPE
from outpace.records.model_families import FAMILY_TRAITS

_GPT2 = {
    "embed.tokens": "transformer.wte",
    "embed.positions": "transformer.wpe",
    "blocks.*.attention_norm": "transformer.h.*.ln_1",
    "blocks.*.attention.q": "transformer.h.*.attn.c_attn",
    "blocks.*.attention.k": "transformer.h.*.attn.c_attn",
    "blocks.*.attention.v": "transformer.h.*.attn.c_attn",
    "blocks.*.attention.out": "transformer.h.*.attn.c_proj",
    "blocks.*.mlp_norm": "transformer.h.*.ln_2",
    "blocks.*.mlp.up": "transformer.h.*.mlp.c_fc",
    "blocks.*.mlp.down": "transformer.h.*.mlp.c_proj",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
_LLAMA = {
    "embed.tokens": "model.embed_tokens",
    "blocks.*.attention_norm": "model.layers.*.input_layernorm",
    "blocks.*.attention.q": "model.layers.*.self_attn.q_proj",
    "blocks.*.attention.k": "model.layers.*.self_attn.k_proj",
    "blocks.*.attention.v": "model.layers.*.self_attn.v_proj",
    "blocks.*.attention.out": "model.layers.*.self_attn.o_proj",
    "blocks.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
    "blocks.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
    "blocks.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "blocks.*.mlp.gate": "model.layers.*.mlp.gate_proj",
    "blocks.*.mlp.up": "model.layers.*.mlp.up_proj",
    "blocks.*.mlp.down": "model.layers.*.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
_BERT = {
    "embed.tokens": "bert.embeddings.word_embeddings",
    "embed.positions": "bert.embeddings.position_embeddings",
    "embed.segments": "bert.embeddings.token_type_embeddings",
    "embed.norm": "bert.embeddings.LayerNorm",
    "blocks.*.attention.q": "bert.encoder.layer.*.attention.self.query",
    "blocks.*.attention.k": "bert.encoder.layer.*.attention.self.key",
    "blocks.*.attention.v": "bert.encoder.layer.*.attention.self.value",
    "blocks.*.attention.out": "bert.encoder.layer.*.attention.output.dense",
    "blocks.*.attention_norm": "bert.encoder.layer.*.attention.output.LayerNorm",
    "blocks.*.mlp.up": "bert.encoder.layer.*.intermediate.dense",
    "blocks.*.mlp.down": "bert.encoder.layer.*.output.dense",
    "blocks.*.mlp_norm": "bert.encoder.layer.*.output.LayerNorm",
    "head_transform.dense": "cls.predictions.transform.dense",
    "head_transform.norm": "cls.predictions.transform.LayerNorm",
    "head": "cls.predictions.decoder",
}


@dataclass(frozen=True)
class Naming:
    """Names of one family.

    `prefix` precedes all names except those that start with `heads`; files of a bare encoder omit
    it. `transposed`: weights stored as in × out (GPT-2's Conv1D). `ignored`: patterns of names that
    outpace does not use (buffers in old files, heads for other purposes).
    """

    modules: Mapping[str, str]
    prefix: str
    heads: tuple[str, ...]
    ignored: tuple[str, ...]
    tied_head: str
    head_bias: str = ""
    transposed: tuple[str, ...] = ()

    def stored_name(self, name: str) -> str:
        """Return the stored name of outpace's tensor `name`."""
        if name == "head_bias":
            return self.head_bias
        module, leaf = name.rsplit(".", 1)
        number = re.search(r"\d+", module)
        pattern = module if number is None else module.replace(number[0], "*", 1)
        theirs = self.modules[pattern]
        return f"{theirs if number is None else theirs.replace('*', number[0], 1)}.{leaf}"

    def is_transposed(self, stored: str) -> bool:
        """Return whether the stored tensor is the transpose of outpace's."""
        return any(stored.endswith(f".{module}.weight") for module in self.transposed)

    def current_name(self, stored: str) -> str:
        """Return the current form of a stored name, which may be in an old form."""
        name = stored.replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        return name if name.startswith((self.prefix, *self.heads)) else self.prefix + name

    def is_ignored(self, current_name: str) -> bool:
        """Return whether a tensor of a file is not one of the model's weights."""
        return any(re.search(pattern, current_name) for pattern in self.ignored)


_NAMINGS: Mapping[str, Naming] = {
    "gpt2": Naming(
        _GPT2,
        "transformer.",
        ("lm_head.",),
        (r"\.attn\.(bias|masked_bias)$",),
        "lm_head.weight",
        transposed=("c_attn", "c_proj", "c_fc"),
    ),
    "bert": Naming(
        _BERT,
        "bert.",
        ("cls.",),
        (r"\.position_ids$", r"\.pooler\.", r"^cls\.seq_relationship\."),
        "cls.predictions.decoder.weight",
        head_bias="cls.predictions.bias",
    ),
    "llama": Naming(_LLAMA, "model.", ("lm_head.",), (r"rotary_emb\.",), "lm_head.weight"),
}


def tensor_naming(model_type: str) -> Naming | None:
    """Return the names in a family's files; None for outpace's format, which needs no mapping."""
    if model_type == OWN_TYPE:
        return None
    traits = FAMILY_TRAITS.get(model_type)  # type: ignore[call-overload]
    return _NAMINGS["llama" if traits is None else traits.form]


def group(names: Iterable[str], used: Naming | None) -> dict[str, list[str]]:
    """Map stored names to outpace's names, in order: GPT-2 stores q, k and v in one tensor."""
    groups: dict[str, list[str]] = {}
    for name in names:
        stored = name if used is None else used.stored_name(name)
        groups.setdefault(stored, []).append(name)
    return groups
