"""Reader of a Hugging Face config.json as a ModelSpec."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outpace.interop.config_check import (
    ReadValues,
    format_missing_dimensions,
    quiet_transformers,
    read_type,
    require_consistent,
)
from outpace.interop.config_notes import reading_notes
from outpace.records.base import Record, keep_memo, read_object, require_no_pointer
from outpace.records.errors import BadInputError, excerpt, shorten
from outpace.records.misplaced_content import misplaced_content
from outpace.records.model import ModelSpec
from outpace.records.model_families import FAMILIES, FAMILY_TRAITS

CONFIG_FILE = "config.json"
# Model types with custom code whose layers are those of a family in transformers: the config.json
# of moonshotai/Kimi-K2-Instruct names DeepseekV3ForCausalLM; microsoft/Phi-4-multimodal-instruct
# has Phi-3's keys and others for images and audio.
SAME_LAYERS: Mapping[str, str] = MappingProxyType({"kimi_k2": "deepseek_v3", "phi4mm": "phi3"})
# model_type of exported specs for which transformers has no architecture; only outpace reads it.
OWN_TYPE = "outpace"
_ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def read_config(directory: Path) -> dict[str, Any]:
    """Return the values of config.json. Raises BadInputError if it is missing or not an object."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        if (directory / "adapter_config.json").is_file():
            raise BadInputError(
                f"{directory} holds an adapter (adapter_config.json), not a whole model. "
                "Merge it into its base model first, with outpace merge."
            )
        raise BadInputError(
            f"{directory} is not a Hugging Face model directory: it has no config.json"
            f"{other_form(directory)}"
        )
    require_text(path)
    return read_object(path)


def other_form(directory: Path) -> str:
    """Describe another format of the model in a directory without config.json, or return "".

    The description is appended to an error message.
    """
    if (directory / "params.json").is_file():
        return (
            ". Its params.json belongs to the publisher's format (Meta's or Mistral's). Fetch the "
            "same model in Hugging Face's format, which has a config.json"
        )
    for pattern, words in _OTHER_FORMS.items():
        found = next(iter(sorted(directory.glob(pattern))), None)
        if found is not None:
            return f". {words.format(folder=found.parent)}"
    return ""


_WITHOUT_CONFIG = "It holds weights, but not their config.json: fetch that from the model's source"
# Contents of a directory without a config.json, by file pattern; the first match counts.
_OTHER_FORMS: Mapping[str, str] = MappingProxyType(
    {
        "*.gguf": "It holds GGUF files, which are for inference: fetch the original model",
        "model_index.json": "It is a diffusers pipeline, not a language model",
        "*.onnx": "It holds ONNX files, which are for inference: fetch the original model",
        "saved_model.pb": "It is a TensorFlow SavedModel: fetch the model in PyTorch's format",
        "*.safetensors": _WITHOUT_CONFIG,
        "pytorch_model*.bin": _WITHOUT_CONFIG,
        "*.ckpt": "Its .ckpt file is another trainer's checkpoint: export it to Hugging Face's "
        "format, which has a config.json",
        "*.pth": "Its .pth files are in the publisher's format, or a checkpoint: fetch or export "
        "the model in Hugging Face's format, which has a config.json",
        "snapshots/*/config.json": "It is a folder of the Hub's cache: use {folder}",
        "*/config.json": "A folder inside it has a config.json: use {folder}",
    }
)


def require_text(path: Path) -> None:
    """Refuse a model's JSON file that is a Git LFS pointer, a web page or not UTF-8."""
    require_no_pointer(path)
    try:
        with path.open("rb") as file:
            found = misplaced_content(file.read(256))
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from None
    if found is not None:
        raise BadInputError(f"{path} is not a config: {found}.")


class ConfigReading(Record):
    """The `ModelSpec` that a config.json describes, with notes on how outpace read the file."""

    spec: ModelSpec
    notes: tuple[str, ...] = ()


def spec_from_hf(directory: Path) -> ModelSpec:
    """Return the spec of a Hugging Face model directory.

    The spec's only dropout is that of the residual stream for GPT-2 and BERT, and that of attention
    for other families. Raises BadInputError for an unsupported architecture or feature.
    """
    return read_spec_with_notes(directory).spec


