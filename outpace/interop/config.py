"""config.json of a Hugging Face model directory, read into a ModelSpec."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from outpace.records.base import keep_memo, read_object
from outpace.records.errors import BadInputError, clipped, nearest
from outpace.records.model import Family, ModelSpec

CONFIG_FILE = "config.json"
# The model_type of a spec that no architecture of transformers has: outpace alone reads it.
OWN_TYPE = "outpace"
FAMILIES: tuple[Family, ...] = get_args(Family)
_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_python_tanh": "gelu_tanh",
        "silu": "silu",
        "swish": "silu",
    }
)


def read_config(directory: Path) -> dict[str, Any]:
    """The values of config.json. Raises BadInputError when there is none or it is no object."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        if (directory / "adapter_config.json").is_file():
            raise BadInputError(
                f"{directory} holds an adapter (adapter_config.json), not a whole model. "
                "Merge it into its base model first, with outpace merge."
            )
        raise BadInputError(
            f"{directory} is no Hugging Face model directory: it has no config.json"
        )
    return read_object(path)


def spec_from_hf(directory: Path) -> ModelSpec:
    """The dimensions and choices of a Hugging Face model directory.

    A spec has one dropout: GPT-2's and BERT's is that of the residual stream, the others' that
    of attention. Raises BadInputError for an architecture or a feature that is not supported.
    """
    where = str(directory / CONFIG_FILE)
    values = read_config(directory)
    model_type = values.get("model_type")
    if model_type == OWN_TYPE:
        return ModelSpec.parse(values.get("spec") or {}, where)
    if not isinstance(model_type, str):
        raise BadInputError(
            f"{where} has no model_type, so the architecture is unknown; add one of "
            f"{', '.join(FAMILIES)}"
        )
    if model_type not in FAMILIES:
        raise BadInputError(
            f"{where}: the architecture {model_type!r} is not supported."
            f"{nearest(model_type, FAMILIES)} Supported: {', '.join(FAMILIES)}. "
            "Any other model can be trained through file.py:build."
        )
    return spec_from_config(load_config(directory, where), where)


def remembered_spec(directory: Path, cache_dir: Path | None) -> ModelSpec:
    """As `spec_from_hf`, by what is kept in `cache_dir` of an equal config.json.

    transformers takes half a second to load, and says the same each time.
    """
    if cache_dir is None:
        return spec_from_hf(directory)
    digest = blake2b(digest_size=16)
    try:
        config = (directory / CONFIG_FILE).read_bytes()
        for part in (config, version("transformers").encode(), *_own_sources()):
            digest.update(part + b"\0")
    except (OSError, PackageNotFoundError):
        return spec_from_hf(directory)  # which says what is wrong
    kept = cache_dir / "specs" / f"{digest.hexdigest()}.json"
    with suppress(BadInputError):
        return ModelSpec.load(kept)
    spec = spec_from_hf(directory)
    keep_memo(kept, spec.model_dump_json())
    return spec


def _own_sources() -> Iterator[bytes]:
    """What reads a config and what is made of it: where they change, nothing is remembered."""
    for module in (sys.modules[__name__], sys.modules[ModelSpec.__module__]):
        yield Path(str(module.__file__)).read_bytes()


