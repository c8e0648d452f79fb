"""Checks that a config.json describes the model that its model_type names.

transformers accepts any key and ignores keys that the model's code does not read. A config with the
wrong model_type therefore loads without a warning, but builds a different model.
"""

import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from outpace.records.errors import BadInputError, excerpt, shorten

_OWN_MODEL = "Any other model can be trained or planned through a Python function that builds "
_OWN_MODEL += "it: --model file.py:build."
# Keys of transformers' base class in releases 3 to 5, and keys that tools add to configs. None of
# them changes a model's computation.
_NEUTRAL_KEYS = frozenset(
    """
    model_type architectures transformers_version torch_dtype dtype auto_map name_or_path tags
    library_name license language is_llama_config use_cache output_attentions output_hidden_states
    output_past output_scores return_dict return_dict_in_generate torchscript use_bfloat16
    pruned_heads chunk_size_feed_forward is_encoder_decoder cross_attention_hidden_size
    tie_encoder_decoder tie_word_embeddings max_length min_length do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens finetuning_task id2label
    label2id num_labels problem_type tokenizer_class prefix task_specific_params
    decoder_start_token_id tf_legacy_loss gradient_checkpointing n_ctx predict_special_tokens
    attn_implementation experts_implementation quantization_config max_sequence_length
    initializer_range initializer_factor rope_theta rope_scaling rope_parameters directionality
    pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
    unsloth_version unsloth_fixed pretraining_tp max_window_layers loss_type partial_rotary_factor
    original_max_position_embeddings
    """.split()  # noqa: SIM905 (a table of names)
)
_NEUTRAL = re.compile(r"^_|_token_id$|^unsloth_|_ids?$")
# Words in the names of settings that change layers or activations.
_CHANGES = re.compile(
    r"multiplier|softcap|logits?_scal|attn_scal|scale_(emb|depth|width)|emb(ed(ding)?)?s?_scale"
    r"|residual_scale|temperature_tuning|attention_chunk|(attn|attention)_sink|_gate$|_gate_"
    r"|no_rope|nope|^rope_|_rope$|mrope|rotary|alibi|qk_|_qk|[qk]_(layer)?norm|clip_qkv"
    r"|query_pre_attn|(block|layer)_configs?$"
    r"|experts?|moe|router|lora_rank|window|layer_types|layers?_block_type|block_types|hybrid"
    r"|mamba|ssm|conv|recurrent|linear_(attn|attention|num|key|value)|parallel_(attn|residual)"
    r"|multi_query|new_decoder|cross_attention|position_embedding|pos_emb|relative_attention|mup"
    r"|(^|_)norm_(type|first|position|after)|(pre|post|sandwich)_?norm|layernorm_type|mlp_type"
    r"|_bias$|^use_.*bias|^(no_)?bias$|gated|glu|activation|hidden_act|embedding_size|kv_heads"
    r"|key_value_heads|head_dim|bidirectional|^mm_|vision|audio|_shared|share_|skip_layers|altup|laurel"
)
# Keys of nested configs for model parts, such as text_config. Other nested configs belong to tools.
_PART_CONFIG = re.compile(
    r"(^|_)(text|vision|visual|image|video|audio|speech|llm|language|encoder|decoder|thinker"
    r"|talker|backbone|qformer|projector)(_model)?_config$"
)
_TRUE_BY_NATURE = frozenset({"use_rope", "use_rotary", "is_causal", "causal"})
_FACTORS = re.compile(r"multiplier|scal|factor|ratio|percent|pct|freq|step|interval")
_USUAL_WORDS = frozenset(
    "default none full dense absolute rope rotary rmsnorm rms_norm rms swiglu silu".split()  # noqa: SIM905
)
# Names of widths and layer counts in various architectures.
_DIMENSIONS = frozenset(
    """
    hidden_size num_hidden_layers num_attention_heads intermediate_size vocab_size
    max_position_embeddings num_key_value_heads head_dim n_embd n_layer n_head n_heads n_layers
    n_positions n_inner d_model d_ff d_kv num_layers num_heads num_decoder_layers ffn_dim
    moe_intermediate_size expansion_ratio max_seq_len
    """.split()  # noqa: SIM905 (a table of names)
)
_MOST_NAMED = 8


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress transformers' warnings about a config; errors are still raised."""
    from transformers.utils import logging as hf_logging

    earlier = hf_logging.get_verbosity()
    hf_logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(earlier)


