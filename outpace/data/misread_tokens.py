"""Detection of tokens that the author of a text may not have intended."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from outpace.data.tokenizer import Tokenizer

# Fraction of unknown tokens above which to warn; most texts have a few.
_UNKNOWN_SHARE = 0.01
_SHOWN = 3


class MisreadText:
    """Counts of special tokens, unknown tokens, lost characters and NULs in texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._names = {number: name for name, number in tokenizer.special_tokens.items()}
        self._special = np.zeros(tokenizer.vocab_size, dtype=bool)
        self._special[list(self._names)] = True
        self._unknown_id = tokenizer.unknown_id
        self._known = tokenizer.known_characters()
        self._normalizer = tokenizer.inner.normalizer
        self.specials: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.unknown = self.tokens = self.nuls = 0

    def add(self, text: str, ids: "np.ndarray[Any, np.dtype[np.uint32]]") -> None:
        """Update the counts with a text and its ids."""
        self.tokens += len(ids)
        self.nuls += text.count("\0")
        self.specials.update(self._names[int(number)] for number in ids[self._special[ids]])
        if self._unknown_id is not None:
            self.unknown += int((ids == self._unknown_id).sum())
        if self._known is not None:
            if self._normalizer is not None:
                text = self._normalizer.normalize_str(text)
            self.lost.update(sign for sign in text if sign not in self._known)
            for sign in [sign for sign in self.lost if sign.isspace()]:
                del self.lost[sign]


def misread_hints(
    reference: str,
    tokens: int,
    specials: Mapping[str, int],
    unknown: int,
    lost: Mapping[str, int],
    nuls: int = 0,
) -> list[str]:
    """Return hints that describe the counts of a `MisreadText`."""
    hints = []
    if nuls:
        hints.append(
            f"the text of {reference} has {nuls:,} NUL characters, which are trained on "
            "unchanged. They usually come from a file that was truncated or converted wrongly: "
            "check it, or remove them"
        )
    if specials:
        hints.append(
            f"the text of {reference} contains names of special tokens, which are read as those "
            f"tokens: {_list_frequent(specials)}. Write them differently if they are meant as text"
        )
    hints += unknown_hints(f"of {reference}", unknown, tokens)
    if lost:
        hints.append(
            f"the tokenizer has no token for {sum(lost.values()):,} characters of {reference}, "
            f"and none for unknown characters, so they are lost: {_list_frequent(lost)}. Use a "
            "tokenizer that knows them, or a byte-level one"
        )
    return hints


def unknown_hints(of: str, unknown: int, tokens: int) -> list[str]:
    """Return a warning if more than 1 % of the tokens are the unknown token.

    `of` names the data in the warning: "of the data".
    """
    if unknown <= _UNKNOWN_SHARE * tokens:
        return []
    return [
        f"{unknown / tokens:.1%} of the tokens {of} stand for text that the tokenizer does not "
        "know. Is the tokenizer for this language and script?"
    ]


def _list_frequent(counts: Mapping[str, int]) -> str:
    """List the most frequent names with their counts, as in "'</s>' (3 times), '<s>' (once)"."""
    first = Counter(counts).most_common(_SHOWN)
    said = ", ".join(f"{name!r} ({'once' if n == 1 else f'{n:,} times'})" for name, n in first)
    return said + (f" and {len(counts) - _SHOWN} more" if len(counts) > _SHOWN else "")
