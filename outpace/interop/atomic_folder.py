"""Directories that are written completely or not at all."""

import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from outpace.records.base import sync_folder, temporary_name
from outpace.records.checksums import CHECKSUMS_FILE, write_checksums
from outpace.records.errors import BadInputError


@contextmanager
def whole_folder(directory: Path, marker: str) -> Iterator[Path]:
    """Yield a temporary directory to fill, and rename it to `directory` at the end.

    An existing `directory` is replaced only if it is empty or contains `marker`, so only files that
    outpace wrote are lost. Raises BadInputError if it cannot be replaced or written (disk full, no
    permission); the temporary directory is always removed.
    """
    if directory.exists() and not _may_replace(directory, marker):
        raise BadInputError(
            f"{directory} already exists and contains something other than a model (no {marker}). "
            "Name another directory, or remove it."
        )
    temporary = directory.with_name(temporary_name(directory))
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        write_checksums(temporary)
        _set_default_permissions(temporary)
        sync_folder(temporary)
        _replace_folder(temporary, directory)
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise BadInputError(
            f"cannot write {directory}: {reason}. Free some space, or name a writable directory."
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _set_default_permissions(folder: Path) -> None:
    """Give all files the permissions of other new files, because safetensors makes them private."""
    mode = stat.S_IMODE((folder / CHECKSUMS_FILE).stat().st_mode)
    for path in folder.iterdir():
        if path.is_file():
            with suppress(OSError):  # file systems that set permissions themselves (CIFS)
                path.chmod(mode)


def _may_replace(directory: Path, marker: str) -> bool:
    return directory.is_dir() and ((directory / marker).exists() or not any(directory.iterdir()))


def _replace_folder(temporary: Path, directory: Path) -> None:
    old = directory.with_name(f"{temporary_name(directory)}.old")
    if directory.exists():
        directory.rename(old)
    try:
        temporary.rename(directory)
    except OSError:
        if old.exists():
            old.rename(directory)
        raise
    shutil.rmtree(old, ignore_errors=True)
