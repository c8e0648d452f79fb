"""Data set of fixed-length samples from a corpus."""

import copy
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from outpace.data.corpus import Corpus
from outpace.data.order import Index, block_counts, block_size_for, mixture_at, samples_at
from outpace.data.stream import Array
from outpace.data.tokenizer import Tokenizer
from outpace.records.errors import BadInputError

IGNORED = -100
# Devlin et al. 2019, §3.1: of the 15 % to predict, 80 % are masked and 10 % replaced at random.
PREDICTED, _MASKED, _REPLACED = 0.15, 0.8, 0.1

FILLER = -1  # stream number of a filler sample
# A sample's location and its position in training.
Key = tuple[int, int, int]  # stream, sample within it, position since the start of training
Batch = dict[str, torch.Tensor]


class TokenDataset(Dataset[Batch]):
    """Data set of token samples: sample i of a stream covers its tokens i·S to i·S + S, inclusive.

    The last of these tokens is only a target. `locate` returns the keys of the samples at training
    positions, and `__getitems__` their batch: `tokens` and `targets`, (B, S) int64, and with
    `document_attention` also `documents`, (B, S) int32. Raises BadInputError if a source has less
    than one sample; `part` names the data in messages.
    """

    def __init__(
        self,
        corpus: Corpus,
        seq_len: int,
        *,
        objective: Literal["causal", "masked"],
        seed: int,
        document_attention: bool,
        tokenizer: Tokenizer | None,
        part: str = "",
    ) -> None:
        self._streams = corpus.streams
        self._seq_len = seq_len
        self._seed = seed
        self._document_attention = document_attention
        self._eos_id = None if tokenizer is None else tokenizer.eos_id
        recorded = all(stream.document_starts is not None for stream in corpus.streams)
        if document_attention and not recorded and tokenizer is None:
            raise BadInputError(
                "attention cannot be kept inside documents: a nanoGPT .bin does not record where "
                "they begin. Name the --tokenizer whose end-of-text token is between them, or "
                "leave --document-attention out."
            )
        self._mask = None if objective == "causal" else _TokenMasking(tokenizer)
        self._sizes = tuple((len(stream) - 1) // seq_len for stream in self._streams)
        for stream, size in zip(self._streams, self._sizes, strict=True):
            if size < 1:
                raise BadInputError(
                    f"the data{part} has {len(stream)} tokens, which is less than one sample of "
                    f"{seq_len} + 1. Give more data or a shorter --seq-len."
                )
        self._counts = None
        if corpus.weights is not None:
            self._counts = block_counts(corpus.weights, block_size_for(corpus.weights))
        self._most: int | None = None
        self._once_in = 1

    def __len__(self) -> int:
        if self._most is not None:
            return -(-self._most // self._once_in) * self._once_in
        return sum(self._sizes)

    @property
    def seq_len(self) -> int:
        """Number of tokens per sample."""
        return self._seq_len

    @property
    def left_over_tokens(self) -> int:
        """Number of targets after the last whole sample of each source, which are not used."""
        targets = sum(len(stream) - 1 for stream in self._streams)
        return targets - sum(self._sizes) * self._seq_len

    def single_pass(self, most: int, batch: int) -> "TokenDataset":
        """Return a data set of the first `most` samples, once each, in batches of `batch`.

        Samples without targets fill up the last batch, so a mean over all targets does not depend
        on the batch size. A weighted mixture keeps its proportions and its number of samples, so
        samples of a small source may repeat.
        """
        found = copy.copy(self)
        found._most, found._once_in = min(most, len(self)), batch
        return found

    def passes(self, samples: int) -> tuple[float, ...]:
        """Return the number of passes over each source for a number of training samples."""
        if self._counts is None:
            return (samples / len(self),) * len(self._sizes)
        whole = sum(self._counts)
        return tuple(
            samples * count / whole / size
            for count, size in zip(self._counts, self._sizes, strict=True)
        )

    def locate(self, seed: int, positions: Index) -> list[Key]:
        """Return the key of the sample at each position since the start of training."""
        if self._counts is None:
            flat = samples_at(seed, positions, sum(self._sizes))
            borders = np.cumsum(self._sizes)
            source = np.searchsorted(borders, flat, side="right")
            index = flat - np.concatenate(([0], borders))[source]
        else:
            source, rank = mixture_at(seed, positions, self._counts)
            index = np.empty_like(rank)
            for k, size in enumerate(self._sizes):
                chosen = source == k
                index[chosen] = samples_at(seed + k + 1, rank[chosen], size)
        if self._most is not None:
            source[positions >= self._most] = FILLER
        keys = zip(source.tolist(), index.tolist(), positions.tolist(), strict=True)
        return [(int(s), int(i), int(p)) for s, i, p in keys]

    def __getitem__(self, index: int) -> Batch:
        """Return a sample by its index over all streams, as tensors of shape (S,)."""
        borders = np.cumsum(self._sizes)
        source = int(np.searchsorted(borders, index, side="right"))
        first = int(borders[source - 1]) if source else 0
        batch = self.__getitems__([(source, index - first, index)])
        return {name: tensor[0] for name, tensor in batch.items()}

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        """Return the batch of samples at `keys`; FILLER samples have no targets."""
        filled = [row for row, (source, _, _) in enumerate(keys) if source == FILLER]
        keys = [(0, 0, p) if source == FILLER else (source, i, p) for source, i, p in keys]
        length = self._seq_len
        rows = np.stack([self._streams[s].read(i * length, length + 1) for s, i, _ in keys])
        if self._mask is None:
            batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
        else:
            places = [position for _, _, position in keys]
            batch = self._mask.apply(rows[:, :-1], self._seed, places)
        if filled:
            batch["targets"] = batch["targets"].copy()
            batch["targets"][filled] = IGNORED
        tensors = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in batch.items()}
        if self._document_attention:
            numbers = [
                self._document_numbers(s, i, row) for (s, i, _), row in zip(keys, rows, strict=True)
            ]
            tensors["documents"] = torch.from_numpy(np.stack(numbers))
        return tensors

    def _document_numbers(self, source: int, index: int, row: Array) -> Array:
        """Return the document number of each token of a sample.

        Documents are separated as recorded in the data, or else by end-of-text tokens. `row` has
        the ids of the sample.
        """
        stream, length = self._streams[source], self._seq_len
        if stream.document_starts is not None:
            return stream.documents(index * length, length)
        ended = row[:length] == self._eos_id
        found: Array = (np.cumsum(ended) - ended).astype(np.int32)
        return found


class _TokenMasking:
    """Random masking of tokens, a pure function of (seed, position)."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None or tokenizer.mask_id is None:
            raise BadInputError(
                "a masked language model needs a tokenizer with a [MASK] token; give one with "
                "--tokenizer, or let one be trained on the data"
            )
        self._mask_id = tokenizer.mask_id
        self._vocab = tokenizer.vocab_size
        ids = (tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.eos_id)
        self._special = np.array([i for i in ids if i is not None])

    def apply(self, rows: Array, seed: int, positions: list[int]) -> dict[str, Array]:
        tokens, targets = rows.copy(), np.full_like(rows, IGNORED)
        for row, position in enumerate(positions):
            draw = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, position))))
            shares, open_to = draw.random(rows.shape[1]), ~np.isin(rows[row], self._special)
            chosen = (shares < PREDICTED) & open_to
            if not chosen.any() and open_to.any():
                # Predict at least one token, as BERT's create_pretraining_data.py does: otherwise,
                # short samples may have no targets, and a batch of them no loss.
                chosen[np.argmin(np.where(open_to, shares, 1.0))] = True
            fate = draw.random(rows.shape[1])
            other = draw.integers(0, self._vocab, rows.shape[1])
            targets[row, chosen] = rows[row, chosen]
            tokens[row, chosen & (fate < _MASKED)] = self._mask_id
            replaced = chosen & (fate >= _MASKED) & (fate < _MASKED + _REPLACED)
            tokens[row, replaced] = other[replaced]
        return {"tokens": tokens, "targets": targets}
