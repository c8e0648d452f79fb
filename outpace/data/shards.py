"""Cache of token shards, written once per text and tokenizer and then memory-mapped.

An entry is a folder named after a hash of its inputs. For each split, it holds files of raw
little-endian token ids and the positions at which documents begin; `index.json` lists sizes and
checksums. The folder gets its final name only when it is complete.
"""

import contextlib
import errno
import io
import os
import shutil
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from outpace.data.entry_lock import entry_lock
from outpace.data.index import FORMAT, SPLITS, Index, documents_name, shard_name
from outpace.data.misread_tokens import MisreadText
from outpace.data.parallel_encoding import Encoders
from outpace.data.sources import Source, check_unchanged
from outpace.data.text import Piece, pieces
from outpace.data.tokenizer import Tokenizer
from outpace.records.base import sync_folder
from outpace.records.checksums import file_checksum
from outpace.records.errors import BadInputError

Progress = Callable[[str, int, int | None], None]
Tokens = np.ndarray[Any, np.dtype[Any]]

INDEX = "index.json"
SHARD_TOKENS = 256 << 20
# Large enough to be worth sending to another process, small enough to limit memory use.
_BATCH_CHARACTERS = 2 << 20
# Characters of a document that are hashed to choose its split; shorter texts are never cut into
# pieces.
_HASHED_CHARACTERS = 1 << 14
_BUFFERED_TOKENS = 1 << 20
_SIGNS_KEPT = 1000  # number of lost characters to list in the index
# Above this size, computing checksums would take too long, so only file sizes are compared.
_CHECKED_BYTES = 4 << 30


def entry_path(
    cache: Path, content: str, tokenizer: Tokenizer, eval_fraction: float, text_field: str
) -> Path:
    """Return the folder of a cache entry, which may not exist yet."""
    parts = [FORMAT, content, tokenizer.fingerprint, repr(eval_fraction), text_field]
    parts += ["opened once"] if tokenizer.opening_ids else []
    key = xxhash.xxh3_128_hexdigest("|".join(map(str, parts)).encode())
    return cache / "tokens" / key


def ensure_entry(
    entry: Path,
    source: Source,
    tokenizer: Tokenizer,
    text_field: str,
    eval_fraction: float,
    processes: int,
    progress: Progress,
) -> Index:
    """Return the index of a cache entry, creating the entry if it is missing or damaged.

    One process creates an entry while others that need it wait. Raises BadInputError if the cache
    cannot be used.
    """
    index, _ = read_index(entry)
    if index is not None:
        return index
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with entry_lock(entry.parent / f"{entry.name}.lock"):
            index, problem = read_index(entry)
            if index is not None:
                return index
            if problem is not None:
                progress(f"{problem}; tokenising again", 0, None)
                shutil.rmtree(entry)
            for left in entry.parent.glob(f"{entry.name}.*.tmp"):
                shutil.rmtree(left)  # left by a killed process, since this one holds the lock
            return _write_entry(
                entry, source, tokenizer, text_field, eval_fraction, processes, progress
            )
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BadInputError(
                f"the disk of the token cache {entry.parent} is full. Free some space, or choose "
                "another folder with --cache-dir."
            ) from None
        raise BadInputError(
            f"the token cache {entry.parent} cannot be used: {error}. Choose another folder with "
            "--cache-dir."
        ) from None


def read_index(entry: Path) -> tuple[Index | None, str | None]:
    """Read the index of a cache entry.

    Returns the index and None, or None and a description of the damage, or None twice if there is
    no entry.
    """
    if not entry.is_dir():
        return None, None
    try:
        index = Index.load(entry / INDEX)
        check = sum(file.bytes for file in index.files.values()) <= _CHECKED_BYTES
        for name, file in index.files.items():
            path = entry / name
            if path.stat().st_size != file.bytes:
                return None, f"cached shard {name} has the wrong size"
            if check and file_checksum(path) != file.xxh3_128:
                return None, f"cached shard {name} has the wrong checksum"
    except (OSError, BadInputError) as error:
        return None, f"cached tokens are damaged ({error})"
    return index, None


