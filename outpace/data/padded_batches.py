"""Batches of variable-length samples, padded to the longest sample or to a fixed length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from outpace.data.order import Index, samples_at

IGNORED = -100
# Tensor cores need multiples of 8 (NVIDIA, "Train With Mixed Precision", §4.2).
MULTIPLE = 8
CUDA_MULTIPLE = 64
COMPILED_SHAPES = 4  # maximum number of shapes that a run compiles
FILLER = -1
Batch = dict[str, torch.Tensor]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RaggedSamples:
    """Samples stored one after the other: sample i is [starts[i], starts[i + 1]) of each array.

    `values` holds the arrays by name, and `fill` their padding values. `labels` is set if each
    sample has one target instead of one per token.
    """

    starts: Ints
    values: dict[str, NDArray[np.int32]]
    fill: dict[str, int]
    labels: Ints | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Ints:
        """Number of tokens of each sample."""
        return np.diff(self.starts)

    @property
    def targets(self) -> int:
        """Total number of targets."""
        if self.labels is not None:
            return len(self.labels)
        return int((self.values["targets"] != IGNORED).sum())


def concatenate_samples(
    samples: Sequence[Mapping[str, Sequence[int]]],
    fill: dict[str, int],
    labels: Sequence[int] | None = None,
) -> RaggedSamples:
    """Concatenate samples, each of which maps names to sequences of equal length.

    `fill` has a padding value for each name. `labels` has one target per sample, if there is not
    one per token.
    """
    lengths = [len(next(iter(sample.values()))) for sample in samples]
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    values = {
        name: np.concatenate([np.asarray(sample[name], dtype=np.int32) for sample in samples])
        for name in fill
    }
    return RaggedSamples(
        starts, values, fill, None if labels is None else np.asarray(labels, np.int64)
    )


@dataclass(frozen=True)
class SampleLengths:
    """Lengths of a step's samples before and after padding."""

    lengths: Ints
    padded: Ints


@dataclass(frozen=True)
class PaddedDataset(Dataset[Batch]):
    """Data set of batches, padded on the right to a multiple of `multiple`, at most `most` tokens.

    Batches are padded to their longest sample, or to `most` if `fixed` is set. A large `multiple`
    limits the number of shapes, for each of which kernels and compiled code must be prepared (see
    `shape_multiple`). `mask` adds a `padding_mask`, True for real tokens, which encoders need and
    causal models do not. `last` adds the position of each sample's last token.

    For evaluation, `once_in` is the size of batches in which each sample (or each of the first
    `most_samples`) comes once and in order; samples without targets fill up the last batch.
    """

    samples: RaggedSamples
    most: int
    fixed: bool = False
    mask: bool = False
    last: bool = False
    once_in: int | None = None
    multiple: int = MULTIPLE
    most_samples: int | None = None

    def __len__(self) -> int:
        if self.once_in is None:
            return len(self.samples)
        return round_up(self._sample_count, self.once_in)

    @property
    def _sample_count(self) -> int:
        return min(len(self.samples), self.most_samples or len(self.samples))

    def single_pass(self, most: int, batch: int) -> "PaddedDataset":
        """Return a data set of the first `most` samples, once each, in batches of `batch`."""
        return replace(self, once_in=batch, most_samples=most)

    @property
    def mean_targets(self) -> int:
        """Mean number of targets per sample, rounded and at least 1."""
        return max(1, round(self.samples.targets / len(self.samples)))

    def first_prompt(self) -> list[int]:
        """Return the tokens of the first sample that come before its first target."""
        rows = slice(0, int(self.samples.starts[1]))
        tokens, targets = (self.samples.values[name][rows] for name in ("tokens", "targets"))
        found: list[int] = tokens[: int(np.argmax(targets != IGNORED)) + 1].tolist()
        return found

    def locate(self, seed: int, positions: Index) -> list[int]:
        """Return the sample index at each position since the start of training."""
        if self.once_in is None:
            found: list[int] = samples_at(seed, positions, len(self.samples)).tolist()
            return found
        places = positions % len(self)
        return [int(p) if p < self._sample_count else FILLER for p in places.tolist()]

    def padded_length(self, longest: int) -> int:
        """Return the padded length of a batch whose longest sample has `longest` tokens."""
        return self.most if self.fixed else min(round_up(longest, self.multiple), self.most)

    def sample_lengths(self, seed: int, positions: Index, micro_batch: int) -> SampleLengths:
        """Return the lengths of the samples at these positions, padded per micro-batch."""
        keys = self.locate(seed, positions)
        lengths = self.samples.lengths[keys]
        longest = lengths.reshape(-1, micro_batch).max(axis=1)
        padded = [self.padded_length(int(one)) for one in longest]
        return SampleLengths(lengths, np.repeat(padded, micro_batch))

    def __getitem__(self, index: int) -> Batch:
        """Return a sample without the batch dimension."""
        return {name: tensor[0] for name, tensor in self.__getitems__([index]).items()}

    def __getitems__(self, keys: Sequence[int]) -> Batch:
        """Return a padded batch of the samples at `keys`; FILLER gives a sample without targets."""
        own = self.samples.lengths[[max(key, 0) for key in keys]]
        length = self.padded_length(int(own.max()))
        filled = np.array([key == FILLER for key in keys])
        arrays: dict[str, NDArray[Any]] = {
            name: np.full((len(keys), length), fill, dtype=np.int64)
            for name, fill in self.samples.fill.items()
        }
        for row, key in enumerate(keys):
            start = int(self.samples.starts[max(key, 0)])
            for name, array in arrays.items():
                array[row, : own[row]] = self.samples.values[name][start : start + own[row]]
        if self.samples.labels is not None:
            arrays["targets"] = self.samples.labels[[max(key, 0) for key in keys]]
        arrays["targets"][filled] = IGNORED
        if self.mask:
            arrays["padding_mask"] = np.arange(length) < own[:, None]
        if self.last:
            arrays["last"] = own - 1
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def round_up(length: int, multiple: int = MULTIPLE) -> int:
    """Round a length up to a multiple."""
    return -(-length // multiple) * multiple


def shape_multiple(most: int, device_type: str, compiled: bool) -> int:
    """Return the multiple to which lengths of up to `most` tokens are rounded up.

    On CUDA, it is 64, because cuDNN's attention takes 0.1 to 1 s to plan each new length.
    Compilation takes longer, so a compiled model gets at most `COMPILED_SHAPES` lengths.
    """
    multiple = CUDA_MULTIPLE if device_type == "cuda" else MULTIPLE
    return round_up(-(-most // COMPILED_SHAPES), multiple) if compiled else multiple
