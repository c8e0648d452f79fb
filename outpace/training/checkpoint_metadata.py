"""The metadata file of torch's distributed checkpoints, and the messages of its errors."""

import pickle
import traceback

METADATA_FILE = ".metadata"


def first_reason(error: BaseException) -> str:
    """Return the error of the first failed rank in one line."""
    failures = getattr(error, "failures", None)  # of DCP's CheckpointException
    if failures:
        rank, (inner, _) = min(failures.items())
        return f"{first_reason(inner)} (rank {rank})"
    if isinstance(error, pickle.UnpicklingError):
        return "it does not contain a readable tensor"  # torch advises to run it
    return " ".join(str(error).split())[:300]


def release_frames(error: BaseException | None) -> None:
    """Release objects held by an error's frames: tensors, and views of buffers.

    If such a view of an io.BytesIO is left to the garbage collector, it crashes CPython 3.12.1
    (segmentation fault in bytesiobuf_releasebuffer).
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
