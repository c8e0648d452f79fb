"""Tokens that a tokenizer's folder defines outside tokenizer.json.

tokenizer_config.json may define tokens that tokenizer.json lacks or change the properties of
existing ones, and older folders have added_tokens.json. transformers adds all of these tokens. To
get the same ids, outpace adds them too.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from outpace.records.base import read_object
from outpace.records.errors import BadInputError, excerpt

ADDED_TOKENS_FILE = "added_tokens.json"
_NAMED = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip

_DISPENSABLE = ("bos_token", "unk_token", "pad_token")


def add_tokens(inner: tokenizers.Tokenizer, config: Mapping[str, Any], folder: Path) -> None:
    """Add the tokens that `folder` defines outside tokenizer.json, in transformers' order.

    `config` holds the values of the folder's tokenizer_config.json and special_tokens_map.json.
    Raises BadInputError if a token would get an id other than the one that the folder specifies.
    """
    _require_ids(inner, _read_stored_ids(folder / "tokenizer.json"), folder / "tokenizer.json")
    listed = _read_numbered_tokens(config, folder)
    stored = inner.get_added_tokens_decoder().values()
    known = {repr(token) for token in stored}
    tokens = [token for _, token in sorted(listed.items(), key=lambda pair: pair[0])]
    inner.add_tokens([token for token in tokens if repr(token) not in known])
    vocabulary = inner.get_vocab(with_added_tokens=True)
    # Special tokens that already exist keep their properties.
    alike = {token.content: token for token in inner.get_added_tokens_decoder().values()}
    extra = [alike.get(token.content, token) for token in _extra_special_tokens(config)]
    # A missing bos, unk or pad token is added only if new tokens follow it, because their ids
    # depend on it. For other roles, `Tokenizer` raises an error.
    behind = any(token.content not in vocabulary for token in extra)
    named = [
        alike.get(token.content, token)
        for role in _NAMED
        if (token := _make_special_token(config.get(role))) is not None
        and (token.content in vocabulary or (behind and role in _DISPENSABLE))
    ]
    inner.add_special_tokens([*named, *extra])
    where = folder / ("tokenizer_config.json" if _has_token_list(config) else ADDED_TOKENS_FILE)
    _require_ids(inner, {token.content: number for number, token in listed.items()}, where)


def _has_token_list(config: Mapping[str, Any]) -> bool:
    return isinstance(config.get("added_tokens_decoder"), dict)


def _read_numbered_tokens(config: Mapping[str, Any], folder: Path) -> dict[int, AddedToken]:
    path = folder / ADDED_TOKENS_FILE
    try:
        if _has_token_list(config):
            told = config["added_tokens_decoder"]
            return {int(number): AddedToken(**token) for number, token in told.items()}
        if not path.is_file():
            return {}
        special = {token.content for token in _extra_special_tokens(config)}
        special |= {
            t.content for role in _NAMED if (t := _make_special_token(config.get(role))) is not None
        }
        return {
            int(number): AddedToken(name, normalized=name not in special, special=name in special)
            for name, number in read_object(path).items()
        }
    except (TypeError, ValueError, AttributeError) as error:
        raise BadInputError(f"its added tokens cannot be read: {error}") from None


def _extra_special_tokens(config: Mapping[str, Any]) -> list[AddedToken]:
    told = config.get("extra_special_tokens")
    older = config.get("additional_special_tokens")
    lists: list[Any] = [list(told.values()), older] if isinstance(told, dict) else [told or older]
    values = [value for part in lists if isinstance(part, list) for value in part]
    return [token for value in values if (token := _make_special_token(value)) is not None]


def _make_special_token(value: Any) -> AddedToken | None:
    if isinstance(value, str) and value:
        return AddedToken(value, special=True, normalized=False)
    if isinstance(value, dict) and isinstance(value.get("content"), str) and value["content"]:
        names = ("single_word", "lstrip", "rstrip", "normalized")
        flags = {name: value[name] for name in names if isinstance(value.get(name), bool)}
        return AddedToken(value["content"], special=True, **flags)
    return None


def _read_stored_ids(path: Path) -> dict[str, int]:
    """Return the ids that tokenizer.json gives its added tokens; loading may renumber them."""
    text = path.read_text(encoding="utf-8")
    begin = text.find("[", text.find('"added_tokens"'))
    if '"added_tokens"' not in text or begin < 0:
        return {}
    try:
        found: Iterable[Any] = json.JSONDecoder().raw_decode(text, begin)[0]
    except ValueError:
        return {}
    return {
        token["content"]: token["id"]
        for token in found
        if isinstance(token, dict) and isinstance(token.get("id"), int) and token.get("content")
    }


def _require_ids(inner: tokenizers.Tokenizer, wanted: Mapping[str, int], where: Path) -> None:
    for name, number in wanted.items():
        found = inner.token_to_id(name)
        if found != number:
            raise BadInputError(
                f"{where} gives the token {excerpt(name)} the id {number}, but the tokenizer "
                f"{'does not have it' if found is None else f'gives it {found}'}: ids of added "
                "tokens follow those before them, without a gap. Correct the ids, or fetch the "
                "folder again from the tokenizer's source."
            )
