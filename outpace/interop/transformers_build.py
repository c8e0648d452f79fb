"""Construction of transformers models of any family on the meta device, from a config alone."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from outpace.interop.config import CONFIG_FILE, OWN_TYPE, load_config, read_config
from outpace.interop.config_check import ReadValues, quiet_transformers
from outpace.interop.config_notes import reading_notes
from outpace.records.errors import BadInputError, excerpt, shorten

# More layers are a typing mistake, and would take minutes to build.
_MOST_LAYERS = 2000
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_seq_length",
              "max_target_positions", "max_encoder_position_embeddings")  # fmt: skip


@dataclass(frozen=True)
class BuiltModel:
    """A transformers model on the meta device, without weights.

    `positions` is the longest sequence, or None for any length. `decodes` is True for an
    encoder-decoder model. `features` is the name of an encoder input that is not tokens (such as
    audio), with its shape for one sample, or None. `family` is the model_type, and `notes` describe
    how outpace interpreted the config.
    """

    module: Any
    family: str
    positions: int | None
    decodes: bool
    notes: tuple[str, ...]
    features: tuple[str, tuple[int, ...]] | None = None


def config_value(config: Any, name: str) -> Any:
    """Return a config's value; None if it is missing or has no single value for all layers."""
    with suppress(Exception):  # transformers raises it if layers have different values
        return getattr(config, name)
    return None


def transformers_version() -> str | None:
    """Return the installed release of transformers; None if it cannot be imported."""
    try:
        import transformers
    except ImportError:
        return None
    return str(transformers.__version__)


def can_build(model_type: object) -> bool:
    """Return whether transformers is installed and supports the family."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        return False
    return isinstance(model_type, str) and model_type != OWN_TYPE and model_type in CONFIG_MAPPING


def build_from_folder(directory: Path, dtype: str = "bfloat16") -> BuiltModel:
    """Build the language model that a directory's config.json describes, on the meta device.

    Of a multimodal model, only the text part is built. Raises BadInputError if the config
    contradicts itself, or if transformers cannot build a model from it.
    """
    where = str(directory / CONFIG_FILE)
    values = read_config(directory)
    config = load_config(directory, values, strict=False)
    text = _find_text_config(config, where)
    tied = [*_restore_tied_head(config, text, values, where)]
    with _record_reads(type(text)) as read:
        built = build_on_meta(config, where, dtype)
    notes = [*built.notes, *tied]
    notes += _note_default_dimensions(values, config, text, read, where)
    notes += reading_notes(values, ReadValues(config), where, planned=True)
    return replace(built, notes=tuple(notes))


@contextmanager
def _record_reads(config_class: Any) -> Iterator[set[str]]:
    """Yield a set that gets the name of every value read from configs of this class."""
    names: set[str] = set()
    inherited = config_class.__getattribute__

    def record_name(config: Any, name: str) -> Any:
        names.add(name)
        return inherited(config, name)

    config_class.__getattribute__ = record_name
    try:
        yield names
    finally:
        del config_class.__getattribute__


def build_on_meta(config: Any, where: str, dtype: str = "bfloat16") -> BuiltModel:
    """Build a config's model (or its text part) on the meta device, with a head if there is one.

    Raises BadInputError if transformers cannot build it.
    """
    import torch

    text = _find_text_config(config, where)
    for part in (config, text):
        _check_layer_counts(part, where)
    make, decodes, kind = _choose_builder(config, text)
    try:
        with quiet_transformers(), torch.device("meta"):
            module = make(getattr(torch, dtype))
    except Exception as error:  # any error that a family's code raises
        raise BadInputError(
            f"{where}: transformers cannot build a {config.model_type} from this: "
            f"{shorten(' '.join(f'{type(error).__name__}: {error}'.split()), 400)}"
        ) from None
    notes = [
        f"{where}: outpace has no reader for {config.model_type}. transformers "
        f"{transformers_version()} built the model without storage{kind}, and one forward pass "
        "was traced."
    ]
    if text is not config:
        notes.append(
            f"{where}: only the text part ({text.model_type}) of {config.model_type} is planned; "
            "add the time and memory for images or audio."
        )
    features = _longest_audio_input(module, text) if decodes else None
    if features is not None:
        name, shape = features
        notes.append(
            f"{where}: its encoder reads {name} of {' × '.join(map(str, shape))} per sample."
        )
    return BuiltModel(
        module, config.model_type, _find_max_positions(text), decodes, tuple(notes), features
    )


def _longest_audio_input(module: Any, config: Any) -> tuple[str, tuple[int, ...]] | None:
    """Return the name and shape of the longest audio input that the encoder supports, or None."""
    positions = getattr(config, "max_source_positions", None)
    if module.main_input_name != "input_features" or positions is None:
        return None
    if hasattr(config, "num_mel_bins"):  # Whisper: its second convolution halves the length
        return "input_features", (config.num_mel_bins, 2 * positions)
    return "input_features", (positions, config.input_feat_per_channel)


Maker = Callable[[Any], Any]


def _choose_builder(config: Any, text: Any) -> tuple[Maker, bool, str]:
    """Return a function that builds the model in a dtype, with two facts about the model.

    The first is True for an encoder-decoder model. The second is a phrase to append to the note on
    how the model was built, or "".
    """
    import transformers

    found = _find_head_class(text)
    if found is not None:
        decodes, chosen = found
        return lambda dtype: chosen.from_config(text, dtype=dtype), decodes, ""
    several = _find_multimodal_class(config) if text is not config else None
    if several is not None:
        return partial(_build_text_part, several, config, text), False, ""
    headless: Any = transformers.AutoModel
    return lambda dtype: headless.from_config(text, dtype=dtype), False, ", without a head"


def _build_text_part(auto: Any, config: Any, text: Any, dtype: Any) -> Any:
    from outpace.interop.text_part import TextPart

    return TextPart(auto.from_config(config, dtype=dtype), text)


def _find_text_config(config: Any, where: str) -> Any:
    """Return the config of the text part, which is the whole config for most models."""
    try:
        text = config.get_text_config()
    except ValueError as error:
        raise BadInputError(
            f"{where}: {shorten(str(error))} Name the intended model by a Python function that "
            "builds it: --model file.py:build."
        ) from None
    if getattr(config, "is_encoder_decoder", False) and _find_head_class(config) is not None:
        return config
    return text


def _restore_tied_head(
    config: Any, text: Any, values: Mapping[str, Any], where: str
) -> Iterator[str]:
    """Apply the file's tie_word_embeddings to the config.

    Yields a note if the file lacks it and the defaults of config and text part disagree.
    """
    tied, inner = values.get("tie_word_embeddings"), values.get("text_config")
    if isinstance(tied, bool):
        config.tie_word_embeddings = text.tie_word_embeddings = tied
    elif not isinstance(inner, dict) or "tie_word_embeddings" not in inner:
        usual, outer = (config_value(part, "tie_word_embeddings") for part in (text, config))
        if usual is not None and outer is not None and usual != outer:
            kind = "" if usual else "not "
            yield (
                f"{where} does not say whether the head is tied to the embedding: outpace assumes "
                f"that it is {kind}tied, as is usual for {text.model_type}. If that is wrong, "
                "write tie_word_embeddings there."
            )


def _find_multimodal_class(config: Any) -> Any:
    import transformers
    from transformers.models.auto import modeling_auto as auto

    for mapping, chosen in (
        (auto.MODEL_FOR_MULTIMODAL_LM_MAPPING, transformers.AutoModelForMultimodalLM),
        (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, transformers.AutoModelForSeq2SeqLM),
        (auto.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM),
    ):
        if type(config) in mapping:
            return chosen
    return None


def _check_layer_counts(config: Any, where: str) -> None:
    for name in ("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers"):
        value = config_value(config, name)
        if isinstance(value, int) and not 0 < value <= _MOST_LAYERS:
            raise BadInputError(
                f"{where}: {name} = {excerpt(value)}; it must be a whole number, at least 1 and "
                f"at most {_MOST_LAYERS}"
            )


def _find_head_class(config: Any) -> tuple[bool, Any] | None:
    """Return whether a model is an encoder-decoder, and transformers' class for it with a head.

    Returns None if transformers has no class with a head for it.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    kind, decodes = type(config), bool(getattr(config, "is_encoder_decoder", False))
    architectures = getattr(config, "architectures", None)
    named = list(map(str, architectures)) if isinstance(architectures, list) else []
    joined = " ".join(named)
    decoder = getattr(config, "is_decoder", False) or "CausalLM" in joined or "LMHead" in joined
    translates = kind in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    # The first of these classes that the family has, unless the config names another.
    heads: tuple[tuple[bool, Any, Any], ...] = (
        (decodes, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, transformers.AutoModelForSeq2SeqLM),
        (decodes, auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING, transformers.AutoModelForSpeechSeq2Seq),
        (not (decoder or translates), auto.MODEL_FOR_MASKED_LM_MAPPING,
         transformers.AutoModelForMaskedLM),
        (True, auto.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM),
        (True, auto.MODEL_FOR_MASKED_LM_MAPPING, transformers.AutoModelForMaskedLM),
        (True, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING, transformers.AutoModelForMultimodalLM),
    )  # fmt: skip
    likely = [(mapping[kind], chosen) for likely, mapping, chosen in heads
              if likely and kind in mapping]  # fmt: skip
    exact = [one for one in likely if getattr(one[0], "__name__", None) in named]
    for _, chosen in (*exact, *likely):
        return decodes and chosen is not transformers.AutoModelForCausalLM, chosen
    return None


