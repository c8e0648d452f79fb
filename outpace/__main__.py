"""`python -m outpace` is `outpace`."""

import os
import sys
from pathlib import Path


def ignore_working_directory() -> None:
    """Import no file of the working directory in the place of a library, such as a user's
    tokenizers.py; Python puts that directory first for `-m`. A checkout of outpace stays.
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
