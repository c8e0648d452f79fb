"""Folders for files that outpace can produce again."""

import os
from collections.abc import Mapping
from pathlib import Path

from outpace.records.errors import BadInputError

_ELSEWHERE = "Choose another folder with --cache-dir, or with XDG_CACHE_HOME."


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
            f"there is no folder for a cache: HOME is not set, and user {os.getuid()} has no "
            f"home on this host. {_ELSEWHERE}"
        ) from None


def cache_folder(asked: Path | None, environ: Mapping[str, str]) -> Path:
    """Return the requested cache folder, or the user's; it is created if needed.

    Raises BadInputError if it can neither be created nor read.
    """
    folder = user_cache(environ) if asked is None else asked
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with os.scandir(folder):
            pass
    except OSError as error:
        raise BadInputError(
            f"the cache {folder} cannot be used ({error.strerror}). {_ELSEWHERE}"
        ) from None
    return folder
