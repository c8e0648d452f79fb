"""Readers of configs, one per architecture, which return the values of an outline."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from outpace.interop.config_check import ReadValues
from outpace.records.errors import BadInputError, excerpt
from outpace.records.outline import AttentionShape, MatmulShape, Mlp, Stack

# Upper limits; larger numbers are typing mistakes.
_MOST_LAYERS, _MOST = 100_000, 2**32
_KINDS = ("full_attention", "sliding_attention")
# Keys that models read although the config class lacks them, and values that classes derive.
_BESIDE_FIELDS = frozenset(
    {"head_dim", "seq_length", "n_positions", "tie_word_embeddings", "is_gated_act"}
)
# Families that divide the hidden size by the number of heads, even if the config has head_dim.
_SPLIT_WIDTH = frozenset({"gpt2", "bert", "gpt_neox", "bloom", "mpt", "opt"})


class ConfigValues:
    """Validating reader of a config's values."""

    def __init__(self, config: Any, where: str) -> None:
        self.config = config
        self.where = where

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value of the config, or `default`.

        Values that the config class does not define are ignored, because transformers ignores them.
        """
        config = self.config.config if isinstance(self.config, ReadValues) else self.config
        known = {*config.__dataclass_fields__, *config.attribute_map, *_BESIDE_FIELDS}
        found = getattr(self.config, name, None) if name in known else None
        return default if found is None else found

    def positive_int(self, name: str, default: int | None = None) -> int:
        """Return a whole number of at least 1."""
        found = self.get(name, default)
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            self.refuse(name, found, "it must be a whole number, at least 1")
        most = _MOST_LAYERS if name.endswith("layers") else _MOST
        if found > most:
            self.refuse(name, found, f"it must be a whole number, at most {most}")
        return int(found)

    def refuse(self, name: str, found: Any, allowed: str) -> None:
        said = (
            f"{self.where} has no {name}"
            if found is None
            else f"{self.where}: {name} = {excerpt(found)}"
        )
        raise BadInputError(f"{said}; {allowed}")

    def head_dim(self, hidden: int, heads: int) -> int:
        """Return the width of a head: head_dim, or else the hidden size / number of heads."""
        if self.config.model_type not in _SPLIT_WIDTH and self.get("head_dim") is not None:
            return self.positive_int("head_dim")
        if hidden % heads:
            raise BadInputError(
                f"{self.where}: the hidden width {hidden} is not a multiple of the {heads} heads; "
                "change one of them or give head_dim"
            )
        return hidden // heads

    def drops(self, *names: str) -> bool:
        return any(self.get(name, 0) > 0 for name in names)


Reader = Callable[[ConfigValues], dict[str, Any]]


def _merge_equal_layers(layers: Iterable[Stack]) -> tuple[Stack, ...]:
    """Merge equal layers into stacks with a layer count, in order of first occurrence."""
    counts: dict[Stack, int] = {}
    for layer in layers:
        counts[layer] = counts.get(layer, 0) + layer.layers
    return tuple(layer.model_copy(update={"layers": n}) for layer, n in counts.items())


def _read_windows(values: ConfigValues, layers: int) -> list[int | None]:
    """Return the attention window of each layer in tokens; None stands for full attention."""
    window = values.get("sliding_window") or None
    kinds: Sequence[str] | None = values.get("layer_types")
    if kinds is None:
        return [window] * layers
    strange = sorted(set(kinds) - set(_KINDS))
    if strange:
        values.refuse("layer_types", strange[0], f"supported: {', '.join(_KINDS)}")
    if len(kinds) != layers:
        values.refuse("layer_types", f"{len(kinds)} kinds", f"there are {layers} layers")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _read_attention(values: ConfigValues, hidden: int, **more: Any) -> AttentionShape:
    heads = values.positive_int("num_attention_heads")
    dim = values.head_dim(hidden, heads)
    return AttentionShape(
        heads=heads,
        kv_heads=values.positive_int("num_key_value_heads", heads),
        head_dim=dim,
        value_dim=dim,
        **more,
    )


def _read_embedding_sizes(values: ConfigValues, positions: int | None = None) -> dict[str, Any]:
    vocab = values.positive_int("vocab_size")
    return {
        "vocab": vocab,
        "outputs": vocab,
        "tied": bool(values.get("tie_word_embeddings", False)),
        "max_positions": positions or values.positive_int("max_position_embeddings"),
    }


def _read_llama_like(
    values: ConfigValues,
    mlp: Callable[[int], Mlp] | None = None,
    norms: int = 2,
    windowed: bool = True,
    **attention: Any,
) -> dict[str, Any]:
    """Return an outline's values for layers with RMSNorm, rotary positions and gated MLPs.

    `mlp` returns the MLP of a layer by its index; by default, all MLPs are dense. `norms` is the
    number of norms per layer. Unless `windowed` is set, sliding_window is ignored.
    """
    hidden, layers = values.positive_int("hidden_size"), values.positive_int("num_hidden_layers")
    bias = bool(values.get("attention_bias", False))
    made = _read_attention(values, hidden, **{"qkv_bias": bias, "out_bias": bias, **attention})
    dense = _read_dense_mlp(values)
    windows = _read_windows(values, layers) if windowed else [None] * layers
    stacks = (
        Stack(
            name=_name_stack(window, chosen),
            layers=1,
            attention=made.model_copy(update={"window": window}),
            mlp=chosen,
            norms=norms,
            norm_last=norms > 2,
            dropout=values.drops("attention_dropout", "resid_pdrop"),
        )
        for layer, window in enumerate(windows)
        for chosen in (dense if mlp is None else mlp(layer),)
    )
    return {
        "hidden": hidden,
        "stacks": _merge_equal_layers(stacks),
        "outside_parameters": hidden,
        **_read_embedding_sizes(values),
    }


def _name_stack(window: int | None, mlp: Mlp) -> str:
    name = "layers of experts" if mlp.experts else "layers"
    return name if window is None else f"{name} with a window"


def _read_dense_mlp(values: ConfigValues) -> Mlp:
    bias = bool(values.get("mlp_bias", False))
    return Mlp(width=values.positive_int("intermediate_size"), gated=True, bias=bias)


def _read_mixtral(values: ConfigValues) -> dict[str, Any]:
    experts = _read_experts(values, "num_local_experts", "intermediate_size")
    return _read_llama_like(values, lambda layer: experts, qkv_bias=False, out_bias=False)


def _read_experts(values: ConfigValues, number: str, width: str, **more: Any) -> Mlp:
    return Mlp(
        width=values.positive_int(width),
        gated=True,
        experts=values.positive_int(number),
        active=values.positive_int("num_experts_per_tok"),
        **more,
    )


def _read_qwen_mlps(values: ConfigValues, experts: Mlp) -> Callable[[int], Mlp]:
    only, step = values.get("mlp_only_layers", []), values.positive_int("decoder_sparse_step", 1)
    dense = _read_dense_mlp(values)
    return lambda layer: dense if layer in only or (layer + 1) % step else experts


def _read_qwen2_moe(values: ConfigValues) -> dict[str, Any]:
    shared = values.positive_int("shared_expert_intermediate_size")
    experts = _read_experts(
        values, "num_experts", "moe_intermediate_size", shared=shared, shared_gate=True
    )
    return _read_llama_like(
        values,
        _read_qwen_mlps(values, experts),
        qkv_bias=values.get("qkv_bias", True),
        out_bias=False,
    )


def _read_qwen3_moe(values: ConfigValues) -> dict[str, Any]:
    experts = _read_experts(values, "num_experts", "moe_intermediate_size")
    return _read_llama_like(values, _read_qwen_mlps(values, experts), qk_norm=True)


def _read_deepseek(values: ConfigValues) -> dict[str, Any]:
    """Read a DeepSeek model, without its multi-token prediction layers."""
    hidden, layers = values.positive_int("hidden_size"), values.positive_int("num_hidden_layers")
    heads, bias = (
        values.positive_int("num_attention_heads"),
        bool(values.get("attention_bias", False)),
    )
    rope = values.positive_int("qk_rope_head_dim")
    attention = AttentionShape(
        heads=heads,
        kv_heads=heads,
        head_dim=values.positive_int("qk_nope_head_dim") + rope,
        value_dim=values.positive_int("v_head_dim"),
        qkv_bias=bias,
        out_bias=bias,
        query_rank=None
        if values.get("q_lora_rank") is None
        else values.positive_int("q_lora_rank"),
        kv_rank=values.positive_int("kv_lora_rank"),
        rope_dim=rope,
    )
    each = values.positive_int("moe_intermediate_size")
    shared = each * values.positive_int("n_shared_experts")
    dense = _read_dense_mlp(values)
    # Experts have no biases, but the shared MLP does.
    beside = 2 * shared + hidden if dense.bias else 0
    experts = _read_experts(values, "n_routed_experts", "moe_intermediate_size", shared=shared)
    first = values.get("first_k_dense_replace", 0)
    stacks = (
        Stack(
            name=_name_stack(None, mlp),
            layers=1,
            attention=attention,
            mlp=mlp,
            other_parameters=beside if mlp.experts else 0,
            dropout=values.drops("attention_dropout"),
        )
        for layer in range(layers)
        for mlp in (dense if layer < first else experts,)
    )
    return {
        "hidden": hidden,
        "stacks": _merge_equal_layers(stacks),
        "outside_parameters": hidden,
        **_read_embedding_sizes(values),
    }


def _read_gemma3_text(values: ConfigValues) -> dict[str, Any]:
    """Read the text part of a multimodal model, without its vision tower."""
    text = ConfigValues(values.config.text_config, f"{values.where}: text_config")
    return _read_llama_like(text, norms=4, qk_norm=True)


def _read_gpt_like(
    values: ConfigValues,
    width: int,
    *,
    bias: bool = True,
    norm_bias: bool = True,
    outside: int = 0,
    positions: int | None = None,
    dropouts: Sequence[str] = (),
    stack: Mapping[str, Any] = MappingProxyType({}),
    **attention: Any,
) -> dict[str, Any]:
    """Return an outline's values for layers with LayerNorm and an MLP of two matmuls.

    `width` is the MLP's width. `outside` is the number of parameters outside the layers, except the
    final norm. `stack` holds further fields of Stack.
    """
    hidden = values.positive_int("hidden_size")
    made = _read_attention(values, hidden, **{"qkv_bias": bias, "out_bias": bias, **attention})
    layers = Stack(
        layers=values.positive_int("num_hidden_layers"),
        attention=made,
        mlp=Mlp(width=width, bias=bias),
        dropout=values.drops(*dropouts),
        **{"norm_bias": norm_bias, **stack},
    )
    return {
        "hidden": hidden,
        "stacks": (layers,),
        "outside_parameters": (2 if norm_bias else 1) * hidden + outside,
        **_read_embedding_sizes(values, positions),
    }


def _read_gpt2(values: ConfigValues) -> dict[str, Any]:
    if values.get("add_cross_attention", False):
        values.refuse(
            "add_cross_attention",
            True,
            "it must be false, since without an encoder there is nothing to attend to",
        )
    width = values.positive_int("n_inner", 4 * values.positive_int("n_embd"))
    positions = values.positive_int("n_positions")
    read = _read_gpt_like(
        values, width, positions=positions, dropouts=("resid_pdrop", "attn_pdrop")
    )
    return {**read, "learned_positions": positions}


def _read_bert(values: ConfigValues) -> dict[str, Any]:
    for name in ("is_decoder", "add_cross_attention"):
        if values.get(name, False):
            values.refuse(name, True, "outpace supports BERT only as an encoder")
    hidden, vocab = values.positive_int("hidden_size"), values.positive_int("vocab_size")
    positions = values.positive_int("max_position_embeddings")
    outside = values.positive_int("type_vocab_size") * hidden + 2 * hidden + hidden + vocab
    read = _read_gpt_like(
        values, values.positive_int("intermediate_size"), outside=outside, causal=False,
        dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob"),
        stack={"norm_last": True},
    )  # fmt: skip
    transform = MatmulShape(name="head transform", inputs=hidden, outputs=hidden)
    return {**read, "learned_positions": positions, "head_matmuls": (transform,)}


def _read_gpt_neox(values: ConfigValues) -> dict[str, Any]:
    projected = bool(values.get("attention_bias", True))
    parallel = bool(values.get("use_parallel_residual", True))
    return _read_gpt_like(
        values, values.positive_int("intermediate_size"),
        dropouts=("hidden_dropout", "attention_dropout"),
        stack={"parallel": parallel}, qkv_bias=projected, out_bias=projected,
    )  # fmt: skip


def _read_phi(values: ConfigValues) -> dict[str, Any]:
    """Read a Phi model, which has one norm per layer and a biased head."""
    normed = bool(values.get("qk_layernorm", False))
    hidden = values.positive_int("hidden_size")
    dim = values.head_dim(hidden, values.positive_int("num_attention_heads"))
    return _read_gpt_like(
        values, values.positive_int("intermediate_size"), outside=values.positive_int("vocab_size"),
        dropouts=("resid_pdrop", "attention_dropout"), qk_norm=normed,
        stack={"parallel": True, "norms": 1, "other_parameters": 2 * dim if normed else 0},
    )  # fmt: skip


def _read_bloom(values: ConfigValues) -> dict[str, Any]:
    """Read BLOOM, which has a norm after the embedding; its ALiBi biases have no parameters."""
    hidden = values.positive_int("hidden_size")
    return _read_gpt_like(
        values, 4 * hidden, outside=2 * hidden, positions=values.positive_int("seq_length", 2048),
        dropouts=("hidden_dropout", "attention_dropout"),
    )  # fmt: skip


def _read_mpt(values: ConfigValues) -> dict[str, Any]:
    """Read an MPT model, which has no biases; its ALiBi biases have no parameters."""
    width = values.positive_int("expansion_ratio", 4) * values.positive_int("hidden_size")
    return _read_gpt_like(
        values, width, bias=False, norm_bias=False, positions=values.positive_int("max_seq_len"),
        dropouts=("resid_pdrop",),
    )  # fmt: skip


def _read_opt(values: ConfigValues) -> dict[str, Any]:
    """Read OPT, which has two extra rows of positions; the 350M also has a narrower embedding."""
    hidden, narrow = values.positive_int("hidden_size"), values.positive_int("word_embed_proj_dim")
    final = values.get("do_layer_norm_before", True)
    final = final and not values.get("_remove_final_layer_norm", False)
    affine = bool(values.get("layer_norm_elementwise_affine", True))
    read = _read_gpt_like(
        values, values.positive_int("ffn_dim"), bias=bool(values.get("enable_bias", True)),
        norm_bias=affine, dropouts=("dropout", "attention_dropout"),
        stack={"norms": 2 if affine else 0},
    )  # fmt: skip
    if not (final and affine):
        read["outside_parameters"] = 0
    read["learned_positions"] = values.positive_int("max_position_embeddings") + 2
    if narrow != hidden:
        read["embedding_width"] = narrow
        read["embed_matmuls"] = (MatmulShape(name="project in", inputs=narrow, outputs=hidden),)
        read["head_matmuls"] = (MatmulShape(name="project out", inputs=hidden, outputs=narrow),)
    return read


def _read_vit(values: ConfigValues) -> dict[str, Any]:
    """Read a ViT, whose classifier reads only the class token."""
    hidden = values.positive_int("hidden_size")
    image, patch = (_read_pair(values, name) for name in ("image_size", "patch_size"))
    patches = (image[0] // patch[0]) * (image[1] // patch[1])
    if patches < 1:
        values.refuse("patch_size", patch, f"the image has {image}")
    classes = len(values.get("id2label", {})) or values.positive_int("num_labels", 2)
    bias = bool(values.get("qkv_bias", True))
    stack = Stack(
        layers=values.positive_int("num_hidden_layers"),
        attention=_read_attention(values, hidden, causal=False, qkv_bias=bias, out_bias=True),
        mlp=Mlp(width=values.positive_int("intermediate_size"), bias=True),
        norm_bias=True,
        seq_len=patches + 1,
        dropout=values.drops("hidden_dropout_prob", "attention_probs_dropout_prob"),
    )
    inputs = values.positive_int("num_channels", 3) * patch[0] * patch[1]
    cut = MatmulShape(name="patches", inputs=inputs, outputs=hidden, positions=patches)
    return {
        "hidden": hidden,
        "stacks": (stack,),
        "vocab": 0,
        "outputs": classes,
        "learned_positions": patches + 1,
        # The bias for patches, the class token, the final norm, and the classifier's bias.
        "outside_parameters": 4 * hidden + classes,
        "embed_matmuls": (cut,),
        "predicted": 1,
        "max_positions": patches + 1,
    }


def _read_pair(values: ConfigValues, name: str) -> tuple[int, int]:
    found = values.get(name)
    pair = tuple(found) if isinstance(found, list | tuple) else (found, found)
    if len(pair) != 2 or not all(isinstance(one, int) and one > 0 for one in pair):
        values.refuse(name, found, "it must be a positive integer or a pair of them")
    return pair


def _read_t5(values: ConfigValues) -> dict[str, Any]:
    hidden, heads = values.positive_int("d_model"), values.positive_int("num_heads")
    dim = values.positive_int("d_kv")
    attention = AttentionShape(
        heads=heads, kv_heads=heads, head_dim=dim, value_dim=dim, causal=False
    )
    common = {
        "mlp": Mlp(
            width=values.positive_int("d_ff"), gated=bool(values.get("is_gated_act", False))
        ),
        "dropout": values.drops("dropout_rate"),
    }
    encoder = Stack(
        name="encoder", layers=values.positive_int("num_layers"), attention=attention, **common
    )
    decoder = Stack(
        name="decoder",
        layers=values.positive_int("num_decoder_layers"),
        attention=attention.model_copy(update={"causal": True}),
        cross_attention=attention,
        norms=3,
        **common,
    )
    # For each of the two: a final norm, and position biases per head, which belong to the first
    # layer.
    biases = values.positive_int("relative_attention_num_buckets") * heads
    return {
        "hidden": hidden,
        "stacks": (encoder, decoder),
        "outside_parameters": 2 * (hidden + biases),
        **_read_embedding_sizes(values, values.positive_int("n_positions", 512)),
    }


# By model_type: the name in messages, and the reader.
READERS: Mapping[str, tuple[str, Reader]] = MappingProxyType(
    {
        "gpt2": ("GPT-2", _read_gpt2),
        "llama": ("Llama", partial(_read_llama_like, windowed=False)),
        "mistral": ("Mistral", _read_llama_like),
        "qwen2": ("Qwen 2", partial(_read_llama_like, qkv_bias=True, out_bias=False)),
        "qwen3": ("Qwen 3", partial(_read_llama_like, qk_norm=True)),
        "bert": ("BERT", _read_bert),
        "gpt_neox": ("GPT-NeoX", _read_gpt_neox),
        "bloom": ("BLOOM", _read_bloom),
        "mpt": ("MPT", _read_mpt),
        "opt": ("OPT", _read_opt),
        "mixtral": ("Mixtral", _read_mixtral),
        "qwen2_moe": ("Qwen2-MoE", _read_qwen2_moe),
        "qwen3_moe": ("Qwen3-MoE", _read_qwen3_moe),
        "deepseek_v2": ("DeepSeek-V2", _read_deepseek),
        "deepseek_v3": ("DeepSeek-V3", _read_deepseek),
        "gemma": ("Gemma", partial(_read_llama_like, windowed=False)),
        "gemma2": ("Gemma 2", partial(_read_llama_like, norms=4)),
        "gemma3_text": ("Gemma 3", partial(_read_llama_like, norms=4, qk_norm=True)),
        "gemma3": ("Gemma 3, whose vision tower is not included", _read_gemma3_text),
        "phi": ("Phi", _read_phi),
        "phi3": ("Phi-3", partial(_read_llama_like, qkv_bias=False, out_bias=False)),
        "vit": ("ViT", _read_vit),
        "t5": ("T5", _read_t5),
    }
)
