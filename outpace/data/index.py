"""Index of a token cache entry: its files and their contents."""

from typing import Literal, Self

import numpy as np
from pydantic import Field, NonNegativeInt, model_validator

from outpace.records.base import Record

FORMAT: Literal[1] = 1
SPLITS = ("train", "validation")


def shard_name(split: str, number: int) -> str:
    """Return the file name of a split's token shard, numbered from 0."""
    return f"{split}-{number:05d}.bin"


def documents_name(split: str) -> str:
    """Return the name of the file that stores where a split's documents begin."""
    return f"{split}-documents.npy"


class File(Record):
    """Size in bytes and xxh3_128 checksum of a file, as written."""

    bytes: NonNegativeInt
    xxh3_128: str


class Split(Record):
    """Token files of one split in a cache entry.

    `shards` are the names of the files, in order, with `tokens` tokens in all. `documents` names
    the file with the position of each document, and `largest` is the largest token id, or −1
    without tokens.
    """

    tokens: NonNegativeInt
    largest: int
    shards: tuple[str, ...]
    documents: str


class Misread(Record):
    """Counts of tokens and characters that the author of a text may not have intended or noticed.

    - `specials`: special tokens that are written out in the text, by name
    - `unknown`: tokens that stand for unknown text
    - `lost`: characters that have no token, by character
    - `nuls`: NUL characters
    """

    specials: dict[str, NonNegativeInt] = Field(default_factory=dict)
    unknown: NonNegativeInt = 0
    lost: dict[str, NonNegativeInt] = Field(default_factory=dict)
    nuls: NonNegativeInt = 0


class Index(Record):
    """Contents of a cache entry, stored as index.json."""

    format: Literal[1] = FORMAT
    dtype: Literal["<u2", "<u4"]
    splits: dict[str, Split]
    files: dict[str, File]
    misread: Misread = Misread()

    @model_validator(mode="after")
    def _require_consistent_files(self) -> Self:
        if set(self.splits) != set(SPLITS):
            raise ValueError(
                f"it has the splits {', '.join(self.splits)}, not the splits of an entry"
            )
        names = set()
        for name, split in self.splits.items():
            own = [shard_name(name, number) for number in range(len(split.shards))]
            if [*split.shards, split.documents] != [*own, documents_name(name)]:
                raise ValueError(f"{name} does not have the files of an entry")
            names |= {*own, documents_name(name)}
        if names != set(self.files):
            raise ValueError("the files of its splits are not the listed files")
        for name, split in self.splits.items():
            held = sum(self.files[shard].bytes for shard in split.shards)
            if held != split.tokens * np.dtype(self.dtype).itemsize:
                raise ValueError(f"{name} has {split.tokens} tokens in {held} bytes")
        return self
