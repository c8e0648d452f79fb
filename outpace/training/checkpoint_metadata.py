"""Errors of torch's distributed checkpoint (DCP), and the name of its metadata file."""

import pickle
import traceback

METADATA_FILE = ".metadata"


def first_reason(error: BaseException) -> str:
    """Return the message of the first rank's error as one line."""
    failures = getattr(error, "failures", None)  # of DCP's CheckpointException
    if failures:
        rank, (inner, _) = min(failures.items())
        return f"{first_reason(inner)} (rank {rank})"
    if isinstance(error, pickle.UnpicklingError):
        return "it does not contain a readable tensor"  # torch's message advises unsafe loading
    return " ".join(str(error).split())[:300]


def release_frames(error: BaseException | None) -> None:
    """Release the tensors and buffer views that the stack frames of an error hold.

    CPython 3.12.1 crashes if the garbage collector frees a view of an io.BytesIO (segmentation
    fault in bytesiobuf_releasebuffer).
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
