"""Check that all hosts see a run's directory, without which checkpoints cannot be saved."""

import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from outpace.jobs.ranks.process_groups import Groups
from outpace.parallel.rank_objects import gather_objects
from outpace.records.errors import BadInputError, OutpaceError
from outpace.training.run_dir import TOKEN_PREFIX

_LOOKS, _LOOK_AGAIN_S = 20, 0.5  # network file systems may show a file with a delay


def require_shared(groups: Groups, folder: Path) -> None:
    """Raise BadInputError on all ranks if a host does not see a file that rank 0 writes."""
    ranks = groups.ranks
    if ranks.world_size == ranks.local_world_size:
        return
    with _shared_token_file(groups, folder) as name:
        said = gather_objects((socket.gethostname(), _is_visible(folder / name)), groups.patient)
    blind = sorted({host for host, sees in said if not sees})
    if blind:
        raise BadInputError(
            f"{folder} on {said[0][0]} is not visible on {', '.join(blind)}, but every host "
            "writes its part of a checkpoint. Pass an --out that all hosts share, or use "
            "--measure-only."
        )


@contextmanager
def _shared_token_file(groups: Groups, folder: Path) -> Iterator[str]:
    """Yield the name of a file that rank 0 keeps in `folder` until all ranks have checked it."""
    token = folder / f"{TOKEN_PREFIX}{uuid.uuid4().hex}"

    def write() -> str:
        try:
            token.write_text("seen?")
        except OSError as error:
            raise OutpaceError(f"cannot write in {folder}: {error.strerror}") from None
        return token.name

    try:
        yield groups.run_on_rank_0(write)
    finally:
        if groups.ranks.rank == 0:
            with suppress(OSError):
                token.unlink()


def _is_visible(token: Path) -> bool:
    for _ in range(_LOOKS):
        if token.is_file():
            return True
        time.sleep(_LOOK_AGAIN_S)
    return False