def _find_max_positions(config: Any) -> int | None:
    for part in (config, getattr(config, "decoder", None)):
        for name in _POSITIONS:
            value = config_value(part, name)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _note_default_dimensions(
    values: Mapping[str, Any], config: Any, text: Any, read: Collection[str], where: str
) -> Iterator[str]:
    """Yield a note on dimensions that were `read` although the file omits them."""
    inner = values.get("text_config") if text is not config else values
    given = inner if isinstance(inner, dict) else values  # older files have one level
    aliases: Mapping[str, str] = getattr(text, "attribute_map", {})
    named = {aliases.get(name, name) for name in given}
    needed = {aliases.get(name, name) for name in read}
    nested = [one for value in given.values() if isinstance(value, dict) for one in value.values()]
    fields = getattr(type(text), "__dataclass_fields__", {})
    taken = [
        f"{name} {fields[name].default}"
        for name in fields
        if name in needed - named
        and _is_dimension(name, fields[name].default)
        and config_value(text, name) == fields[name].default
        and fields[name].default not in nested  # Kimi Linear's are in linear_attn_config
    ]
    if taken:
        place = f"{where}: text_config" if given is not values else where
        yield (
            f"{place} leaves out dimensions, for which transformers' defaults are used: "
            f"{', '.join(taken)}. If the model has other dimensions, write them into that file."
        )


_DIMENSIONS = ("size", "heads", "layers", "dim", "rank", "experts", "width", "inner", "rate",
               "embeddings", "vocab", "expand", "groups", "n_layer", "n_head", "n_embd", "d_model",
               "d_ff", "d_kv", "per_tok", "topk", "top_k", "state", "kernel", "window",
               "interval", "replace")  # fmt: skip


def _is_dimension(name: str, value: Any) -> bool:
    return type(value) is int and value > 0 and name.endswith(_DIMENSIONS)
