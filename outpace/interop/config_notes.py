"""Notes on how outpace reads a config.json, such as defaults, ignored keys and ignored dropouts."""

from collections.abc import Mapping
from typing import Any

from outpace.interop.config_check import (
    ReadValues,
    changes_model,
    config_parts,
    show_pairs,
    unknown_keys,
)
from outpace.records.errors import shorten
from outpace.records.model_families import FAMILY_TRAITS

# Keys that transformers converts before building a model, or writes redundantly.
_TURNED = frozenset(
    """
    rotary_pct rotary_emb_base rope_local_base_freq sliding_window_pattern head_dim n_embed
    num_local_experts qk_head_dim
    """.split()  # noqa: SIM905
)
# Keys for the number of multi-token prediction layers, by architecture.
_FUTURE_TOKENS = (
    "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers",
)  # fmt: skip


def reading_notes(
    values: Mapping[str, Any], read: ReadValues, where: str, *, planned: bool = False
) -> tuple[str, ...]:
    """Return notes on how outpace interprets a config.json.

    The notes name dimensions that were `read` although the file omits them, so transformers'
    defaults apply. They also name keys that the model_type does not have, and differing dropouts of
    GPT-2 and BERT, which outpace ignores. If `planned` is set, the model is only planned for: the
    notes then name its features that plans ignore, and fewer unknown keys.
    """
    notes: list[str] = []
    inner = read.inner("text_config")
    for part, kind, place in config_parts(values, where):
        seen = inner if place != where and inner is not None else read
        notes += (
            _note_default_dimensions(part, seen, place) if inner is None or place != where else []
        )
        notes += _note_ignored_keys(part, kind, seen, place, every=not planned)
    notes += _note_ignored_dropouts(read.config, where)
    if not planned:
        notes += _note_custom_code(values, where)
    else:
        notes += _note_unplanned_features(values, where)
    return tuple(notes)


def _note_default_dimensions(values: Mapping[str, Any], read: ReadValues, where: str) -> list[str]:
    config = read.config
    aliases: Mapping[str, str] = getattr(config, "attribute_map", {})
    given = {aliases.get(name, name) for name in values}
    fields = getattr(type(config), "__dataclass_fields__", {})
    usual = {name: getattr(fields[name], "default", None) for name in fields}
    read_names = {aliases.get(name, name) for name in read.names} - given
    names = [name for name in fields if name in read_names]
    taken = [
        f"{name} {usual[name]}"
        for name in names
        if isinstance(usual.get(name), int)
        and not isinstance(usual[name], bool)
        and getattr(config, name, None) == usual[name]
    ]
    if not taken:
        return []
    return [
        f"{where} leaves out dimensions, for which transformers' defaults are used: "
        f"{', '.join(taken)}. If the model has other dimensions, write them into that file."
    ]


def _note_ignored_keys(
    values: Mapping[str, Any], kind: Any, read: ReadValues, where: str, *, every: bool
) -> list[str]:
    """Return a note on the file's keys that the config class does not have.

    It names all of them if `every` is set, otherwise only those that may change the layers.
    """
    names = [
        name
        for name in unknown_keys(values, kind)
        if name not in read.names
        and name not in (*_TURNED, *_FUTURE_TOKENS)
        and (every or changes_model(name, values))
    ]
    if not names:
        return []
    return [
        f"{where} has {show_pairs(values, names)}, which transformers' {kind.model_type} does not "
        "read; nor does outpace."
    ]


def _note_ignored_dropouts(config: Any, where: str) -> list[str]:
    traits = FAMILY_TRAITS.get(config.model_type)
    names = () if traits is None else (*traits.dropouts, "classifier_dropout")
    found = {name: value for name in names if (value := getattr(config, name, None)) is not None}
    if len(set(found.values())) <= 1:
        return []
    first, *others = found.items()
    differing = " and ".join(f"{name} {value:g}" for name, value in others if value != first[1])
    return [
        f"{where}: {first[0]} {first[1]:g} is used for all of the model's dropouts, including "
        f"those of the exported model; {differing} {'is' if ' and ' not in differing else 'are'} "
        "ignored. --dropout sets another value."
    ]


def _note_custom_code(values: Mapping[str, Any], where: str) -> list[str]:
    named = values.get("auto_map")
    classes = [str(value) for key, value in named.items() if "Model" in str(key)] if isinstance(
        named, dict
    ) else []  # fmt: skip
    if not classes:
        return []
    return [
        f"{where}: auto_map names custom code of the model ({shorten(classes[0], 60)}), which "
        f"outpace does not run: the layers are those of transformers' {values['model_type']}."
    ]


def _note_unplanned_features(values: Mapping[str, Any], where: str) -> list[str]:
    notes = []
    quantized = values.get("quantization_config")
    if isinstance(quantized, dict):
        kind = shorten(str(quantized.get("quant_method", "quantized")), 40)
        notes.append(
            f"{where}: the weights are stored in {kind} (quantization_config). The plan assumes "
            "that they are converted to its precision before training."
        )
    for part, _, place in config_parts(values, where):
        for name in _FUTURE_TOKENS:
            layers = part.get(name)
            if isinstance(layers, int) and layers > 0:
                notes.append(
                    f"{place}: the layers for predicting further tokens ({name} {layers}) are not "
                    "included in plans; add their parameters, time and memory."
                )
    return notes
