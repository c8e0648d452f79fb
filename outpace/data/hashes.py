"""Content hashes, remembered so that large files are not read again at every start."""

import json
import time
from pathlib import Path

import xxhash

from outpace.data.sources import Source, fingerprint
from outpace.records.base import write_atomic

# A file written this recently may change again within the clock's resolution.
_SETTLED_S = 2.0


def remembered_fingerprint(source: Source, text_field: str, cache_dir: Path) -> str:
    """The source's fingerprint; computed anew when any file's size or time has changed."""
    if source.kind == "dataset":
        return fingerprint(source, text_field)
    seen = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in source.files]
    state = xxhash.xxh3_128_hexdigest(json.dumps([seen, str(source.root), text_field]).encode())
    memo = cache_dir / "hashes" / state
    if memo.is_file():
        return memo.read_text()
    found = fingerprint(source, text_field)
    newest_s = max(mtime for _, _, mtime in seen) / 1e9
    if time.time() - newest_s > _SETTLED_S:
        try:
            memo.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(memo, found)
        except OSError:
            pass  # a memo is only a convenience; the cache itself will complain
    return found