def _write_entry(
    entry: Path,
    source: Source,
    tokenizer: Tokenizer,
    text_field: str,
    eval_fraction: float,
    processes: int,
    progress: Progress,
) -> Index:
    temporary = entry.with_name(f"{entry.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    dtype = np.dtype("<u2") if tokenizer.vocab_size <= 1 << 16 else np.dtype("<u4")
    writers = {split: _SplitWriter(temporary, split, dtype) for split in SPLITS}
    misread = MisreadText(tokenizer)
    try:
        current = writers["train"]
        for piece, ids in encode_pieces(source, tokenizer, text_field, processes, progress):
            if piece.first:
                current = writers[split_of_document(piece.text, eval_fraction)]
                current.begin_document()
                current.write(np.array(tokenizer.missing_opening(ids), dtype=np.uint32))
            current.write(ids)
            misread.add(piece.text, ids)
            if piece.last:
                current.write(np.array([tokenizer.eos_id], dtype=np.uint32))
        check_unchanged(source)
        splits = {split: writer.close() for split, writer in writers.items()}
        files = {name: file for writer in writers.values() for name, file in writer.files.items()}
        counts = {
            "specials": misread.specials, "unknown": misread.unknown,
            "lost": dict(misread.lost.most_common(_SIGNS_KEPT)), "nuls": misread.nuls,
        }  # fmt: skip
        index = Index.parse(
            {"dtype": dtype.str, "splits": splits, "files": files, "misread": counts}, INDEX
        )
        index.save(temporary / INDEX)
        sync_folder(temporary)
        temporary.replace(entry)
        return index
    finally:
        for writer in writers.values():
            writer.abandon()
        shutil.rmtree(temporary, ignore_errors=True)


def split_of_document(text: str, eval_fraction: float) -> str:
    """Return the split of a document, chosen by the hash of its beginning."""
    share = xxhash.xxh3_64_intdigest(text[:_HASHED_CHARACTERS].encode()) / 2**64
    return "validation" if share < eval_fraction else "train"


def encode_pieces(
    source: Source, tokenizer: Tokenizer, text_field: str, processes: int, progress: Progress
) -> Iterator[tuple[Piece, Tokens]]:
    """Yield each piece of a source with its ids, in order.

    This process reads ahead while `processes` others encode.
    """
    ahead: deque[tuple[list[Piece], Future[list[Tokens]]]] = deque()
    done = 0
    with Encoders(tokenizer, processes) as encoders:
        batches = _batch_pieces(pieces(source, text_field, cut=tokenizer.cuts_texts))
        while True:
            while len(ahead) <= processes and (batch := next(batches, None)) is not None:
                ahead.append((batch, encoders.submit([piece.text for piece in batch])))
            if not ahead:
                return
            batch, future = ahead.popleft()
            for piece, ids in zip(batch, future.result(), strict=True):
                yield piece, ids
                done += piece.consumed
            progress("tokenising", done, source.total_bytes)


def _batch_pieces(stream: Iterator[Piece]) -> Iterator[list[Piece]]:
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
    """Writer of one split's tokens, which are collected and then written in large blocks.

    `files` describes the finished files, for the index.
    """

    folder: Path
    split: str
    dtype: np.dtype[Any]
    tokens: int = 0
    largest: int = -1
    shards: list[str] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    _starts: "array[int]" = field(default_factory=lambda: array("q"))  # 8 bytes per document
    _waiting: list[Tokens] = field(default_factory=list)
    _n_waiting: int = 0
    _file: BinaryIO | None = None
    _left: int = 0
    _digest: Any = None

    def begin_document(self) -> None:
        self._starts.append(self.tokens + self._n_waiting)

    def write(self, ids: Tokens) -> None:
        self._waiting.append(ids)
        self._n_waiting += len(ids)
        if self._n_waiting >= _BUFFERED_TOKENS:
            self._flush()

    def _flush(self) -> None:
        if not self._n_waiting:
            return
        ids = np.concatenate(self._waiting).astype(self.dtype)
        self._waiting, self._n_waiting = [], 0
        self.largest = max(self.largest, int(ids.max()))
        self.tokens += len(ids)
        while len(ids):
            if self._left == 0:
                self._open_next_shard()
            assert self._file is not None
            part = ids[: self._left].data
            self._file.write(part)
            self._digest.update(part)
            self._left -= len(part)
            ids = ids[len(part) :]

    def _open_next_shard(self) -> None:
        self._close_shard()
        name = shard_name(self.split, len(self.shards))
        self._file = (self.folder / name).open("wb")
        self._digest = xxhash.xxh3_128()
        self.shards.append(name)
        self._left = SHARD_TOKENS

    def _close_shard(self) -> None:
        if self._file is not None:
            size = self._file.tell()
            self._file.close()
            self.files[self.shards[-1]] = {"bytes": size, "xxh3_128": self._digest.hexdigest()}

    def close(self) -> dict[str, Any]:
        """Finish the files; return this split's record for the index."""
        self._flush()
        self._close_shard()
        name = documents_name(self.split)
        path = self.folder / name
        # numpy bypasses Python's file objects and hides the reason for an error.
        held = io.BytesIO()
        np.save(held, np.array(self._starts, dtype=np.int64))
        path.write_bytes(held.getvalue())
        self.files[name] = {"bytes": path.stat().st_size, "xxh3_128": file_checksum(path)}
        return {
            "tokens": self.tokens,
            "largest": self.largest,
            "shards": self.shards,
            "documents": name,
        }

    def abandon(self) -> None:
        """Close the open file, if any, without writing the tokens that are still in memory."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
