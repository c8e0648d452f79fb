"""Content hashes, cached so that large files are not read on every start."""

import json
import time
from pathlib import Path

import xxhash

from outpace.data.file_reader import state_of
from outpace.data.hf_datasets import dataset_files, open_dataset
from outpace.data.sources import Source, fingerprint
from outpace.data.stream import Stream
from outpace.records.base import keep_memo

# Version of the code that makes samples from files. Increase it when the same files give different
# samples, so that users who cannot resume an older run are told the reason.
READING = 1
# A file changed this recently may change again within the resolution of its time stamp.
_SETTLED_S = 2.0


def cached_fingerprint(source: Source, text_field: str, cache_dir: Path) -> str:
    """Return a source's fingerprint, recomputed only if a file's size or times have changed."""
    files, states, name = source.files, source.states, ""
    if source.kind == "dataset":
        dataset = open_dataset(source.reference)
        files, name = dataset_files(dataset), str(dataset._fingerprint)
        states = tuple(map(state_of, files))
    if not files:  # the dataset is in memory
        return fingerprint(source, text_field)
    seen = [(str(file.absolute()), *state) for file, state in zip(files, states, strict=True)]
    about = [seen, source.kind, text_field, *filter(None, [name])]
    state = xxhash.xxh3_128_hexdigest(json.dumps(about).encode())
    memo = cache_dir / "hashes" / state
    if memo.is_file():
        return memo.read_text()
    found = fingerprint(source, text_field)
    newest_s = max(changed_ns for *_, changed_ns in seen) / 1e9
    if time.time() - newest_s > _SETTLED_S:
        keep_memo(memo, found)
    return found


def remembered_extent(content: str, stream: Stream, cache_dir: Path) -> tuple[int, int]:
    """Return the smallest and largest token id of a stream, from the cache if it has them.

    `content` is the hash of the stream's content, under which the cache stores them.
    """
    memo = cache_dir / "extents" / content
    try:
        low, high = json.loads(memo.read_text())
        return int(low), int(high)
    except (OSError, ValueError, TypeError):
        found = stream.compute_extent()
        keep_memo(memo, json.dumps(found))
        return found
