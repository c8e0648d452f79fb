"""Data for timing a loader: all or part of the user's data, as training reads it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import torch
from torch import Tensor
from torch.utils.data import Dataset

from outpace.data.corpus import Corpus
from outpace.data.samples import TokenDataset
from outpace.data.sources import Source, open_source
from outpace.data.stream import Array, MappedTokens, Stream, token_stream
from outpace.data.text import Piece, pieces
from outpace.data.tokenizer import Tokenizer
from outpace.data.tokenizer_training import train_tokenizer
from outpace.records.errors import BadInputError

# Maximum number of characters that a probe reads; training reads all text.
_TAKEN, _FULL_TAKEN = 1 << 21, 1 << 24
# Tokens are repeated to this number, which exceeds a CPU's caches as a real corpus does.
_LEAST_TOKENS = 1 << 24
# Characters on which a tokenizer is trained; more would not change its speed.
_LEARNED_CHARACTERS, _LEARNED_VOCAB = 1 << 20, 8192
_AT_ONCE = 256


@dataclass(frozen=True)
class LoaderData:
    """Data to load, as for `outpace train`, and the sizes of batches.

    Without a `tokenizer`, one is trained on the text. `dataset` is a user's map-style data set,
    which replaces the sources.
    """

    sources: tuple[str, ...] = ("stdlib",)
    text_field: str = "text"
    tokenizer: Tokenizer | None = None
    objective: Literal["causal", "masked"] = "causal"
    document_attention: bool = False
    seq_len: int = 256
    micro_batch: int = 16
    dataset: Any | None = None


@dataclass(frozen=True)
class LoaderInput:
    """Data that loaders read while they are timed.

    `tokens` are loaded as in training. `texts` are what they were encoded from, empty if there are
    no texts. `sample_tokens` is the number of tokens per sample, or None if unknown.
    """

    tokens: Any
    sample_tokens: int | None
    texts: tuple[str, ...] = ()
    tokenizer: Tokenizer | None = None
    as_text: "TextDataset | None" = None
    notes: tuple[str, ...] = ()


def prepare_input(data: LoaderData, folder: Path, quick: bool) -> LoaderInput:
    """Prepare data for loading, writing files to `folder`.

    Raises BadInputError if no source is given or a source does not exist.
    """
    if data.dataset is not None:
        kind, count = type(data.dataset).__name__, len(data.dataset)
        note = f"loader: timed on your own data set, {count} samples of {kind}"
        return LoaderInput(data.dataset, None, notes=(note,))
    if not data.sources:
        raise BadInputError("no data is given; give at least one source")
    sources = [open_source(reference) for reference in data.sources]
    written = [source for source in sources if not source.is_tokens]
    streams = [token_stream(source.files) for source in sources if source.is_tokens]
    tokenizer, texts, notes = data.tokenizer, [], [_sources_note(data.sources)]
    if written:
        limit = (_TAKEN if quick else _FULL_TAKEN) // len(written)
        parts = [
            part for source in written for part in _read_beginning(source, data.text_field, limit)
        ]
        texts = [part.text for part in parts]
        if not texts:
            raise BadInputError(f"the data at {', '.join(data.sources)} holds no text")
        if tokenizer is None:
            tokenizer = _learn_tokenizer(texts, data.objective == "masked")
            notes.append("loader: no tokenizer is given, so one was trained on the data")
        encoded = _encode_in_batches(tokenizer, texts)
        streams.append(_write_tokens(folder / "tokens.bin", parts, encoded, tokenizer))
        notes.append(
            f"loader: the first {sum(map(len, texts)) / 1000000.0:.1f} million characters of "
            "the text were read; training reads their tokens from the token cache"
        )
    dataset = TokenDataset(
        Corpus(tuple(streams), None, "probe"), data.seq_len, objective=data.objective, seed=0,
        document_attention=data.document_attention, tokenizer=tokenizer,
    )  # fmt: skip
    as_text = None
    if written and tokenizer is not None:
        as_text = _make_text_dataset(tokenizer, texts, encoded, data.seq_len)
    return LoaderInput(dataset, data.seq_len, tuple(texts), tokenizer, as_text, tuple(notes))


def _sources_note(sources: tuple[str, ...]) -> str:
    names = ("Python's own source code" if one == "stdlib" else Path(one).name for one in sources)
    return f"loader: timed on {', '.join(names)}"


def _read_beginning(source: Source, text_field: str, limit: int) -> Iterator[Piece]:
    taken = 0
    for piece in pieces(source, text_field):
        yield Piece(piece.text[: limit - taken], piece.first, piece.last, piece.consumed)
        taken += len(piece.text)
        if taken >= limit:
            return


def _learn_tokenizer(texts: list[str], masked: bool) -> Tokenizer:
    taken, left = [], _LEARNED_CHARACTERS
    for text in texts:
        taken.append(text[:left])
        left -= len(text)
        if left <= 0:
            break
    return train_tokenizer(taken, _LEARNED_VOCAB, masked=masked)


def _encode_in_batches(tokenizer: Tokenizer, texts: list[str]) -> list[Array]:
    batches = (texts[n : n + _AT_ONCE] for n in range(0, len(texts), _AT_ONCE))
    return [ids for batch in batches for ids in tokenizer.encode_batch(batch)]


def _write_tokens(
    path: Path, parts: list[Piece], encoded: list[Array], tokenizer: Tokenizer
) -> Stream:
    """Write encoded texts to a file in the format of the token cache, and open it as a stream.

    The tokens are repeated until there are enough for the measurements.
    """
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    starts, ids, length = [], [], 0
    for part, found in zip(parts, encoded, strict=True):
        if part.first:
            starts.append(length)
        ended = np.append(found, tokenizer.eos_id) if part.last else found
        ids.append(ended.astype(dtype))
        length += len(ended)
    once = np.concatenate(ids)
    times = max(1, math.ceil(_LEAST_TOKENS / len(once)))
    with path.open("wb") as file:
        for _ in range(times):
            file.write(once.data)
    total = times * length
    begins = (np.arange(times)[:, None] * length + np.array(starts)).reshape(-1)
    extent = (int(once.min()), int(once.max()))
    return Stream((MappedTokens(path, dtype),), np.array([total]), 0, total, begins, extent)


class TextDataset(Dataset[dict[str, Tensor]]):
    """Texts that are tokenized on access and padded or truncated to `seq_len` tokens.

    `mean_tokens` is the mean number of tokens per text.
    """

    def __init__(
        self, inner: tokenizers.Tokenizer, texts: list[str], seq_len: int, pad_id: int,
        mean_tokens: float,
    ) -> None:  # fmt: skip
        self._inner, self._texts, self._seq_len, self._pad_id = inner, texts, seq_len, pad_id
        self.mean_tokens = mean_tokens

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self._inner.encode(self._texts[index], add_special_tokens=False).ids
        row = torch.full((self._seq_len + 1,), self._pad_id)
        row[: len(ids)] = torch.tensor(ids[: self._seq_len + 1])
        return {"tokens": row[:-1], "targets": row[1:]}


def _make_text_dataset(
    tokenizer: Tokenizer, texts: list[str], encoded: list[Array], seq_len: int
) -> TextDataset:
    """Return a data set of the texts, split into pieces of about `seq_len` tokens."""
    characters = sum(map(len, texts)) / max(1, sum(map(len, encoded)))
    length = max(1, round(characters * seq_len))
    cut = [text[n : n + length] for text in texts for n in range(0, len(text), length)]
    lengths = [min(len(ids), seq_len) for ids in _encode_in_batches(tokenizer, cut)]
    return TextDataset(tokenizer.inner, cut, seq_len, tokenizer.eos_id, float(np.mean(lengths)))
