"""Cache of encoded samples, so that the same data is encoded only once."""

import io
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outpace.data.classify import EncodedSamples
from outpace.data.padded_batches import RaggedSamples
from outpace.records.base import keep_memo

_VALUES, _FILL = "values.", "fill."


def load_or_encode(
    cache_dir: Path, key: str, encode: Callable[[], EncodedSamples]
) -> EncodedSamples:
    """Load the samples stored under `key`, or call `encode` and store its result.

    `key` must identify everything that the result depends on. A damaged file is replaced; if the
    result cannot be stored, the next call encodes again.
    """
    path = cache_dir / "encoded" / f"{key}.npz"
    with suppress(Exception):  # numpy and zipfile raise many errors for damaged files
        return _read_samples(path)
    made = encode()
    keep_memo(path, _to_npz(made))
    return made


def _to_npz(encoded: EncodedSamples) -> bytes:
    samples, file = encoded.samples, io.BytesIO()
    arrays: dict[str, NDArray[np.int32] | NDArray[np.int64]] = {
        "starts": samples.starts, "cut": np.asarray(encoded.cut, np.int64),
        **{_VALUES + name: values for name, values in samples.values.items()},
        **{_FILL + name: np.asarray(fill, np.int64) for name, fill in samples.fill.items()},
    }  # fmt: skip
    if samples.labels is not None:
        arrays["labels"] = samples.labels
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def _read_samples(path: Path) -> EncodedSamples:
    # Read from memory, since numpy would leave an invalid file open until garbage collection.
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as kept:
        found = {name: kept[name] for name in kept.files}
    values, fill = (
        {name.removeprefix(kind): one for name, one in found.items() if name.startswith(kind)}
        for kind in (_VALUES, _FILL)
    )
    starts, labels = found["starts"], found.get("labels")
    lengths = {len(one) for one in values.values()}
    whole = lengths == {int(starts[-1])} and values.keys() == fill.keys()
    if not whole or (labels is not None and len(labels) != len(starts) - 1):
        raise ValueError(f"{path} is damaged")
    numbers = {name: int(one) for name, one in fill.items()}
    return EncodedSamples(RaggedSamples(starts, values, numbers, labels), int(found["cut"]))