def load_config(directory: Path, where: str) -> Any:
    """The config as transformers understands it, every default filled in.

    `where` names it in the error. Raises BadInputError.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        said = clipped(" ".join(str(error).split()), 1000)
        raise BadInputError(f"{where} is not understood by transformers: {said}") from None


def spec_from_config(config: Any, where: str) -> ModelSpec:
    """The spec of a `transformers` config of one of the families. Raises BadInputError."""
    if getattr(config, "quantization_config", None) is not None:
        raise BadInputError(
            f"{where}: the weights are quantized (quantization_config), which cannot be trained. "
            "Use the model that it was quantized from."
        )
    family = config.model_type
    reader = {"gpt2": _read_gpt2, "bert": _read_bert}.get(family, _read_llama_like)
    return ModelSpec.parse({"family": family, **reader(config, where)}, where)


def _refuse(config: Any, where: str, allowed: Mapping[str, Any]) -> None:
    """Refuse settings that change what the model computes in a way that a spec cannot say."""
    for name, value in allowed.items():
        found = getattr(config, name, value)
        if found != value and found is not None:
            raise BadInputError(
                f"{where}: {name} = {found!r} is not supported, only {value!r}. "
                "Such a model can be trained through file.py:build."
            )


def _activation(name: str, where: str) -> str:
    if name not in _ACTIVATIONS:
        raise BadInputError(
            f"{where}: the activation {name!r} is not supported; supported: "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _read_gpt2(config: Any, where: str) -> dict[str, Any]:
    _refuse(
        config,
        where,
        {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    )
    return {
        "layers": config.n_layer,
        "hidden": config.n_embd,
        "heads": config.n_head,
        "ffn": config.n_inner or 4 * config.n_embd,
        "vocab": config.vocab_size,
        "max_positions": config.n_positions,
        "norm_eps": config.layer_norm_epsilon,
        "activation": _activation(config.activation_function, where),
        "tied": config.tie_word_embeddings,
        "dropout": config.resid_pdrop,
    }


def _read_bert(config: Any, where: str) -> dict[str, Any]:
    _refuse(
        config,
        where,
        {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
    )
    return {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "ffn": config.intermediate_size,
        "vocab": config.vocab_size,
        "max_positions": config.max_position_embeddings,
        "norm_eps": config.layer_norm_eps,
        "activation": _activation(config.hidden_act, where),
        "tied": config.tie_word_embeddings,
        "segments": config.type_vocab_size,
        "dropout": config.hidden_dropout_prob,
    }


def _read_llama_like(config: Any, where: str) -> dict[str, Any]:
    return {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None),
        "ffn": config.intermediate_size,
        "vocab": config.vocab_size,
        "max_positions": config.max_position_embeddings,
        "norm_eps": config.rms_norm_eps,
        "activation": _activation(config.hidden_act, where),
        "tied": config.tie_word_embeddings,
        "dropout": config.attention_dropout,
        **_read_rope(config.rope_parameters or {}, where),
        **_read_biases(config),
        **_read_windows(config, where),
    }


def _read_biases(config: Any) -> dict[str, Any]:
    """Which of Llama's and Qwen 3's products have biases; Mistral's and Qwen 2's are fixed."""
    if config.model_type not in ("llama", "qwen3"):
        return {}
    attention = config.attention_bias
    return {
        "qkv_bias": attention,
        "out_bias": attention,
        "mlp_bias": getattr(config, "mlp_bias", False),
    }


def _read_windows(config: Any, where: str) -> dict[str, Any]:
    if config.model_type == "llama":
        return {}  # transformers' Llama reads no such key
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if config.model_type == "mistral" or kinds is None:
        return {"sliding_window": window}
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise BadInputError(
            f"{where}: layer_types has {', '.join(unknown)}; supported: full_attention, "
            "sliding_attention"
        )
    layers = tuple(index for index, kind in enumerate(kinds) if kind == "sliding_attention")
    if not layers or window is None:
        return {}
    everywhere = len(layers) == config.num_hidden_layers
    return {"sliding_window": window, "window_layers": None if everywhere else layers}


def _read_rope(rope: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        # This kind alone changes nothing up to the positions first trained with.
        remedy = " Remove it, and sequences no longer than those are right." * (kind == "dynamic")
        raise BadInputError(
            f"{where}: the rotary scaling {kind!r} is not supported; supported: default, "
            f"llama3.{remedy}"
        )
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise BadInputError(
            f"{where}: partial_rotary_factor = {rope['partial_rotary_factor']} is not supported; "
            "rotary positions turn whole heads here"
        )
    read: dict[str, Any] = {"rope_theta": rope.get("rope_theta", 10_000.0)}
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        read["rope_scaling"] = {
            **{name: rope[name] for name in names if name in rope},
            "original_max_positions": rope.get("original_max_position_embeddings"),
        }
    return read