class ReadValues:
    """Wrapper of a `transformers` config that records which values are read."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._config, name)
        self.names.add(name)
        if hasattr(value, "to_dict"):  # a nested config, with separate names
            value = vars(self).setdefault(f"_inner_{name}", ReadValues(value))
        return value

    def inner(self, name: str) -> "ReadValues | None":
        """Return the wrapper of a nested config, or None if it was not read."""
        return vars(self).get(f"_inner_{name}")

    @property
    def config(self) -> Any:
        """The wrapped config."""
        return self._config


def require_consistent(values: Mapping[str, Any], where: str, *, strict: bool) -> None:
    """Refuse a config.json that mixes two different models.

    Nested configs that the model_type does not have are always refused. If `strict` is set, so are
    unknown keys that would change the layers.
    """
    model_type = str(values["model_type"])
    _check_architectures(values.get("architectures"), model_type, where)
    for part, kind, place in config_parts(values, where):
        _check_dimensions(part, place, strict=strict)
        _check_rope(part, place, strict=strict)
        unknown = unknown_keys(part, kind)
        inside = [key for key in unknown if _describes_model(key, part[key])]
        changing = [key for key in unknown if strict and changes_model(key, part)]
        found = inside or changing
        if found:
            raise BadInputError(
                f"{place} has {show_pairs(part, found)}, which transformers' {model_type} does not "
                "read: the layers belong to another model, or the model_type is wrong. Fetch "
                f"config.json again from the model's source. {_OWN_MODEL}"
            )


def read_type(values: Mapping[str, Any]) -> Any:
    """Return the model_type by which transformers reads a config.json.

    It is the one in the file, except that a mistral with layer_types is read as ministral.
    """
    told = values.get("model_type")
    return "ministral" if told == "mistral" and "layer_types" in values else told


def config_parts(
    values: Mapping[str, Any], where: str
) -> Iterator[tuple[Mapping[str, Any], type, str]]:
    """Yield the config and, if its class defines one, its nested `text_config`.

    Each comes with its transformers class, and its location for messages.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[str(read_type(values))]
    yield values, kind, where
    inner = getattr(kind, "sub_configs", {}).get("text_config")
    text = values.get("text_config")
    if inner is not None and isinstance(text, dict):
        if text.get("model_type") in CONFIG_MAPPING:
            inner = CONFIG_MAPPING[text["model_type"]]
        yield text, inner, f"{where}: text_config"


