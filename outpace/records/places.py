"""Folders in which outpace keeps what can be produced again."""

import os
from collections.abc import Mapping
from pathlib import Path

from outpace.records.errors import BadInputError

_ELSEWHERE = "Name another place with --cache-dir, or with XDG_CACHE_HOME."


def user_cache(environ: Mapping[str, str]) -> Path:
    """The user's cache folder of outpace, by XDG_CACHE_HOME or their home.

    Raises BadInputError where they have no home.
    """
    named = environ.get("XDG_CACHE_HOME", "")
    if Path(named).is_absolute():
        return Path(named) / "outpace"
    try:
        return Path.home() / ".cache" / "outpace"
    except RuntimeError:  # no HOME, and no entry for the user
        raise BadInputError(
            f"there is no place for a cache: HOME is not set, and this host knows no home of user "
            f"{os.getuid()}. {_ELSEWHERE}"
        ) from None


def cache_folder(asked: Path | None, environ: Mapping[str, str]) -> Path:
    """The folder asked for, else the user's; made if it is not there.

    Raises BadInputError where it can be neither made nor read.
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
