"""Files and settings that an exported model keeps from its original Hugging Face directory.

Training changes only the weights, so the tokenizer's files, the special ids and the generation
settings stay the same.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.data.tokenizer_files import load_tokenizer
from outpace.records.base import read_object

GENERATION_FILE = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "encoder.json", "vocab.txt",
    "tokenizer.model",
)  # fmt: skip
# Additional files of a tokenizer.
_BESIDE_TOKENIZER = (
    "special_tokens_map.json", "added_tokens.json", "merges.txt", "vocab.bpe", "spiece.model",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_CONFIG_IDS = {"eos_id": "eos_token_id", "bos_id": "bos_token_id", "pad_id": "pad_token_id"}
# Generation settings of transformers that outpace generate ignores, with their neutral values; None
# is always neutral.
_NEUTRAL_SETTINGS = {
    "top_p": 1, "min_p": 0, "top_h": None, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0,
    "repetition_penalty": 1, "no_repeat_ngram_size": 0, "exponential_decay_length_penalty": None,
    "num_beams": 1, "penalty_alpha": None, "guidance_scale": 1, "min_length": 0,
    "min_new_tokens": 0, "stop_strings": None, "bad_words_ids": None, "sequence_bias": None,
    "suppress_tokens": None, "begin_suppress_tokens": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}  # fmt: skip
TokenIds = int | list[int] | None


def tokenizer_writer(source: Path, chat_template: str | None = None) -> Callable[[Path], None]:
    """Return a function that copies a tokenizer's files into a folder.

    Older formats are converted, because other programs can read them only if they know the model's
    type. `chat_template` is the template used in training if the folder has none. Raises
    BadInputError if the tokenizer cannot be read.
    """
    if not all((source / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        found = load_tokenizer(str(source))
        more = {} if chat_template is None else {"chat_template": chat_template}
        return found.replace(found.inner, more).save

    def copy(folder: Path) -> None:
        for name in (*TOKENIZER_FILES, *_BESIDE_TOKENIZER):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        templates = source / "additional_chat_templates"
        if templates.is_dir():
            (folder / templates.name).mkdir()
            for template in filter(Path.is_file, templates.iterdir()):
                shutil.copyfile(template, folder / templates.name / template.name)
        if chat_template is not None:
            path = folder / "tokenizer_config.json"
            config = read_object(path) if path.is_file() else {}
            _write_json(path, {**config, "chat_template": chat_template})

    return copy


def read_token_ids(source: Path, config: Mapping[str, Any]) -> dict[str, TokenIds]:
    """Return the special token IDs of a model directory, by `hf_config`'s argument names.

    `config` holds the values of config.json. IDs that it lacks come from generation_config.json,
    and IDs missing from both are left out.
    """
    generation = _read_generation_config(source)
    found: dict[str, TokenIds] = {}
    for name, key in _CONFIG_IDS.items():
        value = config.get(key) if config.get(key) is not None else generation.get(key)
        if _are_token_ids(value):
            found[name] = value
    return found


def ending_ids(source: Path, config: Mapping[str, Any]) -> set[int]:
    """Return the ids at which transformers stops generation for the model in a directory."""
    found = (config.get("eos_token_id"), _read_generation_config(source).get("eos_token_id"))
    return {one for ids in found if _are_token_ids(ids) for one in _as_list(ids)}


def ignored_generation_settings(source: Path) -> dict[str, Any]:
    """Return the non-neutral settings in generation_config.json that outpace generate ignores."""
    return {
        key: value
        for key, value in _read_generation_config(source).items()
        if key in _NEUTRAL_SETTINGS and value not in (None, [], _NEUTRAL_SETTINGS[key])
    }


def _are_token_ids(value: Any) -> bool:
    return type(value) is int or (
        isinstance(value, list) and bool(value) and all(type(one) is int for one in value)
    )


def append_stop_ids(ids: TokenIds, stops: Sequence[int]) -> TokenIds:
    """Return the token IDs that end a text, followed by those that end an answer."""
    known = ids if isinstance(ids, list) else [] if ids is None else [ids]
    more = [stop for stop in dict.fromkeys(stops) if stop not in known]
    return [*known, *more] if more and (known or len(more) > 1) else more[0] if more else ids


def write_generation_config(folder: Path, config: Any, source: Path | None) -> None:
    """Write generation_config.json as in `source`, with the config's special ids added.

    Without such a file in `source`, transformers derives one from the config.
    """
    from transformers import GenerationConfig

    kept = {} if source is None else _read_generation_config(source)
    if not kept:
        GenerationConfig.from_model_config(config).save_pretrained(str(folder))
        return
    earlier, now = kept.get("eos_token_id"), config.eos_token_id
    ends = [*_as_list(earlier), *(one for one in _as_list(now) if one not in _as_list(earlier))]
    if ends:
        kept["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    for key in ("bos_token_id", "pad_token_id"):
        if kept.get(key) is None and getattr(config, key) is not None:
            kept[key] = getattr(config, key)
    _write_json(folder / GENERATION_FILE, kept)


def _as_list(ids: Any) -> list[int]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _read_generation_config(source: Path) -> dict[str, Any]:
    path = source / GENERATION_FILE
    return read_object(path) if path.is_file() else {}


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
