"""Cache folders, for files that outpace can regenerate."""

import os
from collections.abc import Mapping
from pathlib import Path

from outpace.records.errors import BadInputError

_ELSEWHERE = "Choose another folder with --cache-dir or XDG_CACHE_HOME."


def user_cache(environ: Mapping[str, str]) -> Path:
    """Return the user's cache folder, from XDG_CACHE_HOME or the home directory.

    Raises BadInputError if there is no home directory.
    """
    named = environ.get("XDG_CACHE_HOME", "")
    if Path(named).is_absolute():
        return Path(named) / "outpace"
    try:
        return Path.home() / ".cache" / "outpace"
    except RuntimeError:  # no HOME, and no entry for the user in the password file
        raise BadInputError(
            f"there is no cache folder: HOME is not set, and user {os.getuid()} has no home "
            f"directory on this host. {_ELSEWHERE}"
        ) from None


def cache_folder(asked: Path | None, environ: Mapping[str, str]) -> Path:
    """Return the requested cache folder, or the user's by default, and create it if needed.

    Raises BadInputError if it cannot be created or read.
    """
    folder = user_cache(environ) if asked is None else asked
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with os.scandir(folder):
            pass
    except OSError as error:
        raise BadInputError(
            f"cannot use the cache folder {folder}: {error.strerror}. {_ELSEWHERE}"
        ) from None
    return folder
