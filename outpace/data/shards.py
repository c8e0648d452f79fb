"""Token shards in a cache: written once for a text and a tokenizer, mapped into memory ever after.

An entry is a folder named after the content: for each split, files of raw little-endian token ids,
the places where documents begin, and `index.json` with sizes and checksums, written before the
folder gets its name. What is not whole was never there.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from filelock import FileLock

from outpace.data.sources import Piece, Source, pieces
from outpace.data.tokenizer import Tokenizer
from outpace.records.errors import BadInputError

Progress = Callable[[str, int, int | None], None]
Tokens = np.ndarray[Any, np.dtype[Any]]

FORMAT = 1
INDEX = "index.json"
SPLITS = ("train", "validation")
SHARD_TOKENS = 256 << 20
# Enough text at a time that all threads have work, little enough that memory stays flat.
_BATCH_CHARACTERS = 4 << 20
_BATCHES_AHEAD = 3
# Beyond this the checksums would take longer than a person waits; sizes are always compared.
_CHECKED_BYTES = 4 << 30


def entry_path(
    cache: Path, content: str, tokenizer: Tokenizer, eval_fraction: float, text_field: str
) -> Path:
    """The folder of an entry, whether it is there or not."""
    key = xxhash.xxh3_128_hexdigest(
        f"{FORMAT}|{content}|{tokenizer.fingerprint}|{eval_fraction!r}|{text_field}".encode()
    )
    return cache / "tokens" / key


def ensure_entry(
    entry: Path,
    source: Source,
    tokenizer: Tokenizer,
    text_field: str,
    eval_fraction: float,
    threads: int,
    progress: Progress,
) -> dict[str, Any]:
    """Make the entry if it is not there or not whole; return its index.

    Processes that want the same entry wait for each other. Raises BadInputError.
    """
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(entry.with_suffix(".lock")):
            index, problem = read_index(entry)
            if index is not None:
                return index
            if problem is not None:
                progress(f"{problem}; tokenising again", 0, None)
                shutil.rmtree(entry)
            return _build(entry, source, tokenizer, text_field, eval_fraction, threads, progress)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BadInputError(
                f"the disk of the token cache {entry.parent} is full; free some space or name "
                "another place with --cache-dir"
            ) from None
        raise BadInputError(f"the token cache {entry.parent} cannot be used: {error}") from None


def read_index(entry: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The index of a whole entry, or what is wrong with one that is damaged."""
    if not entry.is_dir():
        return None, None
    try:
        index: dict[str, Any] = json.loads((entry / INDEX).read_text())
        check = sum(file["bytes"] for file in index["files"].values()) <= _CHECKED_BYTES
        for name, file in index["files"].items():
            path = entry / name
            if path.stat().st_size != file["bytes"]:
                return None, f"cached shard {name} has the wrong size"
            if check and _checksum(path) != file["xxh3_128"]:
                return None, f"cached shard {name} has the wrong checksum"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"cached tokens are damaged ({error})"
    return index, None


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _build(
    entry: Path,
    source: Source,
    tokenizer: Tokenizer,
    text_field: str,
    eval_fraction: float,
    threads: int,
    progress: Progress,
) -> dict[str, Any]:
    temporary = entry.with_name(f"{entry.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    dtype = np.dtype("<u2") if tokenizer.vocab_size <= 1 << 16 else np.dtype("<u4")
    writers = {split: _SplitWriter(temporary, split, dtype) for split in SPLITS}
    try:
        current = writers["train"]
        for piece, ids in encoded(source, tokenizer, text_field, threads, progress):
            if piece.first:
                current = writers[split_of(piece.text, eval_fraction)]
                current.begin_document()
            current.write(ids)
            if piece.last:
                current.write(np.array([tokenizer.eos_id], dtype=np.uint32))
        index = {
            "format": FORMAT,
            "dtype": dtype.str,
            "splits": {split: writer.close() for split, writer in writers.items()},
        }
        index["files"] = {
            path.name: {"bytes": path.stat().st_size, "xxh3_128": _checksum(path)}
            for path in sorted(temporary.iterdir())
        }
        (temporary / INDEX).write_text(json.dumps(index, indent=1))
        temporary.replace(entry)
        return index
    finally:
        for writer in writers.values():
            writer.abandon()
        shutil.rmtree(temporary, ignore_errors=True)


def split_of(text: str, eval_fraction: float) -> str:
    """Which split a document belongs to, by the hash of its (first piece's) text."""
    share = xxhash.xxh3_64_intdigest(text.encode()) / 2**64
    return "validation" if share < eval_fraction else "train"


def encoded(
    source: Source, tokenizer: Tokenizer, text_field: str, threads: int, progress: Progress
) -> Iterator[tuple[Piece, Tokens]]:
    """All pieces of a source with their ids, in order.

    The tokenizer encodes a batch on all its threads without the interpreter's lock, while this
    thread turns the batch before into arrays.
    """
    ahead: list[tuple[list[Piece], Future[list[Tokens]]]] = []
    done = 0
    with ThreadPoolExecutor(max_workers=max(1, min(threads, _BATCHES_AHEAD))) as pool:
        batches = _batches(pieces(source, text_field))
        while True:
            while len(ahead) < _BATCHES_AHEAD and (batch := next(batches, None)) is not None:
                texts = [piece.text for piece in batch]
                ahead.append((batch, pool.submit(tokenizer.encode_batch, texts)))
            if not ahead:
                return
            batch, future = ahead.pop(0)
            for piece, ids in zip(batch, future.result(), strict=True):
                yield piece, ids
                done += piece.consumed
            progress("tokenising", done, source.total_bytes)


def _batches(stream: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in stream:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@dataclass
class _SplitWriter:
    """Appends the tokens of one split to its shards."""

    folder: Path
    split: str
    dtype: np.dtype[Any]
    tokens: int = 0
    largest: int = -1
    shards: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    _file: BinaryIO | None = None
    _left: int = 0

    def begin_document(self) -> None:
        self.starts.append(self.tokens)

    def write(self, ids: Tokens) -> None:
        while len(ids):
            if self._left == 0:
                self._open_next()
            assert self._file is not None
            part = ids[: self._left]
            part.astype(self.dtype).tofile(self._file)
            self.largest = max(self.largest, int(part.max()))
            self.tokens += len(part)
            self._left -= len(part)
            ids = ids[len(part) :]

    def _open_next(self) -> None:
        self.abandon()
        name = f"{self.split}-{len(self.shards):05d}.bin"
        self._file = (self.folder / name).open("wb")
        self.shards.append(name)
        self._left = SHARD_TOKENS

    def close(self) -> dict[str, Any]:
        """Finish the files; what the index says of this split."""
        self.abandon()
        name = f"{self.split}-documents.npy"
        np.save(self.folder / name, np.array(self.starts, dtype=np.int64))
        return {
            "tokens": self.tokens,
            "largest": self.largest,
            "shards": self.shards,
            "documents": name,
        }

    def abandon(self) -> None:
        """Close the open file, if any."""
        if self._file is not None:
            self._file.close()
            self._file = None