def read_spec_with_notes(directory: Path) -> ConfigReading:
    """Read a spec like `spec_from_hf`, with notes on applied defaults and ignored keys."""
    where = str(directory / CONFIG_FILE)
    values = read_config(directory)
    model_type = read_type(values)
    if model_type == OWN_TYPE:
        return ConfigReading(spec=ModelSpec.parse(values.get("spec") or {}, where))
    if not isinstance(model_type, str):
        raise no_model_type(values, where)
    if model_type not in FAMILIES:
        other = " (transformers' reading of a mistral with layer_types)"
        raise BadInputError(
            f"{where}: outpace does not train the architecture {model_type!r}"
            f"{other if model_type != values['model_type'] else ''}, only "
            f"{', '.join(FAMILIES)}. Any other model can be trained through a Python function that "
            "builds it: --model file.py:build. outpace plan and outpace estimate support any "
            "language model that transformers has."
        )
    config = ReadValues(load_config(directory, values, strict=True))
    try:
        spec = spec_from_config(config, where)
    except DimensionsError as error:
        raise BadInputError(f"{error}{format_missing_dimensions(values)}") from None
    _require_valid_padding_id(config.config, where)
    return ConfigReading(spec=spec, notes=reading_notes(values, config, where))


def no_model_type(values: Mapping[str, Any], where: str) -> BadInputError:
    """Return the error for a config.json without a model type."""
    architectures = values.get("architectures")
    hint = f" (architectures: {shorten(str(architectures))})" if architectures else ""
    return BadInputError(
        f"{where} has no model_type, so the architecture is unknown{hint}. Fetch config.json again "
        "from the model's source; for a custom model, use --model file.py:build."
    )


def read_cached_spec(directory: Path, cache_dir: Path | None) -> ConfigReading:
    """Read a spec with notes, caching it in `cache_dir` for later reads of the same config.json.

    Loading transformers takes half a second, and the result is the same each time.
    """
    if cache_dir is None:
        return read_spec_with_notes(directory)
    digest = blake2b(digest_size=16)
    try:
        config = (directory / CONFIG_FILE).read_bytes()
        place = str(directory).encode(errors="surrogateescape")  # its name is in the notes
        for part in (config, place, version("transformers").encode(), *_read_source_code()):
            digest.update(part + b"\0")
    except (OSError, PackageNotFoundError):
        return read_spec_with_notes(directory)  # this reports the error
    kept = cache_dir / "specs" / f"{digest.hexdigest()}.json"
    with suppress(BadInputError):
        return ConfigReading.load(kept)
    reading = read_spec_with_notes(directory)
    keep_memo(kept, reading.model_dump_json())
    return reading


def _read_source_code() -> Iterator[bytes]:
    """Yield the source of the modules that read a config; any change invalidates the cache."""
    for name in (__name__, ModelSpec.__module__, ReadValues.__module__):
        yield Path(str(sys.modules[name].__file__)).read_bytes()


def load_config(directory: Path, values: Mapping[str, Any], *, strict: bool) -> Any:
    """Load a config.json with transformers, which fills in all defaults.

    `values` are the contents of the file, checked by `require_consistent` with `strict`. Raises
    BadInputError if this check fails or transformers cannot read the file.
    """
    where = str(directory / CONFIG_FILE)
    require_consistent(values, where, strict=strict)
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            if values["model_type"] != read_config(directory).get("model_type"):  # SAME_LAYERS
                rest = {name: value for name, value in values.items() if name != "model_type"}
                return AutoConfig.for_model(values["model_type"], **rest)
            return AutoConfig.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:
        said = shorten(" ".join(str(error).split()), 1000)
        raise BadInputError(
            f"{where} is not valid for transformers: {said}{format_missing_dimensions(values)}"
        ) from None


class DimensionsError(BadInputError):
    """Raised if dimensions contradict each other; some may be defaults that the file omits."""


