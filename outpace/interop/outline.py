"""Conversion of a Hugging Face config.json to an Outline, the input of planning.

Each architecture has a small reader. The dimensions are those of the model that transformers
builds.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from outpace.interop.config import (
    CONFIG_FILE,
    OWN_TYPE,
    SAME_LAYERS,
    DimensionsError,
    load_config,
    no_model_type,
    read_config,
    spec_from_config,
    spec_from_hf,
)
from outpace.interop.config_check import ReadValues, format_missing_dimensions, read_type
from outpace.interop.config_notes import reading_notes
from outpace.interop.outline_readers import READERS, ConfigValues
from outpace.interop.transformers_build import can_build, transformers_version
from outpace.planner.model.outline import outline
from outpace.records.base import explain
from outpace.records.errors import BadInputError, excerpt
from outpace.records.model import ModelSpec
from outpace.records.model_families import FAMILIES
from outpace.records.outline import Outline


def needs_trace(directory: Path) -> bool:
    """Return whether only a trace can give an outline of the model in a directory.

    This is so if transformers can build the model but outpace cannot read its config.
    """
    model_type = read_type(read_config(directory))
    return can_build(model_type) and model_type not in READERS


def read_outline_and_spec(directory: Path) -> tuple[Outline, ModelSpec | None]:
    """Return the outline of a Hugging Face directory, and its spec if outpace can train the model.

    Raises BadInputError for an unknown architecture or impossible dimensions.
    """
    where = str(directory / CONFIG_FILE)
    values = read_config(directory)
    model_type = read_type(values)
    if model_type == OWN_TYPE:
        own = spec_from_hf(directory)
        return outline(own, directory.name), own
    if not isinstance(model_type, str):
        raise no_model_type(values, where)
    family = SAME_LAYERS.get(model_type, model_type)
    if family not in READERS:
        raise _unknown_architecture_error(model_type, where)
    values = {**values, "model_type": family}
    if family != model_type and isinstance(values.get("architectures"), list):
        stem = model_type.replace("_", "")
        other = [one for one in values["architectures"] if not str(one).lower().startswith(stem)]
        values["architectures"] = other
    config = ReadValues(load_config(directory, values, strict=family in FAMILIES))
    _restore_tied_embeddings(config, values, where)
    try:
        found, spec = _outline_from_config(config, where)
    except DimensionsError as error:
        raise BadInputError(f"{error}{format_missing_dimensions(values)}") from None
    notes = reading_notes(values, config, where, planned=True)
    if family != model_type:
        notes = (
            f"{where}: {model_type} is read as {family}, since it has the same layers.",
            *notes,
        )
    return found.model_copy(update={"name": directory.name, "notes": notes}), spec


def outline_from_config(config: Any, where: str) -> Outline:
    """Return the outline of a `transformers` config.

    Raises BadInputError if its architecture is not supported.
    """
    if config.model_type not in READERS:
        raise _unknown_architecture_error(config.model_type, where)
    return _outline_from_config(config, where)[0]


def _restore_tied_embeddings(config: ReadValues, values: Mapping[str, Any], where: str) -> None:
    """Apply the file's tie_word_embeddings, because transformers 5 would tie the head of every T5.

    Raises BadInputError if the config and its text_config differ, because programs disagree on
    which one applies.
    """
    tied, text = values.get("tie_word_embeddings"), values.get("text_config")
    inner = text.get("tie_word_embeddings") if isinstance(text, dict) else None
    if isinstance(tied, bool) and isinstance(inner, bool) and tied != inner:
        raise BadInputError(
            f"{where}: tie_word_embeddings is {str(tied).lower()}, but {str(inner).lower()} in "
            "text_config. Remove the one that is wrong: if the head is tied, the model's files "
            "have no lm_head."
        )
    if isinstance(tied, bool):
        for part in (config.config, getattr(config.config, "text_config", None)):
            if part is not None:
                part.tie_word_embeddings = tied


def _unknown_architecture_error(model_type: str, where: str) -> BadInputError:
    library = transformers_version()
    more = (
        f", nor does transformers {library} (a newer version may)"
        if library is not None
        else " without transformers, which supports more"
    )
    return BadInputError(
        f"{where}: outpace does not support the architecture {excerpt(model_type)}{more}. "
        f"Supported: {', '.join(READERS)}. Any other model can be traced, through a Python "
        "function that builds it: --model file.py:build."
    )


def _outline_from_config(config: Any, where: str) -> tuple[Outline, ModelSpec | None]:
    family, why = config.model_type, None
    if family in FAMILIES:
        try:
            spec = spec_from_config(config, where)
            named = outline(spec, family).model_copy(update={"source": where})
            return named, spec
        except BadInputError as error:  # a model that outpace cannot train can still be planned
            why = str(error)
    label, reader = READERS[family]
    try:
        values = reader(ConfigValues(config, where))
        found = Outline(
            name=family, source=where, untrained=why or f"outpace has no {label}", **values
        )
    except ValidationError as error:
        raise DimensionsError(explain(error, where, Outline.model_fields)) from None
    return found, None
