"""A model of transformers from its config alone, on the meta device, for any of its families."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from outpace.interop.config import (
    CONFIG_FILE,
    OWN_TYPE,
    load_config,
    quiet_transformers,
    read_config,
)
from outpace.interop.config_check import ReadValues, reading_notes
from outpace.records.errors import BadInputError, excerpt, shorten

# More is a typing error, which would take minutes to build.
_MOST_LAYERS = 2000
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_seq_length")


@dataclass(frozen=True)
class BuiltModel:
    """A model without storage. `positions`: the longest sequence; None if any length is accepted.

    `decodes`: it has a decoder in addition to its encoder. `family` is the model_type of the built
    model, and `notes` describe how the config was understood.
    """

    module: Any
    family: str
    positions: int | None
    decodes: bool
    notes: tuple[str, ...]


def transformers_version() -> str | None:
    """Return the installed release of transformers; None if it cannot be imported."""
    try:
        import transformers
    except ImportError:
        return None
    return str(transformers.__version__)


def can_build(model_type: object) -> bool:
    """Return whether transformers is installed and has the family."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        return False
    return isinstance(model_type, str) and model_type != OWN_TYPE and model_type in CONFIG_MAPPING


def build_from_folder(directory: Path, dtype: str = "bfloat16") -> BuiltModel:
    """Build the language model that a folder's config.json describes, on meta.

    For a model that also sees or hears, only the text part is built. Raises BadInputError if the
    config contradicts itself, or transformers cannot make a model from it.
    """
    where = str(directory / CONFIG_FILE)
    values = read_config(directory)
    config = load_config(directory, values, strict=False)
    text = _text_config(config, where)
    _restore_tied_head(config, text, values)
    built = build_on_meta(config, where, dtype)
    read = ReadValues(config)
    notes = [*built.notes]
    notes += _names_of_defaults(values, config, text, where)
    notes += reading_notes(values, read, where, planned=True)
    return BuiltModel(built.module, built.family, built.positions, built.decodes, tuple(notes))


def build_on_meta(config: Any, where: str, dtype: str = "bfloat16") -> BuiltModel:
    """Build the model of a config, or its text part, with its head, on meta.

    Raises BadInputError if transformers cannot.
    """
    import torch

    text = _text_config(config, where)
    for part in (config, text):
        _check_layers(part, where)
    make, decodes, kind = _maker(config, text)
    try:
        with quiet_transformers(), torch.device("meta"):
            module = make(getattr(torch, dtype))
    except Exception as error:  # anything that a family's code raises
        raise BadInputError(
            f"{where}: transformers cannot make a {config.model_type} of this: "
            f"{shorten(' '.join(f'{type(error).__name__}: {error}'.split()), 400)}"
        ) from None
    notes = [
        f"{where}: outpace has no reader for {config.model_type}. transformers "
        f"{transformers_version()} built the model without storage{kind}, and one forward of it "
        "was traced."
    ]
    if text is not config:
        notes.append(
            f"{where}: only the text part ({text.model_type}) of {config.model_type} is planned; "
            "what it makes of images or sound comes on top."
        )
    return BuiltModel(module, config.model_type, _positions(text), decodes, tuple(notes))


Maker = Callable[[Any], Any]


def _maker(config: Any, text: Any) -> tuple[Maker, bool, str]:
    """Return a builder of the model in a dtype, whether it has a decoder, and what is missing."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    found = _auto_class(text)
    if found is not None:
        decodes, chosen = found
        return lambda dtype: chosen.from_config(text, dtype=dtype), decodes, ""
    for mapping, several in (
        (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.AutoModelForImageTextToText),
        (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, transformers.AutoModelForSeq2SeqLM),
        (auto.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM),
    ):
        if text is not config and type(config) in mapping:
            return partial(_text_of, several, config, text), False, ""
    headless: Any = transformers.AutoModel
    return lambda dtype: headless.from_config(text, dtype=dtype), False, ", without a head"


def _text_of(auto: Any, config: Any, text: Any, dtype: Any) -> Any:
    from outpace.interop.text_part import TextPart

    return TextPart(auto.from_config(config, dtype=dtype), text)


def _text_config(config: Any, where: str) -> Any:
    """Return the config of the text part, which for most models is the whole config."""
    try:
        text = config.get_text_config()
    except ValueError as error:
        raise BadInputError(
            f"{where}: {shorten(str(error))} Name the intended model by a Python function that "
            "builds it: --model file.py:build."
        ) from None
    if getattr(config, "is_encoder_decoder", False) and type(text) is type(config):
        return config
    return text


def _restore_tied_head(config: Any, text: Any, values: Mapping[str, Any]) -> None:
    """Restore the file's setting of a tied head."""
    tied = values.get("tie_word_embeddings")
    if isinstance(tied, bool):
        config.tie_word_embeddings = text.tie_word_embeddings = tied


def _check_layers(config: Any, where: str) -> None:
    for name in ("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers"):
        value = getattr(config, name, None)
        if isinstance(value, int) and not 0 < value <= _MOST_LAYERS:
            raise BadInputError(
                f"{where}: {name} = {excerpt(value)}; it has to be a whole number, at least 1 and "
                f"at most {_MOST_LAYERS}"
            )


def _auto_class(config: Any) -> tuple[bool, Any] | None:
    """Return whether the model has a decoder, and its class with a head; None without a class."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    kind = type(config)
    if getattr(config, "is_encoder_decoder", False) and (
        kind in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    ):
        return True, transformers.AutoModelForSeq2SeqLM
    architectures = getattr(config, "architectures", None)
    named = " ".join(map(str, architectures)) if isinstance(architectures, list) else ""
    decoder = getattr(config, "is_decoder", False) or "CausalLM" in named or "LMHead" in named
    masked = kind in auto.MODEL_FOR_MASKED_LM_MAPPING
    if masked and not decoder and kind not in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        return False, transformers.AutoModelForMaskedLM
    if kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        return False, transformers.AutoModelForCausalLM
    return (False, transformers.AutoModelForMaskedLM) if masked else None


def _positions(config: Any) -> int | None:
    for name in _POSITIONS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _names_of_defaults(
    values: Mapping[str, Any], config: Any, text: Any, where: str
) -> Iterator[str]:
    """Name whole numbers that the file omits and transformers fills in with defaults."""
    inner = values.get("text_config") if text is not config else values
    given = inner if isinstance(inner, dict) else {}
    aliases: Mapping[str, str] = getattr(text, "attribute_map", {})
    named = {aliases.get(name, name) for name in given}
    fields = getattr(type(text), "__dataclass_fields__", {})
    taken = [
        f"{name} {fields[name].default}"
        for name in fields
        if name not in named
        and _is_dimension(name, fields[name].default)
        and getattr(text, name, None) == fields[name].default
    ]
    if taken:
        place = where if text is config else f"{where}: text_config"
        yield (
            f"{place} leaves out dimensions, for which transformers' defaults are taken: "
            f"{', '.join(taken)}. If the model is another, write its own there."
        )


_DIMENSIONS = ("size", "heads", "layers", "dim", "rank", "experts", "width", "inner", "rate",
               "embeddings", "vocab", "expand", "groups", "n_layer", "n_head", "n_embd", "d_model",
               "d_ff", "d_kv", "per_tok", "topk", "top_k", "state", "kernel", "window",
               "interval", "replace")  # fmt: skip


def _is_dimension(name: str, value: Any) -> bool:
    return type(value) is int and value > 0 and name.endswith(_DIMENSIONS)
