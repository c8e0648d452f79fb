"""Detection of tokens whose rows in the embedding and the head were never trained.

Base models have rows for tokens that did not occur in pretraining, such as those of a chat
template. These rows are zero or all the same, and adapters change neither matrix. A model trained
on conversations with adapters can therefore neither distinguish these tokens nor learn to end an
answer with one.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outpace.data.padded_batches import RaggedSamples
from outpace.data.tokenizer import Tokenizer
from outpace.interop.weights import read_token_rows
from outpace.records.errors import first_names

_CHUNK = 1 << 20  # tokens that are read at a time


def untrained_token_hints(
    directory: Path, tokenizer: Tokenizer, parts: Sequence[RaggedSamples]
) -> list[str]:
    """Return a hint about tokens in the samples on which the base model was never trained."""
    added = {number: token.content for number, token in _added_tokens(tokenizer).items()}
    found = find_untrained(directory, _find_used_tokens(parts, added.keys()), added.keys())
    if not found:
        return []
    names = first_names([repr(added[number]) for number in sorted(found)])
    return [
        "adapters train neither the embedding nor the head, whose rows for these tokens of the "
        f"conversations were never trained: {names}. These rows are zero or all the same, so the "
        "model barely learns to write such a token, for example to end an answer. Start from an "
        "instruct model, train all weights (without --lora-rank), or use a chat template of "
        "plain text"
    ]


def _find_used_tokens(parts: Sequence[RaggedSamples], token_ids: Collection[int]) -> set[int]:
    is_used = np.zeros(max(token_ids, default=0) + 1, bool)
    for values in (part.values[name] for part in parts for name in ("tokens", "targets")):
        for begin in range(0, len(values), _CHUNK):
            chunk = values[begin : begin + _CHUNK]
            is_used[chunk[(chunk >= 0) & (chunk < len(is_used))]] = True
    return {number for number in token_ids if is_used[number]}


def find_untrained(
    directory: Path, token_ids: Collection[int], known_ids: Collection[int]
) -> set[int]:
    """Return which of the tokens have a row of zeros, or the same row as another known token."""
    if not token_ids:
        return set()
    numbers = sorted(known_ids)
    found: set[int] = set()
    for rows in read_token_rows(directory, numbers):
        shown = [row.numpy().tobytes() for row in rows]
        found |= {
            number
            for number, row, bits in zip(numbers, rows, shown, strict=False)
            if number in token_ids and (not bool(row.any()) or shown.count(bits) > 1)
        }
    return found


def _added_tokens(tokenizer: Tokenizer) -> dict[int, Any]:
    found: dict[int, Any] = tokenizer.inner.get_added_tokens_decoder()
    return found
