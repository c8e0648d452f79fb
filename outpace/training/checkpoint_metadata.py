"""Metadata of torch's distributed checkpoints, and messages of their errors."""

import pickle
import traceback

METADATA_FILE = ".metadata"


def first_reason(error: BaseException) -> str:
    """Return the error of the first failed rank as one line."""
    failures = getattr(error, "failures", None)  # of DCP's CheckpointException
    if failures:
        rank, (inner, _) = min(failures.items())
        return f"{first_reason(inner)} (rank {rank})"
    if isinstance(error, pickle.UnpicklingError):
        return "it does not contain a readable tensor"  # torch's message advises loading it anyway
    return " ".join(str(error).split())[:300]


def release_frames(error: BaseException | None) -> None:
    """Release objects held by an error's stack frames: tensors, and views of buffers.

    A view of an io.BytesIO left to the garbage collector crashes CPython 3.12.1 (segmentation fault
    in bytesiobuf_releasebuffer).
    """
    known: set[int] = set()
    left = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in known:
            continue
        known.add(id(one))
        traceback.clear_frames(one.__traceback__)
        left += [one.__cause__, one.__context__]
        left += [inner for inner, _ in getattr(one, "failures", {}).values()]
