"""Byte-level BPE with a cache of words.

A byte-level tokenizer splits a text into words with a regular expression, then merges the bytes of
each word independently of its context. A word seen before therefore needs only a lookup. Here,
Python's `re` splits the texts, because it is several times as fast as the tokenizer's own engine.
It is used only for texts on which both engines are known to agree; the tokenizer encodes all
others.
"""

import json
import re
import threading
import unicodedata
from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import tokenizers

Ids = np.ndarray[Any, np.dtype[np.uint32]]

# The pattern of `tokenizers`' ByteLevel pre-tokenizer (Radford et al. 2019, the code of GPT-2).
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
# Patterns that have been compared with the tokenizers' engine, character by character.
PATTERNS = (_GPT2, _QWEN2, _LLAMA3)
_CLASSES = re.compile(r"\\p\{L\}|\\p\{N\}|\\.|[^\\]")
_MOST_WORDS, _MOST_CHARACTERS = 1 << 20, 64 << 20
_SPACES = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_ASCII_SPACES = "\t\n\x0b\x0c\r "


class Words:
    """Encoder of texts that caches the ids of their words.

    The ids are those of `tokenizers.Tokenizer.encode_batch_fast`.
    """

    def __init__(self, inner: tokenizers.Tokenizer, pattern: str) -> None:
        self._inner = inner
        self._cut_ascii = re.compile(_expand_classes(pattern, "a-zA-Z", "0-9", _ASCII_SPACES))
        self._pattern = pattern
        added = [token.content for token in inner.get_added_tokens_decoder().values()]
        self._added = re.compile("|".join(map(re.escape, added))) if added else None
        self._known: dict[str, bytes] = {}
        self._characters = 0
        self._lock = threading.Lock()

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Return the ids of each text, without adding special tokens."""
        cut = [self._split_words(text) for text in texts]
        left = [text for text, words in zip(texts, cut, strict=True) if words is None]
        others = iter(self._inner.encode_batch_fast(left, add_special_tokens=False))
        with self._lock:  # other threads must not clear the words in the meantime
            self._cache_words(set(chain.from_iterable(words for words in cut if words)))
            find = self._known.__getitem__
            joined = [None if words is None else b"".join(map(find, words)) for words in cut]
        return [
            np.array(next(others).ids, dtype=np.uint32)
            if ids is None
            else np.frombuffer(ids, dtype=np.uint32)
            for ids in joined
        ]

    def _split_words(self, text: str) -> list[str] | None:
        """Split a text into words; return None if the tokenizer itself must encode it."""
        if self._added is not None and self._added.search(text):
            return None
        if text.isascii():
            return self._cut_ascii.findall(text)
        settled = _load_unicode_classes()
        if settled.unsure.search(text):
            return None
        return _compile_unicode_pattern(self._pattern).findall(text)

    def _cache_words(self, words: set[str]) -> None:
        new = list(words - self._known.keys())
        if len(self._known) + len(new) > _MOST_WORDS or self._characters > _MOST_CHARACTERS:
            self._known.clear()
            self._characters = 0
            new = list(words)
        for word, one in zip(
            new, self._inner.encode_batch_fast(new, add_special_tokens=False), strict=True
        ):
            self._known[word] = np.array(one.ids, dtype=np.uint32).tobytes()
            self._characters += len(word)


def words_of(inner: tokenizers.Tokenizer) -> Words | None:
    """Return an encoder that caches words; None if its ids might differ from the tokenizer's."""
    told = json.loads(inner.to_str())
    model = told["model"]
    affixes = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type") != "BPE" or told["normalizer"] or any(model.get(name) for name in affixes):
        return None
    pattern = _read_pattern(told["pre_tokenizer"])
    return Words(inner, pattern) if isinstance(pattern, str) and pattern in PATTERNS else None


def _read_pattern(config: dict[str, Any] | None) -> Any:
    """Return the regular expression by which a pre-tokenizer splits texts.

    Returns None if there is none, or if the pre-tokenizer changes texts or splits them otherwise.
    """
    if config is None:
        return None
    steps = config["pretokenizers"] if config["type"] == "Sequence" else [config]
    last = steps[-1]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return _GPT2 if last["use_regex"] else None
    if len(steps) != 2 or steps[0]["type"] != "Split" or last["use_regex"]:
        return None
    split = steps[0]
    if split["behavior"] != "Isolated" or split["invert"]:
        return None
    return split["pattern"].get("Regex")


def _expand_classes(pattern: str, letters: str, numbers: str, spaces: str) -> str:
    """Replace the character classes in a pattern with explicit characters."""
    inside = False
    parts = []
    for part in _CLASSES.findall(pattern):
        if part in "[]":
            inside = part == "["
        listed = {r"\p{L}": letters, r"\p{N}": numbers, r"\s": spaces}.get(part)
        if listed is not None:
            part = listed if inside else f"[{listed}]"
        elif part == r"\S":
            part = f"[^{spaces}]"
        parts.append(part)
    return "".join(parts)


class _UnicodeClasses:
    """Classes of characters on which Python's `re` and the tokenizer's regular expressions agree.

    The two may use different versions of Unicode, so `letters` and `numbers` have only characters
    whose category has not changed since Unicode 3.2. `unsure` matches all other characters.
    """

    def __init__(self) -> None:
        old, now = unicodedata.ucd_3_2_0.category, unicodedata.category
        letters, numbers, sure = [], [], []
        for code in range(0x10000):
            character = chr(code)
            category = now(character)
            if category in ("Cn", "Cs", "Co"):
                continue
            if category != old(character):
                continue
            sure.append(code)
            if category[0] == "L":
                letters.append(code)
            elif category[0] == "N":
                numbers.append(code)
        self.letters, self.numbers = _format_ranges(letters), _format_ranges(numbers)
        self.unsure = re.compile(f"[^{_format_ranges(sure)}]")


@cache
def _load_unicode_classes() -> _UnicodeClasses:
    return _UnicodeClasses()


@cache
def _compile_unicode_pattern(pattern: str) -> re.Pattern[str]:
    settled = _load_unicode_classes()
    return re.compile(_expand_classes(pattern, settled.letters, settled.numbers, _SPACES))


def _format_ranges(codes: list[int]) -> str:
    return "".join(f"\\u{first:04x}-\\u{last:04x}" for first, last in _find_runs(codes))


def _find_runs(codes: list[int]) -> Iterator[tuple[int, int]]:
    first = last = codes[0]
    for code in codes[1:]:
        if code != last + 1:
            yield first, last
            first = code
        last = code
    yield first, last
