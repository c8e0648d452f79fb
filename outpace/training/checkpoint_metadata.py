"""The file that torch's distributed checkpoints end with, and what their errors say."""

import pickle

METADATA_FILE = ".metadata"


def first_reason(error: BaseException) -> str:
    """Return the first rank's error in a line."""
    failures = getattr(error, "failures", None)  # of DCP's CheckpointException
    if failures:
        rank, (inner, _) = min(failures.items())
        return f"{first_reason(inner)} (rank {rank})"
    if isinstance(error, pickle.UnpicklingError):
        return "what is stored there is no tensor that can be read"  # torch advises to run it
    return " ".join(str(error).split())[:300]
