"""Output files, checked before a command starts, and hints."""

import argparse
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.records.errors import BadInputError, excerpt

if TYPE_CHECKING:
    from outpace.records.base import Record


def tell_hint(hint: str) -> None:
    """Print a hint to standard error, separate from the result."""
    print(f"hint: {hint}", file=sys.stderr)


def output_file(text: str) -> Path:
    """Convert an argument to the path of a writable file, or give argparse the reason why not."""
    path = output_place(text)
    why = "an empty name" if not text else _find_obstacle(path)
    if why is not None:
        raise argparse.ArgumentTypeError(f"{excerpt(text)}: {why}. Name a file that can be written")
    return path


def output_place(text: str) -> Path:
    """Convert an argument to a path, and expand ~, which the shell does not do in --out=~/x."""
    return Path(text).expanduser()


def require_folder_place(path: Path) -> None:
    """Raise BadInputError if a path cannot be used as a folder, such as a file or a broken link."""
    from outpace.records.base import format_path  # --help needs no records

    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise BadInputError(f"--out {excerpt(str(path))}: {why}. Name a folder.") from None
    if path.is_symlink() and not path.exists():
        raise BadInputError(
            f"{format_path(path)} is a link to {format_path(path.readlink())}, which does not "
            "exist. Create that directory, or use another --out."
        )
    if path.exists() and not path.is_dir():
        raise BadInputError(f"{format_path(path)} is not a folder. Use another --out.")


def _find_obstacle(path: Path) -> str | None:
    try:
        os.lstat(path.absolute().parent / path.name)  # raises for impossible names
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        return (error.strerror if isinstance(error, OSError) else None) or str(error)
    folder = path.absolute().parent
    if path.is_dir():
        return "it is a folder"
    if not folder.is_dir():
        return f"there is no folder {folder}"
    # Devices and pipes are written to; regular files are replaced.
    written = path if path.exists() and not path.is_file() else folder
    return None if os.access(written, os.W_OK) else f"{written} is not writable"


def write_output(path: Path, content: str | bytes) -> None:
    """Write the output of a command.

    If `path` is no longer writable, writes to a temporary file and raises BadInputError with its
    name.
    """
    from outpace.records.base import write_atomic  # --help needs no records

    try:
        write_atomic(path, content)
    except OSError as error:
        why = f"cannot write {path}: {error.strerror}"
        with suppress(OSError):
            data = content.encode() if isinstance(content, str) else content
            descriptor, kept = tempfile.mkstemp(prefix="outpace-", suffix=f"-{path.name[-80:]}")
            with open(descriptor, "wb") as file:  # noqa: PTH123 (of a descriptor)
                file.write(data)
            raise BadInputError(f"{why}. The output is saved in {kept}.") from None
        raise BadInputError(f"{why}.") from None


def save_output(path: Path, record: "Record") -> None:
    """Write a record with `write_output`."""
    write_output(path, record.as_file())
