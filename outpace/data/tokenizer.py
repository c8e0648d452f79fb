"""Tokenizers, with the ids and settings that data and models need."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from outpace.data.interruptible import call_interruptibly
from outpace.data.word_cache import words_of
from outpace.records.errors import BadInputError, excerpt, shorten

END_OF_TEXT = "<|endoftext|>"
MASKED_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LONG_CHARACTERS = 1 << 20  # longer texts take seconds to encode
_MOST_IDS = 1 << 24
# End-of-text tokens of different model families, in order of preference.
END_NAMES = (
    END_OF_TEXT, "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>", "[SEP]", "<|end|>", "<|eot_id|>",
)  # fmt: skip
# Roles of tokens in a Hugging Face directory, with the usual tokens for them.
_ROLES = {
    "bos_token": (), "eos_token": (), "unk_token": ("[UNK]",), "pad_token": ("[PAD]", "<pad>"),
    "cls_token": ("[CLS]",), "sep_token": ("[SEP]",), "mask_token": ("[MASK]", "<mask>"),
}  # fmt: skip
# Other settings of such a directory that a saved copy must keep.
_KEPT = (
    "chat_template", "model_max_length", "padding_side", "clean_up_tokenization_spaces",
    "model_input_names", "additional_special_tokens", "extra_special_tokens", "truncation_side",
    "split_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip
# Roles whose token occurs in the data, so a different token would change the text.
_NEEDED = ("mask_token", "cls_token", "sep_token")


class Tokenizer:
    """A `tokenizers.Tokenizer` with the ids and settings that data and models need.

    `eos_id` ends a document, and `vocab_size` is one more than the largest id. If `cuts_texts` is
    True, texts can be cut between a line break and a letter or digit, or before the space between
    two words, and encoded separately, with the same ids. `chat_template` is the default chat
    template, `chat_templates` holds all of them by name, and `template_file` is their file.
    `config` holds the values of tokenizer_config.json; `save` writes those that a copy needs.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        eos: str | None = None,
        config: Mapping[str, Any] | None = None,
        template_file: Path | None = None,
    ) -> None:
        self.inner = inner
        self.template_file = template_file
        inner.no_truncation()
        inner.no_padding()
        vocab = inner.get_vocab(with_added_tokens=True)
        if not vocab:
            raise BadInputError("the tokenizer has no tokens")
        self.vocab_size = max(vocab.values()) + 1
        if self.vocab_size > _MOST_IDS:  # `tokenizers` would allocate memory for every id
            raise BadInputError(
                f"its ids go up to {self.vocab_size - 1}, with {len(vocab)} tokens; the largest id "
                f"may be {_MOST_IDS - 1}"
            )
        self._vocab = vocab
        self._words = words_of(inner)
        self.cuts_texts = _can_cut_texts(inner)
        if eos is not None and eos not in vocab:
            raise BadInputError(_describe_missing_token("eos_token", eos))
        self.eos_token = eos or next((n for n in END_NAMES if n in vocab), None)
        if self.eos_token is None:
            raise BadInputError(
                "the tokenizer has no end-of-text token; give it one of " + ", ".join(END_NAMES)
            )
        self.eos_id: int = vocab[self.eos_token]
        self._config = dict(config or {})
        self._roles = self._find_roles()
        self.chat_templates = _read_templates(self._config.get("chat_template"))
        self.chat_template = self.chat_templates.get("default")
        self.mask_id, self.pad_id, self.cls_id, self.sep_id = (
            vocab.get(self._roles.get(f"{role}_token", ""))
            for role in ("mask", "pad", "cls", "sep")
        )
        # The end of text is included, since some tokenizers differ only in it.
        self.fingerprint = hashlib.blake2b(
            f"{self.eos_token}\n{inner.to_str()}".encode(), digest_size=16, person=b"outpace-token"
        ).hexdigest()

    def _find_roles(self) -> dict[str, str]:
        found = {"eos_token": str(self.eos_token)}
        for role, usual in _ROLES.items():
            named = token_text(role, self._config)
            if role in _NEEDED and named is not None and named not in self._vocab:
                raise BadInputError(_describe_missing_token(role, named))
            names = (named, *usual)
            known = next((name for name in names if name in self._vocab), None)
            if known is not None:
                found.setdefault(role, known)
        return found

    @cached_property
    def opening_ids(self) -> list[int]:
        """Ids that the tokenizer puts before texts: the bos token, as in Llama, or none."""
        bos = self._vocab.get(self._roles.get("bos_token", ""))
        added: list[int] = self.inner.encode("a").ids
        return added[:1] if added[:1] == [bos] else []

    def missing_opening(self, ids: Iterable[int]) -> list[int]:
        """Return the opening ids, or none if `ids` already begin with them.

        The text of a chat template often begins with them.
        """
        opening = self.opening_ids
        return [] if list(islice(ids, len(opening))) == opening else opening

    @property
    def unknown_id(self) -> int | None:
        """Id of the token for unknown text, or None."""
        name = getattr(self.inner.model, "unk_token", None) or self._roles.get("unk_token")
        return self._vocab.get(name or "")

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens by name, without the unknown token."""
        added = self.inner.get_added_tokens_decoder()
        return {
            token.content: number
            for number, token in added.items()
            if token.special and number != self.unknown_id
        }

    def known_characters(self) -> frozenset[str] | None:
        """Return the characters that have a token, or None if the tokenizer can encode any text.

        Only a BPE that has neither bytes nor an unknown token loses characters without a token.
        """
        told = json.loads(self.inner.to_str())
        model = told["model"]
        bytes_too = model.get("byte_fallback") or "ByteLevel" in json.dumps(
            [told["normalizer"], told["pre_tokenizer"]]
        )
        if model.get("type") != "BPE" or model.get("unk_token") or bytes_too:
            return None
        start, end = (
            model.get(name) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix")
        )
        bare = (name.removeprefix(start).removesuffix(end) for name in self._vocab)
        return frozenset(name for name in bare if len(name) == 1)

    @property
    def truncation_side(self) -> str:
        """The side on which transformers truncates texts that are too long: right or left."""
        return "left" if self._config.get("truncation_side") == "left" else "right"

    @property
    def roles(self) -> dict[str, str]:
        """Special tokens by the name of their role in transformers: eos_token, pad_token, …"""
        return dict(self._roles)

    @property
    def named_tokens(self) -> dict[str, str]:
        """Tokens that a chat template can refer to by name.

        These are the tokens with a role, and model-specific ones from tokenizer_config.json, such
        as image_token.
        """
        own = self._config.get("extra_special_tokens")
        found = {}
        for name, value in {**self._config, **(own if isinstance(own, dict) else {})}.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
        return found | self._roles

    def replace(self, inner: tokenizers.Tokenizer, config: Mapping[str, Any]) -> "Tokenizer":
        """Return a tokenizer of `inner` that has this one's configuration, updated by `config`."""
        return Tokenizer(
            inner, self.eos_token, {**self._config, **config},
            None if "chat_template" in config else self.template_file,
        )  # fmt: skip

    def with_length(self, positions: int) -> "Tokenizer":
        """Return the tokenizer with `model_max_length` set to `positions`, unless already set.

        transformers truncates texts only to this length, and a model fails beyond its positions.
        """
        if "model_max_length" in self._config:
            return self
        return self.replace(self.inner, {"model_max_length": positions})

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without adding special tokens.

        A special token written out in the text (such as `<eos>`) becomes that token's id.
        """
        with _convert_panics():
            if len(text) > _LONG_CHARACTERS:
                (one,) = call_interruptibly(
                    lambda: self.inner.encode_batch_fast([text], add_special_tokens=False)
                )
            else:
                one = self.inner.encode(text, add_special_tokens=False)
        return one.ids

    def encode_batch(self, texts: list[str]) -> list[np.ndarray[Any, np.dtype[np.uint32]]]:
        """Return the ids of each text, equal to those of `encode`."""
        with _convert_panics():
            if self._words is not None:
                return self._words.encode_batch(texts)
            encoded = self.inner.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint32) for one in encoded]

    def decode(self, ids: list[int], *, cut: bool = False) -> str:
        """Return the text of ids, without special tokens.

        With `cut`, the ids may end in the middle of a character, which is then dropped.
        """
        text = str(self.inner.decode(ids, skip_special_tokens=True))
        return text.rstrip("\ufffd") if cut else text

    def save(self, directory: Path) -> None:
        """Write a Hugging Face tokenizer directory that AutoTokenizer can load."""
        directory.mkdir(parents=True, exist_ok=True)
        self.inner.save(str(directory / "tokenizer.json"))
        kept = {name: self._config[name] for name in _KEPT if name in self._config}
        own = {name: token for name, token in self.named_tokens.items() if token in self._vocab}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **own, **kept}
        _write_json(directory / "tokenizer_config.json", config)
        _write_json(directory / "special_tokens_map.json", self._roles)


def _describe_missing_token(role: str, token: str) -> str:
    return (
        f"its {role} {token!r} is not in its vocabulary. Name another token in "
        "tokenizer_config.json, or add the token to tokenizer.json."
    )


def _read_templates(chat_template: Any) -> dict[str, str]:
    if chat_template is None:
        return {}
    if isinstance(chat_template, str):
        return {"default": chat_template}
    found = {}
    for one in chat_template if isinstance(chat_template, list) else (None,):
        name, text = (
            (one.get("name"), one.get("template")) if isinstance(one, dict) else (None,) * 2
        )
        if not isinstance(name, str) or not isinstance(text, str):
            raise BadInputError(
                f"its chat_template is {excerpt(chat_template)}; it must be a string, or a list of "
                "templates with name and template"
            )
        found[name] = text
    return found


# Normalizers that never look across a line break.
_LOCAL_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "BertNormalizer"})
# Line and word boundaries between all kinds of characters that pre-tokenizers distinguish.
_BORDERS = (
    (("word\n", "it's.\n", "12\n", "Ж—\n", "}\n"), ("word", "7", "Été", "中")),
    (("word", "it's", "Ж", "中"), (" word", " Été", " 中")),
)


def _can_cut_texts(inner: tokenizers.Tokenizer) -> bool:
    told = json.loads(inner.to_str())["normalizer"]
    steps = told["normalizers"] if told and told["type"] == "Sequence" else [told] if told else []
    if any(step["type"] not in _LOCAL_NORMALIZERS for step in steps) or not inner.pre_tokenizer:
        return False
    if any(len(token.content.split()) > 1 for token in inner.get_added_tokens_decoder().values()):
        return False
    cut = inner.pre_tokenizer.pre_tokenize_str
    return all(
        [word for word, _ in cut(end + beginning)]
        == [word for part in (end, beginning) for word, _ in cut(part)]
        for ends, beginnings in _BORDERS
        for end in ends
        for beginning in beginnings
    )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a Rust panic in `tokenizers`, whose exception class is private."""
    return type(error).__name__ == "PanicException"


@contextmanager
def _convert_panics() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise BadInputError(
            f"the tokenizer fails on a text of the data: {shorten(str(error), 300)}. A pattern of "
            "its pre-tokenizer or normalizer does not terminate on it: look for a very long "
            "word, or use another tokenizer."
        ) from None


def token_text(role: str, config: Mapping[str, Any]) -> str | None:
    """Return the text of the token for a role such as "bos_token"; None if there is none.

    The config stores it as a string or as a dict of properties. Raises BadInputError for other
    values.
    """
    token = config.get(role)
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise BadInputError(f"its {role} is {excerpt(token)}; it must be the token's text")
    return text
