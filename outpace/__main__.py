"""`python -m outpace` is `outpace`."""

import os
import sys
from pathlib import Path


def ignore_working_directory() -> None:
    """Drop the working directory, which `-m` puts first, from the import path.

    Otherwise, one of its files, such as a user's tokenizers.py, could replace a library. It is kept
    if it is a checkout of outpace.
    """
    first = Path(sys.path[0] or os.curdir)
    if sys.flags.safe_path or not first.is_dir() or not first.samefile(os.curdir):
        return
    if not (first / "outpace" / "__main__.py").is_file():
        del sys.path[0]


if __name__ == "__main__":
    ignore_working_directory()
    from outpace.cli.main import command

    command()