def _check_architectures(architectures: Any, model_type: str, where: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if isinstance(architectures, str):
        architectures = [architectures]
    if not isinstance(architectures, list):
        return
    own = _class_name_prefix(CONFIG_MAPPING[model_type].__name__)
    for architecture in map(str, architectures):
        if architecture in _find_model_classes(model_type):
            continue
        joined = architecture.lower().replace("_", "")
        rest = joined.removeprefix(own)
        if rest == joined or not re.match(r"(text)?(for|model|lm|doubleheads|pretrained)|$", rest):
            raise BadInputError(
                f"{where}: architectures says {shorten(architecture)}, model_type says "
                f"{model_type!r}: two different models. Fetch config.json again from the model's "
                f"source, and do not change model_type. {_OWN_MODEL}"
            )


def _find_model_classes(model_type: str) -> set[str]:
    from transformers.models.auto import modeling_auto

    found: set[str] = set()
    for name in dir(modeling_auto):
        if name.endswith("_MAPPING_NAMES"):
            classes = getattr(modeling_auto, name).get(model_type, ())
            found.update((classes,) if isinstance(classes, str) else classes)
    return found


def _class_name_prefix(config_class: str) -> str:
    """Return the prefix of an architecture's class names: "qwen2moe" for "Qwen2MoeConfig"."""
    return config_class.removesuffix("Config").removesuffix("Text").lower().replace("_", "")


def _check_dimensions(values: Mapping[str, Any], where: str, *, strict: bool) -> None:
    """Refuse dimensions that are neither a positive integer nor a list of one integer per layer.

    `strict` refuses lists, too, because no family that outpace trains has them.
    """
    for name in _DIMENSIONS & values.keys():
        value = values[name]
        by_layer = value if isinstance(value, list) and value and not strict else [value]
        if value is not None and any(type(one) is not int or one < 1 for one in by_layer):
            raise BadInputError(
                f"{where}: {name} = {excerpt(value)}; it must be a whole number, at least 1"
            )


def format_missing_dimensions(values: Mapping[str, Any]) -> str:
    """List the dimensions that a config.json omits, with their defaults, to append to an error."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if read_type(values) not in CONFIG_MAPPING:
        return ""
    taken = []
    for part, kind, _ in config_parts(values, ""):
        aliases: Mapping[str, str] = getattr(kind, "attribute_map", {})
        given = {aliases.get(name, name) for name in part}
        fields = getattr(kind, "__dataclass_fields__", {})
        taken += [
            f"{name} {fields[name].default}"
            for name in fields
            if name in _DIMENSIONS - given and isinstance(fields[name].default, int)
        ]
    if not taken:
        return ""
    return f". For missing keys, transformers uses its defaults: {', '.join(taken)}."


# Keys of rotary settings, for each kind that outpace supports.
_ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
}
_ROPE_COMMON = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor"})


def _check_rope(values: Mapping[str, Any], where: str, *, strict: bool) -> None:
    """Refuse rotary settings that transformers ignores or that contradict each other.

    Examples are scaling without a type, keys that transformers does not read for the type, two
    types, and two values for one key. `strict` is set for models that outpace is to train.
    """
    for name in ("rope_scaling", "rope_parameters"):
        rope = values.get(name)
        if not isinstance(rope, dict) or not rope:
            continue
        nested = all(isinstance(value, dict) for value in rope.values())
        if nested and strict:
            what = "differs by type of layer, which transformers does not read for this model_type"
            _refuse_rope(name, rope, where, what)
        if not nested:
            _check_rope_type(name, rope, where, strict)
    _check_rope_versions(values, where)


def _check_rope_type(name: str, rope: Mapping[str, Any], where: str, strict: bool) -> None:
    kinds = {str(rope[key]) for key in ("type", "rope_type") if rope.get(key) is not None}
    if len(kinds) > 1:
        _refuse_rope(name, rope, where, "has two types, of which transformers reads only one")
    if not kinds and not (name == "rope_parameters" and set(rope) <= _ROPE_COMMON):
        raise BadInputError(
            f"{where}: {name} = {excerpt(rope)} has no rope_type, so it has no effect. Write the "
            "type with which the model was trained (see config.json at the model's source), or "
            "null for none."
        )
    known = _ROPE_KEYS.get(next(iter(kinds), "default"))
    if strict and known is not None:
        odd = [key for key in rope if key not in known | _ROPE_COMMON and rope[key] is not None]
        odd = [key for key in odd if key != "original_max_position_embeddings"]
        if odd:
            what = f"has {', '.join(odd)}, which transformers does not read for its type"
            _refuse_rope(name, rope, where, what)


def _check_rope_versions(values: Mapping[str, Any], where: str) -> None:
    """Refuse rope_theta or rope_scaling (transformers 4) that contradict rope_parameters (5)."""
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    pairs = [("rope_theta", values.get("rope_theta"), rope.get("rope_theta"))]
    scaling = values.get("rope_scaling")
    if isinstance(scaling, dict) and "rope_type" in rope:
        pairs += [(key, scaling[key], rope.get(key)) for key in scaling if key != "type"]
    for key, old, new in pairs:
        if old is not None and new is not None and old != new:
            raise BadInputError(
                f"{where} contradicts itself: {key} {excerpt(old)} and, in rope_parameters, "
                f"{excerpt(new)}, so transformers 4 and 5 build different models. Remove one of "
                "them."
            )


def _refuse_rope(name: str, rope: Mapping[str, Any], where: str, what: str) -> NoReturn:
    raise BadInputError(
        f"{where}: {name} = {excerpt(rope)} {what}. It belongs to another model, or is a mistake. "
        f"Fetch config.json again from the model's source. {_OWN_MODEL}"
    )


def unknown_keys(values: Mapping[str, Any], kind: Any) -> list[str]:
    """Return the keys in `values` that the config class does not define."""
    aliases: Mapping[str, str] = getattr(kind, "attribute_map", {})
    known = {*getattr(kind, "__dataclass_fields__", ()), *aliases, *aliases.values()}
    known |= _NEUTRAL_KEYS
    text = getattr(kind, "sub_configs", {}).get("text_config")
    if text is not None and "text_config" not in values:  # older files have one level
        known |= {*getattr(text, "__dataclass_fields__", ())}
    return [
        key
        for key in values
        if key not in known
        and not _NEUTRAL.search(key)
        and not _has_no_effect(key, values)
        and not _is_converted(key, values, kind)
    ]


def _is_converted(key: str, values: Mapping[str, Any], kind: Any) -> bool:
    """Return whether the config class derives other values from a key that it does not keep."""

    def parse(given: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = kind(**given).to_dict()
        found.pop(key, None)
        return found

    rest = {name: value for name, value in values.items() if name != "model_type"}
    try:
        with quiet_transformers():
            return parse(rest) != parse({name: rest[name] for name in rest if name != key})
    except Exception:  # any error that a family's code raises for unexpected values
        return False


def _has_no_effect(key: str, values: Mapping[str, Any]) -> bool:
    """Return whether the key's value means the same as leaving the key out."""
    value = values[key]
    if key in _TRUE_BY_NATURE:
        return value is not False
    if value in (None, False, 0, "", [], {}):
        return True
    if isinstance(value, list):
        return all(item in (1, True, "full_attention", "attention") for item in value)
    if isinstance(value, str):
        return value.lower() in _USUAL_WORDS or value == values.get("hidden_act")
    if key == "num_key_value_heads":
        return bool(value == values.get("num_attention_heads", values.get("n_head")))
    if key == "embedding_size":
        return bool(value == values.get("hidden_size"))
    if key == "sliding_window":
        positions = values.get("max_position_embeddings")
        return isinstance(value, int) and isinstance(positions, int) and value >= positions
    return value == 1 and _FACTORS.search(key) is not None and not isinstance(value, bool)


def _describes_model(key: str, value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    own = {"model_type", "architectures", *_DIMENSIONS} & value.keys()
    named = _PART_CONFIG.search(key) is not None
    return bool(own) or named or any(_describes_model(name, one) for name, one in value.items())


def changes_model(key: str, values: Mapping[str, Any]) -> bool:
    """Return whether a key that transformers does not read would change the model, by its name."""
    if key == "head_dim":  # transformers' models read it even if their config lacks it
        return False
    return key in _TRUE_BY_NATURE or _CHANGES.search(key) is not None


def show_pairs(values: Mapping[str, Any], names: list[str]) -> str:
    """Format keys with their values: "logits_scaling 8.0, embedding_multiplier 12.0"."""
    said = [
        f"{shorten(name, 60)} {{…}}" if isinstance(values[name], dict)
        else f"{shorten(name, 60)} {shorten(excerpt(values[name]), 40)}"
        for name in names[:_MOST_NAMED]
    ]  # fmt: skip
    more = len(names) - len(said)
    return ", ".join(said) + (f" and {more} more" if more > 0 else "")
