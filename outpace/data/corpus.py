"""Corpus: one split of the sources, tokenized and memory-mapped."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash

from outpace.data.hashes import cached_fingerprint, remembered_extent
from outpace.data.index import Index
from outpace.data.markup import markup_hints
from outpace.data.misread_tokens import misread_hints
from outpace.data.order import block_size_for
from outpace.data.shards import Progress, ensure_entry, entry_path, split_of_document
from outpace.data.sources import Source, open_source, unread_split_hints
from outpace.data.stream import Stream, cached_stream, token_stream
from outpace.data.text import pieces
from outpace.data.tokenizer import Tokenizer
from outpace.records.errors import BadInputError

Split = Literal["train", "validation", "all"]


@dataclass(frozen=True)
class Corpus:
    """One split of one or more sources.

    Samples are mixed by `weights`, or in proportion to the sources' sizes if it is None.
    """

    streams: tuple[Stream, ...]
    weights: tuple[float, ...] | None
    fingerprint: str
    hints: tuple[str, ...] = ()

    @property
    def vocab_needed(self) -> int:
        """Vocabulary size that covers all token ids."""
        return 1 + max(stream.largest() for stream in self.streams)


def _ignore_progress(what: str, done: int, total: int | None) -> None:
    pass


def prepare(
    sources: tuple[str, ...],
    *,
    weights: tuple[float, ...] | None,
    text_field: str,
    tokenizer: Tokenizer | None,
    cache_dir: Path,
    split: Split,
    eval_fraction: float,
    processes: int,
    progress: Progress = _ignore_progress,
) -> Corpus:
    """Tokenize sources that are not cached yet, and open all of them.

    `tokenizer` may be None if all sources are already tokenized. Raises BadInputError for missing,
    empty, undecodable or damaged data, and for weights that do not match the sources.
    """
    _check_weights(sources, weights)
    streams, hashes = [], []
    hints: list[str] = []
    written: set[str] = set()
    unknown = 0
    for reference in sources:
        source = open_source(reference)
        content = cached_fingerprint(source, text_field, cache_dir)
        hashes.append(content)
        hints += (*source.hints, *markup_hints(source))
        hints += unread_split_hints(source) if split != "all" else ()
        if source.is_tokens:
            whole = _open_tokens(source, content, cache_dir)
            streams.append(whole if split == "all" else _split_tail(whole, split, eval_fraction))
            continue
        if tokenizer is None:
            raise BadInputError(f"{reference} is text, which needs a tokenizer")
        fraction = 0.0 if split == "all" else eval_fraction
        entry = entry_path(cache_dir, content, tokenizer, fraction, text_field)
        index = ensure_entry(entry, source, tokenizer, text_field, fraction, processes, progress)
        told = index.misread
        written |= set(told.specials)
        unknown += told.unknown
        total = sum(part.tokens for part in index.splits.values())
        hints += misread_hints(reference, total, told.specials, told.unknown, told.lost, told.nuls)
        streams.append(_select_split(entry, index, split, eval_fraction))
    for reference, stream in zip(sources, streams, strict=True):
        if len(stream) == 0 and split == "all":
            raise BadInputError(f"the data at {reference} holds no text")
        if len(stream) == 0:
            raise BadInputError(
                f"the data at {reference} is too small to divide into training and validation "
                "data. Give more, or name validation data with --eval-data."
            )
    name = tokenizer.fingerprint if tokenizer else "tokens"
    if tokenizer and tokenizer.opening_ids:
        # Older versions prepended the opening token even to texts that already began with it.
        ids = tokenizer.opening_ids
        opening = {token for token, number in tokenizer.special_tokens.items() if number in ids}
        absent = bool(opening) and opening.isdisjoint(written)
        if ids == [tokenizer.unknown_id]:  # as in OPT: counted as unknown in texts
            absent = unknown == 0
        name += "|opened" if absent else "|opened once"
    joined = "|".join([*hashes, name, split, repr(eval_fraction), repr(weights)])
    key = xxhash.xxh3_128_hexdigest(joined.encode())
    return Corpus(tuple(streams), weights, key, tuple(hints))


def _check_weights(sources: tuple[str, ...], weights: tuple[float, ...] | None) -> None:
    if not sources:
        raise BadInputError("no data is named; give at least one source")
    if weights is None:
        return
    if len(weights) != len(sources):
        raise BadInputError(f"there are {len(weights)} weights for {len(sources)} sources")
    if not all(0 < weight < math.inf for weight in weights):
        raise BadInputError(f"weights must be above 0 and finite, not {weights}")
    block_size_for(weights)


def _select_split(entry: Path, index: Index, split: Split, eval_fraction: float) -> Stream:
    """Return a split of a cache entry.

    The split is made by document hash. If that does not come close to `eval_fraction`, as with few
    documents, the last tokens are held out instead.
    """
    train = cached_stream(entry, index, "train")
    held_out = cached_stream(entry, index, "validation")
    if split == "all":
        return train
    share = len(held_out) / max(1, len(train) + len(held_out))
    if eval_fraction / 2 <= share <= min(2 * eval_fraction, (1 + eval_fraction) / 2):
        return held_out if split == "validation" else train
    return _split_tail(train.concatenate(held_out), split, eval_fraction)


def _split_tail(whole: Stream, split: Split, eval_fraction: float) -> Stream:
    border = round(len(whole) * (1 - eval_fraction))
    return whole.cut(0, border) if split == "train" else whole.cut(border, len(whole))


def _open_tokens(source: Source, content: str, cache_dir: Path) -> Stream:
    whole = token_stream(source.files)
    extent = remembered_extent(content, whole, cache_dir)
    if extent[0] < 0:
        raise BadInputError(f"{source.reference} has the token id {extent[0]}; ids begin at 0")
    return replace(whole, extent=extent)


def is_tokens(reference: str) -> bool:
    """Return whether a source is already tokenized."""
    return open_source(reference).is_tokens


def content_fingerprint(sources: tuple[str, ...], text_field: str, cache_dir: Path) -> str:
    """Return a hash of the contents of all sources."""
    parts = [cached_fingerprint(open_source(s), text_field, cache_dir) for s in sources]
    return xxhash.xxh3_128_hexdigest("|".join(parts).encode())


def read_documents(
    sources: tuple[str, ...], text_field: str, split: Split, eval_fraction: float
) -> Iterator[str]:
    """Yield the texts of a split for training a tokenizer, with long documents in pieces.

    The texts of all sources are interleaved: wherever reading ends, each source has contributed
    about as many characters. Sources of tokens are left out. If no document belongs to the split,
    all documents are used.
    """
    opened = [open_source(reference) for reference in sources]
    written = [source for source in opened if not source.is_tokens]
    for wanted in dict.fromkeys((split, "all")):
        none = True
        turns = [_read_split_texts(source, text_field, wanted, eval_fraction) for source in written]
        for text in _interleave(turns):
            none = False
            yield text
        if not none:
            return


def _interleave(streams: Sequence[Iterator[str]]) -> Iterator[str]:
    """Interleave texts: each comes from the stream with the fewest characters so far."""
    given = dict.fromkeys(range(len(streams)), 0)
    while given:
        least = min(given, key=lambda k: (given[k], k))
        text = next(streams[least], None)
        if text is None:
            del given[least]
            continue
        given[least] += len(text)
        yield text


def _read_split_texts(
    source: Source, text_field: str, split: str, eval_fraction: float
) -> Iterator[str]:
    wanted = True
    for piece in pieces(source, text_field):
        if piece.first and split != "all":
            wanted = split_of_document(piece.text, eval_fraction) == split
        if wanted:
            yield piece.text


def unigram_entropy(corpus: Corpus) -> float:
    """Return the entropy of the token frequencies in nats, the loss of the best unigram model.

    The sources of a mixture are weighted as in its loss.
    """
    weights = corpus.weights or tuple(len(stream) for stream in corpus.streams)
    shares = np.zeros(corpus.vocab_needed)
    for weight, stream in zip(weights, corpus.streams, strict=True):
        counts = np.zeros(len(shares), dtype=np.int64)
        for block in stream.blocks():
            counts += np.bincount(block, minlength=len(shares))
        shares += counts * (weight / sum(weights) / len(stream))
    shares = shares[shares > 0]
    return float(-(shares * np.log(shares)).sum())