def spec_from_config(config: Any, where: str) -> ModelSpec:
    """Return the spec of a `transformers` config from one of the supported families.

    Raises DimensionsError for inconsistent dimensions, and BadInputError for unsupported features.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise BadInputError(
            f"{where}: the weights are quantized (quantization_config), which cannot be trained. "
            "Use the model that it was quantized from."
        )
    family = config.model_type
    values = {"family": family, **_READERS[FAMILY_TRAITS[family].form](config, where)}
    try:
        return ModelSpec.parse(values, where)
    except BadInputError as error:
        raise DimensionsError(str(error)) from None


def _require_valid_padding_id(config: Any, where: str) -> None:
    pad, rows = config.pad_token_id, config.vocab_size
    if config.model_type != "gpt2" and isinstance(pad, int) and not -rows <= pad < rows:
        raise BadInputError(
            f"{where}: pad_token_id = {pad}, but the embedding has {rows} rows (vocab_size), so "
            "transformers cannot build the model. Write the number of a token, or null."
        )


def _require_supported_values(config: Any, where: str, allowed: Mapping[str, Any]) -> None:
    for name, value in allowed.items():
        found = getattr(config, name, value)
        if found != value and found is not None:
            raise BadInputError(
                f"{where}: {name} = {found!r} is not supported, only {value!r}. "
                "Such a model can be trained through file.py:build."
            )


def _read_activation(name: str, where: str) -> str:
    if name not in _ACTIVATIONS:
        raise BadInputError(
            f"{where}: the activation {name!r} is not supported; supported: "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _read_gpt2(config: Any, where: str) -> dict[str, Any]:
    _require_supported_values(
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
        "activation": _read_activation(config.activation_function, where),
        "tied": config.tie_word_embeddings,
        "dropout": config.resid_pdrop,
    }


def _read_bert(config: Any, where: str) -> dict[str, Any]:
    _require_supported_values(
        config,
        where,
        {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
    )
    if config.type_vocab_size < 1:
        raise BadInputError(f"{where}: type_vocab_size = 0; BERT has at least one type of token.")
    return {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "ffn": config.intermediate_size,
        "vocab": config.vocab_size,
        "max_positions": config.max_position_embeddings,
        "norm_eps": config.layer_norm_eps,
        "activation": _read_activation(config.hidden_act, where),
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
        "activation": _read_activation(config.hidden_act, where),
        "tied": config.tie_word_embeddings,
        "dropout": config.attention_dropout,
        **_read_rope(config.rope_parameters or {}, where),
        **_read_biases(config),
        **_read_windows(config, where),
    }


def _read_biases(config: Any) -> dict[str, Any]:
    names = FAMILY_TRAITS[config.model_type].biases
    if not names:
        return {}
    attention = config.attention_bias
    return {
        "qkv_bias": attention,
        "out_bias": attention,
        "mlp_bias": "mlp_bias" in names and config.mlp_bias,
    }


def _read_windows(config: Any, where: str) -> dict[str, Any]:
    windows = FAMILY_TRAITS[config.model_type].windows
    if windows == "none":
        return {}  # transformers ignores the key
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if windows == "all" or kinds is None:
        return {"sliding_window": window}
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise BadInputError(
            f"{where}: layer_types has {', '.join(unknown)}; supported: full_attention, "
            "sliding_attention"
        )
    layers = tuple(index for index, kind in enumerate(kinds) if kind == "sliding_attention")
    if not layers:
        return {}
    if window is None:
        raise BadInputError(
            f"{where} contradicts itself: layer_types has sliding_attention, but no window is in "
            "use (sliding_window is null or use_sliding_window false). Correct the one that is "
            "wrong."
        )
    everywhere = len(layers) == config.num_hidden_layers
    return {"sliding_window": window, "window_layers": None if everywhere else layers}


def _read_rope(rope: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        # Dynamic scaling leaves positions up to the original length unchanged.
        remedy = (
            " If you remove it, sequences up to the original length are computed correctly."
            * (kind == "dynamic")
        )
        raise BadInputError(
            f"{where}: the rotary scaling {kind!r} is not supported; supported: default, "
            f"llama3.{remedy}"
        )
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise BadInputError(
            f"{where}: partial_rotary_factor = {rope['partial_rotary_factor']} is not supported; "
            "outpace applies rotary positions to whole heads"
        )
    theta = rope.get("rope_theta", 10_000.0)
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise BadInputError(
            f"{where}: rope_theta = {excerpt(theta)}, and transformers cannot build a model with "
            "it. Write the number that the model was trained with."
        )
    read: dict[str, Any] = {"rope_theta": theta}
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        read["rope_scaling"] = {
            **{name: rope[name] for name in names if name in rope},
            "original_max_positions": rope.get("original_max_position_embeddings"),
        }
    return read


_READERS: Mapping[str, Callable[[Any, str], dict[str, Any]]] = MappingProxyType(
    {"gpt2": _read_gpt2, "bert": _read_bert, "llama": _read_llama_like}
)
