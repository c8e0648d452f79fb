"""Conversion of a ModelSpec to the config of the equivalent `transformers` model."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from outpace.interop.config import OWN_TYPE, spec_from_config
from outpace.interop.config_check import quiet_transformers
from outpace.interop.origin import TokenIds
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.model_families import FAMILIES, FAMILY_TRAITS, Family, FamilyTraits

_HF_ACTIVATIONS = MappingProxyType({"gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"})


def hf_config(
    spec: ModelSpec,
    *,
    eos_id: TokenIds = None,
    bos_id: TokenIds = None,
    pad_id: TokenIds = None,
    dtype: str = "float32",
    given: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Return the config of the `transformers` model that is equivalent to a spec.

    Its architecture is the spec's family, or else the first family that has all features of the
    spec. `given` holds the config.json from which the spec was read; settings that a spec does not
    have are copied from it. Raises BadInputError if no family has all features of the spec.
    """
    if isinstance(pad_id, int) and pad_id >= spec.vocab:
        pad_id = None  # transformers cannot build an embedding without this row
    ids = {"eos_token_id": eos_id, "bos_token_id": bos_id, "pad_token_id": pad_id}
    order = sorted(FAMILIES, key=lambda family: family != spec.family)
    for family in order:
        settings = dict(ids)
        if family == given.get("model_type"):
            settings |= _collect_other_settings(family, given, ids, spec.vocab)
        config = _build_config(family, spec, settings)
        if config is not None:
            config.architectures = [FAMILY_TRAITS[family].language_model]
            config.dtype = dtype
            return config
    raise BadInputError(
        f"no architecture of transformers has all features of this {spec.family} model; it can "
        "only be written in outpace's own format"
    )


def exported_type(spec: ModelSpec) -> str:
    """Return the model_type of an exported spec.

    transformers takes seconds to load, so it is loaded only if the exported family may differ.
    """
    like_qwen2 = spec.qkv_bias and not spec.out_bias
    if like_qwen2 == (spec.family == "qwen2"):
        return spec.family
    try:
        return str(hf_config(spec).model_type)
    except BadInputError:
        return OWN_TYPE


def add_old_rotary_keys(values: dict[str, Any]) -> None:
    """Add rope_theta and rope_scaling, which transformers 4 reads instead of rope_parameters.

    transformers 5 reads all three.
    """
    rope = values.get("rope_parameters")
    if isinstance(rope, dict):
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        plain = scaling.get("rope_type", "default") == "default"
        values["rope_theta"] = rope["rope_theta"]
        values["rope_scaling"] = None if plain else scaling


def _collect_other_settings(
    family: Family, given: Mapping[str, Any], ids: Mapping[str, TokenIds], vocab: int
) -> dict[str, Any]:
    """Return the settings of a config.json that a spec does not have, except dropouts.

    Special ids that the file omits get the family's defaults, as in transformers.
    """
    import transformers

    fields = getattr(transformers, FAMILY_TRAITS[family].config).__dataclass_fields__
    common = transformers.PreTrainedConfig.__dataclass_fields__
    found = {
        name: given[name]
        for name in fields.keys() & given.keys() - common.keys() - ids.keys()
        if name != "classifier_dropout"
    }
    for name in [name for name, value in ids.items() if value is None and name not in given]:
        usual = fields[name].default
        if isinstance(usual, int) and usual < vocab:
            found[name] = usual
    return found


def _build_config(family: Family, spec: ModelSpec, settings: Mapping[str, Any]) -> Any | None:
    """Return the family's transformers config for a spec, or None.

    Reading the config back must give an equivalent spec, or else the family cannot express it.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    try:
        with quiet_transformers():
            config_class = getattr(transformers, FAMILY_TRAITS[family].config)
            config = config_class(**{**settings, **_spec_settings(family, spec)})
        same = _canonical_values(spec_from_config(config, "")) == _canonical_values(spec)
    except (
        BadInputError,
        StrictDataclassError,
        ValueError,
        TypeError,
    ):  # invalid values in the config
        return None
    return config if same else None


def _spec_settings(family: Family, spec: ModelSpec) -> dict[str, Any]:
    traits = FAMILY_TRAITS[family]
    writer = {"gpt2": _write_gpt2, "bert": _write_bert, "llama": _write_llama_like}[traits.form]
    return {**writer(spec, traits), **dict.fromkeys(traits.dropouts, spec.dropout)}


def _canonical_values(spec: ModelSpec) -> dict[str, Any]:
    """Return a spec's values in a form that is the same for specs of equivalent models."""
    values = spec.model_dump(exclude={"family", "sliding_window", "window_layers"})
    if spec.positions == "learned":
        values = {key: value for key, value in values.items() if not key.startswith("rope")}
    return {**values, "windows": [spec.layer_window(index) for index in range(spec.layers)]}


def _write_gpt2(spec: ModelSpec, traits: FamilyTraits) -> dict[str, Any]:
    return {
        "n_layer": spec.layers,
        "n_embd": spec.hidden,
        "n_head": spec.heads,
        "n_inner": spec.ffn,
        "vocab_size": spec.vocab,
        "n_positions": spec.max_positions,
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": _HF_ACTIVATIONS[spec.activation],
        "tie_word_embeddings": spec.tied,
    }


def _write_bert(spec: ModelSpec, traits: FamilyTraits) -> dict[str, Any]:
    return {
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "intermediate_size": spec.ffn,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_positions,
        "layer_norm_eps": spec.norm_eps,
        "hidden_act": _HF_ACTIVATIONS[spec.activation],
        "tie_word_embeddings": spec.tied,
        "type_vocab_size": spec.segments,
    }


def _write_llama_like(spec: ModelSpec, traits: FamilyTraits) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if spec.rope_scaling is not None:
        scaling = spec.rope_scaling.model_dump()
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_positions")
        rope |= {"rope_type": "llama3", **scaling}
    values: dict[str, Any] = {
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "intermediate_size": spec.ffn,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": _HF_ACTIVATIONS[spec.activation],
        "tie_word_embeddings": spec.tied,
        "rope_parameters": rope,
    }
    if traits.has_head_dim or spec.head_dim * spec.heads != spec.hidden:
        values["head_dim"] = spec.head_dim
    biases = {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}
    values |= {name: biases[name] for name in traits.biases}
    return {**values, **_write_windows(spec, traits)}


def _write_windows(spec: ModelSpec, traits: FamilyTraits) -> dict[str, Any]:
    if traits.windows == "none":
        return {}
    if traits.windows == "all":
        return {"sliding_window": spec.sliding_window}
    windows = [spec.layer_window(index) for index in range(spec.layers)]
    return {
        "use_sliding_window": any(windows),
        "sliding_window": spec.sliding_window,
        "max_window_layers": next((i for i, w in enumerate(windows) if w), spec.layers),
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windows],
    }
